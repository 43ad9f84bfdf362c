"""CPU stand-ins for CUDA kernels: equally strict about dtypes, shapes and lengths, computed by the reference."""

from dataclasses import replace

import torch

from trl_packfa.attention import AttentionArguments, flash, get_backend, varlen
from trl_packfa.layout import AttentionLayout, PackedLayout


@torch.library.custom_op("trl_packfa_tests::require_longest", mutates_args=())
def require_longest(query: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the query if `longest` is the right value for the kernel; the check runs when a graph runs."""
    if longest != int(cu_seqlens.diff().max()):
        raise RuntimeError(f"the longest document was said to have {longest} tokens: {cu_seqlens.tolist()}")
    return query.clone()


require_longest.register_fake(lambda query, cu_seqlens, longest: torch.empty_like(query))
require_longest.register_autograd(lambda ctx, grad: (grad, None, None))


def _attend_apart(q, k, v, cu_q, cu_k, scale, window, causal):
    layout = AttentionLayout(*(PackedLayout.from_cu_seqlens(offsets) for offsets in (cu_q, cu_k)), causal)
    return get_backend("reference")(q, k, v, AttentionArguments(scaling=scale, sliding_window=window).on(layout))


# As libraries and not as `custom_op`, in whose functions autograd cannot be used.
_QKV, _OPTIONS = "Tensor q, Tensor k, Tensor v", "Tensor cu_q, Tensor cu_k, float scale, int? window, bool causal"
torch.library.define("trl_packfa_tests::attend_apart", f"({_QKV}, {_OPTIONS}) -> Tensor")
torch.library.define(
    "trl_packfa_tests::attend_apart_backward", f"(Tensor grad, {_QKV}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl("trl_packfa_tests::attend_apart", "default")
@torch.no_grad()
def _forward(q, k, v, *options):
    return _attend_apart(q, k, v, *options).contiguous()


@torch.library.impl("trl_packfa_tests::attend_apart_backward", "default")
def _backward(grad, q, k, v, *options):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = _attend_apart(*given, *options)
    return tuple(by.contiguous() for by in torch.autograd.grad(out, given, grad))


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    options = (ctx.scale, ctx.window, ctx.causal)
    by_qkv = torch.ops.trl_packfa_tests.attend_apart_backward(grad, *ctx.saved_tensors, *options)
    return *by_qkv, None, None, None, None, None


_NAME = "trl_packfa_tests::attend_apart"
torch.library.register_fake(_NAME, lambda q, *_: torch.empty_like(q))
torch.library.register_fake(f"{_NAME}_backward", lambda _, q, k, v, *__: tuple(torch.empty_like(x) for x in (q, k, v)))
torch.library.register_autograd(_NAME, _differentiate, setup_context=_save)


def pretend(monkeypatch, backend):
    """Let this backend run on the CPU during a test; return the list of dtypes that its kernel is called with."""
    dtypes = []

    def attend(q, k, v, cu_seqlens, cu_seqlens_k, longest, longest_k, scale, window, causal):
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
        if cu_seqlens_k is not cu_seqlens or not causal:
            k = require_longest(k, cu_seqlens_k, longest_k)
            return torch.ops.trl_packfa_tests.attend_apart(q, k, v, cu_seqlens, cu_seqlens_k, scale, window, causal)
        return torch.ops.trl_packfa.attend(q, k, v, None, cu_seqlens, "reference", scale, window, None)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        left, right = window_size
        if right not in (0, left):
            raise RuntimeError(f"such a window is not asked for: {window_size}")
        return attend(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, left, right == 0)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False, window_size=(-1, -1)):  # fmt: skip
        left, right = window_size
        if right not in ((-1, 0) if causal else (left,)):
            raise RuntimeError(f"such a window is not asked for: {window_size}, causal={causal}")
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, left, causal)

    on_any_device(monkeypatch, {"varlen": varlen.VarlenBackend, "flash": flash.FlashBackend}[backend])
    monkeypatch.setattr(varlen, "_varlen_attn", varlen_attn)
    kernel = flash._Kernel(flash_attn_varlen_func, frozenset(flash_attn_varlen_func.__code__.co_varnames))
    monkeypatch.setitem(flash._KERNELS, (8, 0), kernel)
    monkeypatch.setattr(flash, "_capability", lambda device: (8, 0))
    return dtypes


def on_any_device(monkeypatch, backend):
    """Make a backend accept every device; it keeps its other refusals."""
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, needs_cuda=False))
