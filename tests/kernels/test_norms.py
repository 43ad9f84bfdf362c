"""Norms whose output fused LoRA does not keep, but computes again in its backward."""

import weakref
from contextlib import nullcontext

import pytest
import tiny
import torch
from pretended_liger import pretend_liger
from test_fused_lora import adapted
from tolerance import differs
from torch.autograd.graph import saved_tensors_hooks

from trl_packfa import patch
from trl_packfa.kernels import norms
from trl_packfa.kernels.lora import overrides

LAYERS = 2


@pytest.fixture(autouse=True)
def _with_liger(monkeypatch):
    """As on CUDA, where Liger computes the norms."""
    pretend_liger(monkeypatch)


@pytest.fixture
def kept(monkeypatch):
    """Return the numbers of norms' outputs that are alive."""
    alive, run_norm = set(), norms.run_norm

    def noting(*given):
        out, number = run_norm(*given), len(alive) + len(ended)
        alive.add(number)
        weakref.finalize(out.untyped_storage(), lambda: (alive.discard(number), ended.append(number)))
        return out

    ended = []
    monkeypatch.setattr(norms, "run_norm", noting)
    return alive


def loss_of(model, context=nullcontext):
    with context():
        return model(**tiny.batch(tiny.documents())).logits.sin().sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def keeping():
    """Return hooks that change nothing. Under hooks an input is kept itself."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.3}, {"target_modules": ["q_proj", "down_proj"]}], ids=str)
def test_a_norms_output_is_not_kept_beside_its_input(options, kept):
    """The control is a run under hooks, which also has the same gradients, to the bit."""
    model, found, outputs = patch(adapted(**options)), [], []
    for context in (nullcontext, keeping):
        torch.manual_seed(7)
        loss = loss_of(model, context)
        outputs.append(len(kept))
        found.append(gradients(model, loss))
    assert outputs == [0, 2 * LAYERS]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_a_layer_that_keeps_its_input_itself_keeps_the_norms_output(kept):
    loss = loss_of(patch(tiny.model(layers=LAYERS).train()))
    assert len(kept) >= 2 * LAYERS
    del loss


def test_an_output_that_was_overwritten_is_kept(monkeypatch):
    """The control does not look whether a hook has written to the output."""
    model = patch(adapted())
    for layer in model.base_model.model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda module, args, out: out.mul_(2))
    expected, found = (gradients(model, loss_of(model, context)) for context in (keeping, nullcontext))
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    monkeypatch.setattr(overrides, "source_of", norms._SOURCES.get)
    found = gradients(model, loss_of(model))
    assert any(differs(grad, expected[name]) for name, grad in found.items())


def test_an_output_is_saved_as_any_tensor_is(tmp_path):
    states = patch(adapted()).base_model.model.model(**tiny.batch(tiny.documents())).last_hidden_state
    assert norms.source_of(states)
    torch.save(states, tmp_path / "states.pt")
    assert torch.equal(torch.load(tmp_path / "states.pt"), states)


def test_nothing_is_noted_without_gradients():
    model = patch(adapted())
    seen = []
    for layer in model.base_model.model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, args, out: seen.append(norms.source_of(out))
        )
    with torch.no_grad():
        loss_of(model)
    assert seen == [None] * LAYERS
    loss_of(model)
    assert None not in seen[LAYERS:]
