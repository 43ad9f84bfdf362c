"""Fakes of a CPU that take the code that runs on CUDA.

torch without CUDA has no autograd for fake `cuda` tensors. So the tensors are fakes of a CPU, the code that asks for
CUDA is told that it has it, and a Triton kernel is one operator: the stand-ins of `tests/shared` allocate what the
kernel allocates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "shared"))

import pretended_head
import pretended_liger
import pretended_triton
from gpu.counting import Recorder
from pretended import on_any_device
from pytest import MonkeyPatch
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.models.llama import modeling_llama
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from trl_packfa.attention import varlen
from trl_packfa.kernels import devices, liger
from trl_packfa.kernels.lm_head import chunked
from trl_packfa.kernels.lora import launches, projections
from trl_packfa.layout import from_call

HERE = Path(__file__).parent


@contextmanager
def on_fake_cuda(recorder: Recorder, *, by_liger: bool) -> Iterator[None]:
    """Make fakes of a CPU take the code that runs on CUDA, with every Triton kernel as one operator.

    `by_liger` also replaces the parts of transformers' Llama that `use_liger_kernel=True` replaces.
    """
    rope = _as_one_each(recorder, pretended_liger.LigerRopeFunction,
                        (lambda a, r: (r, r), lambda a, r: (r[:2], r[:2])))  # fmt: skip
    norms = {
        "rms_norm_forward": lambda a, r: (a[0], r[0]),
        "rms_norm_backward": _norm_backward,
        "fused_add_rms_norm_backward": lambda a, r: (*a[:3], r[0]),
    }
    forward = recorder.as_one(pretended_liger.swiglu_forward, lambda a, r: r)
    backward = recorder.as_one(pretended_liger.swiglu_backward, lambda a, r: (a[:3], a[:2]))
    # Two passes that read the logits, and one that writes their slopes.
    score = recorder.as_one(pretended_head.score_rows, lambda a, r: (a[0], a[0], *a))
    with MonkeyPatch.context() as patched:
        patched.setattr(chunked, "score_kernel", lambda logits: score)
        for name, moved in norms.items():
            patched.setattr(pretended_liger, name, recorder.as_one(getattr(pretended_liger, name), moved))
        patched.setattr(pretended_liger, "LigerRopeFunction", rope)
        patched.setattr(pretended_liger, "swiglu_forward", forward)
        patched.setattr(pretended_liger, "swiglu_backward", backward)
        patched.setattr(pretended_triton, "draw_bits", _no_bits)
        for name, options in _LAUNCHES.items():
            patched.setattr(pretended_triton, name, recorder.as_one(getattr(pretended_triton, name), *options))
        pretended_triton.pretend_triton(patched)
        pretended_liger.pretend_liger(patched)
        on_any_device(patched, varlen.VarlenBackend)
        for module in (liger, projections, launches):  # fakes are whole, although of a class of their own
            patched.setattr(module, "is_plain", lambda tensor: True)
        patched.setattr(devices, "makes_float32", lambda device: "dtype" in torch.ops.aten.mm.overloads())
        patched.setattr(projections, "has_half_products", lambda dtype, device: True)  # a CPU may have none
        # A batch on a device is not read back.
        patched.setattr(from_call, "refuse_contradictions", lambda *args, **options: None)
        # TRL's head calls its Triton kernels, or on a CPU their torch code, which is one operator here.
        patched.setattr(trl_utils, "_use_triton", lambda device: True)
        fold = recorder.as_one(chunked_logprob._forward_tile, lambda a, r: a[0])
        slope = recorder.as_one(chunked_logprob._backward_tile, lambda a, r: (a[0], a[0]))
        product = recorder.as_one(
            chunked_logprob._addmm_fp32, lambda a, r: (a[0], *a), "product",
            lambda total, a, b, *_: 2.0 * a.numel() * b.shape[-1],
        )  # fmt: skip
        for name, function in (("_forward_tile", fold), ("_backward_tile", slope), ("_addmm_fp32", product)):
            patched.setattr(chunked_logprob, name, function)
        patched.syspath_prepend(HERE / "stand_in")
        for name in ("flash_attn", "flash_attn.bert_padding"):  # forgotten again at the end
            patched.setitem(sys.modules, name, import_module(name))
        patched.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
        patched.setattr(flash_utils, "_loaded_implementation", None)
        patched.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **options: True)
        # CUDA's dropout is one kernel that writes the result and the mask.
        patched.setattr(torch.nn.functional, "dropout", _dropout)
        if by_liger:
            patched.setattr(modeling_llama.LlamaRMSNorm, "forward", _liger_norm)
            patched.setattr(modeling_llama.LlamaMLP, "forward", _liger_mlp)
            patched.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: rope.apply(q, k, cos, sin))
        yield


def _gradient_products(args: Any, result: Any) -> Any:
    """Return what the two launches move: both products in parts, and their sums."""
    grad, B, inner, outer, *_ = args
    tokens, features = grad.shape
    shapes = launches.product_parts(tokens, features, inner.shape[1])[1:]
    parts = [grad.new_empty(shape, dtype=torch.float32) for shape in shapes]
    return [(grad, B, inner, parts), (parts, outer, result)]


def _dropped_grad_A(args: Any, result: Any) -> Any:
    """Return what the launch moves, which makes parts, and their sum."""
    x = args[1]
    parts = x.new_empty((launches.grad_A_parts(*x.shape)[1], *result.shape), dtype=torch.float32)
    return [(args, parts), (parts, result)]


def _no_bits(seed: torch.Tensor, layers: int, tokens: int, features: int, rate: float) -> torch.Tensor:
    return seed.new_empty((layers, tokens, -(-features // 32)), dtype=torch.int32)


def _integer_operations(seed: Any, layers: int, tokens: int, features: int, rate: float) -> float:
    """Return the integer operations of masks: for 32 features 16 numbers, each joined to the word in one operation.

    Four numbers are seven rounds of Philox, each of four products, two operations on bits and two sums for the key; a
    product of 32 bits takes two operations' time.
    """
    return layers * tokens * features / 32 * (4 * 7 * (4 * 2 + 2 + 2) + 16)


def _selections(*args: Any) -> float:
    """Return the integer operations of applying masks: for each layer and feature a shift, "and", a test, a choice."""
    bits = next(x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.int32)
    return 4.0 * 32 * bits.numel()


# Of each launch of ours what it moves, its kind, and its arithmetic if that may take longer.
_LAUNCHES: dict[str, tuple[Any, ...]] = {
    "swiglu_backward": (lambda a, r: (a, r),),
    "gradient_products": (_gradient_products, "adapter product"),
    "draw_bits": (lambda a, r: r, "dropout", _integer_operations),
    "dropped_inner": (lambda a, r: (a, r), "dropout", _selections),
    "dropped_grad_A": (_dropped_grad_A, "dropout", _selections),
    "dropped_grad_x": (lambda a, r: a, "dropout", _selections),
}


def _norm_backward(args: Any, result: Any) -> Any:
    """Return what Liger 0.8.5 moves: out of place, it fills the result with zeros before the kernel writes it."""
    moved = (*args[:2], result[0])
    return [moved] if result[0] is args[0] else [result[0], moved]


def _as_one_each(recorder: Recorder, function: Any, moved: tuple[Callable[..., Any], ...]) -> Any:
    """Return an autograd function whose forward and backward are one operator each."""
    name = function.__name__
    passes = (recorder.as_one(function.forward, moved[0]), recorder.as_one(function.backward, moved[1]))
    return type(name, (function,), dict(zip(("forward", "backward"), map(staticmethod, passes), strict=True)))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed, x, rates, *ctx.launch = pretended_liger.rms_norm_forward(x, weight, eps, 0.0, "llama", None)
        ctx.save_for_backward(x, weight, rates)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        block, warps, mode = ctx.launch
        given: Any = (grads[0].contiguous(), *ctx.saved_tensors, 0.0, mode, block, warps, True, None, False)
        return pretended_liger.rms_norm_backward(*given)[0], None, None


def _liger_norm(self: Any, hidden_states: torch.Tensor) -> Any:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return pretended_liger.swiglu_forward(gate, up)[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        return pretended_liger.swiglu_backward(gate, up, grads[0].contiguous())


def _liger_mlp(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))
