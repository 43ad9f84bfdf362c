"""Liger's Triton kernels for RMSNorm, rotation and SwiGLU, on CUDA with liger-kernel installed.

torch's operators each pass over memory once. transformers' RMSNorm takes eight passes, and a rotation takes a dozen.
Compiled graphs run the model's own code, because they fuse these operators themselves. Other devices run it too.

https://github.com/linkedin/Liger-Kernel

Shape letters: B rows, L row length, D model features, I features inside an MLP, H head dim, R rotated part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from ..override import runs_own_forward
from ..versions import installed_version

# The oldest supported version, which added rotations of a part of the head.
OLDEST = "0.8.5"
# Dtypes of Liger's kernels, and the largest row. A row, padded to a power of two, is one block of threads.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_FEATURES = 65536
_MODULE = "liger_kernel.ops"
# Functions by name, with the arguments that are passed here. The installed functions must have these arguments.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "rms_norm_forward": ("X", "W", "eps", "offset", "casting_mode", "row_mode"),
    "rms_norm_backward": ("dY", "X", "W", "RSTD", "offset", "casting_mode", "BLOCK_SIZE", "num_warps", "in_place",
                          "row_mode", "needs_dw"),
    "fused_add_rms_norm_backward": ("dY", "dS_out", "S", "W", "RSTD", "offset", "casting_mode", "BLOCK_SIZE",
                                    "num_warps", "num_stages", "in_place", "needs_dw"),
    "LigerRopeFunction": ("q", "k", "cos", "sin"),
    "swiglu_forward": ("a", "b"),
    "swiglu_backward": ("a", "b", "dc"),
}  # fmt: skip
# Liger's norms take several rows at once up to this width. They pipeline sums with a residual in two stages.
_NARROW, _STAGES = 256, 2
_SILU = (nn.SiLU, SiLUActivation)


class LigerKernels(NamedTuple):
    """The functions of `liger_kernel.ops` on this machine."""

    version: str
    norm_forward: Callable[..., Any]  # of `(..., D)`
    norm_backward: Callable[..., Any]  # to the gradients of input and weight
    summed_norm_backward: Callable[..., Any]  # of the norm of a sum, which also gets the sum's own gradient
    rope: type[Function]  # rotates queries and keys `(B, heads, L, H)`, and overwrites them
    swiglu_forward: Callable[..., Any]  # `(gate, up)`, `(T, I)` each, to both and `silu(gate) * up`
    swiglu_backward: Callable[..., Any]  # `(gate, up, gradient)` to the gradients; overwrites `gate` and `up`


def liger_kernels() -> LigerKernels | None:
    """Return Liger's functions, or `None` if they cannot be used ([`liger_unavailable`] says why)."""
    found = _load()
    return None if isinstance(found, str) else found


def liger_unavailable() -> str | None:
    """Return the reason why Liger's kernels cannot be used, `None` if they can."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> LigerKernels | str:
    version = installed_version("liger-kernel")
    if version is None:
        return "liger-kernel is not installed: pip install 'trl-packfa[kernels]'"
    if Version(version) < Version(OLDEST):
        return f"liger-kernel {version} is older than {OLDEST}"
    try:
        ops = import_module(_MODULE)
        functions = {name: getattr(ops, name) for name in _FUNCTIONS}
    except Exception as error:  # a broken Triton may raise any error
        return f"liger-kernel {version} cannot be imported: {type(error).__name__}: {error}"
    for name, wanted in _FUNCTIONS.items():
        taken = _arguments(functions[name])
        if taken[: len(wanted)] != wanted:
            return f"liger-kernel {version}: {name} takes {taken}, not {wanted}"
    return LigerKernels(version, *functions.values())


def _arguments(function: Any) -> tuple[str, ...]:
    if isinstance(function, type):  # an autograd function, whose first argument is its context
        return tuple(inspect.signature(function.forward).parameters)[1:]  # type: ignore[attr-defined]
    return tuple(inspect.signature(function).parameters)


def lies_on_cuda(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is on CUDA, where the kernels run."""
    return tensor.device.type == "cuda"


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of no subclass; a DTensor, for example, holds only a part of the data."""
    return type(tensor.data) is torch.Tensor


def takes(*tensors: torch.Tensor) -> bool:
    """Tell whether Liger's kernels accept these tensors together.

    They must be contiguous, on CUDA, of one supported dtype, and with rows of at most `MOST_FEATURES`.
    """
    first = tensors[0]
    return first.dtype in DTYPES and all(
        is_plain(x)
        and lies_on_cuda(x)
        and x.dtype == first.dtype
        and x.shape[-1] <= MOST_FEATURES
        and x.is_contiguous()
        for x in tensors
    )


def norm_on_cuda(hidden: torch.Tensor, weight: torch.Tensor) -> LigerKernels | None:
    """Return Liger's functions if they compute Llama's RMSNorm of `hidden` `(..., D)` here, else `None`."""
    kernels = liger_kernels() if not torch.compiler.is_compiling() and lies_on_cuda(hidden) else None
    # Both must have one dtype. With a wider weight, Llama's result has the weight's dtype, Liger's the input's.
    return kernels if kernels is not None and takes(hidden, weight) else None


def norm_by_liger(kernels: LigerKernels, eps: float, hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    """Compute Llama's RMSNorm of `(..., D)` in one pass over memory forward and one backward.

    Also return the factor of each row that the kernel has multiplied with, `(T,)`, float32.
    """
    with torch.cuda.device_of(hidden):
        return _RMSNorm.apply(hidden, weight, eps, kernels)


class _RMSNorm(Function):
    """Autograd function of Llama's RMSNorm of `(..., D)`. It saves the input, and a float32 number of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, kernels: LigerKernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # "llama" casts as Llama does: float32 up to the weight, then the input's dtype.
        normed, _, rates, *launch = kernels.norm_forward(hidden, weight, eps, 0.0, "llama", None)
        ctx.save_for_backward(hidden, weight, rates)
        ctx.kernels, (ctx.block, ctx.warps, ctx.mode) = kernels, launch
        ctx.mark_non_differentiable(rates)
        ctx.set_materialize_grads(False)  # torch would make zeros for the rates
        return normed, rates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        """Compute the gradients of the input and of the weight."""
        if grad is None:
            return (None,) * 4
        hidden, weight, rates = ctx.saved_tensors
        grad, trains = grad.contiguous(), ctx.needs_input_grad[1]
        options = (weight, rates, 0.0, ctx.mode, ctx.block, ctx.warps)
        # In place would overwrite the incoming gradient, which a residual also reads.
        with torch.cuda.device_of(hidden):
            if hidden.shape[-1] <= _NARROW:
                hidden = hidden.flatten(0, -2)
                by_hidden, by_weight = ctx.kernels.norm_backward(grad, hidden, *options, False, None, trains)
            else:
                # The plain norm's backward (0.8.5) fills its result with zeros first; this one does not. The gradient
                # that it adds is one row of zeros.
                zeros = torch.zeros_like(weight).expand_as(grad)
                given = (grad, zeros, hidden, *options, _STAGES, False, trains)
                by_hidden, _, by_weight = ctx.kernels.summed_norm_backward(*given)
        return by_hidden, by_weight, None, None


def rotation_on_cuda(query: torch.Tensor, cos: torch.Tensor) -> LigerKernels | None:
    """Return Liger's functions if they can rotate `query` by `cos`, else `None`."""
    kernels = liger_kernels() if lies_on_cuda(query) and lies_on_cuda(cos) else None
    dtype = torch.promote_types(query.dtype, cos.dtype)
    return kernels if dtype in DTYPES and cos.shape[-1] % 2 == 0 else None


def rotate_by_liger(
    kernels: LigerKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    overwrites: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, as Llama does.

    Both halves of `cos` and `sin` must be equal, because the kernel reads the first half only. `overwrites` allows to
    overwrite query and key.
    """
    dtype = torch.promote_types(query.dtype, cos.dtype)
    # The kernel overwrites its inputs. So it gets copies, unless no backward and no hook can need the inputs. In the
    # backward it overwrites the gradients of the attention, which nothing else reads.
    options = {"memory_format": torch.contiguous_format, "copy": not overwrites}
    pair = (x.to(dtype, **options).transpose(1, 2) for x in (query, key))
    with torch.cuda.device_of(query):
        rotated = kernels.rope.apply(*pair, cos.to(dtype), sin.to(dtype))
    query, key = (x.transpose(1, 2) for x in rotated)  # type: ignore[union-attr]
    return query, key


def multiplies_by_liger(mlp: Any, x: torch.Tensor) -> bool:
    """Tell whether Liger can compute the product inside a gated MLP for an input `(..., D)`."""
    plain = type(mlp.act_fn) in _SILU and runs_own_forward(mlp.act_fn)
    return plain and lies_on_cuda(x) and liger_kernels() is not None


def is_swiglu_on_cuda(module: nn.Module) -> bool:
    """Tell whether a gated MLP has SiLU, is on CUDA, and Liger is available."""
    weight = next(module.parameters(), None)
    return weight is not None and multiplies_by_liger(module, weight)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * up` of `(..., I)`. [`takes`] must accept both tensors."""
    with torch.cuda.device_of(gate):
        return _kernels().swiglu_forward(gate, up)[-1]


def swiglu_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *, overwrites: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up from the gradient of [`swiglu`]. `overwrites` allows to overwrite both."""
    pair = (gate, up) if overwrites else (gate.clone(), up.clone())
    with torch.cuda.device_of(gate):
        return _kernels().swiglu_backward(*pair, grad.contiguous())


def _kernels() -> LigerKernels:
    kernels = liger_kernels()
    assert kernels is not None
    return kernels


def is_last_backward() -> bool:
    """Tell whether the running backward frees its saved tensors, so that they may be overwritten."""
    # With `retain_graph=True` another backward reads them again. AOTAutograd makes the same test before it reuses
    # buffers.
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    asks = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return asks is not None and not asks()


class _SwiGLU(Function):
    """Autograd function of `silu(gate) * up` for `(..., I)`. It saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return swiglu_gradients(gate, up, grad, overwrites=is_last_backward())


def gated_by_liger(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute Llama's MLP of `(..., D)`, with the product by Liger if its kernels accept the tensors."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _SwiGLU.apply(gate, up) if takes(gate, up) else mlp.act_fn(gate) * up
    return mlp.down_proj(product)
