"""FlashAttention's kernels take half precision only, and TRL trains float32 weights under bfloat16 autocast."""

import math

import pytest
import tiny
import torch
from pretended import pretend
from training import arguments, losses, packed_trainer, trained

from trl_packfa import PackedLayout, check, patch
from trl_packfa.attention import AttentionArguments, get_backend
from trl_packfa.patching.state import find_state


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_autocast_takes_the_fast_kernel(backend, architecture, monkeypatch):
    """Rotated queries and keys are float32 there, values bfloat16."""
    dtypes = pretend(monkeypatch, backend)
    model = patch(tiny.model(architecture))
    with torch.autocast("cpu", torch.bfloat16):
        report = check(model)
    assert report.is_exact, str(report)
    assert set(find_state(model).backends.resolved.values()) == {backend}
    assert set(dtypes) == {torch.bfloat16}


@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_the_kernel_would_refuse_what_autocast_leaves(backend, monkeypatch):
    """The control: without autocast nothing is cast."""
    pretend(monkeypatch, backend)
    query = torch.randn(8, 4, 16)
    with pytest.raises(RuntimeError, match="takes one half precision"):
        call = AttentionArguments(scaling=1.0).on(PackedLayout.from_lengths([3, 5]).attention)
        get_backend(backend)(query, query, query, call)


@pytest.mark.parametrize("fused", [True, False])
def test_a_default_run_trains_through_it(fused, tmp_path, monkeypatch):
    """TRL's dtypes; the run's own check comes first."""
    dtypes = pretend(monkeypatch, "varlen")
    trainer = trained(packed_trainer(arguments(out=tmp_path, bf16=True, fused_kernels=fused)))
    assert set(dtypes) == {torch.bfloat16}
    assert trainer.check_report.backend == "varlen"
    assert set(find_state(trainer.model).backends.resolved.values()) == {"varlen"}
    assert all(map(math.isfinite, losses(trainer)))
