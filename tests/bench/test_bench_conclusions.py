"""What the benchmark concludes of the steps it timed, and what it refuses to."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from trl_packfa import PackedSFTConfig
from trl_packfa.bench.compare import Result, compare, require_equal_work
from trl_packfa.bench.data import facts, random_documents
from trl_packfa.bench.measuring import peak_bytes, reset_peak, summary
from trl_packfa.bench.run import Peak
from trl_packfa.bench.sides import parse_sides
from trl_packfa.bench.table import remarks, speed_rows
from trl_packfa.errors import InvalidConfig


def result(name="step", *, seconds=(1.0,) * 6, tokens=100, share=1.5, **facts):
    one = Result(parse_sides(name)[0])
    one.facts = {"equal": {"threads": 2, "device": "cpu", **facts}, "leaks": False, "steps_per_epoch": 9, "remark": ""}
    alike = {"computed": 200, "documents": 4, "micro_batches": 2, "largest": 100, "loss": 2.0, "compiled": 0}
    one.every_step = [{**alike, "seconds": s, "tokens": tokens + i, "fingerprint": i, "cpu_seconds": share * s}
                      for i, s in enumerate(seconds)]  # fmt: skip
    one.end = {"peak_bytes": 1, "eval_loss": None, "attention": "sdpa", "trace": {}}
    return one


def rows(results):
    data = facts(random_documents([25, 25], vocab_size=9, seed=0))
    return {"sides": [one.to_dict(data, flops=1.0, peak=1.0, base=results[0]) for one in results]}


def test_a_clear_ratio_stands():
    ratio = compare(result(seconds=(0.5, 0.52, 0.49, 0.51, 0.5, 0.5)), result("padding"))
    assert ratio.low < ratio.value < ratio.high and ratio.value == pytest.approx(1.99, abs=0.02)
    assert not ratio.verdict
    assert compare(base := result("padding"), base).value == 1.0
    assert compare(result(), result("padding", seconds=())).verdict == "no ratio yet: padding has not run"


def test_a_short_a_noisy_and_a_busy_run_conclude_nothing():
    ratio = compare(result(seconds=(0.5,) * 4), result("padding", seconds=(1.0,) * 4))
    assert ratio.verdict == "too short to conclude: 4 timed steps; raise --max_steps to 5 or more"
    noisy = compare(result(seconds=(0.2, 3.0, 0.3, 0.2, 2.0, 0.4)), result("padding"))
    assert "holds 1; raise --max_steps, or free the machine" in noisy.verdict
    for sides in ((result(share=0.3), result("padding")), (result(), result("padding", share=0.3))):
        assert compare(*sides).verdict.startswith("the machine was busy with other work")
    on_gpu = result(share=0.3, device="cuda:0"), result("padding", share=0.3, device="cuda:0")
    assert "busy" not in compare(*on_gpu).verdict


def test_no_ratio_to_or_from_a_side_that_failed():
    failed = dataclasses.replace(result("padding"), failure="died of something")
    report = rows([failed, result()])
    assert speed_rows(report)[0]["true tokens/s"] == "-" and speed_rows(report)[1]["times"] == "-"
    assert speed_rows(report)[1]["true tokens/s"] == "102"
    assert remarks(report) == ["padding failed: died of something", "step: no ratio: padding failed"]
    assert "ratio" not in rows([result("padding"), dataclasses.replace(result(), failure="x")])["sides"][1]


def test_unequal_work_is_not_compared():
    require_equal_work([result("padding"), result()])
    with pytest.raises(InvalidConfig, match=r"padding and step did not do the same work.\n  - threads: 2 and 1"):
        require_equal_work([result("padding"), result(threads=1)])
    with pytest.raises(InvalidConfig, match="step 1 holds other examples: 100 and 90 tokens"):
        require_equal_work([result("padding"), result(tokens=90)])
    # Rows take other examples in a step by design, and a side that failed did no work.
    require_equal_work([result("padding"), result("bfd", tokens=90)])
    require_equal_work([result("padding"), dataclasses.replace(result(threads=1), failure="x")])


def test_a_contaminated_side_runs_only_if_named():
    for name, contaminated, fails in (("trl-bfd", "", True), ("trl-bfd", "trl-bfd", False), ("fixed", "", False)):
        one = Result(parse_sides(name, contaminated=contaminated)[0])
        one.built({"leaks": True})
        assert bool(one.failure) == fails
    leaking = result("padding")
    leaking.facts["leaks"] = True
    assert "documents see each other" in remarks(rows([leaking]))[0]


def test_the_peak_is_the_best_of_a_run(monkeypatch):
    """A slow minute at the start would make sides look better than the machine allows."""
    rates = iter([100.0, 187.0, 142.0])
    monkeypatch.setattr("trl_packfa.bench.run.peak_flops", lambda *args, **options: next(rates))
    peak = Peak(None, PackedSFTConfig("out", use_cpu=True, bf16=False))
    assert (peak.source, peak.best) == ("measured here", 100.0)
    peak.measure()
    peak.measure()
    assert peak.best == 187.0


def test_memory_is_that_of_the_steps_alone(monkeypatch):
    """On a GPU: what torch allocated, counted anew when the weights are there."""
    gpu = SimpleNamespace(now=16, peak=20)

    def forget():
        gpu.peak = gpu.now

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", forget)
    reset_peak()
    assert peak_bytes() == 16
    gpu.peak = 18
    assert peak_bytes() == 18


@pytest.mark.parametrize(("on_gpu", "waits"), [(False, 6 / 4), (True, (9 - 1) / 4)])
def test_the_hosts_waits_are_those_of_a_micro_batch(on_gpu, waits, monkeypatch):
    """On a GPU without the wait that ends the measured step."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    waits_of_host = {"aten::nonzero": 2, "aten::_local_scalar_dense": 4}
    counts = {**waits_of_host, "cudaStreamSynchronize": 8, "cudaDeviceSynchronize": 1}
    events = [SimpleNamespace(key=key, count=n, self_cpu_time_total=n) for key, n in counts.items()]
    found = summary(SimpleNamespace(key_averages=lambda: events), micro_batches=4)
    assert (found["host_syncs"], found["aten_calls"]) == (waits, 6)


def test_a_known_peak_is_not_measured(monkeypatch):
    measuring = "trl_packfa.trainers.sft.throughput.matmul_flops"
    monkeypatch.setattr(measuring, lambda *args, **options: pytest.fail("measured"))
    peak = Peak(None, PackedSFTConfig("out", use_cpu=True, bf16=False, peak_tflops=2.0))
    peak.measure()
    assert (peak.best, peak.source) == (2e12, "peak_tflops")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    args = SimpleNamespace(peak_tflops=None, device=torch.device("cuda", 0), bf16=True, fp16=False)
    peak = Peak(None, args)
    peak.measure()
    assert (peak.best, peak.source) == (989e12, "data sheet of NVIDIA H100 80GB HBM3")
