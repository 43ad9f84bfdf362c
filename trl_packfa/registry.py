"""Which architectures can be patched, and the public verbs: `patch`, `unpatch`, `patched`, `describe`, `register`.

Built-in patches come from `trl_packfa.patches`, third parties' from the entry-point group `trl_packfa.patches`
or from `register()`. A model type has one patch; a second one is an error that names both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from torch import nn

from .adapters import adapter_kinds, quantization_config_of, refuse_adapters, refuse_quantization
from .declaration import Patch
from .elementwise import RMSNormOverride
from .errors import InvalidConfig, UnsupportedModel
from .finding import model_config, model_type
from .lora import adapted_layers, describe_lora
from .patching import PatchState, find_state, undo_patch
from .results import results
from .trust import apply_trusted, apply_unknown

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "trl_packfa.patches"

Model = TypeVar("Model", bound=nn.Module)


@cache
def _table() -> dict[str, Patch]:
    """The registry itself: model type to patch. Filled at first use, so that importing trl_packfa stays light."""
    from .patches import PATCHES

    table: dict[str, Patch] = {}
    for built_in in PATCHES:
        _add(table, built_in)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        logger.info("trl-packfa: loading a patch from %s", entry_point.value)  # before any of its code runs
        third_party = entry_point.load()
        logger.info("trl-packfa: patch for %s from %s", third_party.model_types, entry_point.value)
        _add(table, third_party)
    return table


def _add(table: dict[str, Patch], new: Patch) -> None:
    for name in new.model_types:
        if name in table:
            raise InvalidConfig(
                f"two patches for model type '{name}'.",
                why=[f"one from {table[name].origin}", f"one from {new.origin}"],
                do="Uninstall one of them, or give the new one another model type.",
            )
    table.update(dict.fromkeys(new.model_types, new))


def register(new: Patch) -> None:
    """Add a patch for this process.

    Raises:
        [`InvalidConfig`]: if one of its model types has a patch already.
    """
    _add(_table(), new)


def registered() -> dict[str, Patch]:
    """Every model type that can be patched, with its patch, in alphabetical order."""
    return dict(sorted(_table().items()))


def get_patch(model: nn.Module) -> Patch:
    """The patch for a model, looked up by the `config.model_type` of the outermost transformers model in it.

    Raises:
        [`UnsupportedModel`]: with the nearest names.
    """
    patch = get_patch_for_type(model_type(model))
    while patch.serves is not None and not patch.serves(model_config(model)):
        if patch.otherwise is None:
            raise UnsupportedModel(
                f"the patch for model type '{model_type(model)}' is not for a config like this one.",
                do="Train it padded with PackedSFTConfig(packing=False).",
            )
        patch = patch.otherwise
    return patch


def get_patch_for_type(name: str) -> Patch:
    """The patch for a `config.model_type`.

    Raises:
        [`UnsupportedModel`]: with the nearest names.
    """
    table = _table()
    if name not in table:
        near = get_close_matches(name, table, n=3)
        known = [results()[name]["why"]] if name in results() else []
        raise UnsupportedModel(
            f"there is no patch for model type '{name}'.",
            why=known or ([f"nearest: {', '.join(near)}"] if near else [f"supported: {', '.join(sorted(table))}"]),
            do="Declare a trl_packfa.Patch for it and register() it (documentation, 'Writing a patch'), or train it "
            "padded with PackedSFTConfig(packing=False).",
        )
    return table[name]


def patch(model: Model, *, backend: str = "auto", fused_lora: bool = True) -> Model:
    """Make this model instance honour document boundaries, on any device; returns the same model.

    Boundaries are read from each call: TRL's `cu_seq_lens_q` and friends, or `position_ids` that restart. Calls
    without boundaries, padded batches and `generate()` run the unpatched code. Works before or after PEFT wrapping,
    on quantized models, with gradient checkpointing and under `torch.compile`. Idempotent.

    An architecture without a patch, or whose code is not the code that its patch was measured with, is checked on this
    model first ([`check`]), and so is a kind of adapter or quantization of which nobody knows it.

    Args:
        model (`torch.nn.Module`):
            A transformers causal LM, bare or wrapped.
        backend (`str`, *optional*, defaults to `"auto"`):
            Attention backend: `"auto"` or one of `trl-packfa backends`.
        fused_lora (`bool`, *optional*, defaults to `True`):
            Compute LoRA layers together with their base layers in packed calls, to PEFT's result within rounding.
            What cannot be fused runs PEFT's own forward; [`describe`] says why.

    Raises:
        [`UnsupportedModel`]: if there is no patch for the architecture, and no general one is exact on it; if
            the adapter or the quantization cannot be packed.
        [`ContaminationError`]: if the architecture's code has changed and packing is not exact on it.
        [`NoBackend`]: if the named backend does not exist.
    """
    refuse_adapters(model)
    refuse_quantization(quantization_config_of(model))
    state = find_state(model)
    if state is not None and _is_as_asked(state, model, backend, fused_lora):
        return model
    undo_patch(model)
    try:
        found = get_patch(model)
    except UnsupportedModel as refusal:
        apply_unknown(model, backend, refusal, fused_lora=fused_lora)
    else:
        apply_trusted(model, found, backend, fused_lora=fused_lora)
    state = find_state(model)
    assert state is not None
    state.adapter_kinds = adapter_kinds(model)
    return model


def _is_as_asked(state: PatchState, model: nn.Module, backend: str, fused_lora: bool) -> bool:
    """Whether nothing is left to do: adapters may have been added since."""
    known = {id(layer) for layer in state.adapted}
    new = fused_lora and any(id(layer) not in known for layer in adapted_layers(model))
    same = state.adapter_kinds == adapter_kinds(model)
    return state.backends.name == backend and state.fused_lora == fused_lora and same and not new


def unpatch(model: Model) -> Model:
    """Restore a patched model to what it was, bit for bit; returns the same model. Idempotent."""
    undo_patch(model)
    return model


@contextmanager
def patched(model: Model, *, backend: str = "auto", fused_lora: bool = True) -> Iterator[Model]:
    """[`patch`] for the length of a `with` block; a model that was patched before stays patched."""
    was_patched = find_state(model) is not None
    try:
        yield patch(model, backend=backend, fused_lora=fused_lora)
    finally:
        if not was_patched:
            unpatch(model)


def _how_it_runs(name: str, state: PatchState) -> str:
    """Whether mixers of this class run on their own kernels, which is found out for training and evaluation apart."""
    native = {is_training for (kind, is_training), offer in state.native.items() if kind.__name__ == name and offer}
    other = {is_training for (kind, is_training), offer in state.native.items() if kind.__name__ == name and not offer}
    if not native:
        return "document by document"
    if not other:
        return "on its own kernels"
    mode = "training" if True in native else "evaluation"
    return f"on its own kernels in {mode}, otherwise document by document"


def describe(model: nn.Module) -> str:
    """What was changed on a model, one line a fact: level, modules, attention arguments and backends."""
    state = find_state(model)
    if state is None:
        return "not patched"
    windows = Counter(f"window {window}" if window else "full" for window in state.windows)
    lines = [
        f"model type {model_type(model)} (patch from {state.patch.origin})",
        f"level: {state.patch.level}",
        "backbone: boundaries read once per call, no mask built",
        f"backend asked for: {state.backends.name}",
    ]
    if windows:
        modules = ", ".join(f"{n} x {window}" for window, n in windows.items())
        lines.insert(3, f"{len(state.attention)} attention modules: {modules}")
    by_document = Counter(type(module).__name__ for module in state.mixers.values())
    for name, n in by_document.items():
        how = _how_it_runs(name, state)
        lines.append(f"{n} x {name}: {how}")
    lines += [f"backend used: {name} for {request.describe()}" for request, name in state.backends.resolved.items()]
    lines += describe_lora(state.adapted, state.fused_lora)
    norms = sum(isinstance(vars(module).get("forward"), RMSNormOverride) for module, _, _ in state.edits)
    lines += [f"{norms} x RMSNorm: in pieces, in packed calls on a CPU"] if norms else []
    return "\n".join(lines)
