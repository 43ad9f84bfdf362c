"""Bring a layout from the backbone, which has found it, to the modules below; [`find_layout`] reads it in any of them.

No single way reaches all modules, so the backbone sends the layout by three:
- the keyword `packed_layout`, to layers that take further keywords. With activation checkpointing a backward pass
  recomputes layers from their arguments alone, outside of any call. Reentrant checkpoints also drop attributes of
  tensors;
- the mask, which transformers passes to layers that take no other arguments;
- the context variable, for modules that get neither: rotary embeddings, recurrent state, backbones whose causal LM
  does not pass its arguments on, and layers in a compiled graph, which makes new mask tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..layout import PackedLayout

# The key in a layout's memo for the tokens of its call `(B, L)`, which some layers need.
INPUT_IDS = "input_ids"

# A context variable belongs to one thread. On accelerators autograd runs the backward in threads of its own. Layers
# that a checkpoint recomputes there find nothing here, so they need the keyword or the mask.
_IN_FLIGHT: ContextVar[PackedLayout | None] = ContextVar("trl_packfa_layout", default=None)


def current_layout() -> PackedLayout | None:
    """Return the layout of the call that this thread is in, `None` outside of packed calls."""
    return _IN_FLIGHT.get()


@contextmanager
def packed_call(layout: PackedLayout | None) -> Iterator[None]:
    """Give this thread's call a layout inside a `with` block."""
    token = _IN_FLIGHT.set(layout)
    try:
        yield
    finally:
        _IN_FLIGHT.reset(token)


def empty_mask(layout: PackedLayout, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a mask without elements that stands for the mask in a packed call and carries the layout.

    It has four dimensions, so transformers builds no mask. It has no elements, so attention that the patch has missed
    fails instead of leaking.
    """
    # Adding it to scores `(B, N, L, L)` raises, as a size of 0 does not broadcast against L. transformers passes every
    # mask of four dimensions on unchanged (`_preprocess_mask_arguments`).
    mask: Any = torch.empty((1, 1, 0, 0), device=device, dtype=dtype)
    mask.packed_layout = layout
    return mask


def is_empty_mask(value: Any) -> bool:
    """Tell whether a value is an [`empty_mask`], or a slice of one."""
    return isinstance(value, torch.Tensor) and value.dim() >= 3 and value.shape[-2:] == (0, 0)


def find_layout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedLayout | None:
    """Return the layout from a module's arguments, by name or on the mask, or else that of this thread's call."""
    layout = kwargs.get("packed_layout")
    if layout is not None:
        return layout
    # A slice or a cast of the mask is a new tensor without the attribute. Then the context variable is used.
    mask = next((value for value in (*args, *kwargs.values()) if hasattr(value, "packed_layout")), None)
    return current_layout() if mask is None else mask.packed_layout
