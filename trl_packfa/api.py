"""The public verbs: `patch` finds a patch, applies it and verifies it; `unpatch`, `patched`, `describe`.

A patch is trusted for code that it was measured with; anything else is measured before it is trusted. When
transformers moves, the failure is a refusal, never a leak.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from .adapters import (
    adapter_kinds,
    refuse_adapters,
    refuse_quantized,
    unmeasured_adapters,
    unread_quantizers,
)
from .errors import ContaminationError, InvalidConfig, UnsupportedModel, is_out_of_memory
from .exactness import check, check_unpadding, proof_identity
from .kernels.lm_head.chunked import undo_head
from .kernels.lora import adapted_layers, describe_lora
from .patches.base import Patch
from .patches.measured import fingerprint, known_sources, measured_transformers, results
from .patching.apply import PatchState, all_or_none, apply_patch, find_state, undo_patch
from .patching.fused import describe_kernels
from .patching.inspect import get_patch, inner_model, model_type
from .patching.named_models import NAME, runs_by_name
from .versions import installed_version, newer_than_tested, tell_of_newer_versions

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    backend: str = "auto",
    fused_lora: bool = True,
    fused_kernels: bool = True,
    unpad: bool = False,
    share_prefixes: bool = False,
) -> Model:
    """Make this model instance honour document boundaries, on any device; returns the same model.

    Boundaries are read from each call: TRL's `cu_seq_lens_q` and friends, or `position_ids` that restart. Calls
    without boundaries and `generate()` run the unpatched code, and so do padded batches without `unpad`. Works before
    or after PEFT wrapping, on quantized models, with gradient checkpointing and under `torch.compile`. Idempotent.

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
        fused_kernels (`bool`, *optional*, defaults to `True`):
            Compute RMSNorms, rotations and SwiGLU in fewer passes over memory in packed calls: on CUDA by liger-kernel
            where it is installed, on a CPU in pieces. `False` runs the model's own code; [`describe`] says what runs.
        unpad (`bool`, *optional*, defaults to `False`):
            Run padded batches, whichever side their pads are on, without their pads: inside the backbone as one row of
            the true tokens, while callers see the shapes of the padded batch, with zeros at pads. Positions count from
            each row's first token. Calls that are handed a cache, or ask for one, run with their pads. It is measured
            at once that padded batches, with their pads and without, have the same outputs and gradients on this
            model.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            With `unpad`, compute once what rows of a batch begin with (the prompt of a preference pair, or of a group
            of completions), 16 tokens or more: the rows' own tokens attend to it and to themselves, and its gradients
            are added. It is measured at once that outputs and gradients are those of the rows by themselves. Where
            more than attention mixes tokens (recurrent state, documents run one by one), and while dropout or noise
            draws random numbers, each row runs by itself; [`describe`] and a warning say so.

    Raises:
        [`InvalidConfig`]: if `share_prefixes` comes without `unpad`.
        [`UnsupportedModel`]: if there is no patch for the architecture, and no general one is exact on it; if
            the adapter or the quantization cannot be packed; with `unpad`, if the backbone is handed no mask.
        [`ContaminationError`]: if the architecture's code has changed and packing is not exact on it, or if padded
            batches without their pads, or rows that share what they begin with, are not.
        [`NoBackend`]: if the named backend does not exist.
    """
    tell_of_newer_versions()
    # Before anything is undone or set: a model that is refused stays as it was.
    if share_prefixes and not unpad:
        raise InvalidConfig(
            "share_prefixes=True without unpad=True: rows are compared where their pads are dropped.",
            do="Pass unpad=True, too.",
        )
    refuse_adapters(model)
    refuse_quantized(model)
    state = find_state(model)
    options = {
        "fused_lora": fused_lora,
        "fused_kernels": fused_kernels,
        "unpad": unpad,
        "share_prefixes": share_prefixes,
    }
    if state is not None and _is_as_asked(state, model, backend, options):
        return model
    with all_or_none([model]):
        # Patched otherwise than asked now, or before an adapter came: taken back whole, so that edits never pile up.
        undo_patch(model)
        try:
            found = get_patch(model)
        except UnsupportedModel as refusal:
            _apply_unknown(model, backend, refusal, options)
        else:
            _apply_trusted(model, found, backend, **options)
        state = find_state(model)
        assert state is not None
        state.adapter_kinds = adapter_kinds(model)
        if unpad and state.unpadding_report is None:
            _require_unpadded(model)
    if state.unpadding is not None and state.unpadding.sharing is not None:
        state.unpadding.sharing.tell_of_refusal(model)
    return model


def _is_as_asked(state: PatchState, model: nn.Module, backend: str, options: dict[str, bool]) -> bool:
    """Whether nothing is left to do: adapters may have been added since."""
    is_now = {
        "fused_lora": state.fused_lora,
        "fused_kernels": state.fused_kernels,
        "unpad": state.unpadding is not None,
        "share_prefixes": state.unpadding is not None and state.unpadding.sharing is not None,
    }
    # By identity: `add_adapter` puts another layer in the place of a linear one, under the same name.
    known = {id(layer) for layer in state.adapted}
    new = options["fused_lora"] and any(id(layer) not in known for layer in adapted_layers(model))
    same = state.adapter_kinds == adapter_kinds(model)
    return state.backends.name == backend and is_now == options and same and not new


def _apply_trusted(model: nn.Module, patch: Patch, backend: str, **options: bool) -> None:
    """Patch a model; if its code is not the code that the patch was measured with, or its adapter or
    quantization is of a kind that was never measured, only if the check finds it exact.

    Raises:
        [`ContaminationError`]: if it does not; the model is unpatched again.
        [`UnsupportedModel`]: if the patch does not fit the model's code.
    """
    # A third party's patch is in no table of ours, whatever code its model runs.
    known = patch.origin == "trl_packfa" and fingerprint(model) in known_sources().get(model_type(model), ())
    try:
        apply_patch(model, patch, backend, **options)
    except (UnsupportedModel, AttributeError) as error:
        if known or patch.origin != "trl_packfa":
            raise
        raise _does_not_fit(model, error) from error
    unmeasured = [f"PEFT's {kind}" for kind in unmeasured_adapters(model)] + unread_quantizers(model)
    # Masks and the attention interface lie outside of a model's code: a newer release may have changed those alone.
    unmeasured += newer_than_tested()
    if known and not unmeasured:
        return
    what = ", ".join(unmeasured) if known else f"{type(model).__name__}'s code"
    # A warning, as Python shows no less by itself, and nothing else tells why this takes its time.
    logger.warning("trl-packfa: %s was never measured under packing: checking this model first.", what)
    _require_exact(model)


def _does_not_fit(model: nn.Module, error: Exception) -> UnsupportedModel:
    """Return the refusal of a type that is supported, but whose installed code its patch does not fit."""
    name = model_type(model)
    if name not in results():  # registered by the user
        return UnsupportedModel(str(error))
    return UnsupportedModel(
        f"the patch for '{name}' does not fit its code in transformers {installed_version('transformers')}.",
        why=[str(error).splitlines()[0], f"it was tested with transformers {', '.join(measured_transformers())}"],
        do=f"Install transformers {measured_transformers()[-1]}, or report it.",
    )


def _apply_unknown(model: nn.Module, backend: str, refusal: UnsupportedModel, options: dict[str, bool]) -> None:
    """Patch a model of a type without a patch by the first general level that the check finds exact on it.

    Raises:
        [`UnsupportedModel`]: `refusal`, with what each level came to.
    """
    name = model_type(model)
    if results().get(name, {}).get("verdict") == "refused":  # measured before: no level serves it
        raise refusal
    tried = []
    # The fast level first. Level `rebatch` runs the whole backbone document by document, which is exact for whatever
    # is causal.
    for patch in (Patch(model_types=(name,)), Patch(model_types=(name,), rebatch=True)):
        try:
            apply_patch(model, patch, backend, **options)
            _require_exact(model)
        except BaseException as error:  # whatever unknown code raises, it is no level for it
            undo_patch(model)
            if not isinstance(error, Exception) or is_out_of_memory(error):
                raise  # says nothing about the level: the next one would be the slower one for no reason
            tried.append(f"level {patch.level}: {str(error).splitlines()[0]}")
            continue
        logger.warning("trl-packfa: no patch for model type '%s'; level %s checked and used.", name, patch.level)
        return
    raise UnsupportedModel(f"{refusal}\nTried on this model:", why=tried)


def _require_exact(model: nn.Module) -> None:
    _require_weights(model)
    state = find_state(model)
    if state is not None and state.unpadding is not None:
        _require_unpadded(model)
        # The packed check compares logits of an LM head.
        if inner_model(model).get_output_embeddings() is None:
            return  # a classifier: padded batches are all that it is called with
    report = check(model)
    report.require_exact()
    logger.warning("trl-packfa: %s in %.1f s", report, report.seconds)
    if state is not None:
        state.report = replace(report, identity=proof_identity(model))


def _require_unpadded(model: nn.Module) -> None:
    """Require that padded batches are the same with and without their pads, and keep the report for [`describe`]."""
    _require_weights(model)
    state = find_state(model)
    assert state is not None
    report = check_unpadding(model)
    report.require_exact()
    state.unpadding_report = report
    if report.pads_seen:
        logger.warning("trl-packfa: %s: %s", type(inner_model(model)).__name__, report)


def _require_weights(model: nn.Module) -> None:
    if any(parameter.device == torch.device("meta") for parameter in model.parameters()):
        raise ContaminationError(
            f"{type(model).__name__} cannot be checked: its weights are on the meta device.",
            do="Load its weights before patching it.",
        )


def unpatch(model: Model) -> Model:
    """Restore a patched model to what it was, bit for bit, and one that a [`PackedSFTTrainer`] has trained to what TRL
    made of it; returns the same model. Idempotent."""
    undo_patch(model)
    # A `PackedSFTTrainer` gives the model this head before it patches it: the patch, which lies on top, goes first.
    undo_head(inner_model(model))
    return model


@contextmanager
def patched(
    model: Model,
    *,
    backend: str = "auto",
    fused_lora: bool = True,
    fused_kernels: bool = True,
    unpad: bool = False,
    share_prefixes: bool = False,
) -> Iterator[Model]:
    """[`patch`] for the length of a `with` block; a model that was patched before stays patched."""
    was_patched = find_state(model) is not None
    try:
        yield patch(
            model,
            backend=backend,
            fused_lora=fused_lora,
            fused_kernels=fused_kernels,
            unpad=unpad,
            share_prefixes=share_prefixes,
        )
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


def _describe_sharing(state: PatchState) -> list[str]:
    """Whether rows share what they begin with, where that was asked for."""
    sharing = None if state.unpadding is None else state.unpadding.sharing
    if sharing is None:
        return []
    if sharing.refusal:
        return [f"rows that begin alike: each by itself, {sharing.refusal}"]
    return [f"rows that begin alike: their prefix once, {state.unpadding_report.sharing}"]


def describe(model: nn.Module) -> str:
    """What was changed on a model, one line a fact: level, modules, attention arguments and backends."""
    state = find_state(model)
    if state is None:
        return f"runs by name, attn_implementation='{NAME}'" if runs_by_name(model) else "not patched"
    windows = Counter(f"window {window}" if window else "full" for window in state.windows)
    lines = [
        f"model type {model_type(model)} (patch from {state.patch.origin})",
        f"level: {state.patch.level}",
        "backbone: boundaries read once per call, no mask built",
        f"backend asked for: {state.backends.name}",
    ]
    if state.unpadding is not None:
        lines.append(f"padded batches: without their pads, {state.unpadding_report}")
        lines += _describe_sharing(state)
    if windows:
        modules = ", ".join(f"{n} x {window}" for window, n in windows.items())
        lines.insert(3, f"{len(state.attention)} attention modules: {modules}")
    by_document = Counter(type(module).__name__ for module in state.mixers.values())
    for name, n in by_document.items():
        how = _how_it_runs(name, state)
        lines.append(f"{n} x {name}: {how}")
    lines += [f"backend used: {name} for {request.describe()}" for request, name in state.backends.resolved.items()]
    lines += describe_lora(state.adapted, state.fused_lora)
    return "\n".join([*lines, *describe_kernels(state)])
