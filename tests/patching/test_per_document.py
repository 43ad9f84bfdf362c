"""Modules that run document by document: what is made for them."""

import torch
from calls import watched

from trl_packfa import PackedLayout
from trl_packfa.layout.call_context import empty_mask
from trl_packfa.patching import per_document


def test_a_layout_of_inference_mode_serves_training():
    layout, x = PackedLayout.from_lengths((30, 5)), torch.randn(1, 35, 4, requires_grad=True)
    with torch.inference_mode():
        per_document.run_by_document(torch.sin, (x,), {}, layout)
    per_document.run_by_document(torch.sin, (x,), {}, layout).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_a_mask_is_made_only_for_modules_that_are_handed_one(monkeypatch):
    """It is quadratic in the longest document of a group: a state space model never looks at it."""
    made = watched(monkeypatch, torch, "full")
    layout = PackedLayout.from_lengths((300, 5))
    x = torch.randn(1, 305, 4)

    def mixer(hidden, attention_mask=None):
        assert attention_mask is None or attention_mask.shape[-2:] == (hidden.shape[1],) * 2
        return hidden * 2

    assert torch.equal(per_document.run_by_document(mixer, (x,), {}, layout), x * 2) and not made
    masked = {"attention_mask": empty_mask(layout, x.device, dtype=torch.float32)}
    assert torch.equal(per_document.run_by_document(mixer, (x,), masked, layout), x * 2)
    assert [tuple(shape) for shape, *_ in made] == [(300, 300), (5, 5)]
