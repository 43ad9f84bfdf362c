"""Packed attention for transformers' attention interface.

Shape letters: B rows, L row length, T packed tokens (B * L), N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from ..attention.base import AttentionArguments, chosen_keys
from ..attention.dispatch import BackendChoice
from ..errors import PackingError
from ..layout import PackedLayout
from ..layout.call_context import KEYWORD, current_call, empty_mask, find_layout
from ..patches.base import Heads
from ..runtime.compile import outside_of_graphs
from ..runtime.override import Override
from .handed_masks import note_mask
from .inspect import is_causal
from .mask_rules import sees_ahead

# Our name in transformers' attention interface. It is set on single modules, never on a whole model.
INTERFACE = "trl_packfa"


def interface_config(
    config: PreTrainedConfig,
    backends: BackendChoice,
    window: Callable[[Any], int | None] | None = None,
    *,
    by_mask: bool = False,
) -> PreTrainedConfig:
    """Return a copy of an attention module's config that sends its attention to our function.

    `window` reads the sliding window from the module, for models that do not pass it in the call. With `by_mask` the
    model's mask decides whether attention is causal, so the module need not say so.
    """
    # A shallow copy, without the setter of `_attn_implementation`: the setter would also change the configs inside
    # this one, which the model's own config shares.
    ours = copy.copy(config)
    vars(ours).update(_attn_implementation_internal=INTERFACE, trl_packfa_source=config, trl_packfa_backends=backends)
    ours.trl_packfa_window, ours.trl_packfa_by_mask = window, by_mask
    return ours


class MasksByInterface(Override):
    """Forward of a module that makes masks: while it runs, its config sends them to our function.

    Between calls the module has its own config, which is the one that users change, and that a saved model has.
    """

    def __init__(self, module: nn.Module, backends: BackendChoice) -> None:
        super().__init__(module)
        self.backends = backends
        self.config = interface_config(self.module.config, backends)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        module: Any = self.module
        own = module.config
        if not torch.compiler.is_compiling():  # a graph cannot copy a config, and takes the last copy
            self.config = interface_config(own, self.backends)
        module.config = self.config
        try:
            return self.call_original(*args, **kwargs)
        finally:
            module.config = own


def mask_config(config: PreTrainedConfig, backends: BackendChoice) -> PreTrainedConfig | None:
    """Return a copy of a composite model's config that sends the masks for its text decoder to our function.

    `None` if the config has no config of a decoder.
    """
    text = config.get_text_config()
    names = [name for name, value in vars(config).items() if value is text]
    if not names:
        return None
    ours = copy.copy(config)
    vars(ours).update(dict.fromkeys(names, interface_config(text, backends)))
    return ours


def packed_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement transformers' attention interface: `query` `(B, N, L, H)`, `key` and `value` `(B, K, L, H)` to `(B, L,
    N, H)`.

    Without a layout ([`find_layout`]) the model's own attention function runs. The option `indices` `(B, L, K)` holds
    the keys inside the document that an indexer chose for each query (DeepSeek sparse attention), -1 for none.
    """
    layout = find_layout((query, attention_mask), options)
    options.pop(KEYWORD, None)
    indices: torch.Tensor | None = options.pop("indices", None)
    if layout is None:
        if indices is not None:
            attention_mask = _masked_by_choice(attention_mask, indices, query, key)
        # Every modelling file has its own eager attention, which no table of transformers lists.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = AttentionInterface().get_interface(module.config.trl_packfa_source._attn_implementation, eager)
        return own(module, query, key, value, attention_mask, **options)
    require_known(module, options, by_mask=module.config.trl_packfa_by_mask)
    arguments = read_options(query, options)
    # Some models apply the window in their mask only. Packing uses no mask, so it is read from the module.
    if module.config.trl_packfa_window is not None:
        arguments = replace(arguments, sliding_window=module.config.trl_packfa_window(module))
    return attend_packed(module.config.trl_packfa_backends, query, key, value, layout, arguments, indices), None


# The options of transformers' attention interface that packed attention reads.
READ = ("scaling", "sliding_window", "softcap", "s_aux", "dropout")


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
    """Run packed attention in the shapes and with the `indices` of [`packed_attention_forward`]."""
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


def _masked_by_choice(
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


# Arguments by which some models add to the scores or choose keys; packed attention does not compute them.
_UNKNOWN = ("position_bias", "sinks", "block_indices", "alibi")


def require_known(module: Any, kwargs: dict[str, Any], *, by_mask: bool = False) -> None:
    """Raise [`PackingError`] for attention arguments that packed attention does not compute."""
    if not by_mask and kwargs.get("is_causal", is_causal(module)) is False:
        raise PackingError(f"{type(module).__name__} attends in both directions, packed attention is causal.")
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise PackingError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention; packed attention lacks them.",
            do="Declare its class in a trl_packfa.Patch's masked_mixers, which run document by document.",
        )


def empty_packed_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Implement transformers' mask interface: an empty mask for a packed call, else the mask of the model's attention.

    In a padded call of a model with images that mask is only noted, see `handed_masks.py`.
    """
    # The mask interface gets neither the call's keywords nor its mask, so the call comes from the context variable.
    call = current_call()
    if call.layout is not None:
        _require_direction(call.layout, kwargs)
        # Bool, as transformers' own mask for SDPA is: some models branch on the mask's dtype (Doge, Falcon).
        return empty_mask(call, call.layout.cu_seqlens.device, dtype=torch.bool)
    source = kwargs["config"].trl_packfa_source

    def make() -> torch.Tensor | None:
        return AttentionMaskInterface()[source._attn_implementation](*args, **{**kwargs, "config": source})

    return note_mask(make, kwargs) if call.notes_masks else make()


@outside_of_graphs
def _require_direction(layout: PackedLayout, options: dict[str, Any]) -> None:
    """Raise [`PackingError`] if an encoder's call asks for a mask under which tokens do not see later tokens."""
    rule, length = options.get("mask_function"), options.get("q_length")
    # A row of single tokens has no later ones.
    if layout.causal or rule is None or layout.max_seqlen < 2 or options.get("use_vmap", False):
        return
    if not sees_ahead(rule, (1, int(length)), layout.cu_seqlens.device):  # type: ignore[arg-type]
        raise PackingError(
            "this call asks for a causal mask, but the model was patched as an encoder.",
            do="Patch the model with unpad=False.",
        )


AttentionInterface.register(INTERFACE, packed_attention_forward)
AttentionMaskInterface.register(INTERFACE, empty_packed_mask)
