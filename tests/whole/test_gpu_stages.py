"""The GPU kit's stages on a small model and a CPU: all of their lines but the sizes, so that none is first tried where
time on a GPU is short."""

import json

import pytest
from gpu import run, wanted


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tests", "kernels", "train", "paper", "rest"])
def test_every_stage_runs_on_a_cpu_in_its_smallest_form(stage, tmp_path, capsys):
    assert run.main([stage, "--small", "--out", str(tmp_path), "--limit", "3000"]) == 0, capsys.readouterr().out
    for step in run.stages(tmp_path, small=True)[stage]:
        written = tmp_path / f"{step.name}.json"
        assert (tmp_path / f"{step.name}.log").exists() or written.exists()
        if stage not in ("tests", "kernels"):
            report = json.loads(written.read_text())
            assert not [side for side in report["sides"] if "failed" in side]
            assert wanted.side(report, report["sides"][-1]["side"])["attention"] == "sdpa"
