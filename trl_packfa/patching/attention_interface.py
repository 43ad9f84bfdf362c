"""The two functions behind `packfa`, one name in transformers' registries of attention and of masks.

Modules of a patched model have a view of their config with this name: their calls bring the documents that the
backbone found. In a model that was loaded with `attn_implementation="packfa"` the functions find documents themselves,
see `by_name.py`.

Shape letters: B rows, L row length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ..compile import outside_of_graphs
from ..errors import InvalidConfig, PackingError
from ..layout import PackedLayout
from ..layout.call_context import KEYWORD, current_call, empty_mask, find_layout
from .by_name import NAME, attend_by_name, attend_unpacked, mask_by_name
from .handed_masks import note_mask
from .mask_rules import sees_ahead
from .packed_attention import InterfaceOptions, attend_by_options, eager_attention, masked_by_choice
from .state import Edit, PatchState


class InterfaceConfig:
    """View of a module's config with the name of our functions.

    The view shares every attribute with the config, also those that users set later, and saves as the config does.
    So a model's own config keeps the user's `attn_implementation`, which calls without documents use. The view of a
    module that makes masks has our name only inside of the calls whose masks are ours: it may be the model's config,
    of which users make other models.
    """

    __slots__ = ()
    # Slots of each subclass. What lies in slots is in no file that a model is saved to.
    trl_packfa_config: Any  # a `PreTrainedConfig`; transformers types its attention's name as optional
    trl_packfa_options: InterfaceOptions | None  # `None` for a module that makes masks

    def __init_subclass__(cls) -> None:
        """Leave out what transformers does to new classes of configs: this one declares no fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make the view again of the copied or unpickled config."""
        return interface_config, (self.trl_packfa_config, self.trl_packfa_options)

    @property
    def _attn_implementation(self) -> Any:
        # A graph is for calls of both kinds, and torch cannot read the context in it.
        if self.trl_packfa_options is not None or torch.compiler.is_compiling():
            return NAME
        call = current_call()
        is_ours = call.layout is not None or call.notes_masks
        return NAME if is_ours else PreTrainedConfig._attn_implementation.fget(self)  # type: ignore[attr-defined]

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        PreTrainedConfig._attn_implementation.fset(self, value)  # type: ignore[attr-defined]  # it is a property


@cache
def _view_of(kind: type[PreTrainedConfig]) -> type[Any]:
    slots = ("trl_packfa_config", "trl_packfa_options")
    return type(kind.__name__, (InterfaceConfig, kind), {"__slots__": slots})


def interface_config(config: PreTrainedConfig, options: InterfaceOptions | None = None) -> Any:
    """Return a view of a module's config under which it asks our functions for attention, or for masks."""
    view: Any = object.__new__(_view_of(type(config)))
    object.__setattr__(view, "__dict__", vars(config))
    view.trl_packfa_config, view.trl_packfa_options = config, options
    return view


def mask_edits(inner: PreTrainedModel, state: PatchState) -> list[Edit]:
    """Return the edits of the models that ask our function for masks.

    A backbone does so if it computes with its mask. Models between the outermost one and its text decoder may do so.
    """
    backbone: Any = state.parts.backbone
    edits: list[Edit] = []
    if state.patch.makes_mask:
        edits.append((backbone, "config", interface_config(backbone.config)))
    if state.unpadding is None or not state.parts.takes_images:
        return edits
    module: Any
    for module in inner.modules():
        is_between = isinstance(module, PreTrainedModel) and module not in (inner, backbone)
        if is_between and any(below is backbone for below in module.modules()):
            edits += [(module, "config", config) for config in _mask_configs(module.config)]
    return edits


def _mask_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a copy of a composite model's config that sends the masks for its text decoder to our function.

    The list is empty if the config has no config of a decoder.
    """
    text = config.get_text_config()
    names = [name for name, value in vars(config).items() if value is text]
    if not names:
        return []
    ours = copy.copy(config)
    vars(ours).update(dict.fromkeys(names, interface_config(text)))
    return [ours]


def packed_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement transformers' attention interface: `query` `(B, N, L, H)`, `key` and `value` `(B, K, L, H)` to `(B, L,
    N, H)`.

    Without a layout ([`find_layout`]) a patched model's own attention function runs. The option `indices` is that of
    [`attend_packed`].
    """
    config = module.config
    if not isinstance(config, InterfaceConfig):
        return attend_by_name(module, (query, key, value), attention_mask, options), None
    facts = config.trl_packfa_options
    assert facts is not None, "modules that make masks have no attention of their own"
    layout = find_layout((query, attention_mask), options)
    options.pop(KEYWORD, None)
    indices: torch.Tensor | None = options.pop("indices", None)
    if layout is None:
        if indices is not None:
            attention_mask = masked_by_choice(attention_mask, indices, query, key)
        own = config.trl_packfa_config._attn_implementation
        if own == NAME:
            return attend_unpacked(facts, module, (query, key, value), attention_mask, options), None
        forward = AttentionInterface().get_interface(own, eager_attention(module))
        return forward(module, query, key, value, attention_mask, **options)
    return attend_by_options(facts, module, (query, key, value), layout, options, indices), None


def packed_mask(**options: Any) -> torch.Tensor | None:
    """Implement transformers' mask interface: an empty mask for a packed call, else the mask of the model's attention.

    In a padded call of a model with images that mask is only noted, see `handed_masks.py`.
    """
    config = options["config"]
    if not isinstance(config, InterfaceConfig):
        require_registered()
        return mask_by_name(options)
    # The mask interface gets neither the call's keywords nor its mask, so the call comes from the context variable.
    call = current_call()
    if call.layout is not None:
        _require_direction(call.layout, options)
        # Bool, as transformers' own mask for SDPA is: some models branch on the mask's dtype (Doge, Falcon).
        return empty_mask(call, call.layout.cu_seqlens.device, dtype=torch.bool)

    def make() -> torch.Tensor | None:
        own: Any = config.trl_packfa_config
        if own._attn_implementation == NAME:
            return mask_by_name({**options, "config": own})
        return AttentionMaskInterface()[own._attn_implementation](**{**options, "config": own})

    return note_mask(make, options) if call.notes_masks else make()


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


_REGISTRIES: tuple[tuple[Any, Any], ...] = (
    (AttentionInterface, packed_attention_forward),
    (AttentionMaskInterface, packed_mask),
)


def register_name() -> None:
    """Register both functions with transformers.

    Raise [`InvalidConfig`] if another package has registered the name.
    """
    _register()
    require_registered()


def _register() -> None:
    for interface, ours in _REGISTRIES:
        # A function of ours that an earlier import has registered gives way.
        if getattr(interface().get(NAME), "__module__", __name__) == __name__:
            interface.register(NAME, ours)


@outside_of_graphs
def require_registered() -> None:
    """Raise [`InvalidConfig`] if another package's function has our name."""
    for interface, ours in _REGISTRIES:
        if (other := interface().get(NAME)) is not ours:
            raise InvalidConfig(
                f"attn_implementation='{NAME}' is registered twice.",
                why=[f"{other.__module__}.{other.__qualname__} has taken the name"],
                do="Import one of the two packages only, in one version.",
            )


_register()  # also in a process that has only unpickled a patched model
