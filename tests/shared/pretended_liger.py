"""CPU stand-ins for Liger's kernels, as strict about dtypes, shapes and memory as liger-kernel 0.8.5. They take the
same arguments and overwrite the same memory. Source: `liger_kernel/ops/{rms_norm,fused_add_rms_norm,rope,swiglu}.py`
of that version."""

from collections import Counter
from contextlib import contextmanager

import pretended_triton
import torch
from pretended_triton import written
from torch.autograd import Function

from trl_packfa.kernels import liger
from trl_packfa.kernels.lora import launches

# Triton's types; a lookup of any other dtype fails.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require(tensors, *, same=()):
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise KeyError(tensor.dtype)
        if tensor.shape[-1] > 65536:
            raise RuntimeError("Cannot launch Triton kernel: row too wide")
        if not tensor.is_contiguous():
            raise RuntimeError("the kernel reads rows one after the other, whatever their stride")
    if len({tensor.dtype for tensor in same}) > 1:
        raise RuntimeError(f"the result would be in the first's dtype: {[tensor.dtype for tensor in same]}")


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    assert casting_mode == "llama" and offset == 0.0 and X.shape[-1] == W.shape[0]
    _require([X, W], same=[X, W])
    rates = (X.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    flat = X.view(-1, X.shape[-1])
    return (X.float() * rates).to(X.dtype) * W, flat, rates.flatten(), "block", "warps", "mode"


def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None):
    assert X.dim() == 2, "rows are found by the first stride"
    dX, dW = _norm_backward(dY, X, W, RSTD, offset, (BLOCK_SIZE, num_warps, casting_mode), needs_dw)
    return (dY.copy_(dX) if in_place else torch.zeros_like(dY).copy_(dX)), dW


def fused_add_rms_norm_backward(
    dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place, needs_dw=None
):
    assert num_stages == 2 and not in_place and dS_out.view(-1, dS_out.shape[-1]).dtype == dY.dtype
    dX, dW = _norm_backward(dY, S, W, RSTD, offset, (BLOCK_SIZE, num_warps, casting_mode), needs_dw)
    dX = (dX + dS_out.float()).to(S.dtype)
    return dX, dX, dW


def _norm_backward(dY, X, W, RSTD, offset, launch, needs_dw):
    assert launch == ("block", "warps", "mode") and offset == 0.0 and RSTD.dtype == torch.float32
    _require([dY, X, W], same=[dY, X, W])
    x, m, rates = X.float().view_as(dY), dY.float() * W.float(), RSTD.view(*dY.shape[:-1], 1)
    dX = rates * (m - rates.square() * (m * x).mean(-1, keepdim=True) * x)
    if not needs_dw:
        return dX, None
    return dX, (dY.float() * (x * rates).to(X.dtype).float()).flatten(0, -2).sum(0).to(W.dtype)


class LigerRopeFunction(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        assert q.shape[2] == k.shape[2] and cos.shape[0] in (1, q.shape[0]) and cos.shape[-1] <= q.shape[-1]
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return tuple(_rotated(x, cos, sin, sign=1) for x in (q, k))

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *(_rotated(x, cos, sin, sign=-1) for x in (dq, dk)), None, None, None, None, None


def _rotated(x, cos, sin, *, sign):
    """Rotate `x` `(B, heads, L, H)`, in its own memory if that is contiguous in the order `(B, L, heads, H)`."""
    out = x.transpose(1, 2).contiguous()
    laid = out.data  # as Triton writes: autograd's count of a tensor's versions does not see it
    half = cos.shape[-1] // 2
    # The first halves of the tables only, in the dtype of the sines.
    c, s = (table[..., :half].unsqueeze(2) for table in (cos, sin))
    low, high = laid[..., :half].to(s.dtype), laid[..., half : 2 * half].to(s.dtype)
    laid[..., :half], laid[..., half : 2 * half] = low * c - sign * high * s, high * c + sign * low * s
    return out.transpose(1, 2)


def swiglu_forward(a, b, gate_multiplier=1.0):
    _require([a, b], same=[a, b])
    return a, b, torch.nn.functional.silu(a.float()).to(b.dtype) * b


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    _require([a, b, dc], same=[a, b, dc])
    wide, sigmoid = a.float(), torch.sigmoid(a.float())
    silu = wide * sigmoid
    db, da = dc.float() * silu, dc.float() * (silu * (1 - sigmoid) + sigmoid) * b.float()
    return written(a, da), written(b, db)


def pretend_liger(monkeypatch):
    """Run these stand-ins instead of Liger's kernels on a CPU during a test, and that of our backward of SwiGLU;
    return the number of calls of each."""
    calls, current = Counter(), []

    def swiglu_backward_with_product(*args, **options):
        calls["swiglu_backward"] += 1
        return pretended_triton.swiglu_backward(*args, **options)

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def counted(function, name):
        def call(*args):
            assert current[-1:] == [args[0].device], "Triton launches on the current device"
            calls[name] += 1
            return function(*args)

        return call

    class Rope:
        apply = staticmethod(counted(LigerRopeFunction.apply, "rope"))

    norms = (
        counted(rms_norm_forward, "rms_norm"),
        counted(rms_norm_backward, "rms_norm_backward"),
        counted(fused_add_rms_norm_backward, "rms_norm_backward"),
    )
    products = (counted(swiglu_forward, "swiglu_forward"), counted(swiglu_backward, "swiglu_backward"))
    kernels = liger.LigerKernels("0.8.5", *norms, Rope, *products)
    for module in ("trl_packfa.kernels.liger", "trl_packfa.kernels.norms", "trl_packfa.patching.describe"):
        monkeypatch.setattr(f"{module}.liger_kernels", lambda: kernels)
        monkeypatch.setattr(f"{module}.lies_on_cuda", lambda tensor: tensor.device.type == "cpu")
    monkeypatch.setattr(launches, "swiglu_backward", swiglu_backward_with_product)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr("trl_packfa.patching.describe.liger_unavailable", lambda: None)
    return calls
