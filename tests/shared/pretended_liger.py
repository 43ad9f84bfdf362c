"""CPU stand-ins for Liger's kernels, as strict about dtypes, shapes and memory as liger-kernel 0.8.5. They take the
same arguments and overwrite the same memory. Source: `liger_kernel/ops/{rms_norm,rope,swiglu}.py` of that version."""

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


class LigerRMSNormFunction(Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert casting_mode == "llama" and offset == 0.0 and X.shape[-1] == W.shape[0]
        _require([X, W], same=[X, W])
        wide = X.float()
        rate = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(X, W, rate)
        ctx.in_place = in_place
        return (wide * rate).to(X.dtype) * W

    @staticmethod
    def backward(ctx, dY):
        X, W, rate = ctx.saved_tensors
        dY = dY.contiguous()
        x, m = X.float(), dY.float() * W.float()
        dX = rate * (m - rate.square() * (m * x).mean(-1, keepdim=True) * x)
        dW = (dY.float() * (x * rate).to(X.dtype).float()).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        result = dY.copy_(dX) if ctx.in_place else dX.to(X.dtype)
        return result, None if dW is None else dW.to(W.dtype), None, None, None, None, None


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
    laid = x.transpose(1, 2).contiguous().data
    half = cos.shape[-1] // 2
    # The first halves of the tables only, in the dtype of the sines.
    c, s = (table[..., :half].unsqueeze(2) for table in (cos, sin))
    low, high = laid[..., :half].to(s.dtype), laid[..., half : 2 * half].to(s.dtype)
    laid[..., :half], laid[..., half : 2 * half] = low * c - sign * high * s, high * c + sign * low * s
    return laid.transpose(1, 2)


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

    class Norm:
        apply = staticmethod(counted(LigerRMSNormFunction.apply, "rms_norm"))

    class Rope:
        apply = staticmethod(counted(LigerRopeFunction.apply, "rope"))

    kernels = liger.LigerKernels(
        "0.8.5", Norm, Rope, counted(swiglu_forward, "swiglu_forward"), counted(swiglu_backward, "swiglu_backward")
    )
    for module in ("trl_packfa.kernels.liger", "trl_packfa.kernels.norms", "trl_packfa.patching.describe"):
        monkeypatch.setattr(f"{module}.liger_kernels", lambda: kernels)
        monkeypatch.setattr(f"{module}.lies_on_cuda", lambda tensor: tensor.device.type == "cpu")
    monkeypatch.setattr(launches, "swiglu_backward", swiglu_backward_with_product)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr("trl_packfa.patching.describe.liger_unavailable", lambda: None)
    # What is there for a CPU gives way.
    monkeypatch.setattr("trl_packfa.kernels.norms.are_worth_it", lambda x: False)
    monkeypatch.setattr("trl_packfa.kernels.rotary.are_worth_it", lambda x: False)
    return calls
