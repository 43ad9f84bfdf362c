"""The two functions behind `attn_implementation="packfa"`: attention and mask interface of a model without a patch.

A packed call uses no mask and runs by the backends. Other calls run as with `sdpa`, plus the softcap and sinks that
`sdpa` lacks. Padded rows and generation with a cache use its mask. Rows without pads run by the backends if the model
asks for a window, softcap or sinks.

Shape letters: B rows, L row length, M keys of a row, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention.base import AttentionArguments
from ..attention.reference import dense_attention
from ..errors import InvalidConfig
from ..layout import PackedLayout
from ..layout.call_context import PackedCall, empty_mask
from ..runtime.compile import outside_of_graphs
from ..runtime.per_document import BOUNDARIES
from .attention_interface import READ, attend_packed, read_options, require_known
from .inspect import is_causal
from .mask_rules import sees_ahead, starts_in_rule
from .named_boundaries import PADDING, layout_of_attention
from .named_models import AS_SDPA, CHOSEN, NAME, refuse_at_load, require_positions, served_patch


# Outside of graphs, as the documents of a call are read on the host.
@outside_of_graphs
def named_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement transformers' attention interface: `query` `(B, N, L, H)`, `key` and `value` `(B, K, M, H)` to `(B, L,
    N, H)`.

    Raise [`PackingError`] if the type is not served, or the call's boundaries cannot be honoured.
    """
    causal = options.get("is_causal")
    causal = is_causal(module) if causal is None else causal
    patch = served_patch(module.config) if causal else None
    layout = layout_of_attention(query, key.shape[2], attention_mask, options)
    arguments = read_options(query, options)
    if patch is not None and patch.window is not None:
        arguments = replace(arguments, sliding_window=patch.window(module))
    if layout is None:
        rest = {name: option for name, option in options.items() if name not in (*BOUNDARIES, *READ)}
        return _unpacked(module, query, key, value, attention_mask, arguments, causal=causal, **rest), None
    require_known(module, options)
    require_positions(module.config, layout, options.get("position_ids"))
    return attend_packed(CHOSEN.backends, query, key, value, layout, arguments), None


def _unpacked(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: AttentionArguments,
    *,
    causal: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend as `sdpa` does, with the softcap, sinks and windows that it lacks: `(B, L, N, H)`."""
    rows, length = query.shape[0], query.shape[2]
    whole = mask is None and causal and length > 1
    more = arguments.softcap is not None or arguments.sinks is not None
    windowed = whole and arguments.sliding_window is not None and length > arguments.sliding_window
    if not more and not windowed:
        sdpa = AttentionInterface()["sdpa"]
        kwargs.pop("is_causal", None)
        options = {"scaling": arguments.scaling, "dropout": arguments.dropout, "is_causal": causal}
        return sdpa(module, query, key, value, mask, **options, **kwargs)[0]
    if whole:
        # Keys after the last query are the part of a static cache that is still empty.
        key, value = key[:, :, :length], value[:, :, :length]
        layout = _one_a_row(rows, length, query.device)
        return attend_packed(CHOSEN.backends, query, key, value, layout, arguments)
    if mask is None:
        mask = torch.ones((1, 1, length, key.shape[2]), dtype=torch.bool, device=query.device)
    bias = None
    if mask.dtype != torch.bool:  # a caller's own mask, which is added to the scores
        mask, bias = torch.ones_like(mask, dtype=torch.bool), mask
    mask = mask | ~mask.any(dim=-1, keepdim=True)  # pads see no key; let them see all, or they would become NaN
    return dense_attention(query, key, value, mask, arguments, bias).transpose(1, 2)


@lru_cache(maxsize=4)  # so that the layers of a forward share what backends derive from the layout
def _one_a_row(rows: int, length: int, device: torch.device) -> PackedLayout:
    return PackedLayout.from_lengths([length] * rows, rows=rows, device=device)


def named_mask(**options: Any) -> torch.Tensor | None:
    """Implement transformers' mask interface, which is called with keywords.

    A call without pads and cache gets no mask, one whose positions restart gets an empty mask, and any other gets
    `sdpa`'s. Raise [`PackingError`] if the type is not served.
    """
    return _make_mask(torch.compiler.is_compiling(), options)


@outside_of_graphs
def _make_mask(traced: bool, options: dict[str, Any]) -> torch.Tensor | None:
    require_registered()
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    if "allow_is_bidirectional_skip" in options:  # the mask of an encoder, or of attention to one
        return sdpa_mask(**options)
    served_patch(options["config"])
    if AS_SDPA.get():
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    length, padding = options["q_length"], options.get("attention_mask")
    may_skip, by_index = options.get("allow_is_causal_skip", True), not options.get("use_vmap", False)
    padded = padding is not None and not bool(padding.all())
    # The offset is read only where the lengths agree: a static cache's offset is a tensor.
    if padded or length != options["kv_length"] or int(options.get("q_offset", 0)) or not by_index:
        mask = sdpa_mask(**options)
        if mask is not None:
            setattr(mask, PADDING, padding)
        return mask
    # In these cases the rule is a plain causal one, and there are no boundaries to read off it.
    if (may_skip and options.get("local_size") is None) or length == 1:
        return None
    rule, shape, device = options["mask_function"], (options["batch_size"], length), options["device"]
    if sees_ahead(rule, shape, device):  # tokens of one image
        return sdpa_mask(**options)
    layout = starts_in_rule(rule, shape, device)
    if layout is not None:
        return empty_mask(PackedCall(layout), torch.device(device), dtype=torch.bool)
    # Some models always need a mask, and get one. In a graph transformers always asks for one, so that tells nothing.
    return None if may_skip or traced else sdpa_mask(**options)


def register_name() -> None:
    """Register both functions with transformers, and from then on refuse to build models that they cannot serve.

    Raise [`InvalidConfig`] if another package has registered the name.
    """
    for interface, ours in _REGISTRIES:
        # A function of ours that an earlier import has registered gives way.
        if getattr(interface().get(NAME), "__module__", __name__) == __name__:
            interface.register(NAME, ours)
    require_registered()
    if not _WATCHED:
        _WATCHED.append(register_module_module_registration_hook(refuse_at_load))


# The hook that sees each model as it is built. There is only one, however often the name is registered.
_WATCHED: list[Any] = []


def require_registered() -> None:
    """Raise [`InvalidConfig`] if another package's function has our name."""
    for interface, ours in _REGISTRIES:
        if (other := interface().get(NAME)) is not ours:
            raise InvalidConfig(
                f"attn_implementation='{NAME}' is registered twice.",
                why=[f"{other.__module__}.{other.__qualname__} has taken the name"],
                do="Import one of the two packages only, in one version.",
            )


_REGISTRIES: tuple[tuple[Any, Any], ...] = (
    (AttentionInterface, named_attention_forward),
    (AttentionMaskInterface, named_mask),
)
