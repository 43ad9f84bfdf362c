"""Half-precision products of a check on a CPU that emulates them: computed in float32 and rounded once."""

import threading

import pytest
import torch

from trl_packfa.checking import products


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
def test_replaced_products_are_rounded_once(layer, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(products, "_KEPT", 0)
    x = torch.randn(5, 16).bfloat16().requires_grad_()
    with products.fast_half_products(layer) as kernels:
        found = layer(x)
        found.float().sum().backward()
        assert len(kernels._wide) == kept, "the weight and its transpose are converted once"
    assert torch.equal(found, in_float32(layer.weight, x))
    ones = torch.ones(5, 16).bfloat16()
    assert torch.equal(x.grad, in_float32(layer.weight.t(), ones))
    assert torch.equal(layer.weight.grad, in_float32(x.t(), ones.t()))


def test_a_weight_that_changes_is_converted_again(layer):
    x = torch.randn(5, 16).bfloat16()
    with torch.no_grad(), products.fast_half_products(layer):
        layer(x)
        layer.weight.mul_(2)
        assert torch.equal(layer(x), in_float32(layer.weight, x))
        part = layer.weight[:8]  # it begins at the same address
        assert torch.equal(x @ part.t(), in_float32(part, x))


PRODUCTS = {
    "mm": lambda matrix, batch: matrix @ matrix,
    "addmm": lambda matrix, batch: torch.addmm(matrix[0], matrix, matrix, beta=0.5, alpha=2.0),
    "bmm": lambda matrix, batch: batch @ batch,
    "baddbmm": lambda matrix, batch: torch.baddbmm(batch, batch, batch, beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_is_replaced_inside_the_block_alone(layer, name, recwarn):
    product, matrix, batch = PRODUCTS[name], torch.randn(8, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    expected, own = product(matrix.float(), batch.float()), product(matrix, batch)
    with products.fast_half_products(layer):
        found = product(matrix, batch)
        assert torch.equal(product(matrix.float(), batch.float()), expected), "float32 is not touched"
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(product(matrix, batch), own), "torch's kernels are back"
    assert not recwarn.list


def test_torchs_kernels_come_back_after_an_error_and_run_small_models_and_float32(layer, monkeypatch):
    x = torch.randn(5, 16).bfloat16()
    own = layer(x)
    with pytest.raises(RuntimeError, match="shapes"), products.fast_half_products(layer) as kernels:
        layer(x)
        x @ x
    assert torch.equal(layer(x), own) and not kernels._wide
    assert not isinstance(products.fast_half_products(layer.float()), products._InFloat32)
    monkeypatch.setattr(products, "CHEAP", 10**6)
    assert not isinstance(products.fast_half_products(layer.bfloat16()), products._InFloat32)


def test_products_of_another_thread_are_those_without_the_check(layer):
    x, found = torch.randn(5, 16).bfloat16(), []
    with torch.no_grad():
        expected = layer(x)
        with products.fast_half_products(layer) as kernels:
            other = threading.Thread(target=lambda: found.append(layer(x)))
            other.start()
            other.join()
            assert not kernels._wide
    assert torch.equal(found[0], expected)
