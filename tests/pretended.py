"""CUDA kernels' stand-ins on a CPU: as strict about dtypes as those, computed by the reference."""

import torch

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, flash, get_backend, kernel_limits, varlen

CUDA_ONLY = "needs a CUDA"


def pretend(monkeypatch, backend):
    """Let this backend run on the CPU for the length of a test; returns the dtypes that its kernel was called with."""
    dtypes = []

    def attend(q, k, v, cu_seqlens, longest, scale, window):
        dtypes.append(q.dtype)
        if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(f"the kernel takes one half precision, got {q.dtype}, {k.dtype}, {v.dtype}")
        layout = PackedLayout.from_cu_seqlens(cu_seqlens)
        assert longest >= layout.max_seqlen
        arguments = AttentionArguments(scaling=scale, sliding_window=window + 1 if window >= 0 else None)
        with torch.autocast("cpu", enabled=False):
            return get_backend("reference")(q, k, v, layout, arguments)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return attend(q, k, v, cu_seq_q, max_q, scale, window_size[0])

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False, window_size=(-1, -1)):  # fmt: skip
        return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])

    module = {"varlen": varlen, "flash": flash}[backend]
    monkeypatch.setattr(varlen, "_varlen_attn", varlen_attn)
    kernel = flash._Kernel(flash_attn_varlen_func, frozenset(flash_attn_varlen_func.__code__.co_varnames), (8, 0))
    monkeypatch.setattr(flash, "_kernel", lambda capability: kernel)
    monkeypatch.setattr(flash, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(module, "flash_refusals", _refusals_elsewhere)
    return dtypes


def _refusals_elsewhere(request, **options):
    """What the kernels would refuse on their own device."""
    return [reason for reason in kernel_limits.flash_refusals(request, **options) if not reason.startswith(CUDA_ONLY)]
