"""What a run is told that it could save: estimates in a line, nothing changed."""

import logging
from functools import partial
from pathlib import Path

import memory_table
import pytest
import tiny
import torch
from operations import kept_bytes
from peft import get_peft_model
from tiny_models import small_model
from tolerance import assert_estimate
from training import arguments, lora_config, packed_trainer

from trl_packfa import PackedSFTConfig, patch
from trl_packfa.data.flops import attention_heads
from trl_packfa.trainers.sft import memory
from trl_packfa.trainers.sft.memory import checkpointing_can_be_off, estimate, shape_as_loaded, without_checkpointing

GB = 1e9


def adapted(dtype=torch.float32):
    return get_peft_model(tiny.model(layers=2).to(dtype), lora_config())


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_checkpointing_can_be_off_where_it_fits(lora):
    model = adapted() if lora else tiny.model(layers=2)
    args = arguments(gradient_checkpointing=True, use_peft=lora)
    line = checkpointing_can_be_off(model, args, 1000, 80 * GB)
    needed = estimate(shape_as_loaded(model), without_checkpointing(args), 1000).needed
    assert f"can be off: est. {needed / GB:.1f} GB of 80.0 GB at 1,000 tokens." in line
    operations = "4 operations a weight and token instead of 6" if lora else "6 operations a weight and token instead"
    assert f"gradient_checkpointing=False computes {operations}" in line
    assert args.gradient_checkpointing, "said, not done"
    assert checkpointing_can_be_off(model, args, 1000, needed - 1) is None, "it would not fit"
    assert checkpointing_can_be_off(model, without_checkpointing(args), 1000, 80 * GB) is None, "it is off"


@pytest.mark.parametrize(("name", "estimated"), [("gemma4_text", True), ("blt", False)])
def test_widths_that_differ_from_layer_to_layer_or_are_not_said(name, estimated):
    """A word about speed stops no training."""
    model = small_model(name)
    line = checkpointing_can_be_off(model, arguments(gradient_checkpointing=True), 1000, 80 * GB)
    assert (line is not None) == estimated
    assert (memory.shape_of(model, arguments()) is not None) == estimated, "which `plan` leaves out"
    if estimated:
        text = model.config.get_text_config()
        widths = [text.per_layer_config[layer].head_dim for layer in range(text.num_hidden_layers)]
        assert len(set(widths)) > 1 and attention_heads(text)[1] == round(sum(widths) / len(widths))


def test_what_is_loaded_weighs_what_its_config_says(tmp_path):
    args = arguments(use_peft=True, lora_r=4)
    by_config, loaded = memory.shape_of(tiny.model(layers=2), args), shape_as_loaded(adapted())
    assert estimate(loaded, args, 500).total == pytest.approx(estimate(by_config, args, 500).total)
    half = shape_as_loaded(adapted(torch.bfloat16))
    assert estimate(half, args, 500).weights == estimate(loaded, args, 500).weights / 2


def test_a_layer_with_fused_lora_keeps_what_is_estimated():
    """Its norms their inputs, its MLP gate and up; one document, which attention copies nothing of."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept, tokens = {}, 64
    for layers in (1, 3):
        model = tiny.model(layers=layers, attention_bias=False, **sizes)
        model = patch(get_peft_model(model, lora_config()).train())
        kept[layers] = kept_bytes(model, partial(model, **tiny.batch([torch.arange(tokens) % 90])))
    shape = shape_as_loaded(model)
    measured = (kept[3] - kept[1]) / 2 / tokens
    assert_estimate(memory.layer_bytes(shape, 4, fused_mlp=True, fused_norms=True), measured)
    assert memory.layer_bytes(shape, 4) > 1.3 * measured, "control: without"


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"lora_dropout": 0.0}, True), ({"fused_kernels": False}, False),
     ({"lora_target_modules": ["q_proj"]}, False)],
)  # fmt: skip
def test_whose_mlps_are_fused(options, fused, tmp_path):
    assert memory.fuses_mlps(PackedSFTConfig(str(tmp_path), use_cpu=True, **options)) == fused


def test_frozen_float32_under_bf16_is_said(monkeypatch):
    monkeypatch.setattr(memory, "_FEW_BYTES", 100)
    args = arguments(bf16=True)
    size = sum(p.numel() * 4 for p in adapted().parameters() if not p.requires_grad)
    line = memory.frozen_in_float32(adapted(), args)
    assert "dtype='bfloat16' saves the casts" in line and f"{size / GB:.1f} GB that every pass casts" in line
    assert memory.frozen_in_float32(adapted(torch.bfloat16), args) is None
    assert memory.frozen_in_float32(tiny.model(layers=1), args) is None, "weights that train are to be float32"
    assert memory.frozen_in_float32(adapted(), arguments(bf16=False)) is None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_trainer_says_it(on_gpu, caplog, monkeypatch):
    """With the largest micro-batch of its documents. Where there is no GPU, it is not said what fits one."""
    monkeypatch.setattr(memory, "_FEW_BYTES", 100)
    if on_gpu:
        monkeypatch.setattr(memory, "memory_of", lambda device: int(80 * GB))
    with caplog.at_level(logging.INFO, logger="trl_packfa"):
        trainer = packed_trainer(arguments(bf16=True, gradient_checkpointing=True))
    assert "the frozen weights are float32 (TRL's default)" in caplog.text
    assert ("gradient checkpointing can be off: est." in caplog.text) == on_gpu
    assert trainer.args.gradient_checkpointing


def test_the_table_of_memory_is_that_of_the_estimate():
    page = (Path(__file__).parents[2] / "docs" / "getting_started.md").read_text(encoding="utf-8")
    block = page.split("<!-- generated: python tools/memory_table.py -->\n")[1].split("\n<!-- end -->")[0]
    assert block == memory_table.table()
