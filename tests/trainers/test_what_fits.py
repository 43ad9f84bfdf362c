"""The estimate of memory beside what autograd keeps, and the table of it."""

from functools import partial
from pathlib import Path

import memory_table
import pytest
import tiny
import torch
from operations import kept_bytes
from peft import get_peft_model
from pretended_liger import pretend_liger
from tiny_models import small_model
from tolerance import assert_estimate
from training import arguments, lora_config

from trl_packfa import PackedSFTConfig, patch
from trl_packfa.data.flops import attention_heads
from trl_packfa.trainers.sft import memory


@pytest.mark.parametrize(("name", "estimated"), [("gemma4_text", True), ("blt", False)])
def test_widths_that_differ_from_layer_to_layer_or_are_not_said(name, estimated):
    model = small_model(name)
    assert (memory.shape_of(model, arguments()) is not None) == estimated, "which `plan` leaves out"
    if estimated:
        text = model.config.get_text_config()
        widths = [text.per_layer_config[layer].head_dim for layer in range(text.num_hidden_layers)]
        assert len(set(widths)) > 1 and attention_heads(text)[1] == round(sum(widths) / len(widths))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused LoRA"])
def test_a_layer_keeps_what_is_estimated(fused, monkeypatch):
    """On a wide layer, where what grows with the number of heads and with the rotation does not matter. Fused, its
    norms keep their inputs, its MLP gate and up. One document, which attention copies nothing of."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept, ids = {}, torch.arange(64) % 90
    for layers in (1, 3):
        model = tiny.model(layers=layers, attention_bias=False, **sizes).train()
        forward = partial(model.model, input_ids=ids[None])
        if fused:
            pretend_liger(monkeypatch)
            model = patch(get_peft_model(model, lora_config()).train())
            forward = partial(model, **tiny.batch([ids]))
        kept[layers] = kept_bytes(model, forward)
    shape = memory.shape_of(tiny.model(layers=1, attention_bias=False, **sizes), arguments())
    measured = (kept[3] - kept[1]) / 2 / len(ids)
    assert_estimate(memory.layer_bytes(shape, 4, fused_mlp=fused, fused_norms=fused), measured)
    assert not fused or memory.layer_bytes(shape, 4) > 1.3 * measured, "control: without"


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"lora_dropout": 0.0}, True), ({"fused_kernels": False}, False),
     ({"lora_target_modules": ["q_proj"]}, False)],
)  # fmt: skip
def test_whose_mlps_are_fused(options, fused, tmp_path):
    assert memory.fuses_mlps(PackedSFTConfig(str(tmp_path), use_cpu=True, **options)) == fused


def test_the_table_of_memory_is_that_of_the_estimate():
    page = (Path(__file__).parents[2] / "docs" / "getting_started.md").read_text(encoding="utf-8")
    block = page.split("<!-- generated: python tools/memory_table.py -->\n")[1].split("\n<!-- end -->")[0]
    assert block == memory_table.table()
