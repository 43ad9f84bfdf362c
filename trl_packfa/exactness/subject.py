"""The model under the check: what of it is followed, whose gradients are compared, and what its ranks agree on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from ..patching.apply import PatchState
from ..patching.inspect import model_config, model_type
from ..runtime.autocast import multiplies_in_tf32
from ..runtime.zero3 import GradientParts, is_partitioned, whole_shape, whole_size
from .compare import Finding
from .following import find_parts
from .probe import device_of

_Measured = TypeVar("_Measured")

# Types without experts that group tokens by content: BLT's patches, padded to the most that a document has.
_REGROUPING = ("blt",)
# Gradients of at most this share of the parameters, or so many numbers, are copied rather than computed again.
_FEW, _FEW_NUMBERS = 0.1, 2**28
# By how much losses are scaled down where gradients overflow, a power of two so that nothing else is rounded, and how
# often. float16 ends at 65,504; what 2**-24 of it loses at the other end is a millionth of the gradients that fit.
_SCALED_DOWN, _LEAST_SCALE = 2.0**-8, 2.0**-24
# Logits in these dtypes may have been cast up from what computed them.
_WIDE = (torch.float32, torch.float64)


class Subject:
    """A patched causal LM in the mode in which it is measured.

    Args:
        model (`torch.nn.Module`), state ([`PatchState`]):
            The model and what was done to it.
        gradient_parts ([`GradientParts`] or `None`):
            Where gradients go under ZeRO-3.
        progress (`Callable` or `None`):
            Told of each part and the share of the work that is done.
        skipped (`dict`, *optional*):
            Layers that are left out, as [`~depth.layers_to_skip`] found them; `None` for the whole model, whose
            embeddings and LM head are measured too.

    Attributes:
        whole (`bool`): whether all layers, the embeddings and the LM head are measured.
        trained (`list[torch.nn.Parameter]`): the parameters that train.
        dimensions (`dict[str, int]`): how many dimensions each of them has, by name.
        chooses (`bool`): whether tokens choose which others they see (sparse attention): rounding then makes single
            tokens choose otherwise, and what counts is the typical token.
        regroups (`bool`): whether tokens are grouped by what they are: others then change how sums are rounded.
        loss_scale (`float`): what every loss is multiplied by, so that gradients are finite.
    """

    def __init__(
        self,
        model: nn.Module,
        state: PatchState,
        gradient_parts: GradientParts | None,
        progress: Callable[[str, float], None] | None,
        skipped: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.gradient_parts, self.whole = model, gradient_parts, skipped is None
        self.parts = find_parts(model, state).without(skipped or ())
        out = {id(p) for name in skipped or () for p in model.get_submodule(name).parameters()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in out}
        self.trained = list(trained.values())
        self.loss_scale = 1.0
        self.dimensions = {name: len(whole_shape(p)) for name, p in trained.items()}
        self.chooses = any("Indexer" in type(module).__name__ for module in model.modules())
        # Experts multiply the tokens that chose them together: another document's tokens change the shape of that
        # product, and so how its sums are rounded.
        self.regroups = _has_experts(model) or model_type(model) in _REGROUPING
        self._progress, self._done = progress, 0.0
        self.clear()

    def begin(self, text: str, share: float) -> None:
        """Announce a part that is this share of the whole work."""
        if self._progress is not None:
            self._progress(text, min(self._done, 1.0))
        self._done += share

    def anywhere(self, found: bool) -> bool:
        """Whether `found` is true on any rank that holds a part of this model, as those run its forwards together."""
        model = self.model
        if not is_partitioned(model) and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return found
        # With the weights in parts, a forward that one rank runs alone would wait for the others for ever.
        everywhere: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everywhere, found)
        return any(everywhere)

    def finite(self, measure: Callable[[], _Measured], gradients: Callable[[_Measured], Finding | None]) -> _Measured:
        """A measurement whose gradients are finite, taken again with smaller losses where they overflow, as mixed
        precision training in float16 does; the last one if nothing helps."""
        while True:
            found = measure()
            finding = gradients(found)
            overflows = finding is not None and not math.isfinite(finding.difference)
            if not self.anywhere(overflows) or self.loss_scale <= _LEAST_SCALE:
                return found
            self.loss_scale *= _SCALED_DOWN

    def clear(self) -> None:
        """Forget all gradients."""
        self._gained = [0.0] * len(self.trained)
        self._before: dict[int, torch.Tensor] = {}
        if self.gradient_parts is not None:
            self.gradient_parts.clear()
        for parameter in self.trained:
            parameter.grad = None

    def copied(self) -> list[torch.Tensor | None] | None:
        """A copy of the gradients where it is small beside the model, as an adapter's; `None` where it is not."""
        trained = sum(map(whole_size, self.trained))
        few = trained <= _FEW * sum(map(whole_size, self.model.parameters())) or trained <= _FEW_NUMBERS
        if self.gradient_parts is not None or not few:
            return None
        return [None if p.grad is None else p.grad.clone() for p in self.trained]

    def put_back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients to what was copied."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    @torch.no_grad()
    def take_away(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Subtract what was copied."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad -= gradient

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter gets a gradient in a `with` block: those of weights cost time and memory."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def note_gain(self) -> None:
        """Note what the gradients of vectors and scalars have gained since the last time: a document's part."""
        if self.gradient_parts is not None:
            return
        for i, (parameter, dimensions) in enumerate(zip(self.trained, self.dimensions.values(), strict=True)):
            # Matrices' parts rarely cancel, and a copy of each would be a second model in memory.
            if dimensions < 2 and parameter.grad is not None:
                now = parameter.grad.detach().clone()
                gained = now.float() - self._before[i].float() if i in self._before else now
                self._gained[i] += _norm(gained) ** 2
                self._before[i] = now

    def sizes(self) -> list[float]:
        """What the gradient of each trained parameter is measured against: its norm, or that of the documents' parts,
        which may cancel. Of a scalar's sum next to nothing may be left, and any rounding would be large beside it."""
        return [max(norm, gained**0.5) for norm, gained in zip(self.norms(), self._gained, strict=True)]

    def norms(self) -> list[float]:
        """L2 norm of each trained parameter's gradient."""
        if self.gradient_parts is not None:
            return self.gradient_parts.norms()
        return [0.0 if p.grad is None else _norm(p.grad) for p in self.trained]


def _norm(gradient: torch.Tensor) -> float:
    # FSDP2's gradients are sharded; the norm of a `DTensor` is put together over ranks.
    norm = gradient.float().norm()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _has_experts(model: nn.Module) -> bool:
    config = model_config(model).get_text_config()
    counts = {name: value for name, value in vars(config).items() if "expert" in name}
    return any(isinstance(value, int) and not isinstance(value, bool) and value > 1 for value in counts.values())


def compute_dtype(model: nn.Module, logits: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype whose rounding shows: that of most weights, or autocast's; logits may be cast up from it."""
    device = device_of(model).type
    # Half-precision logits name the dtype themselves. float32 ones may be upcast by the model's last line.
    if logits not in _WIDE:
        return logits
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in (*_WIDE, torch.bfloat16, torch.float16):
            sizes[parameter.dtype] += whole_size(parameter)
    return sizes.most_common(1)[0][0]


def rounding_dtype(model: nn.Module, logits: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype that rounds as coarsely as the model's products: [`compute_dtype`], or float16 for TF32."""
    dtype = compute_dtype(model, logits)
    return torch.float16 if dtype is torch.float32 and multiplies_in_tf32(device_of(model)) else dtype
