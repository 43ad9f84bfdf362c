"""The GPU kit on a machine without a GPU: what it carries, its stages on a small model, and its stand-in for
flash-attn."""

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import counted
import oracle
import pytest
import torch
from battery import graphs_after_each_batch, patched_model
from gpu import model, parts, prepare, run, wanted
from pretended import pretend
from tolerance import assert_low_precision, differs
from transformers import modeling_flash_attention_utils as flash_utils

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, flash, get_backend, varlen
from trl_packfa.bench import environment
from trl_packfa.bench.arguments import read_arguments
from trl_packfa.kernels import devices

ROOT = Path(__file__).parents[2]
STAGES = ("first", "second", "third", "fourth")


def wheel(folder, name, files):
    info = f"{name}-1.0.dist-info"
    record = "".join(f"{file},sha256=x,1\n" for file in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        for file in files:
            made.writestr(file, "x")
        made.writestr(f"{info}/RECORD", record)


KINDS = ("cpu", "cuda128", "cuda130", "rocm64", "xpu")
BITSANDBYTES = ["bitsandbytes/__init__.py", *(f"bitsandbytes/libbitsandbytes_{kind}.so" for kind in KINDS)]


@pytest.fixture
def pip(monkeypatch):
    """A stand-in for pip: a wheel for every name it is asked for; git is asked really."""
    asked, run_ = [], subprocess.run

    def answer(command, **options):
        if command[0] == "git":
            return run_(command, **options)
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        name = command[-1].split("==")[0]
        asked.append(command[-1])
        wheel(Path(command[command.index("-d") + 1]), name, BITSANDBYTES if name == "bitsandbytes" else [f"{name}.py"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(prepare.subprocess, "run", answer)
    return asked


def test_the_kit_carries_what_is_tested_and_is_small(pip, tmp_path, capsys):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "old.whl").touch()
    made = prepare.make(tmp_path / "kit", python="3.12", cuda="130", also=["six==1.17.0"])
    assert {"transformers==5.24.0", "trl==1.16.0", "liger-kernel==0.8.5", "six==1.17.0"} <= set(pip)
    assert not any(name.startswith("torch") for name in pip) and len(made) == len(pip)
    trimmed = zipfile.ZipFile(next(path for path in made if path.name.startswith("bitsandbytes")))
    kept = {Path(name).name for name in trimmed.namelist()}
    assert kept == {"__init__.py", "libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so", "RECORD"}
    record = trimmed.read("bitsandbytes-1.0.dist-info/RECORD").decode()
    assert "cuda130" in record and "cuda128" not in record and record.endswith("RECORD,,\n")
    assert "MiB  with the working tree, of 64" in capsys.readouterr().out


def test_a_kit_that_cannot_travel_is_refused(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "LIMIT", 1000)
    with pytest.raises(SystemExit, match=r"(?s)^the kit is too large to carry:\n.*transformers"):
        prepare.make(tmp_path, python="3.12", cuda="130")


def test_git_ignores_the_kit_and_the_wheel_leaves_it_out():
    assert ".gpu/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "benchmarks/gpu/prepare.py" in (ROOT / "Makefile").read_text()


def test_what_was_carried_is_unpacked_once(tmp_path):
    wheel(tmp_path, "thing", ["thing.py"])
    site = tmp_path / "site"
    run.unpack(tmp_path, site)
    assert (site / "thing.py").read_text() == "x"
    (site / "thing.py").unlink()
    run.unpack(tmp_path, site)
    assert not (site / "thing.py").exists(), "the same kit"
    wheel(tmp_path, "other", ["other.py"])
    run.unpack(tmp_path, site)
    assert (site / "thing.py").exists() and (site / "other.py").exists()
    run.unpack(tmp_path / "nowhere", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def sides_of(step):
    """Return the sides of a benchmark's command and their base."""
    asked = read_arguments(step.command[step.command.index("bench") + 1 :])
    return [side.name for side in asked.sides], asked


def test_every_stage_has_its_time_and_its_files(tmp_path):
    """Each command ends within its limit by the expected seconds of its parts; the last stage takes three."""
    stages = run.stages(run.Options(tmp_path))
    assert tuple(stages) == STAGES
    names = [step.name for steps in stages.values() for step in steps]
    assert len(set(names)) == len(names) and set(run.SECONDS) == set(names)
    seconds = {stage: sum(sum(run.SECONDS[step.name].values()) for step in steps) for stage, steps in stages.items()}
    assert all(seconds[stage] <= run.LIMIT for stage in STAGES[:3]) and seconds["fourth"] <= 3 * run.LIMIT
    assert all(sum(parts.values()) <= run.LIMIT for parts in run.SECONDS.values())
    assert {figure.step for figure in wanted.FIGURES} <= {step.name for stage in STAGES[:3] for step in stages[stage]}
    assert all(len(run.chosen(figure.step, stages)) == 1 for figure in wanted.FIGURES)
    assert run.chosen("first", stages) == stages["first"] and not run.chosen("nothing", stages)
    readme = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    assert all(f"| `run.py {stage}` |" in readme for stage in STAGES)
    assert all(f"| {number} |" in readme for number in seconds.values())


def test_the_expected_seconds_are_those_of_the_sides(tmp_path):
    """In the order of their value, and all of them are read by some figure or compared with one that is."""
    steps = [step for steps in run.stages(run.Options(tmp_path)).values() for step in steps if "bench" in step.command]
    for step in steps:
        sides, asked = sides_of(step)
        assert ["start", *sides] == list(run.SECONDS[step.name])
        assert not asked.bench.trace and asked.bench.presets and (asked.bench.base in sides or len(sides) == 1)
    assert sides_of(steps[0])[0][0] == "step", "the product's default comes first"
    (traced,) = run.chosen("llama3_8b", run.stages(run.Options(tmp_path, trace=True)))
    assert sides_of(traced)[1].bench.trace


def test_parts_are_timed_on_a_cpu(tmp_path):
    written = tmp_path / "parts.json"
    assert parts.main(["--small", "--json", str(written)]) == 0
    rows = json.loads(written.read_text())["rows"]
    assert {row["part"] for row in rows} == {"RMSNorm", "MLP, LoRA", "MLP, LoRA, NF4", "LM head"}
    assert {row["side"] for row in rows} == {"transformers, PEFT", "ours", "TRL"}
    assert all(row["ms"] > 0 for row in rows)


def test_a_step_that_does_not_end_is_ended(tmp_path, capsys):
    endless = run.Step("endless", ["-c", "import time; print('began', flush=True); time.sleep(600)"])
    (tmp_path / "endless.json").write_text("of an earlier run")
    assert run.run_step(endless, tmp_path, run.environment(tmp_path), seconds=2) == 124
    assert "exit code 124" in capsys.readouterr().out and "began" in (tmp_path / "endless.log").read_text()
    assert not (tmp_path / "endless.json").exists()


def test_a_machine_without_flash_attn_gets_the_stand_in(tmp_path, monkeypatch):
    def stand_in():
        return str(ROOT / "benchmarks" / "gpu" / "stand_in") in run.environment(tmp_path)["PYTHONPATH"].split(":")

    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert stand_in()
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: name)
    assert not stand_in()


def test_figures_are_read_from_a_gpus_reports_only(tmp_path):
    sides = [
        {"side": "padding", "tokens_per_second": 100.0, "attention": "flash_attention_2"},
        {"side": "step", "tokens_per_second": 210.0},
    ]
    report = {"environment": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "arguments": ["--config", "x"], "sides": sides}
    figure = wanted.FIGURES[0]
    assert wanted.measured(figure, tmp_path) == wanted.NOT_YET
    (tmp_path / "paper_x2.json").write_text(json.dumps(report))
    assert wanted.measured(figure, tmp_path) == "2.10 (padding with flash_attention_2), NVIDIA H100 80GB HBM3"
    failed = {**report, "sides": [sides[0], {"side": "step", "failed": "x"}]}
    (tmp_path / "paper_x2.json").write_text(json.dumps(failed))
    assert wanted.measured(figure, tmp_path).startswith("a side failed")
    assert wanted.measured(wanted.FIGURES[2], tmp_path) == wanted.NOT_YET
    for trial in ({"environment": {"gpus": []}}, {"arguments": ["--model", "tiny"]}):
        (tmp_path / "paper_x2.json").write_text(json.dumps({**report, **trial}))
        assert wanted.measured(figure, tmp_path) == wanted.NOT_YET


def test_a_run_that_was_cut_off_is_read(tmp_path):
    """Its journal has the steps of sides that the report lacks; the last line may be half written."""
    head = {"environment": {"gpus": ["NVIDIA H100"]}, "arguments": [], "peak_flops": 1e6, "peak_source": "x"}
    lines = [{"side": name, "timed": number > 0, "tokens": tokens, "seconds": 2.0, "compiled": 0}
             for name, tokens in (("trl-bfd@8192x1", 100), ("bfd@8192x1", 150), ("step", 140))
             for number in range(2 if name == "step" else 5)]  # fmt: skip
    journal = tmp_path / "llama3_8b.jsonl"
    journal.write_text("\n".join(map(json.dumps, [head, *lines])) + '\n{"side": "st')
    ratio = next(figure for figure in wanted.FIGURES if figure.wanted.startswith("1.6"))
    assert wanted.measured(ratio, tmp_path).startswith("1.50 (trl-bfd@8192x1 with ?, bfd@8192x1 cut off after 4 steps")
    assert "a side failed" in wanted.measured(wanted.FIGURES[2], tmp_path), "one timed step is no figure"
    ended = {"side": "trl-bfd@8192x1", "tokens_per_second": 60.0, "attention": "flash_attention_2"}
    whole = {**head, "model_flops_per_token": 4e3, "sides": [ended]}
    (tmp_path / "llama3_8b.json").write_text(json.dumps(whole))
    assert wanted.measured(ratio, tmp_path).startswith("1.25 (trl-bfd@8192x1 with flash_attention_2, bfd@8192x1 cut")
    share = next(figure for figure in wanted.FIGURES if figure.what.startswith("MFU"))
    assert wanted.measured(share, tmp_path) == "30.0% of x, NVIDIA H100"
    journal.write_text("")
    assert wanted.measured(ratio, tmp_path).startswith("a side failed")


def test_every_figure_is_read_from_what_the_benchmark_writes():
    full = {
        "tokens_per_second": 12_500.4, "mfu": 0.512, "attention": "flash", "recompiles": 0,
        "host_syncs_per_micro_batch": 3.5,
    }  # fmt: skip
    sides = {name for parts in run.SECONDS.values() for name in parts}
    report = {"sides": [{"side": name, **full} for name in sides], "peak_source": "data sheet of NVIDIA H100"}
    found = {figure.wanted: figure.read(report) for figure in wanted.FIGURES}
    assert found["45 %, predicted"] == "51.2% of data sheet of NVIDIA H100"
    assert found["14,000, predicted"] == "12,500" and found["0"] == "bfd-compiled@8192x1 0"
    assert found["TRL's or fewer"] == "trl-bfd@8192x1 3.5, bfd@8192x1 3.5, step 3.5"
    assert not any("failed" in text for text in found.values())


def test_results_of_another_machine_are_collected(tmp_path, capsys):
    """Into the page's table, and as rows to copy into other pages."""
    there, here, page = tmp_path / "there", tmp_path / "here", tmp_path / "README.md"
    there.mkdir(), here.mkdir()
    page.write_text(f"before\n{wanted.BEGIN}\nold\n<!-- end -->\nafter\n")
    sides = [{"side": name, "tokens_per_second": rate, "attention": "flash"} for name, rate in
             (("padding", 10.0), ("step", 30.0))]  # fmt: skip
    report = {"environment": {"gpus": ["NVIDIA H100"]}, "arguments": [], "sides": sides}
    (there / "paper_x2.json").write_text(json.dumps(report))
    (there / "small_lengths.json").touch()
    (there / "llama3_8b.log").write_text("x")
    rows = run.collect(there, here, page)
    assert {path.name for path in here.iterdir()} == {"paper_x2.json", "llama3_8b.log"}
    assert "3.00 (padding with flash), NVIDIA H100" in rows and wanted.NOT_YET not in rows
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert "3.00 (padding with flash)" in text and wanted.NOT_YET in text
    for argv in (["collect"], ["first", str(there)]):
        with pytest.raises(SystemExit):
            run.main(argv)
    assert "collect takes a folder" in capsys.readouterr().err


def test_a_copy_without_git_knows_its_commit(pip, tmp_path, monkeypatch):
    """The kit carries it, and reports have it."""
    prepare.make(tmp_path / ".gpu", python="3.12", cuda="130")
    known = (tmp_path / ".gpu" / "commit.txt").read_text().strip()
    assert len(known.removesuffix("-dirty")) >= 12
    package = tmp_path / "trl_packfa" / "bench" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(package))
    assert environment._commit() == known
    (tmp_path / ".gpu" / "commit.txt").unlink()
    assert environment._commit() is None


def test_results_go_where_the_machine_takes_them_from(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "stages", lambda on: {"first": [run.Step("said", ["-c", "print('here')"])]})
    monkeypatch.setattr(run, "unpack", lambda *args: None)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert run.main(["first"]) == 0 and (tmp_path / "said.log").read_text() == "here\n"


@pytest.mark.parametrize(
    ("script", "code", "printed"),
    [("raise SystemExit(1)", 1, "0"), ("import time; time.sleep(60)", 1, "0"), ("", 0, "None")],
    ids=["failed", "hung", "passed"],
)
def test_steps_after_kernels_that_failed_run_torchs_operators(script, code, printed, tmp_path, monkeypatch, capsys):
    steps = [["-c", script], ["-c", f"import os; print(os.environ.get('{devices.TRITON}'))"]]
    named = [run.Step(name, step) for name, step in zip((run.KERNELS, "next"), steps, strict=True)]
    monkeypatch.setattr(run, "stages", lambda on: {"first": named})
    monkeypatch.setattr(run, "unpack", lambda *args: None)
    assert run.main(["first", "--out", str(tmp_path), "--limit", "20"]) == code
    assert (tmp_path / "next.log").read_text() == f"{printed}\n"
    assert (f"{devices.TRITON}=0" in capsys.readouterr().out) == bool(code)


def test_the_page_holds_the_table():
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    block = page.split(f"{wanted.BEGIN}\n")[1].split("\n<!-- end -->")[0]
    assert block == wanted.markdown()


def test_the_predictions_are_those_of_this_code():
    """The page's table is that of the rows, and they have the operators that `test_counts.py` holds."""
    rows = json.loads(model.RESULTS.read_text())["rows"]
    page = (ROOT / "docs" / "hardware.md").read_text()
    block = page.split("<!-- generated: python benchmarks/gpu/model.py --table -->\n")[1].split("\n<!-- end -->")[0]
    assert block == model.markdown(rows) and len(block.splitlines()) == len(model.CONFIGURATIONS) + 2
    counts = json.loads(counted.BOUNDS.read_text())["cases"]["device/lora"]
    (row,) = (row for row in rows if (row["configuration"], row["side"]) == ("8 B", "bfd"))
    assert row["operators"] == 32 * counts["operators_per_layer"] + counts["operators_outside"]
    assert row["host_waits"] == counts["host_syncs"]


@pytest.fixture
def flash_attn(monkeypatch):
    """It, on a CPU: torch's function is as strict as on a GPU, and computed by the reference."""
    pretend(monkeypatch, "varlen")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu" / "stand_in")
    for name in ("flash_attn", "flash_attn.bert_padding"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("flash_attn")
    monkeypatch.setattr(module, "varlen_attn", varlen._varlen_attn)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    yield module
    for name in ("flash_attn", "flash_attn.bert_padding"):
        sys.modules.pop(name, None)
    flash_utils._loaded_implementation = None


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("how", ["padded", "packed", "rows of one length"])
def test_transformers_attends_by_document_with_the_stand_in(how, window, flash_attn):
    """As `attn_implementation="flash_attention_2"` calls it, forward and backward."""
    lengths = (12, 12) if how == "rows of one length" else (5, 12, 1, 9)
    shape, options = (len(lengths), max(lengths)), {"scaling": 0.25, "sliding_window": window}
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(sum(lengths), n, 16, generator=generator).bfloat16().requires_grad_() for n in (4, 2, 2)]
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]

    def forward(q, k, v):
        common = {"is_causal": True, "softmax_scale": 0.25, "sliding_window": window}
        common |= {"attn_implementation": "flash_attention_2"}
        if how == "packed":
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            heads = (x[None] for x in (q, k, v))
            out = flash_utils._flash_attention_forward(*heads, None, sum(lengths), position_ids=positions, **common)
            return out[0]
        zeros = [torch.zeros(*shape, *x.shape[1:], dtype=x.dtype) for x in (q, k, v)]
        padded = [x.masked_scatter(mask[..., None, None], own) for x, own in zip(zeros, (q, k, v), strict=True)]
        given = mask.long() if how == "padded" else None
        return flash_utils._flash_attention_forward(*padded, given, shape[1], **common)[mask]

    upstream = torch.randn(sum(lengths), 4, 16, generator=generator)
    layout, results = PackedLayout.from_lengths(lengths), []
    for attend in (
        forward,
        lambda q, k, v: get_backend("reference")(q, k, v, AttentionArguments(**options).on(layout.attention)),
        lambda q, k, v: oracle.attention(q, k, v, lengths, **options),
    ):
        out = attend(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))])
    for ours, eager, exact in zip(*results, strict=True):
        assert_low_precision(ours, eager, exact, factor=3.0)
    leaking = oracle.attention(*tensors, (sum(lengths),), **options)
    assert differs(leaking.float(), results[0][0].float()), "the control"


@pytest.mark.slow
def test_our_backend_takes_the_stand_in_into_a_graph(flash_attn, monkeypatch):
    """One graph of the backbone, one of the head, whatever documents a batch holds."""
    strict = flash_attn.varlen_attn
    pretend(monkeypatch, "flash")
    monkeypatch.setattr(flash_attn, "varlen_attn", strict)
    monkeypatch.setitem(flash._KERNELS, (8, 0), flash._kernel_of(flash_attn.flash_attn_varlen_func))
    model = patched_model("llama", "cpu", torch.bfloat16, "flash", layers=2)
    assert graphs_after_each_batch(model, "cpu") == [2] * 5


@pytest.mark.parametrize("window", [(-1, -1), (7, 0)])
def test_torch_s_own_operator_takes_the_stand_ins_call(window, flash_attn, monkeypatch):
    """On the meta device, which knows signatures and shapes, forward and backward."""
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(flash_attn, "varlen_attn", varlen_attn)
    tensors = [torch.randn(2, 9, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2, 2)]
    out = flash_attn.flash_attn_func(*tensors, softmax_scale=0.3, causal=True, window_size=window)
    grads = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert out.shape == (2, 9, 4, 64) and [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]


def test_what_the_stand_in_lacks_it_says(flash_attn):
    q = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dropout_p=0.1: the stand-in for flash-attn has no dropout"):
        flash_attn.flash_attn_varlen_func(q, q, q, bounds, bounds, 3, 3, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="no KV cache"):
        flash_attn.flash_attn_with_kvcache(q, q, q)
    assert importlib.metadata.version("flash-attn") == flash_attn.__version__ == "2.8.3+torch.varlen"
