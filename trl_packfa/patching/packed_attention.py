"""Packed attention in the arguments of transformers' attention interface.

Shape letters: B rows, L row length, T packed tokens (B * L), N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..attention.base import AttentionArguments
from ..attention.biases import chosen_keys
from ..attention.dispatch import BackendChoice
from ..compile import outside_of_graphs
from ..errors import PackingError
from ..layout import PackedLayout
from ..patches.base import Heads
from .inspect import is_causal


class InterfaceOptions(NamedTuple):
    """The facts about a model that its attention needs beside a call's arguments."""

    backends: BackendChoice
    # Reads the sliding window from the module, for models that do not pass it in the call.
    window: Callable[[Any], int | None] | None = None
    # Whether the model's mask decides if attention is causal, so that the module need not say so.
    by_mask: bool = False


def attend_by_options(
    facts: InterfaceOptions,
    module: Any,
    heads: Heads,
    layout: PackedLayout,
    options: dict[str, Any],
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run [`attend_packed`] with the options of transformers' attention interface.

    Raise [`PackingError`] for those that packed attention does not compute.
    """
    require_known(module, options, by_mask=facts.by_mask)
    arguments = read_options(heads[0], options)
    # Some models apply the window in their mask only. Packing uses no mask, so it is read from the module.
    if facts.window is not None:
        arguments = replace(arguments, sliding_window=facts.window(module))
    return attend_packed(facts.backends, *heads, layout, arguments, indices)


def read_options(query: torch.Tensor, options: Mapping[str, Any]) -> AttentionArguments:
    """Read the arguments of attention from the options of transformers' attention interface, all of them optional."""
    scaling = options.get("scaling")
    return AttentionArguments(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        dropout=options.get("dropout") or 0.0,
    )


def attend_packed(
    backends: BackendChoice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    arguments: AttentionArguments,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed attention on `query` `(B, N, L, H)`, `key` and `value` `(B, K, L, H)`: `(B, L, N, H)`.

    `indices` `(B, L, K)` holds the keys inside the document that an indexer chose for each query (DeepSeek sparse
    attention), -1 for none.
    """
    # Rows of equal length are joined to one packed row: documents never cross the end of a row.
    q_TNH, k_TKH, v_TKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if indices is None:
        out_TNH = backends.attend(q_TNH, k_TKH, v_TKH, layout, arguments)
    else:
        out_TNH = _attend_to_chosen(backends, indices, (q_TNH, k_TKH, v_TKH), layout, arguments)
    return out_TNH.view(query.shape[0], query.shape[2], *out_TNH.shape[1:])


# Outside of graphs, as the bias depends on this batch's documents.
@outside_of_graphs
def _attend_to_chosen(
    backends: BackendChoice, indices: torch.Tensor, qkv: Heads, layout: PackedLayout, arguments: AttentionArguments
) -> torch.Tensor:
    """Attend to the keys in `indices` `(B, L, K)`; documents of at most K tokens see all of their keys."""
    if layout.max_seqlen > indices.shape[-1]:
        arguments = replace(arguments, bias=chosen_keys(indices, layout))
    return backends.attend(*qkv, layout, arguments)


def masked_by_choice(
    attention_mask: torch.Tensor | None, indices: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Hide the keys that an indexer did not choose; models do so only for the functions `eager` and `sdpa`."""
    hidden = indices.new_ones((*indices.shape[:2], key.shape[2]), dtype=torch.bool)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    if attention_mask is None:  # transformers leaves a plain causal mask to the attention function
        queries, keys = hidden.shape[-2:]
        attention_mask = torch.ones_like(hidden).tril(keys - queries)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~hidden
    return attention_mask.masked_fill(hidden, torch.finfo(query.dtype).min)


def eager_attention(module: Any) -> Any:
    """Return the eager attention of a module's file, `None` if it has none: no table of transformers lists it."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


# Arguments by which some models add to the scores or choose keys; packed attention does not compute them.
_UNKNOWN = ("position_bias", "sinks", "block_indices", "alibi")


def require_known(module: Any, kwargs: dict[str, Any], *, by_mask: bool = False) -> None:
    """Raise [`PackingError`] for attention arguments that packed attention does not compute."""
    if not by_mask and not is_causal(module, kwargs.get("is_causal")):
        raise PackingError(
            f"{type(module).__name__} attends in both directions, packed attention is causal.",
            do="Pass padded batches to patch(model, unpad=True), which keeps such attention, or train padded.",
        )
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise PackingError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention; packed attention lacks them.",
            do="Declare its class in the masked_mixers of a ModulePatch (trl_packfa.patches.base).",
        )
