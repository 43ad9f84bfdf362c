"""Predict a training step on a GPU from its operators, on a machine without one: operators, peak memory, milliseconds.

    python benchmarks/gpu/model.py [--json FILE] [--only TEXT] [--table] [--interface]

The forward and the backward of a micro-batch run on fake tensors, which have shapes and no data. Every operator is
counted, with its arithmetic and the bytes that it reads and writes; storages are followed from their allocation to
their end. An operator takes the longer one of arithmetic / rate and bytes / bandwidth.

torch without CUDA has no autograd for fake `cuda` tensors. So the tensors are fakes of a CPU, the code that asks for
CUDA is told that it has it, and a Triton kernel is one operator: the stand-ins of `tests/shared` allocate what the
kernel allocates. Not counted: launches that the host is too slow for, optimizer state, workspaces, fragmentation.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "shared"))

import pretended_head
import pretended_liger
import pretended_triton
from peft import LoraConfig, get_peft_model
from pretended import on_any_device
from pytest import MonkeyPatch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.models.llama import modeling_llama
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from trl_packfa import PackedLayout, candidates, patch
from trl_packfa.attention import varlen
from trl_packfa.bench.measuring import WAITS
from trl_packfa.bench.presets import preset_config
from trl_packfa.kernels import devices, liger
from trl_packfa.kernels.lm_head import chunked
from trl_packfa.kernels.lm_head.chunked import ChunkedHead
from trl_packfa.kernels.lora import launches, projections
from trl_packfa.layout import from_call
from trl_packfa.patches.base import InterfacePatch
from trl_packfa.patching.inspect import inner_model

HERE = Path(__file__).parent
_BLOCK = 512  # bytes: torch's allocator rounds up to it
_NARROW = 64  # a product with a side of at most so many features is one of an adapter
_aten: Any = torch.ops.aten


class Device(NamedTuple):
    """Rates that a GPU reaches in such work; not those of its data sheet."""

    name: str
    products: float  # operations a second of large products in bfloat16
    bandwidth: float  # bytes a second
    attention: tuple[float, float]  # operations a second of FlashAttention 2, forward and backward
    integers: float  # integer operations a second


# Copies and products of 8,192 squared reach these on an H100; an H200 has the same cores and a faster memory. Integers
# are by the data sheet: 132 multiprocessors of 64 operations in each of 1.755e9 cycles a second.
H100 = Device("H100", 700e12, 2.8e12, (310e12, 266e12), 14.8e12)
H200 = Device("H200", 700e12, 3.9e12, (310e12, 266e12), 14.8e12)


@dataclass(frozen=True)
class Setting:
    """A model, a side and its options: one row of the table."""

    side: str  # of `SIDES`
    preset: str = "llama-3-8b"
    adapters: str = "float32"  # dtype; TRL has float32 on a bfloat16 base, and bfloat16 on a 4-bit one
    dropout: float = 0.0
    four_bits: bool = False
    checkpointed: bool = False
    documents: tuple[int, ...] = (256,) * 32
    layers: int | None = None  # instead of the preset's
    logs: bool = False  # the step is logged, so ours measures entropy and accuracy; TRL does so in every step
    attention_speed: float = 1.0  # times the rates of FlashAttention 2
    interface: bool = False  # ours runs the model's own attention forward, through transformers' interface


SIDES = ("trl-bfd", "trl-bfd-liger", "bfd")


@dataclass
class Operator:
    """An operator that a device runs: one launch or a few."""

    kind: str  # product, adapter product, attention, attention backward, dequantize, dropout, fused or elementwise
    flops: float
    bytes: int

    def seconds(self, on: Device) -> float:
        """Return the time that arithmetic or memory allows."""
        rate = on.products
        if self.kind.startswith("attention"):
            rate = on.attention[self.kind.endswith("backward")]
        elif self.kind == "dropout":
            rate = on.integers
        return max(self.flops / rate, self.bytes / on.bandwidth)


@dataclass
class Counted:
    """The counts of one micro-batch."""

    operators: list[Operator] = field(default_factory=list)
    forward: int = 0  # operators of the forward
    calls: int = 0  # dispatched calls, views included
    waits: int = 0  # of the host for the device
    peak_bytes: int = 0
    kept_bytes: int = 0  # by the forward for the backward, weights not included
    weight_bytes: int = 0

    def seconds(self, on: Device) -> float:
        return sum(operator.seconds(on) for operator in self.operators)

    def by_kind(self, on: Device) -> dict[str, float]:
        """Return the seconds of each kind of operator."""
        total: dict[str, float] = {}
        for operator in self.operators:
            total[operator.kind] = total.get(operator.kind, 0.0) + operator.seconds(on)
        return total


class Recorder(TorchDispatchMode):
    """Dispatch mode that counts the operators of a device, and follows the bytes of live storages."""

    def __init__(self, documents: Sequence[int], *, attention_speed: float = 1.0) -> None:
        super().__init__()
        self.counted, self.live = Counted(), 0
        self._pairs = sum(n * n for n in documents) / 2 / attention_speed  # of a query and a key, causal
        self._followed: dict[int, Any] = {}
        self._inside = 0  # of a kernel that counts as one operator

    def follow(self, tensors: Any) -> None:
        """Follow the storages of tensors to their end."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._followed:
                    size = -(-storage.nbytes() // _BLOCK) * _BLOCK
                    self._followed[key] = weakref.finalize(storage, self._free, key, size)
                    self.live += size
        if not self._inside:
            self.counted.peak_bytes = max(self.counted.peak_bytes, self.live)

    def _free(self, key: int, size: int) -> None:
        del self._followed[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "bitsandbytes::gemm_4bit":
            with self:
                return _product_in_4_bits(*args)
        result = self._run(func, args, kwargs)
        if not self._inside:
            self.counted.calls += 1
            self.counted.waits += func._schema.name in WAITS
            if _launches(func, result):
                self._note(func, args, kwargs, result)
        self.follow(result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fakes. Every position is trained, so a mask selects all rows."""
        packet = func._overloadpacket
        if packet is _aten.index and args[1][0] is not None and args[1][0].dtype == torch.bool:
            self.counted.waits += 1  # the indices of the mask
            x, mask = args[0], args[1][0]
            return x.new_empty((mask.numel(), *x.shape[mask.dim() :]))
        if packet is _aten.masked_select:
            return args[0].new_empty((args[0].numel(),))
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        packet = getattr(_aten, name.removeprefix("aten::").rstrip("_"), None)  # in place, it computes the same
        kind, flops = "elementwise", 0.0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            sides = [n for x in tree_leaves(args) if isinstance(x, torch.Tensor) for n in x.shape[-2:]]
            kind = "adapter product" if min(sides) <= _NARROW else "product"
        elif name.startswith("torch_attn::"):
            query = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim() == 3)
            kind = "attention backward" if name.endswith("backward") else "attention"
            flops = 4 * self._pairs * query.shape[1] * query.shape[2] * (2.5 if name.endswith("backward") else 1)
        elif "dequantize" in name:
            kind = "dequantize"
        writes_only = name in _WRITES_ONLY or kwargs.get("beta") == 0
        given = (args[1:] if writes_only else args, {k: v for k, v in kwargs.items() if k != "out"})
        moved = (given, result)
        # Of the table only the elements at the index are read or written: as many as there are in the index, or rows.
        if packet in _AT_INDEX:
            moved = (args[2:], args[2:])
        elif packet is _aten.embedding:
            moved = (args[1:], result, result)
        self.add(kind, flops, moved)

    def add(self, kind: str, flops: float, moved: Any) -> None:
        """Count one operator, which reads or writes each of these tensors once."""
        self.counted.operators.append(Operator(kind, flops, sum(map(_bytes, tree_leaves(moved)))))

    def as_one(
        self,
        function: Callable[..., Any],
        moved: Callable[..., Any],
        kind: str = "fused",
        operations: Callable[..., float] | None = None,
    ) -> Any:
        """Return a function whose operators count as one, which moves the tensors `moved(args, result)`.

        Several operators are a list of their tensors. `operations(*args)` is the arithmetic of the first one, if it
        may take longer.
        """

        def call(*args: Any, **options: Any) -> Any:
            self._inside += 1
            try:
                result = function(*args, **options)
            finally:
                self._inside -= 1
            found, flops = moved(args, result), 0.0 if operations is None else operations(*args)
            first, *sums = found if isinstance(found, list) else [found]
            self.add(kind, flops, first)
            for tensors in sums:
                self.add(kind, 0.0, tensors)
            self.follow(())
            return result

        return call


def _product_in_4_bits(x: torch.Tensor, packed: torch.Tensor, shape: Any, absmax: torch.Tensor, *options: Any) -> Any:
    """Multiply as bitsandbytes does on CUDA with more than 1,536 rows: with the weight in half precision."""
    weight = torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, *options[:2], shape, x.dtype)
    return torch.mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])


# Calls that allocate, or that only look at a tensor in another way, and so launch nothing.
_NOTHING = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.detach,
    _aten._unsafe_view, _aten.lift_fresh, _aten.is_same_size, _aten._local_scalar_dense, _aten.alias,
}  # fmt: skip
_AT_INDEX = (_aten.gather, _aten.scatter)
_WRITES_ONLY = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::bernoulli_")


def _launches(func: Any, result: Any) -> bool:
    makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
    return makes and not func.is_view and func._overloadpacket not in _NOTHING


def _bytes(tensor: Any) -> int:
    """Return the bytes that a pass over a tensor moves; expanded ones are read once."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


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


def build(setting: Setting, fakes: FakeTensorMode) -> Any:
    """Build the model of a setting with its adapter, with fakes of this mode as weights."""
    config = preset_config(setting.preset)
    config.num_hidden_layers = setting.layers or config.num_hidden_layers
    ours = setting.side == "bfd"
    lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=setting.dropout, task_type="CAUSAL_LM")
    with torch.device("meta"):  # PEFT moves layers, and bitsandbytes has a class of weights: fakes can neither
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa" if ours else "flash_attention_2"
        )
        trl_utils.add_fused_lm_head(model, outputs=("entropy", "is_top1"))
        if setting.four_bits:
            _quantize(model)
        model: Any = get_peft_model(model, lora)
    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
        weight.data = weight.data.to(getattr(torch, setting.adapters))
    if setting.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with fakes:
        _make_fake(model)
        if ours:
            inner: Any = inner_model(model)
            inner.forward = head = ChunkedHead(inner, inner.forward)
            head.measures = setting.logs
            with MonkeyPatch.context() as patched:
                if setting.interface:
                    patched.setattr(candidates, "get_patch", lambda model: InterfacePatch(model_types=("llama",)))
                patch(model, backend="varlen")
    return model.train()


def _quantize(model: Any) -> None:
    """Replace the linear layers by 4-bit ones, as transformers does."""
    functional: Any = import_module("bitsandbytes.functional")
    kinds: Any = import_module("bitsandbytes.nn")
    for name, linear in list(model.named_modules()):
        if type(linear) is torch.nn.Linear and name != "lm_head":
            packed, state = functional.quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=False)
            new = kinds.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
            new.weight = kinds.Params4bit(
                packed, requires_grad=False, quant_state=state, bnb_quantized=True, module=new
            )
            model.set_submodule(name, new)


def _make_fake(model: Any) -> None:
    """Replace weights of the meta device by fakes of a CPU."""
    fakes: dict[int, Any] = {}  # tied weights stay one
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in fakes:
                    fakes[id(weight)] = _fake_of(weight)
                module._parameters[name] = fakes[id(weight)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")


def _fake_of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    data = torch.empty_like(weight.data, device="cpu")
    state = getattr(weight, "quant_state", None)
    if state is None:
        return torch.nn.Parameter(data, requires_grad=weight.requires_grad)
    state.absmax, state.code = (torch.empty_like(x, device="cpu") for x in (state.absmax, state.code))
    packed: Any = torch.nn.Parameter(data, requires_grad=False)  # bitsandbytes' class takes no fake
    packed.quant_state = state
    return packed


def count(setting: Setting, hooks: AbstractContextManager[Any] | None = None) -> Counted:
    """Run the forward and the backward of one micro-batch on fake tensors, and count.

    `hooks` see what the forward saves for the backward, as those that offload activations do.
    """
    recorder = Recorder(setting.documents, attention_speed=setting.attention_speed)
    tokens = sum(setting.documents)
    layout = PackedLayout.from_lengths(setting.documents)
    layout.attention  # noqa: B018 (made outside of the fakes, from the lengths)
    with ExitStack() as stack:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(on_fake_cuda(recorder, by_liger=setting.side == "trl-bfd-liger"))
        model = build(setting, fakes)
        stack.enter_context(fakes)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "position_ids": layout.position_ids()}
        if setting.side == "bfd":
            batch["packed_layout"] = layout
        else:  # as TRL's collator gives them
            offsets, longest = layout.cu_seqlens, max(setting.documents)
            batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        recorder.follow((list(model.parameters()), list(model.buffers()), batch))
        counted = recorder.counted
        counted.weight_bytes = recorder.live
        with recorder:
            with torch.autocast("cpu", torch.bfloat16), hooks or nullcontext():
                loss = model(**batch, fused_lm_head=True, use_cache=False, num_items_in_batch=tokens).loss
            counted.forward, counted.kept_bytes = len(counted.operators), recorder.live - counted.weight_bytes
            loss.backward()
    gc.collect()
    return counted


LORA = Setting("bfd")
# The lengths of the recipes: a token sees 727 tokens of its document.
_UNEVEN = (736,) * 11 + (96,)
# Name of a configuration, and its setting of each side.
CONFIGURATIONS = {
    "8 B": LORA,
    "8 B, the recipe's lengths": replace(LORA, documents=_UNEVEN),
    # On Hopper, from the lower end of its authors' 1.5 to 2 times (arXiv 2407.08608).
    "8 B, the recipe's lengths, FlashAttention 3": replace(LORA, documents=_UNEVEN, attention_speed=1.5),
    "8 B, lora_dropout=0.05": replace(LORA, dropout=0.05),
    "8 B, adapters in bfloat16": replace(LORA, adapters="bfloat16"),
    "8 B, adapters in bfloat16, lora_dropout=0.05": replace(LORA, adapters="bfloat16", dropout=0.05),
    "8 B, checkpointed": replace(LORA, checkpointed=True),
    "8 B, NF4, checkpointed, 4,096 tokens": replace(
        LORA, four_bits=True, adapters="bfloat16", checkpointed=True, documents=(256,) * 16
    ),
    "1 B, 4,096 tokens": replace(LORA, preset="llama-3.2-1b", documents=(256,) * 16),
    "1 B, checkpointed": replace(LORA, preset="llama-3.2-1b", checkpointed=True),
}  # fmt: skip
RESULTS = HERE / "results" / "model.json"


def figures(counted: Counted) -> dict[str, float]:
    """Return the counts and the predicted milliseconds of a micro-batch, in all and on an H100 by kind of operator."""
    found: dict[str, float] = {
        "operators": len(counted.operators),
        "forward_operators": counted.forward,
        "calls": counted.calls,
        "host_waits": counted.waits,
        "peak_bytes": counted.peak_bytes,
        "kept_bytes": counted.kept_bytes,
    }
    found |= {on.name: counted.seconds(on) * 1e3 for on in (H100, H200)}
    return found | {kind: seconds * 1e3 for kind, seconds in sorted(counted.by_kind(H100).items())}


def by_layer(setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures outside of layers and those of each layer: layers are alike, so two and three are counted."""
    small, large = (figures(count(replace(setting, layers=layers))) for layers in (2, 3))
    each = {name: large[name] - small[name] for name in small}
    return {name: small[name] - 2 * each[name] for name in small}, each


def measure(name: str, side: str, **options: Any) -> dict[str, Any]:
    """Return the row of one side of a configuration; `options` are fields of its [`Setting`]."""
    setting = replace(CONFIGURATIONS[name], side=side, **options)
    outside, each = by_layer(setting)
    layers = preset_config(setting.preset).num_hidden_layers
    whole = {figure: round(outside[figure] + layers * each[figure], 1) for figure in outside}
    return {"configuration": name, "side": side, **whole}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the rows: a line for each configuration, in each cell the sides in the order of `SIDES`."""
    lines = [
        "| 8,192 tokens, forward and backward | operators | peak, GB | H100, ms | times | H200, ms | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["configuration"] for row in rows):
        sides = {row["side"]: row for row in rows if row["configuration"] == name}
        trl, liger, ours = (sides[side] for side in SIDES)
        cells = [", ".join(f"{row['operators']:,.0f}" for row in (trl, liger, ours))]
        cells.append(", ".join(f"{row['peak_bytes'] / 1e9:.1f}" for row in (trl, liger, ours)))
        for on in (H100.name, H200.name):
            cells.append(", ".join(f"{row[on]:,.0f}" for row in (trl, liger, ours)))
            cells.append(", ".join(f"{row[on] / ours[on]:.2f}" for row in (trl, liger)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the rows")
    parser.add_argument("--only", default="", help="count only configurations with this text in their name")
    parser.add_argument("--table", action="store_true", help="count nothing, print the table of the file")
    parser.add_argument("--interface", action="store_true", help="count ours at level interface, and write nothing")
    given = parser.parse_args(argv)
    if given.interface:
        for name in (name for name in CONFIGURATIONS if given.only in name):
            print(*(f"{name}: {measure(name, 'bfd', interface=through)}" for through in (False, True)), sep="\n")
        return 0
    if given.table:
        print(markdown(json.loads(given.json.read_text())["rows"]))
        return 0
    known = json.loads(given.json.read_text())["rows"] if given.only else []
    rows = []
    for name in CONFIGURATIONS:
        if given.only in name:
            for side in SIDES:
                rows.append(measure(name, side))
                print(rows[-1], file=sys.stderr)
        else:
            rows += [row for row in known if row["configuration"] == name]
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
    given.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
