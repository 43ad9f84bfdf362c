"""Arguments that contradict each other are refused at construction, with values, reason and remedy."""

import dataclasses

import pytest
from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig, get_peft_config, get_quantization_config

from trl_packfa import PackedSFTConfig
from trl_packfa.errors import InvalidConfig, NoBackend, PackingError


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


def test_every_field_of_trls_configs_is_there_with_help():
    ours = {f.name: f for f in dataclasses.fields(PackedSFTConfig)}
    for theirs in (SFTConfig, ModelConfig):
        assert {f.name for f in dataclasses.fields(theirs)} <= ours.keys()
    own = ours.keys() - {f.name for c in (SFTConfig, ModelConfig) for f in dataclasses.fields(c)}
    assert own == {
        "loss_by", "loss_weighting", "max_tokens_per_microbatch", "fused_kernels", "peak_tflops",
        "share_prefixes", "sequence_parallel", "expand_turns", "overflow", "check_packing", "attention_backend",
        "recheck",
    }  # fmt: skip
    assert all(ours[name].metadata.get("help") for name in own)


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
