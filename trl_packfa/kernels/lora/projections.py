"""Reading of PEFT's LoRA layers, and the reasons why a layer runs PEFT's own forward.

Shape letters: O output features, D input features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...autocast import HALF, autocast_dtype, has_half_products
from ...override import has_library_forward, runs_own_forward
from ...parallel.zero3 import is_in_parts
from ..liger import is_plain

_LORA = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit")
_PLAIN, _NF4 = "torch.nn.modules.linear.Linear", "bitsandbytes.nn.modules.Linear4bit"


@dataclass(frozen=True)
class Projection:
    """A frozen linear layer and its low-rank update in one call."""

    weight: torch.Tensor  # `(O, D)`, or bitsandbytes' packed 4-bit form of it
    bias: torch.Tensor | None  # `(O,)`
    quant_state: Any  # bitsandbytes' quantization state of a packed weight, else `None`
    lora_A: torch.Tensor | None  # `(R, D)`; `None` for a layer without an adapter
    lora_B: torch.Tensor | None  # `(O, R)`
    scaling: float  # factor of the update
    computes_in: torch.dtype  # of the base product
    dropout: float = 0.0  # rate for the input of the update
    draws: bool = False  # whether the rate holds now; it does not in evaluation mode

    @property
    def features(self) -> int:
        """Number of output features O."""
        return self.weight.shape[0] if self.quant_state is None else self.quant_state.shape[0]

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the base weight `(O, D)` in `dtype`."""
        if self.quant_state is None:
            return self.weight.to(dtype)
        from bitsandbytes.functional import dequantize_4bit  # optional package, which made this layer

        return dequantize_4bit(self.weight.view(-1, 1), self.quant_state).to(dtype)


def factors_of(projections: Sequence[Projection]) -> list[torch.Tensor | None]:
    """List `lora_A` and `lora_B` of each projection in turn."""
    return [factor for p in projections for factor in (p.lora_A, p.lora_B)]


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, with its Python module."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_adapted(module: nn.Module) -> bool:
    """Tell whether a module is a LoRA layer of a kind that may be fused."""
    return kind_of(module) in _LORA


def unsupported_reason(module: Any) -> str | None:
    """Return the reason why a layer must run its own forward now, `None` if it can be fused."""
    if not is_adapted(module):
        return _why_not_base(module)
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not active:
        return "adapters disabled, merged or not active"
    if len(active) > 1:
        return f"{len(active)} adapters active at once"
    return _why_not_adapter(module, active[0]) or _why_not_base(module.base_layer)


def _why_not_adapter(module: Any, name: str) -> str | None:
    if name in module.lora_variant:
        return f"a variant of LoRA ({type(module.lora_variant[name]).__name__})"
    lora_A, lora_B, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or dropout.p >= 1):
        return f"lora_dropout={dropout}"
    if lora_A.bias is not None or lora_B.bias is not None:
        return "lora_bias=True"
    if type(lora_A) is not nn.Linear or type(lora_B) is not nn.Linear:
        return f"adapter of {type(lora_A).__name__}"
    if not all(map(runs_own_forward, (module, lora_A, lora_B, dropout))):
        return "hooks on the layer, or a forward that was set on it"
    if not has_library_forwards(module, lora_A, dropout):
        return "another forward of its class"
    if not module.cast_input_dtype_enabled:
        return "input casting disabled"
    return _why_not_tensor(lora_A.weight) or _why_not_tensor(lora_B.weight)


def _why_not_base(base: Any) -> str | None:
    kind = kind_of(base)
    if kind not in (_PLAIN, _NF4):
        return f"{type(base).__name__} computes its product in its own way"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "the base layer is trained too"
    if not runs_own_forward(base):
        return "hooks on the base layer, or a forward that was set on it"
    if not has_library_forwards(base):
        return "another forward of the base layer's class"
    if kind == _PLAIN:
        return _why_not_tensor(base.weight)
    state = getattr(base.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return "4-bit weights not in their training layout"
    if tuple(state.shape) != (base.out_features, base.in_features):
        return "4-bit weights quantized transposed"
    return None


def has_library_forwards(*modules: nn.Module) -> bool:
    """Tell whether the modules' classes have their library's forward. Return true while a graph is traced."""
    # Dynamo cannot read a function's globals. `lora_overrides` made this test when the model was patched.
    return torch.compiler.is_compiling() or all(map(has_library_forward, modules))


def _why_not_tensor(weight: torch.Tensor) -> str | None:
    if is_in_parts(weight):
        return "weights in parts (DeepSpeed ZeRO-3)"
    if not is_plain(weight):
        return f"weights of type {type(weight.data).__name__}"
    known = (torch.float64, torch.float32, *HALF)
    return None if weight.dtype in known else f"weights in {weight.dtype}"


def read(module: Any) -> Projection:
    """Read the projection of a layer. [`unsupported_reason`] must be `None` for it."""
    base, pair, scaling, rate, draws = module, (None, None), 0.0, 0.0, False
    if is_adapted(module):
        name = next(name for name in module.active_adapters if name in module.lora_A)
        base, scaling = module.base_layer, module.scaling[name]
        pair, dropout = (module.lora_A[name].weight, module.lora_B[name].weight), module.lora_dropout[name]
        if type(dropout) is nn.Dropout:
            rate, draws = dropout.p, dropout.training and dropout.p > 0
    state = getattr(base.weight, "quant_state", None)
    dtype = base.weight.dtype if state is None else base.compute_dtype or torch.float32
    return Projection(base.weight, base.bias, state, *pair, scaling, dtype, rate, draws)


def compute_dtype(x: torch.Tensor, projections: Sequence[Projection]) -> torch.dtype | None:
    """Return the dtype of the products for this input, `None` if the layers' own forward must run.

    Half precision is used only if the device supports it and the layers' own products use it. Devices that emulate it
    are faster and more exact in float32.
    """
    autocast = autocast_dtype(x)
    factors = {p.lora_A.dtype for p in projections if p.lora_A is not None}
    plain = [p.weight.dtype for p in projections if p.quant_state is None]
    if any(p.weight.device != x.device for p in projections):
        return None
    if autocast is None and any(dtype != x.dtype for dtype in plain):
        return None  # the layer's own forward raises
    products = {autocast} if autocast else {x.dtype, *(p.computes_in for p in projections)}
    dtypes = {x.dtype, *products, *factors, *(p.computes_in for p in projections)}
    if dtypes == {torch.float64}:
        return torch.float64
    if any(dtype not in (torch.float32, *HALF) for dtype in dtypes):
        return None
    native = any(dtype in HALF and has_half_products(dtype, x.device.type) for dtype in dtypes)
    if not native or products == {torch.float32}:
        return torch.float32
    (half, *others) = products
    # Without autocast, PEFT multiplies float32 factors in float32. Float16 has too small a range for these products.
    too_narrow = half is torch.float16 and autocast is None and factors != {torch.float16}
    return None if others or half not in HALF or too_narrow else half


def output_dtype(x: torch.Tensor, projection: Projection) -> torch.dtype:
    """Return the dtype of the layer's own output."""
    return x.dtype if projection.quant_state is not None else autocast_dtype(x) or x.dtype
