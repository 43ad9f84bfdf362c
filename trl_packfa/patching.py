"""Patching one model instance: what a patch declares, how it is applied and undone.

The only code that sets attributes on models. Two kinds of edits, both an instance's own `forward`: the backbone
finds the document boundaries once per call, each attention module uses them. Classes, module globals and
`torch.nn.functional` are never touched, and without boundaries every call goes to the original `forward`.

Shape letters: B rows, L row length, T packed tokens (B * L), N heads, H head dim, D model dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from .attention import AttentionBackend, AttentionRequest, get_backend, resolve
from .boundaries import layout_of
from .errors import PackingError, UnsupportedModel
from .layout import PackedLayout

QKV: TypeAlias = Callable[[nn.Module, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

_STATE = "_trl_packfa"


@dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """What the attention call of one module is given besides query, key and value (transformers' names)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0


def read_arguments(module: nn.Module) -> AttentionArguments:
    """The arguments as most transformers attention modules store them on themselves."""
    return AttentionArguments(
        scaling=module.scaling,  # type: ignore[arg-type]
        sliding_window=getattr(module, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None),
        dropout=float(getattr(module, "attention_dropout", 0.0)),  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """How to make one family of architectures honour document boundaries: a declaration, no code of its own.

    Args:
        model_types (`tuple[str, ...]`):
            The `config.model_type`s it serves.
        backbone (`str`):
            Class name of the module that runs the decoder stack.
        attention (`Mapping[str, QKV]`):
            For each attention class by name, the function `(module, hidden_states (B, L, D), position_embeddings)`
            to `query`, `key`, `value` of shape `(B, L, heads, H)`, rotated and normalized: everything before the
            attention itself.
        output (`str`, *optional*, defaults to `"o_proj"`):
            Name of the output projection of an attention module.
        arguments (`Callable`, *optional*):
            Reads the [`AttentionArguments`] off an attention module.
        origin (`str`, *optional*):
            The Python package that declares the patch, shown in logs and in duplicates' errors.
    """

    model_types: tuple[str, ...]
    backbone: str
    attention: Mapping[str, QKV]
    output: str = "o_proj"
    arguments: Callable[[nn.Module], AttentionArguments] = read_arguments
    origin: str = "trl_packfa"
    rung: str = "attention"


@dataclass
class PatchState:
    """What was done to one model, kept on its backbone so that it travels with copies of the model."""

    patch: Patch
    backend: str
    edits: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    attention: dict[str, nn.Module] = field(default_factory=dict)
    resolved: dict[AttentionRequest, AttentionBackend] = field(default_factory=dict)

    def backend_for(self, request: AttentionRequest) -> AttentionBackend:
        """The backend of a request, resolved at its first appearance."""
        if request not in self.resolved:
            self.resolved[request] = resolve(request, self.backend)
        return self.resolved[request]


class _Override:
    """A `forward` of one instance: goes to the original unless the call is packed.

    A plain object instead of a closure, so that a patched model can be deep-copied and pickled.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None, state: PatchState) -> None:
        self.module, self.original, self.state = module, original, state

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up on the class at call time: wrappers such as FSDP2 exchange an instance's class.
        if self.original is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)


class _Backbone(_Override):
    """Finds the boundaries once, hands them to every layer, and keeps any T x T mask from being built."""

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None, state: PatchState) -> None:
        super().__init__(module, original, state)
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        layout = layout_of(call)
        call.pop("packed_layout", None)
        if layout is None:
            kwargs.pop("packed_layout", None)
            return self.call_original(*args, **kwargs)
        if call.get("output_attentions"):
            raise PackingError(
                "attention weights cannot be returned for a packed batch: no T x T matrix exists.",
                do="Pass output_attentions=False, or the documents as a padded batch.",
            )
        tokens = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        layout = layout.to(tokens.device)
        if call.get("position_ids") is None:
            call["position_ids"] = layout.position_ids()
        # A four-dimensional mask is taken as it is, so no mask is built; with no elements, no attention that the
        # patch has missed could use it: an error there, never a leak.
        call["attention_mask"] = torch.empty((1, 1, 0, 0), device=tokens.device)
        call.update(past_key_values=None, use_cache=False, packed_layout=layout)
        return self.call_original(**call)


class _Attention(_Override):
    """The attention of one layer on `(T, N, H)`: no transposes, no mask, no key/value expansion."""

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None, state: PatchState, qkv: QKV) -> None:
        super().__init__(module, original, state)
        self.qkv = qkv

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layout: PackedLayout | None = kwargs.pop("packed_layout", None)
        if layout is None:
            return self.call_original(hidden_states, *args, **kwargs)
        module = self.module
        position_embeddings = args[0] if args else kwargs.get("position_embeddings")
        query, key, value = (t.flatten(0, 1) for t in self.qkv(module, hidden_states, position_embeddings))
        arguments = self.state.patch.arguments(module)
        dropout = arguments.dropout if module.training else 0.0
        backend = self.state.backend_for(_request(query, key, arguments, dropout))
        out_TNH = backend(
            query,
            key,
            value,
            layout,
            scaling=arguments.scaling,
            sliding_window=arguments.sliding_window,
            softcap=arguments.softcap,
            sinks=arguments.sinks,
            dropout=dropout,
        )
        output = getattr(module, self.state.patch.output)
        return output(out_TNH.reshape(*hidden_states.shape[:-1], -1)), None


def _request(
    query: torch.Tensor, key: torch.Tensor, arguments: AttentionArguments, dropout: float
) -> AttentionRequest:
    return AttentionRequest(
        device=query.device,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        num_heads=query.shape[-2],
        num_key_value_heads=key.shape[-2],
        sliding_window=arguments.sliding_window,
        softcap=arguments.softcap,
        sinks=arguments.sinks is not None,
        dropout=dropout,
        needs_grad=torch.is_grad_enabled() and query.requires_grad,
    )


def find_state(model: nn.Module) -> PatchState | None:
    """The state of a patched model, `None` if it is not patched."""
    return next((vars(module)[_STATE] for module in model.modules() if _STATE in vars(module)), None)


def apply_patch(model: nn.Module, patch: Patch, backend: str) -> PatchState:
    """Patch this instance in place. Every edit is resolved before any is made.

    Raises:
        [`UnsupportedModel`]: if the modules that the patch names are not there, or attend in both directions.
        [`NoBackend`]: if there is no backend of that name.
    """
    if backend != "auto":
        get_backend(backend)
    backbone, attention = _find_modules(model, patch)
    state = PatchState(patch, backend, attention=attention)
    planned = [(backbone, _Backbone(backbone, _own_forward(backbone), state))]
    for module in attention.values():
        patch.arguments(module)
        qkv = next(patch.attention[name] for name in _class_names(module) if name in patch.attention)
        planned.append((module, _Attention(module, _own_forward(module), state, qkv)))
    for module, override in planned:
        slot = _forward_slot(module)
        state.edits.append((module, slot, vars(module).get(slot)))
        setattr(module, slot, override)
    setattr(backbone, _STATE, state)
    return state


def undo_patch(model: nn.Module) -> None:
    """Take back every edit, last first; a model that is not patched stays as it is."""
    state = find_state(model)
    if state is None:
        return
    for module, slot, before in reversed(state.edits):
        if before is None:
            delattr(module, slot)
        else:
            setattr(module, slot, before)
    for module in model.modules():
        vars(module).pop(_STATE, None)


def _find_modules(model: nn.Module, patch: Patch) -> tuple[nn.Module, dict[str, nn.Module]]:
    backbones = [m for m in model.modules() if patch.backbone in _class_names(m)]
    if len(backbones) != 1:
        raise UnsupportedModel(
            f"the patch for {', '.join(patch.model_types)} expects one {patch.backbone}, found {len(backbones)} in "
            f"{type(model).__name__}.",
            do="Patch the causal LM itself. If transformers changed this architecture, please report it.",
        )
    attention = {
        name: module
        for name, module in backbones[0].named_modules()
        if not patch.attention.keys().isdisjoint(_class_names(module))
    }
    layers = getattr(getattr(backbones[0], "config", None), "num_hidden_layers", len(attention))
    if len(attention) != layers:
        raise UnsupportedModel(
            f"{patch.backbone} has {layers} layers, but {len(attention)} attention modules of class "
            f"{' or '.join(patch.attention)}.",
            do="This architecture differs from the one that the patch was written for; please report it.",
        )
    two_way = [name for name, module in attention.items() if getattr(module, "is_causal", True) is False]
    if two_way:
        raise UnsupportedModel(
            f"{type(model).__name__} attends in both directions (is_causal=False in {two_way[0]}).",
            why=["packed attention here is causal inside each document"],
            do="Set use_bidirectional_attention=False in the model's config, or train it padded.",
        )
    return backbones[0], attention


def _class_names(module: nn.Module) -> list[str]:
    """Names of the module's class and its bases: wrappers such as FSDP2 subclass on the fly."""
    return [cls.__name__ for cls in type(module).__mro__]


def _forward_slot(module: nn.Module) -> str:
    """The attribute that holds the real forward: accelerate's device hooks move it to `_old_forward`."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A forward set on the instance before us, `None` if it has its class's."""
    return vars(module).get(_forward_slot(module))
