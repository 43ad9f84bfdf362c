"""What a run shows on a terminal and in a pipe."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from rich.console import Console
from tiny_models import small_model
from training import arguments, dataset, packed_trainer

from trl_packfa.plotting import save_loss_curve
from trl_packfa.terminal.progress import RichProgressCallback, _times, checking


def shown(out, *, terminal=False, width=160, resumed=False, evaluation=None, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    trainer = packed_trainer(arguments(out=out, check_packing=False, **options), eval_dataset=evaluation)
    RichProgressCallback.attach(trainer, "training", console)
    trainer.train(resume_from_checkpoint="last" if resumed else None)
    return console.file.getvalue(), trainer


def logged(trainer, key):
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_every_evaluation_is_printed_with_its_step_and_summed_up(terminal, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    text, trainer = shown(tmp_path, terminal=terminal, evaluation=dataset(8), **options)
    losses = logged(trainer, "eval_loss")
    assert list(losses) == [2, 4]
    for step, loss in losses.items():
        assert text.count(f"training  step {step}/4  eval loss {loss:.3f}") == 1
    assert f"eval loss: {losses[2]:.3f} at step 2, {losses[4]:.3f} at step 4" in text
    assert ("evaluating 2/2" in text) == terminal


def test_eighty_columns_break_lines_between_words(tmp_path):
    narrow, _ = shown(tmp_path, terminal=True, width=80, max_steps=2)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", narrow).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert {"mean_token_accuracy", "learning_rate", "entropy"} <= {word for line in lines for word in line.split()}
    assert "2/2" in narrow and "to go" in narrow and "━" not in narrow, "times instead of a bar"
    assert "━" in shown(tmp_path, terminal=True, max_steps=1)[0]


@pytest.mark.parametrize(("elapsed", "began", "at", "expected"), [
    (50.0, 0, 1, "0:00:50 elapsed, 0:02:30 to go"),  # slow steps too
    (60.0, 1, 2, "0:01:00 elapsed, 0:02:00 to go"),  # at the pace of the steps since it was resumed
    (50.0, 0, 0, "0:00:50 elapsed"),
    (50.0, 2, 4, "0:00:50 elapsed, 0:00:00 to go"),
    (50.0, 4, 5, "0:00:50 elapsed, 0:00:00 to go"),
])  # fmt: skip
def test_time_left_is_that_of_the_steps_left(elapsed, began, at, expected):
    assert _times(SimpleNamespace(elapsed=elapsed, completed=at, total=4, fields={"began": began})) == expected


def test_a_check_that_takes_longer_than_estimated_does_not_show_0_seconds(capsys, monkeypatch):
    now = iter([0.0, 100.0, 200.0])
    monkeypatch.setattr("trl_packfa.terminal.progress.time.perf_counter", lambda: next(now))
    with checking("checking") as say:
        say("half", 0.5)
        say("the last part", 0.999)
    text = capsys.readouterr().err
    assert "half, about 100 s to go" in text and "the last part, nearly done" in text


def test_evaluations_by_name(tmp_path):
    named = {"easy": dataset(8), "hard_one": dataset(8, seed=1)}
    text, trainer = shown(tmp_path, evaluation=named, eval_strategy="epoch", max_steps=12)
    for name in named:
        ((step, loss),) = logged(trainer, f"eval_{name}_loss").items()
        assert f"training  step {step}/12  eval loss ({name}) {loss:.3f}" in text


@pytest.mark.parametrize(("steps", "every", "at"), [(3, 10, [1, 3]), (5, 2, [1, 2, 4, 5]), (1, 10, [1])])
def test_the_first_and_the_last_step_are_always_logged(steps, every, at, tmp_path):
    text, trainer = shown(tmp_path, max_steps=steps, logging_steps=every)
    assert [int(step) for step in re.findall(rf"step (\d+)/{steps}  loss", text)] == at
    assert "loss" not in shown(tmp_path, logging_strategy="no", max_steps=1)[0]
    accuracies = logged(trainer, "mean_token_accuracy")
    assert list(logged(trainer, "loss")) == at == list(accuracies), "with all that is logged of a step"


def test_the_tokens_per_second_and_the_time_left_are_those_of_the_run_after_a_resume_too(tmp_path):
    """Not those of before, in the time of the first step, nor with an evaluation in it."""
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    shown(tmp_path, max_steps=2, **saving)
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "evaluation": dataset(8)}
    text, trainer = shown(tmp_path, resumed=True, max_steps=4, **evaluating, **saving)
    lines = [line for line in text.splitlines() if "tokens/s" in line]
    speeds = logged(trainer, "tokens_per_second")
    assert len(lines) == 2
    for step, line in zip((3, 4), lines, strict=True):
        assert re.search(rf"step {step}/4  loss .*  {speeds[step]:,.0f} tokens/s  0:00:0.* to go$", line)
    assert lines[-1].endswith("0:00:00 to go")


def test_in_a_pipe_every_thing_is_one_line(tmp_path, monkeypatch):
    """No bars, whose refreshes would be lines; counts once, in the table; the check as a table with its time.

    In a process of its own, as tqdm reads its defaults when it is imported.
    """
    monkeypatch.chdir(tmp_path)
    tiny.save("model", small_model("qwen3"))
    Path("data.jsonl").write_text("\n".join(json.dumps({"text": "a b c d e f " * (n + 1)}) for n in range(12)))
    data = "--model_name_or_path model --dataset_name data.jsonl"
    train = f"train {data} --output_dir out --max_steps 4 --max_length 16"
    train += " --use_cpu true --bf16 false --report_to none --save_steps 2 --per_device_train_batch_size 2"
    again = f"{train} --resume_from_checkpoint last --max_steps 6"
    commands = [f"plan {data}", "check model", train, again, "merge out merged"]
    code = "import sys\nfrom trl_packfa.cli.main import main\nfor command in sys.argv[1:]:\n"
    code += (
        "    assert main(command.split()) == 0\n    print('<end>', flush=True)\n    print('<end>', file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert not re.search(r"\d(it|s|examples)/s", ran.stdout + ran.stderr), "bars of datasets and of weights"
    out, err = (stream.split("<end>\n")[2] for stream in (ran.stdout, ran.stderr))
    assert out.startswith("loading model, tokenizing data.jsonl ...\n")
    assert (out + err).count("tokens lost") == 1 and out.count("check: exact, in ") == 1
    assert "padding that a padded run would compute" in out and "worst layer, packed against alone" in out
    resumed = ran.stdout.split("<end>\n")[3]
    assert "check: exact, checked before checkpoint-4; nothing has changed since" in resumed


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_a_log_shows_the_metrics_of_trl(terminal, tmp_path):
    text, trainer = shown(tmp_path, terminal=terminal, max_steps=2)
    for entry in trainer.state.log_history[:2]:
        line = next(line for line in text.splitlines() if f"step {entry['step']}/2  loss" in line)
        for name in ("grad_norm", "learning_rate"):
            assert f"  {name} {entry[name]:.3g}" in line
        for name in ("mean_token_accuracy", "entropy"):
            assert f"  {name} {entry[name]:.3f}" in line


def test_in_a_pipe_what_takes_long_writes_lines(tmp_path):
    """As tqdm reads it of the environment, before it is imported: in a process of its own."""
    code = (
        "import sys, time\nfrom trl_packfa.cli import main\nmain._bars_as_lines()\n"
        "from datasets import Dataset\n"
        "data = Dataset.from_list([{'a': n} for n in range(3)])\nimport tqdm\n"
        "now = iter(range(0, 10**6, 40))\n"
        "tqdm.std.time = lambda: next(now)\n"
        "data.map(lambda row: row, desc='Tokenizing')\n"
    )
    options = {"capture_output": True, "text": True, "check": True, "env": {**os.environ, "COLUMNS": "80"}}
    ran = subprocess.run([sys.executable, "-c", code], **options)
    assert re.search(r"Tokenizing: \d/3, .* to go\n", ran.stderr)


def test_the_losses_of_a_run_are_drawn(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    history = [{"loss": 3.0, "step": 1}, {"eval_loss": 2.5, "step": 1}]
    history += [{"loss": 2.0, "step": 2}, {"other": 1, "step": 2}]
    assert save_loss_curve(history, tmp_path / "curve.png")
    assert matplotlib.image.imread(tmp_path / "curve.png").std() > 0
    assert not save_loss_curve(history[:2], tmp_path / "none.png") and not (tmp_path / "none.png").exists()
