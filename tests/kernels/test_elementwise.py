"""Rotation and norms where no kernel takes them, and the norms that a patch finds."""

import pytest
import tiny
import torch
from pretended_liger import pretend_liger
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from trl_packfa import describe, patch
from trl_packfa.kernels.norms import RMSNormOverride, has_norm_kernel
from trl_packfa.kernels.rotary import rotate
from trl_packfa.override import override_in


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_transformers(query, key, cos, sin):
    width = cos.shape[-1]
    rotated = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin, unsqueeze_dim=2)
    return [torch.cat((r, x[..., width:]), -1) for r, x in zip(rotated, (query, key), strict=True)]


@pytest.mark.parametrize("rotated", [16, 8], ids=["whole heads", "half heads"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one row of positions", "positions of each row"])
def test_a_cpu_runs_transformers_rotation(rows, rotated):
    """Sine and cosine are any numbers, their halves not alike."""
    given = [random(2, 17, n, 16, seed=n) for n in (4, 2)] + [random(rows, 17, rotated, seed=seed) for seed in (5, 6)]
    for ours, theirs in zip(rotate(*given), by_transformers(*given), strict=True):
        assert torch.equal(ours, theirs)


def test_queries_are_promoted_as_transformers_does():
    """Under autocast projections are in half precision, tables in float32."""
    query, tables = random(1, 4, 2, 16, seed=0).bfloat16().requires_grad_(), random(2, 1, 4, 16, seed=1)
    ours, _ = rotate(query, query, *tables)
    assert ours.dtype == by_transformers(query, query, *tables)[0].dtype == torch.float32
    (grad,) = torch.autograd.grad(ours.sum(), query)
    assert grad.dtype == torch.bfloat16


def test_llamas_norms_have_a_kernel_where_liger_is_installed(monkeypatch):
    assert not has_norm_kernel(LlamaRMSNorm(8))
    pretend_liger(monkeypatch)
    llama = LlamaRMSNorm(8)
    assert has_norm_kernel(llama)
    others = (Gemma2RMSNorm(8), nn.LayerNorm(8), nn.RMSNorm(8), LlamaRMSNorm(8).to("meta"))
    assert not any(map(has_norm_kernel, others))
    llama.forward = lambda x: x
    assert not has_norm_kernel(llama), "a kernel of somebody else's is in its place"


@pytest.mark.parametrize("architecture, norms", [("llama", 9), ("qwen3", 17), ("gemma2", 0), ("phi", 0)])
def test_a_patch_finds_the_norms(architecture, norms, monkeypatch):
    """Two a layer and the last; Qwen3 has two more for query and key."""
    pretend_liger(monkeypatch)
    model = tiny.model(architecture)
    patch(model)
    overrides = [m for m in model.modules() if isinstance(override_in(m), RMSNormOverride)]
    assert len(overrides) == norms
    assert (f"{norms} x RMSNorm: liger-kernel" in describe(model)) == bool(norms)
