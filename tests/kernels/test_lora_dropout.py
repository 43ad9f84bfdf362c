"""Dropout inside fused LoRA layers: PEFT's masks from the same random state, forward, backward and recomputed."""

from contextlib import nullcontext
from functools import partial

import pytest
import tiny
import torch
from operations import kept_bytes
from test_fused_lora import adapted, assert_like_peft, patch_beside_peft, run
from tolerance import assert_float32, differs
from torch import nn

from trl_packfa import check, patch
from trl_packfa.kernels.lora import projections
from trl_packfa.kernels.lora.dropout import Dropout
from trl_packfa.kernels.lora.projections import read

RATE = 0.3


def test_layers_with_other_rates_equal_peft():
    model = adapted(lora_dropout=RATE)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.lora_dropout["default"] = nn.Identity()
        layer.self_attn.v_proj.lora_dropout["default"] = nn.Dropout(0.6)
        layer.mlp.gate_proj.lora_dropout["default"].eval()
    assert_like_peft(model)


@pytest.mark.parametrize("by_autocast", [False, True])
def test_a_forward_without_gradients_draws_pefts_masks(by_autocast):
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if by_autocast else nullcontext

    def logits(fused):
        model = (patch if fused else patch_beside_peft)(adapted(lora_dropout=RATE))
        torch.manual_seed(7)
        with torch.no_grad(), context():
            return model(**tiny.batch(tiny.documents())).logits, torch.get_rng_state()

    (ours, our_state), (pefts, pefts_state) = logits(True), logits(False)
    assert torch.equal(our_state, pefts_state) and not torch.equal(ours, pefts)
    assert by_autocast or assert_float32(ours, pefts) is None


def test_a_step_leaves_the_random_state_where_peft_leaves_it():
    model, states = adapted(lora_dropout=RATE), []
    for fused in (True, False):
        run(model, fused=fused)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    torch.manual_seed(7)
    assert not torch.equal(states[0], torch.get_rng_state()), "control: numbers were drawn"


def test_two_backwards_of_one_forward_have_the_same_masks():
    model = patch(adapted(lora_dropout=RATE))
    loss = model(**tiny.batch(tiny.documents())).logits.sin().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(map(torch.equal, *(torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))))


def test_evaluation_draws_nothing():
    model = patch(adapted(lora_dropout=RATE).eval())
    plain = patch(adapted(lora_dropout=0.0).eval())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    ours, expected = (each(**tiny.batch(tiny.documents())).logits for each in (model, plain))
    assert torch.equal(torch.get_rng_state(), state)
    assert_float32(ours, expected)
    assert differs(model.train()(**tiny.batch(tiny.documents())).logits, ours), "the same patch, in training mode"


def test_the_check_runs_the_code_of_training(monkeypatch):
    """In float32 without dropout the update is merged into the weight; with dropout it is added, in a check too."""
    added = []
    init = projections.Projection.base
    monkeypatch.setattr("trl_packfa.kernels.lora.layers._merge", lambda p, dtype: added.append(1) or init(p, dtype))
    assert check(patch(adapted(lora_dropout=RATE))).is_exact and not added


def test_no_mask_is_kept_for_the_backward():
    kept = []
    for rate in (RATE, 0.0):
        model = patch(adapted(lora_dropout=rate))
        kept.append(kept_bytes(model, partial(model, **tiny.batch(tiny.documents()))))
    # With dropout the narrow products with `lora_A` are kept: of 6 layers in each of 2, rank 4, 4 bytes a number.
    narrow = 2 * 6 * 4 * 4 * sum(tiny.LENGTHS)
    assert kept[0] == kept[1] + narrow


def test_masks_are_each_layers_own_and_keep_their_share():
    layers = adapted(lora_dropout=RATE).base_model.model.model.layers[0].self_attn
    projections = [read(getattr(layers, name)) for name in ("q_proj", "k_proj", "v_proj")]
    dropout = Dropout(projections, torch.device("cpu"), torch.float32)
    masks = dropout.draw(500, 64)
    shares = [float(mask.float().mean()) for mask in masks]
    assert shares == pytest.approx([1 - RATE] * 3, abs=0.02)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert all(map(torch.equal, masks, dropout.draw_again(500, 64)))
