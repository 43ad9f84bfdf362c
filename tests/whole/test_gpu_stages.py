"""The GPU kit's steps on a small model and a CPU: all of their lines but the sizes, so that none is first tried where
time on a GPU is short."""

import json
from pathlib import Path

import pytest
from gpu import run, wanted
from selection import exhaustive

# `paper_x2` has the recipe of `paper_x16`.
# Their lines are those of `compiled_1b`, `parts` and `tests`.
ALIKE = ("llama3_8b", "automodel", "paper_x16", "attention", "trainers")
STEPS = [
    "tests", "types", "trainers", "parts", "attention", "llama3_8b", "automodel", "paper_x16", "qlora_8b",
    "compiled_1b",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*exhaustive(*ALIKE), *(name for name in STEPS if name not in ALIKE)])
def test_every_step_runs_on_a_cpu_in_its_smallest_form(name, tmp_path, capsys):
    assert run.main([name, "--small", "--out", str(tmp_path), "--limit", "3000"]) == 0, capsys.readouterr().out
    (step,) = run.chosen(name, run.stages(tmp_path, small=True))
    written = tmp_path / f"{step.name}.json"
    assert (tmp_path / f"{step.name}.log").exists() or written.exists()
    if name not in ("tests", "types", "trainers", "parts", "attention"):
        report = json.loads(written.read_text())
        assert len(report["sides"]) == 2 and not [side for side in report["sides"] if "failed" in side]
        assert wanted.side(report, report["sides"][-1]["side"])["attention"] == "sdpa"


def test_no_step_is_left_out():
    steps = [step.name for stage in run.stages(Path("out"), small=False).values() for step in stage]
    assert sorted([*STEPS, "paper_x2"]) == sorted(steps)
