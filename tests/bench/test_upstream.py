"""What TRL's own trainers attend with: on a GPU FlashAttention where it can be had, and the table says what it was. A
device that is described stands in for a GPU."""

from pathlib import Path

import pytest
import torch
from training import LENGTHS, arguments, trained
from transformers import AutoTokenizer
from transformers import modeling_flash_attention_utils as flash_utils

from trl_packfa import PackedSFTConfig
from trl_packfa.bench import sides
from trl_packfa.bench.data import random_documents
from trl_packfa.bench.table import heading, remarks, training_rows

STAND_IN = str(Path(__file__).parents[2] / "benchmarks" / "gpu" / "stand_in")


@pytest.fixture
def gpu(monkeypatch):
    """A device, and the stand-in for flash-attn."""
    monkeypatch.setattr(PackedSFTConfig, "device", torch.device("cuda", 0))
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    for module in (sides, flash_utils):
        monkeypatch.setattr(module, "is_flash_attn_2_available", lambda: True)
    second = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(second, "general_availability_check", lambda: True)


def asked(preset, **options):
    return sides.upstream_attention(preset, arguments(PackedSFTConfig, **{"dtype": "bfloat16", **options}))


def test_trls_side_on_a_gpu_has_flash_attention(preset, gpu):
    assert asked(preset) == asked(preset, dtype="float32", bf16=True) == sides.Attention("flash_attention_2")


def test_an_attention_that_the_user_names_is_taken(preset, gpu):
    assert asked(preset, attn_implementation="sdpa") == sides.Attention("sdpa")
    assert asked(preset, model_init_kwargs={"attn_implementation": "eager"}) == sides.Attention("eager")
    args = arguments(PackedSFTConfig, dtype="bfloat16", attn_implementation="sdpa")
    side = sides.parse_sides("trl-bfd/flash_attention_3")[0]
    assert sides.upstream_kwargs(side, preset, args)["attn_implementation"] == "flash_attention_3"


def test_where_it_cannot_be_had_the_reason_is_told(preset, gpu, monkeypatch):
    half_only = "FlashAttention takes half precision, this runs in float32"
    assert asked(preset, dtype="float32") == sides.Attention(None, half_only)
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_flash_attn", False)
    assert "LlamaForCausalLM does not support Flash Attention 2" in asked(preset).remark
    monkeypatch.setattr(sides, "is_flash_attn_2_available", lambda: False)
    assert asked(preset) == sides.Attention(None, "flash-attn is not installed"), "nothing is loaded from the Hub"


def test_trls_side_on_a_cpu_has_the_models_own_attention(preset):
    assert asked(preset) == sides.Attention(None)


@pytest.mark.parametrize(
    ("name", "expected"), [("trl-bfd/eager", "eager"), ("padding", "sdpa"), ("step/sdpa", "sdpa")]
)
def test_a_side_attends_with_what_it_names(name, expected, preset, tmp_path):
    side, args = sides.parse_sides(name)[0], arguments(PackedSFTConfig, tmp_path, max_length=64, max_steps=1)
    documents = random_documents(LENGTHS, vocab_size=512, seed=0)
    data = {"train_dataset": documents, "processing_class": AutoTokenizer.from_pretrained(preset)}
    trainer = trained(sides.build_trainer(side, args, preset, data))
    assert sides.attention_of(trainer) == expected


def test_the_table_names_it():
    side = {"side": "trl-bfd", "trainer": "TRL", "attention": "sdpa", "remark": "flash-attn is not installed"}
    side |= {"validation_loss": None, "steps_per_epoch": 9, "tokens_per_step": 1.0, "micro_batches_per_step": 1.0}
    side |= {"fill": 1.0, "final_loss": 2.0, "recompiles": 0, "host_syncs_per_micro_batch": 1.0, "leaks": False}
    side |= {"ratio": {"verdict": ""}}
    assert training_rows({"sides": [side]})[0]["attention"] == "sdpa"
    assert remarks({"sides": [side]}) == ["trl-bfd: runs with sdpa, as flash-attn is not installed"]
    data = {"documents": 1, "tokens": 1, "mean_length": 1.0, "longest": 1}
    place = {"gpus": ["NVIDIA H100"], "commit": None}
    versions = {"torch": "2", "transformers": "5", "trl": "1", "flash-attn": "2.8.3"}
    report = {"data": data, "environment": {**place, "versions": versions}, "model_flops_per_token": 0.0}
    assert "flash-attn 2.8.3" in heading(report)
