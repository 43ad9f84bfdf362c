"""CUDA kernels' stand-ins on a CPU: as strict about dtypes, shapes and lengths as those, computed by the reference."""

from dataclasses import replace

import torch

from trl_packfa.attention import flash, varlen


@torch.library.custom_op("trl_packfa_tests::require_longest", mutates_args=())
def require_longest(query: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """The query, if `longest` is what the kernel would have to be told; looked at when a graph runs."""
    if longest != int(cu_seqlens.diff().max()):
        raise RuntimeError(f"the longest document was said to have {longest} tokens: {cu_seqlens.tolist()}")
    return query.clone()


require_longest.register_fake(lambda query, cu_seqlens, longest: torch.empty_like(query))
require_longest.register_autograd(lambda ctx, grad: (grad, None, None))


def pretend(monkeypatch, backend):
    """Let this backend run on the CPU for the length of a test; returns the dtypes that its kernel was called with."""
    dtypes = []

    def attend(q, k, v, cu_seqlens, longest, scale, window):
        if not torch.compiler.is_compiling():
            dtypes.append(q.dtype)
        if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(f"the kernel takes one half precision, got {q.dtype}, {k.dtype}, {v.dtype}")
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            raise RuntimeError(f"v must have the head dim of q and k, got {q.shape}, {k.shape}, {v.shape}")
        if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[1] % k.shape[1]:
            raise RuntimeError(f"the kernel has no heads like these: {q.shape}, {k.shape}")
        if cu_seqlens.dtype != torch.int32 or any(x.stride(-1) != 1 for x in (q, k, v)):
            raise RuntimeError("the kernel takes boundaries in int32, and heads that lie in one piece")
        window = window + 1 if window >= 0 else None
        q = require_longest(q, cu_seqlens, longest)
        return torch.ops.trl_packfa.attend(q, k, v, None, cu_seqlens, "reference", scale, window, None)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return attend(q, k, v, cu_seq_q, max_q, scale, window_size[0])

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False, window_size=(-1, -1)):  # fmt: skip
        return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])

    on_any_device(monkeypatch, {"varlen": varlen.VarlenBackend, "flash": flash.FlashBackend}[backend])
    monkeypatch.setattr(varlen, "_varlen_attn", varlen_attn)
    kernel = flash._Kernel(flash_attn_varlen_func, frozenset(flash_attn_varlen_func.__code__.co_varnames))
    monkeypatch.setitem(flash._KERNELS, (8, 0), kernel)
    monkeypatch.setattr(flash, "_capability", lambda device: (8, 0))
    return dtypes


def on_any_device(monkeypatch, backend):
    """Let a backend refuse no device; all else that it refuses it still does."""
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, needs_cuda=False))
