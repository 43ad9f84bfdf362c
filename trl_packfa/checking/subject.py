"""The model under the check: its traced parts, its trained parameters, and the agreement of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from ..autocast import multiplies_in_tf32
from ..override import attributes_set
from ..parallel.zero3 import GradientParts, is_partitioned, whole_shape, whole_size
from ..patching.inspect import model_config, model_type
from ..patching.state import PatchState
from .compare import nan_as_inf
from .following import find_traced

# Types without experts that group tokens by content: BLT makes patches, padded to the largest number of a document.
_REGROUPING = ("blt",)
# Gradients of at most this share of the parameters, or this many numbers, are copied instead of computed again.
_FEW, _FEW_NUMBERS = 0.1, 2**28
# Losses are scaled down by this factor if gradients overflow, down to the least scale. Powers of two round nothing.
# float16 ends at 65,504; with a scale of 2**-24 it loses only a millionth of the gradients that fit.
_SCALED_DOWN, _LEAST_SCALE = 2.0**-8, 2.0**-24
# Logits in these dtypes may have been cast up from the dtype of the computation.
_WIDE = (torch.float32, torch.float64)
# Numbers of a gradient that are converted at a time.
_NORM_PART = 2**20


class Subject:
    """A patched causal LM in the mode in which it is measured.

    `gradient_parts` collects the gradients under ZeRO-3. `progress` is called with the name of each part and the share
    of the work that is done. `skipped` are layers to leave out, from [`~depth.layers_to_skip`]; `None` measures the
    whole model, with its embeddings and LM head.
    """

    def __init__(
        self,
        model: nn.Module,
        state: PatchState,
        gradient_parts: GradientParts | None,
        progress: Callable[[str, float], None] | None = None,
        skipped: dict[str, tuple[nn.Module, bool]] | None = None,
    ) -> None:
        self.model, self.state, self.gradient_parts = model, state, gradient_parts
        self.whole, self.skipped = skipped is None, skipped or {}
        self.parts = find_traced(model, state).without(self.skipped)
        out = {id(p) for name in self.skipped for p in model.get_submodule(name).parameters()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in out}
        self.trained = list(trained.values())
        self.loss_scale = 1.0  # factor of every loss, so that gradients are finite
        self.dimensions = {name: len(whole_shape(p)) for name, p in trained.items()}
        # Tokens choose the tokens that they see (sparse attention). Rounding changes the choice of single tokens, so
        # the median token is compared.
        self.chooses = any("Indexer" in type(module).__name__ for module in model.modules())
        # Tokens are grouped by content. An expert multiplies all its tokens together: another document's tokens change
        # the shape of that product, and so how its sums are rounded.
        config = vars(model_config(model).get_text_config())
        experts = [value for name, value in config.items() if "expert" in name and isinstance(value, int)]
        self.regroups = any(number > 1 for number in experts) or model_type(model) in _REGROUPING
        self._progress, self._done = progress, 0.0
        self.clear()

    def begin(self, text: str, share: float) -> None:
        """Announce a part that is this share of the whole work."""
        if self._progress is not None:
            self._progress(text, min(self._done, 1.0))
        self._done += share

    def anywhere(self, found: bool) -> bool:
        """Tell whether `found` is true on any rank with a part of this model; they run its forwards together."""
        model = self.model
        if not is_partitioned(model) and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return found
        # If the weights are split, a forward that one rank runs alone would wait for the others for ever.
        everywhere: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everywhere, found)
        return any(everywhere)

    def scale_down(self) -> bool:
        """Make losses smaller, as float16 training does after an overflow; return false if they are smallest."""
        if self.loss_scale <= _LEAST_SCALE:
            return False
        self.loss_scale *= _SCALED_DOWN
        return True

    def clear(self) -> None:
        """Forget all gradients."""
        self._gained = [0.0] * len(self.trained)
        self._before: dict[int, torch.Tensor] = {}
        if self.gradient_parts is not None:
            self.gradient_parts.clear()
        for parameter in self.trained:
            parameter.grad = None

    def copied(self) -> list[torch.Tensor | None] | None:
        """Return a copy of the gradients if it is small compared with the model, as an adapter's is; else `None`."""
        trained = sum(map(whole_size, self.trained))
        few = trained <= _FEW * sum(map(whole_size, self.model.parameters())) or trained <= _FEW_NUMBERS
        if self.gradient_parts is not None or not few:
            return None
        return [None if p.grad is None else p.grad.clone() for p in self.trained]

    def put_back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients to those that were copied."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def frozen(self) -> AbstractContextManager[None]:
        """Keep all parameters from getting gradients inside a `with` block, which saves time and memory."""
        return attributes_set((p, "requires_grad", False) for p in self.model.parameters() if p.requires_grad)

    def note_gain(self) -> None:
        """Note how much the gradients of vectors and scalars have grown since the last call: one document's part."""
        if self.gradient_parts is not None:
            return
        for i, (parameter, dimensions) in enumerate(zip(self.trained, self.dimensions.values(), strict=True)):
            # The parts of matrices rarely cancel, and copies of them would be a second model in memory.
            if dimensions < 2 and parameter.grad is not None:
                now = parameter.grad.detach().clone()
                gained = now.float() - self._before[i].float() if i in self._before else now
                self._gained[i] += _norm(gained) ** 2
                self._before[i] = now

    def sizes(self) -> list[float]:
        """Return the norm of each trained parameter's gradient, or that of the documents' parts if it is larger.

        The parts may cancel: almost nothing may be left of a scalar's sum, and rounding would look large beside it.
        """
        return [max(norm, gained**0.5) for norm, gained in zip(self.norms(), self._gained, strict=True)]

    def norms(self) -> list[float]:
        """Return the L2 norm of each trained parameter's gradient; infinite if a number is NaN."""
        if self.gradient_parts is not None:
            return list(map(nan_as_inf, self.gradient_parts.norms()))
        return [0.0 if p.grad is None else nan_as_inf(_norm(p.grad)) for p in self.trained]


def _norm(gradient: torch.Tensor) -> float:
    if isinstance(gradient, DTensor):  # FSDP2's gradients are sharded, and this puts the norm together over ranks
        norm: Any = gradient.float().norm()
        return float(norm.full_tensor())
    # Part by part: in half precision, new memory for all of a large gradient in float32 costs more than the norm.
    return float(torch.stack([part.float().norm() for part in gradient.reshape(-1).split(_NORM_PART)]).norm())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first loaded weights; offloaded weights are on none until they are used."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def compute_dtype(model: nn.Module, logits: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype that decides the rounding, of most weights or autocast's; logits may be cast up from it."""
    device = device_of(model).type
    # Half-precision logits show the dtype. float32 logits may have been cast up at the end of the model.
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
    """Return the dtype that rounds as coarsely as the model's products: [`compute_dtype`], or float16 for TF32."""
    dtype = compute_dtype(model, logits)
    return torch.float16 if dtype is torch.float32 and multiplies_in_tf32(device_of(model)) else dtype
