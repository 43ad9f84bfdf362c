"""Half-precision products of a proof on a CPU that emulates them: computed in float32 and rounded once."""

import pytest
import torch

from trl_packfa.exactness import products


@pytest.fixture
def layer(monkeypatch):
    """A layer that counts as large, on a CPU that emulates its products."""
    monkeypatch.setattr(products, "has_half_products", lambda dtype, device: False)
    monkeypatch.setattr(products, "CHEAP", 0)
    torch.manual_seed(0)
    return torch.nn.Linear(16, 16, bias=False).bfloat16()


def in_float32(weight, x):
    return (x.detach().float() @ weight.detach().float().t()).bfloat16()


@pytest.mark.parametrize("kept", [True, False])
def test_they_are_rounded_once(layer, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(products, "_KEPT", 0)
    x = torch.randn(5, 16).bfloat16().requires_grad_()
    with products.fast_half_products(layer) as mode:
        found = layer(x)
        found.float().sum().backward()
    assert torch.equal(found, in_float32(layer.weight, x))
    ones = torch.ones(5, 16).bfloat16()
    assert torch.equal(x.grad, in_float32(layer.weight.t(), ones))
    assert torch.equal(layer.weight.grad, in_float32(x.t(), ones.t()))
    assert len(mode._wide) == kept, "the weight and its transpose are converted once"


def test_a_weight_that_changes_is_converted_again(layer):
    x = torch.randn(5, 16).bfloat16()
    with torch.no_grad(), products.fast_half_products(layer):
        layer(x)
        layer.weight.mul_(2)
        assert torch.equal(layer(x), in_float32(layer.weight, x))
        part = layer.weight[:8]  # it begins at the same address
        assert torch.equal(x @ part.t(), in_float32(part, x))


def test_activations_that_change_are_converted_again(layer):
    x = torch.randn(5, 16).bfloat16()
    with torch.no_grad(), products.fast_half_products(layer) as mode:
        layer(x)
        assert [wide.tensor.data_ptr() for wide in mode._recent] == [x.data_ptr()]
        layer(x)
        assert len(mode._recent) == 1
        x.mul_(2)
        assert torch.equal(layer(x), in_float32(layer.weight, x))
        assert torch.equal(layer(x[:3]), in_float32(layer.weight, x[:3]))


def test_small_models_and_float32_run_as_they_are(layer, monkeypatch):
    assert not isinstance(products.fast_half_products(layer.float()), products._InFloat32)
    monkeypatch.setattr(products, "CHEAP", 10**6)
    assert not isinstance(products.fast_half_products(layer.bfloat16()), products._InFloat32)
