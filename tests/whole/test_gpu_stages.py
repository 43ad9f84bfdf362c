"""The GPU kit's steps on a small model and a CPU: all of their lines but the sizes, so that none is first tried where
time on a GPU is short."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from gpu import run, wanted
from selection import exhaustive

# Recipes whose lines others run, too, and commands that the tests of these parts run.
ALIKE = (
    "kernels", "automodel", "qlora_8b", "compiled_1b", "paper_x2", "paper_x16", "types", "trainers", "parts",
    "attention", "full_1b", "dpo_1b",
)  # fmt: skip
STEPS = [
    "kernels", "llama3_8b", "automodel", "qlora_8b", "compiled_1b", "paper_x2", "paper_x16", "tests", "types",
    "trainers", "parts", "attention", "dpo_1b", "full_1b",
]  # fmt: skip
# Kernels of Triton; the side says so, and the others run.
NEEDS_LIGER = "trl-bfd-liger@64x1"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*exhaustive(*ALIKE), *(name for name in STEPS if name not in ALIKE)])
def test_every_step_runs_on_a_cpu_in_its_smallest_form(name, tmp_path, capsys):
    run.main([name, "--small", "--out", str(tmp_path), "--limit", "3000"])
    out = capsys.readouterr().out
    failed = name == "llama3_8b"
    assert f"== {name}: exit code {int(failed)}" in out, out
    (step,) = run.chosen(name, run.stages(run.Options(tmp_path, small=True)))
    written = tmp_path / f"{step.name}.json"
    assert (tmp_path / f"{step.name}.log").exists() or written.exists()
    if "bench" in step.command:
        assert_rehearsed(name, json.loads(written.read_text()), tmp_path)


def assert_rehearsed(name, report, folder):
    """All sides ran, with every step in the journal at once."""
    asked = [re.sub(r"@\d+", "@64", side) for side in run.SECONDS[name] if side != "start"]
    assert [side["side"] for side in report["sides"]] == asked
    failed = [side["side"] for side in report["sides"] if "failed" in side]
    assert failed == [side for side in asked if side == NEEDS_LIGER], report["sides"]
    (folder / f"{name}.json").unlink()
    cut_off = wanted.read_report(name, folder)
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert cut_off["environment"]["commit"] == report["environment"]["commit"]
    assert Counter(line["side"] for line in lines[1:]) == {side: 3 for side in asked if side != NEEDS_LIGER}


def test_no_step_is_left_out():
    steps = [step.name for stage in run.stages(run.Options(Path("out"))).values() for step in stage]
    assert sorted(STEPS) == sorted(steps)


def test_tests_that_a_step_names_are_there():
    assert [name for name in run._TRAINERS if not (Path(__file__).parents[2] / name).exists()] == []
