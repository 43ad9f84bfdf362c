"""Arguments that contradict each other are refused at construction, with values, reason and remedy. What is asked
before data and weights are loaded: one message each, and nothing loaded."""

import dataclasses
import json
import os
import re

import pytest
import tiny
from datasets import Dataset
from training import FORMATS, SAVING, arguments, packed_trainer, trained
from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig, get_peft_config, get_quantization_config

from trl_packfa import PackedSFTConfig
from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, InvalidDataset, MissingPackage, NoBackend, PackingError
from trl_packfa.scripts import train as launch
from trl_packfa.trainers.saving.checkpoint_files import checkpoint_to_resume, finished_message


def config(tmp="out", **options):
    return PackedSFTConfig(tmp, use_cpu=True, bf16=options.pop("bf16", False), **options)


def test_without_a_gpu_float32_is_meant(monkeypatch):
    monkeypatch.setattr("trl_packfa.config.common.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert PackedSFTConfig("out").bf16 is False and PackedSFTConfig("out").dtype == "float32"
    with pytest.raises(ValueError, match="doesn't support bf16"):
        PackedSFTConfig("out", bf16=True)
    assert PackedSFTConfig("out", bf16=True, use_cpu=True).bf16 and PackedSFTConfig("out", use_cpu=True).bf16
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: "cuda")
    with pytest.raises(InvalidConfig, match=r"no bfloat16(.|\n)*fp16=True"):
        PackedSFTConfig("out")


def test_emulated_bfloat16_is_none(monkeypatch):
    """transformers counts the emulation of a T4."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: "cuda")
    with pytest.raises(InvalidConfig, match=r"this cuda has no bfloat16(.|\n)*fp16=True"):
        PackedSFTConfig("out")


def test_every_field_of_trls_configs_is_there_and_ours_have_help():
    ours = {f.name: f for f in dataclasses.fields(PackedSFTConfig)}
    theirs = {f.name for config in (SFTConfig, ModelConfig) for f in dataclasses.fields(config)}
    assert theirs <= ours.keys()
    assert all(ours[name].metadata.get("help") for name in ours.keys() - theirs)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_defaults_pack_adapt_and_bring_no_warning():
    args = config()
    assert (args.packing, args.packing_strategy, args.use_peft, args.check_packing) == (True, "step", True, True)
    assert get_peft_config(args).target_modules == "all-linear"
    assert get_quantization_config(args) is None
    assert args.gradient_checkpointing and not config(gradient_checkpointing=False).gradient_checkpointing


def test_nothing_is_pinned_for_a_cpu():
    """torch warns of it once an epoch; transformers thinks of it where `use_cpu` says so."""
    assert SFTConfig("out", bf16=False).dataloader_pin_memory
    args = PackedSFTConfig("out", bf16=False)
    assert args.dataloader_pin_memory is (args.device.type != "cpu")


@pytest.mark.parametrize(("options", "dtype"), [
    ({}, "float32"),
    ({"load_in_4bit": True}, "float32"),
    ({"load_in_4bit": True, "bf16": True}, "bfloat16"),
    ({"load_in_4bit": True, "dtype": "float16"}, "float16"),
])  # fmt: skip
def test_weights_and_qloras_products_have_the_dtype_of_training(options, dtype):
    assert config(**options).dtype == dtype


@pytest.mark.parametrize(("options", "message"), [
    ({"packing": False, "packing_strategy": "bfd"}, "packing=False, but packing_strategy='bfd'"),
    ({"packing_strategy": "bfd", "max_length": None}, r"fills rows of max_length tokens, max_length is None"),
    ({"packing_strategy": "wrap"}, r"'wrap' is not supported by PackedSFTConfig(.|\n)*'step', 'minibatch', 'bfd'"),
    ({"overflow": "cut"}, r"overflow='cut' is not supported by PackedSFTConfig(.|\n)*'truncate', 'split'"),
    ({"max_length": 1}, "a document needs two tokens"),
    ({"max_tokens_per_microbatch": 0}, r"max_tokens_per_microbatch=0: it must be 2 or more\.\n.*needs two tokens"),
    ({"max_tokens_per_microbatch": 9, "packing_strategy": "bfd"}, "has no effect under packing_strategy='bfd'"),
    ({"train_sampling_strategy": "batch_rebalance"}, "both decide how a step is cut"),
    ({"use_peft": False, "load_in_4bit": True}, "quantized weights cannot be trained"),
    ({"lora_target_modules": ["q_proj", "lm_head"]}, "lora_target_modules names 'lm_head'"),
    ({"packing_strategy": "bfd", "train_sampling_strategy": "group_by_length"},
     "has nothing to order under packing_strategy='bfd'"),
    ({"packing_strategy": "bfd", "dataloader_drop_last": True}, "dataloader_drop_last=True has nothing to drop"),
    ({"packing_strategy": "wrapped", "overflow": "drop"}, "overflow='drop' has no effect under .*'wrapped'"),
    ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end' with packing: documents are cut at their end"),
    ({"loss_weighting": "document"},
     r"loss_weighting='document' is not supported by PackedSFTConfig(.|\n)*'token', 'example'"),
    ({"loss_weighting": "example", "loss_type": "dft"}, r"loss_type='dft' with loss_weighting='example'"),
    ({"loss_weighting": "example", "label_smoothing_factor": 0.1},
     "label_smoothing_factor=0.1 with loss_weighting='example'"),
    ({"sequence_parallel": 0}, "sequence_parallel=0: it must be 1 or more"),
    ({"sequence_parallel": 2, "packing": False}, "only packed rows can be shared"),
    ({"expand_turns": True, "packing": False}, "expand_turns=True with packing=False"),
    ({"share_prefixes": True, "packing": False}, "share_prefixes=True with packing=False"),
    ({"expand_turns": True, "packing_strategy": "wrapped"}, "lost its history"),
    ({"expand_turns": True, "assistant_only_loss": True}, "exactly its own assistant turn"),
    ({"share_prefixes": True, "neftune_noise_alpha": 5.0}, "draws its own noise"),
])  # fmt: skip
def test_contradictions_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        config(**options)
    assert issubclass(InvalidConfig, PackingError) and issubclass(PackingError, ValueError)


def test_unknown_backend_is_refused():
    with pytest.raises(NoBackend, match="no attention backend 'fa2'"):
        config(attention_backend="fa2")


def test_other_arguments_are_taken_over():
    plain = SFTConfig(
        "o", learning_rate=3e-4, max_length=77, eos_token="</s>", hub_token="x", use_cpu=True, bf16=False,
        padding_free=True,
    )  # fmt: skip
    args = PackedSFTConfig.from_args(plain)
    assert (args.learning_rate, args.max_length, args.packing, args.packing_strategy) == (3e-4, 77, True, "step")
    assert (args.eos_token, args.hub_token) == ("</s>", "x"), "to_dict() would have masked them"
    packed = SFTConfig("o", packing=True, packing_strategy="bfd_split", use_cpu=True, bf16=False)
    assert PackedSFTConfig.from_args(packed).packing_strategy == "bfd_split"
    bare = TrainingArguments("o", learning_rate=1e-3, use_cpu=True)
    assert PackedSFTConfig.from_args(bare).learning_rate == 1e-3
    assert PackedSFTConfig.from_args(args) is args


@pytest.mark.parametrize(("changes", "strategy", "overflow"), [
    ({"packing_strategy": "bfd_split"}, "bfd_split", "split"),
    ({"packing": False}, None, "truncate"),
    ({"max_length": 64, "use_peft": False}, "step", "truncate"),
])  # fmt: skip
def test_replaced_config_is_settled_anew_and_the_old_one_stays(changes, strategy, overflow):
    args = config()
    before = dict(vars(args))
    changed = dataclasses.replace(args, **changes)
    assert (changed.packing_strategy, changed.overflow) == (strategy, overflow)
    assert {name: getattr(changed, name) for name in changes} == changes and vars(args) == before
    with pytest.raises(InvalidConfig, match="max_length=1: it must be 2 or more"):
        dataclasses.replace(args, max_length=1)


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
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"trainer_state.json cannot be read"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
