"""`PackedCall` carries layout and tokens of one call; the backbone makes it, [`find_call`] finds it in modules below.

No single way reaches all modules, so the backbone sends it by three:
- the keyword `packed_call`, to layers that take further keywords. Activation checkpointing recomputes layers from
  their arguments alone, outside of any call;
- the mask, for layers that take no keywords. With the mask alone, nine types fail under reentrant checkpoints, which
  drop attributes of tensors;
- the context variable, for modules that get neither: rotary embeddings, recurrent state, backbones whose causal LM
  does not pass its arguments on, and layers in a compiled graph, which makes new mask tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from .packed import PackedLayout
from .padded_rows import PaddedRows

# Name of the keyword, and of the mask's attribute.
KEYWORD = "packed_call"
# Arguments of a packed call that hold its boundaries: FlashAttention's, as transformers names them, and ours.
FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
BOUNDARIES = ("packed_layout", KEYWORD, *FLASH_KEYS)


@dataclass(frozen=True, eq=False)
class PackedCall:
    """The facts about one call of a patched model that its modules need. Without a layout it is not packed."""

    layout: PackedLayout | None = None
    # Tokens of the call, int64, `(B, L)`, for layers that depend on them (activated LoRA).
    input_ids: torch.Tensor | None = None
    # List to which backbones append the logits of their routers, `(T, X)` for each layer.
    router_logits: list[torch.Tensor] | None = None
    # Whether masks are only noted, because the text decoder may not need them (`patching/handed_masks.py`).
    notes_masks: bool = False
    # Whether masks by name are always those of `sdpa`: the check uses such a call as its reference.
    masks_as_sdpa: bool = False
    # Mask `(B, L)` of the positions whose hidden states TRL's LM head needs (`kernels/lm_head/labelled.py`).
    labelled: torch.Tensor | None = None
    # The padded rows of a call that runs without its pads, for cross-attention (`patching/cross_attention.py`).
    rows: PaddedRows | None = None
    # Results that one layer derives from the tokens, kept for the other layers of the same call.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)


# A context variable belongs to one thread. On accelerators autograd runs the backward in threads of its own. Layers
# that a checkpoint recomputes there find nothing here, so they need the keyword or the mask.
_CURRENT: ContextVar[PackedCall] = ContextVar("trl_packfa_call", default=PackedCall())  # noqa: B039 (it is frozen)


def current_call() -> PackedCall:
    """Return the call that this thread is in; an empty one outside of calls."""
    return _CURRENT.get()


@contextmanager
def in_call(call: PackedCall) -> Iterator[None]:
    """Make this the thread's call inside a `with` block."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def packed_call(layout: PackedLayout | None, *, notes_masks: bool = False) -> Iterator[None]:
    """Give this thread's call a layout, or none, inside a `with` block."""
    outer = current_call()
    kept = {"router_logits": outer.router_logits, "masks_as_sdpa": outer.masks_as_sdpa}
    with in_call(PackedCall(layout, notes_masks=notes_masks, **kept)):
        yield


def empty_mask(call: PackedCall, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a mask without elements that stands for the mask in a packed call and carries the call.

    transformers passes masks of four dimensions on unchanged (`_preprocess_mask_arguments`). Adding this one to scores
    `(B, N, L, L)` raises, so attention that the patch has missed fails instead of leaking.
    """
    mask: Any = torch.empty((1, 1, 0, 0), device=device, dtype=dtype)
    setattr(mask, KEYWORD, call)
    return mask


def is_empty_mask(value: Any) -> bool:
    """Tell whether a value is an [`empty_mask`], or a slice of one."""
    return isinstance(value, torch.Tensor) and value.dim() >= 3 and value.shape[-2:] == (0, 0)


def find_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedCall:
    """Return the call from a module's arguments, by name or on the mask, or else this thread's call."""
    call = kwargs.get(KEYWORD)
    if call is not None:
        return call
    # A slice or a cast of the mask is a new tensor without the attribute. Then the context variable is used.
    mask = next((value for value in (*args, *kwargs.values()) if hasattr(value, KEYWORD)), None)
    return current_call() if mask is None else getattr(mask, KEYWORD)


def find_layout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedLayout | None:
    """Return the layout of [`find_call`] on the module's device, that of its first tensor.

    The backbone makes the call on the device of its inputs, but its layers may lie on several (`device_map`).
    """
    layout = find_call(args, kwargs).layout
    if layout is None:
        return None
    # No further than that: a graph gets a guard on each value that is looked at.
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return layout if first is None else layout.to(first.device)
