from types import SimpleNamespace

import pytest
import tiny
import torch
from training import arguments, packed_trainer

from trl_packfa import DataCollatorForPacking, PackedSFTConfig
from trl_packfa.arithmetic import ModelFlops
from trl_packfa.bench.operations import OperationCounter
from trl_packfa.bench.presets import preset_config
from trl_packfa.speed import SpeedMeter


def test_model_flops_are_those_that_torch_counts():
    config, tokens = preset_config("tiny"), 40
    model = tiny.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with OperationCounter() as counter, torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    full = PackedSFTConfig("out", use_peft=False, use_cpu=True, bf16=False)
    # Training is three forwards; a forward without the causal mask's half sees twice as much.
    needed = ModelFlops.planned(config, full)
    assert needed.per_token(seen=2 * tokens) * tokens / 3 == pytest.approx(counter.flops, abs=0.02 * counter.flops)
    lora = PackedSFTConfig("out", lora_r=4, use_cpu=True, bf16=False)
    weights = needed.per_token(seen=0) / 6
    assert 4 * weights < ModelFlops.planned(config, lora).per_token(seen=0) < 6 * weights
    assert needed.per_token(seen=0, trained=0.25) == needed.body + needed.head / 4


def test_an_adapter_costs_its_own_and_no_gradient_of_the_base():
    model = tiny.model(layers=2)
    whole = ModelFlops.of(model)
    trainer = packed_trainer(arguments(), model=model)
    adapter = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert ModelFlops.of(trainer.model).body == pytest.approx(whole.body * 4 / 6 + 6 * adapter)
    assert ModelFlops.of(tiny.model("mistral", layers=2)).attention == 3 * 2 * 64 * 2


EXAMPLES = [{"input_ids": list(range(1, n)), "labels": [-100] * 2 + list(range(3, n))} for n in (5, 31, 9)]


def padded():
    longest = max(len(e["input_ids"]) for e in EXAMPLES)
    ids, mask, labels = (torch.full((len(EXAMPLES), longest), fill) for fill in (0, 0, -100))
    for i, example in enumerate(EXAMPLES):
        n = len(example["input_ids"])
        ids[i, :n], mask[i, :n], labels[i, :n] = torch.tensor(example["input_ids"]), 1, torch.tensor(example["labels"])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("batch", [DataCollatorForPacking(), DataCollatorForPacking(pad_to_multiple_of=64), padded])
def test_mfu_is_the_needed_arithmetic_over_the_peak(batch, monkeypatch):
    """Packed, packed with a trailing pad, padded: the same documents need the same; pads need nothing."""
    model = tiny.model(layers=2)
    args = PackedSFTConfig("out", use_cpu=True, bf16=False, peak_tflops=2e-6)
    meter = SpeedMeter(model, args, world_size=2)
    clock = iter([10.0, 14.0, 15.0, 16.0, 17.0])
    monkeypatch.setattr("trl_packfa.speed.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter.start(1000)
    meter.start(2000)
    meter.add(batch() if batch is padded else batch(EXAMPLES))
    figures = meter.read(1000 + 2 * 42)
    assert figures["tokens_per_second"] == 2 * 42 / 4
    trained, seen = (42 - 2 * 3) / 42, (4**2 + 30**2 + 8**2) / 42
    needed = ModelFlops.of(model).per_token(seen=seen, trained=trained)
    assert figures["mfu"] == pytest.approx(2 * 42 / 4 * needed / (2 * 2e6))
    assert meter.read(1000 + 2 * 42) == {}, "nothing trained since"


def test_the_machine_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr("trl_packfa.speed.peak_flops", lambda *a, **k: measured.append(1) or 1e9)
    trainer = packed_trainer(arguments())
    trainer.train()
    logs = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert len(measured) == 1 and all(0 < entry["mfu"] for entry in logs)
