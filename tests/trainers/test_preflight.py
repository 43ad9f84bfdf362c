"""What is asked before data and weights are loaded: one message each, and nothing loaded."""

import json
import os
import re

import pytest
import tiny
from datasets import Dataset
from training import FORMATS, SAVING, arguments, packed_trainer, trained

from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, InvalidDataset, MissingPackage
from trl_packfa.trainers.saving.checkpoint_files import checkpoint_to_resume, finished_message
from trl_packfa.trainers.sft import script as launch

PLAIN = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"


def conversations():
    return Dataset.from_list(FORMATS["messages"])


@pytest.fixture
def command(tmp_path):
    """Arguments of a run on a small saved model, whose template marks nothing, and conversations."""
    tiny.model(layers=1).save_pretrained(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, FORMATS["messages"])))
    (tmp_path / "file").write_text("")
    return [
        "train", "--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data.jsonl"),
        "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false", "--save_strategy", "no",
        "--max_steps", "4", "--logging_steps", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(("asked", "said"), [
    (["--output_dir", "{}/file"], r"output_dir .*file cannot be written to(.|\n)*file is a file"),
    (["--output_dir", "{}/file/out"], r"file/out cannot be written to: Not a directory\.\n  - .*file is a"),
    (["--output_dir", "/proc/none/out"], r"output_dir /proc/none/out cannot be written to: No such file"),
    (["--resume_from_checkpoint", "{}/none"], r"that is no checkpoint\.\n  - no such folder\nName .* 'last'"),
    (["--resume_from_checkpoint", "{}"], r"that is no checkpoint\.\n  - the folder has no trainer_state.json"),
    (["--resume_from_checkpoint", "true"], r"no whole checkpoint to resume from in .*out"),
    (["--resume_from_checkpoint", "Last"], r"no whole checkpoint to resume from in .*out"),
    (["--report_to", "tensorboard"], r"'tensorboard': its package is not installed(.|\n)*report_to='none'"),
    (["--report_to", "tensorbord"], r"report_to='tensorbord' does not exist(.|\n)*tensorboard"),
    (
        ["--assistant_only_loss", "true"],
        r"nothing marks the assistant's tokens(.|\n)*cannot add them\n  - TRL can mark the unchanged templates of "
        r".*llama3, .*qwen3, (.|\n)*Leave assistant_only_loss off",
    ),
])  # fmt: skip
def test_one_message_before_data_and_weights(asked, said, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "load_dataset_dict", lambda *args, **options: pytest.fail("data was loaded"))
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    assert main([*command, *(word.format(tmp_path) for word in asked)]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error) and "Traceback" not in error


def test_the_control_loads_data(command, monkeypatch):
    monkeypatch.setattr(launch, "load_dataset_dict", lambda *args, **options: pytest.fail("data was loaded"))
    with pytest.raises(pytest.fail.Exception, match="data was loaded"):
        main(command)


def test_the_trainer_asks_before_weights(command, tmp_path, monkeypatch):
    """Not only the command line."""
    monkeypatch.setattr("trl.trainer.sft_trainer.create_model_from_path", None)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    folder = str(tmp_path / "model")
    with pytest.raises(MissingPackage, match="report_to='wandb'"):
        packed_trainer(arguments(out=tmp_path, report_to="wandb"), model=folder)
    by_name = {"model": folder, "processing_class": None, "train_dataset": conversations()}
    with pytest.raises(InvalidConfig, match="nothing marks the assistant's tokens"):
        packed_trainer(arguments(out=tmp_path, assistant_only_loss=True), **by_name)
    with pytest.raises(InvalidDataset, match=r"the train dataset holds no conversations(.|\n)*'completion', 'prompt'"):
        packed_trainer(arguments(out=tmp_path, assistant_only_loss=True), model=folder)
    by_name["processing_class"] = tiny.tokenizer()
    by_name["processing_class"].chat_template = None
    with pytest.raises(InvalidConfig, match="the tokenizer has no chat template"):
        packed_trainer(arguments(out=tmp_path, assistant_only_loss=True), **by_name)


def test_a_template_with_markers_of_its_own_or_by_path_is_taken(tmp_path):
    plain = tiny.tokenizer()
    plain.chat_template = PLAIN
    path = tmp_path / "marked.jinja"
    path.write_text(tiny.tokenizer().chat_template)
    options, found = {"assistant_only_loss": True, "max_steps": 1}, []
    for tokenizer, more in ((tiny.tokenizer(), {}), (plain, {"chat_template_path": str(path)})):
        args = arguments(out=tmp_path, **options, **more)
        run = packed_trainer(args, processing_class=tokenizer, train_dataset=conversations())
        found.append([list(labels) for labels in run.train_dataset["labels"]])
    assert found[0] == found[1]


def test_a_run_is_resumed_from_the_command_line(command, tmp_path, capsys):
    """It says from where, first of all, and goes on from that step."""
    command[command.index("no")] = "steps"
    command += ["--save_steps", "2", "--check_packing", "false", "--report_to", "none"]
    assert main([*command, "--max_steps", "2"]) == 0
    capsys.readouterr()
    assert main([*command, "--resume_from_checkpoint", "true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resuming from checkpoint-2 at step 2\n")
    assert "step 3/4" in out and "step 2/4" not in out and "checkpoint-4" in os.listdir(tmp_path / "out")
    assert main([*command, "--resume_from_checkpoint", "last"]) == 0
    out = capsys.readouterr().out
    assert "already finished: checkpoint-4 is at step 4" in out and "max_steps=4" in out and "step 5" not in out


@pytest.mark.parametrize(
    ("step", "epoch", "options", "finished"),
    [
        (4, 0.5, {"max_steps": 4}, True),
        (4, 9.0, {"max_steps": 5}, False),
        (4, 1.0, {"num_train_epochs": 1}, True),
        (4, 1.0, {"num_train_epochs": 1.5}, False),
    ],
)
def test_a_run_without_steps_left_is_finished(step, epoch, options, finished, tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": epoch}))
    args = arguments(out=tmp_path, **{"max_steps": -1, **options})
    assert (finished_message(tmp_path, args) is not None) == finished


def test_the_trainer_takes_the_same_words_and_names_a_corrupt_state(tmp_path):
    trained(packed_trainer(arguments(out=tmp_path, **{**SAVING, "max_steps": 2})))
    last = str(tmp_path / "checkpoint-2")
    words = (None, False, "false", "", True, "true", "last", last)
    assert [checkpoint_to_resume(asked, tmp_path) for asked in words] == [None] * 4 + [last] * 4
    again = packed_trainer(arguments(out=tmp_path))
    with pytest.raises(InvalidConfig, match="checkpoint-3: that is no checkpoint"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"trainer_state.json cannot be read"):
        again.train(resume_from_checkpoint=last)
