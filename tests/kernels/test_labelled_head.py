"""TRL's fused LM head of labelled positions only: TRL's numbers, and pads are not multiplied with the vocabulary."""

import pytest
import tiny
import torch
from padded import padded
from test_head import assert_scores
from tiny_models import small_model
from tolerance import assert_float32, assert_gradients, differs
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer.utils import add_fused_lm_head

from trl_packfa import patch, unpatch
from trl_packfa.kernels.lm_head.chunked import ChunkedHead

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def batch():
    made = padded(tiny.documents())
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    labels[:, :4] = -100
    return {**made, "labels": labels}


def run(model, **options):
    model.zero_grad()
    output = model(**batch(), fused_lm_head=True, **options)
    (output.loss + 0.1 * output.entropy.sum()).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"cast_lm_head_to_fp32": True}], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "mamba2", "phi"])
def test_scores_are_trls(model_type, options):
    """Plain, softly capped, scaled, behind a causal LM of ours, with a bias."""
    model = small_model(model_type)
    add_fused_lm_head(model, outputs=OUTPUTS, **options)
    expected, expected_grads = run(model)
    patch(model, unpad=True)
    actual, grads = run(model)
    assert_scores(actual, expected, names=("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"))
    assert_gradients(grads, expected_grads)
    other, _ = run(model, num_items_in_batch=7)
    assert_float32(other.loss, -actual.log_probs.sum().double() / 7)
    unpatch(model)
    assert torch.equal(run(model)[0].log_probs, expected.log_probs)


def test_less_is_multiplied():
    model = tiny.model(layers=1)
    add_fused_lm_head(model)

    def flops():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**batch(), fused_lm_head=True)
        return counter.get_total_flops()

    trl = flops()
    patch(model, unpad=True)
    labelled, places = int((batch()["labels"][:, 1:] != -100).sum()), batch()["labels"][:, 1:].numel()
    saved = 2 * (places - labelled) * tiny.VOCAB * model.config.hidden_size
    assert trl - flops() >= saved


def test_our_head_selects_positions_by_itself():
    """It runs on top of the padded batch without pads, or below; the control: other labels."""
    model, twin = (tiny.model() for _ in range(2))
    model.forward = ChunkedHead(model)
    patch(model, unpad=True)
    patch(twin, unpad=True)
    twin.forward = ChunkedHead(twin)
    actual, expected = (each(**batch(), fused_lm_head=True) for each in (model, twin))
    assert_scores(actual, expected)
    everything = batch()["labels"].masked_fill(batch()["labels"] == -100, 3)
    assert differs(model(**{**batch(), "labels": everything}, fused_lm_head=True).log_probs, actual.log_probs)


def test_fields_without_labels_and_calls_without_the_head():
    """Fields that were not asked for are none, a loss of nothing stays connected, other calls are the model's own."""
    model = tiny.model().eval()
    add_fused_lm_head(model)
    plain = model(**batch())
    patch(model, unpad=True)
    output = model(**batch(), fused_lm_head=True)
    assert output.entropy is None and output.mean_logits is None and output.log_probs.requires_grad
    loss = model(**{**batch(), "labels": torch.full_like(batch()["labels"], -100)}, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0 and all(p.grad is not None for p in model.model.layers.parameters())
    found = model(**batch())
    assert found.logits.shape == plain.logits.shape
    assert_float32(found.loss.detach(), plain.loss.detach().double())
