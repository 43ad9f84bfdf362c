"""The public functions `patch`, `unpatch`, `patched` and `describe`.

`patch` finds a patch, applies it and verifies it. A patch is trusted for the model code that it was measured with. For
other code, the model is checked first. So a change in transformers leads to an error, never to attention across
documents.
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

from .adapters import adapter_kinds, refuse_adapters, refuse_quantized
from .candidates import Candidate, does_not_fit, list_candidates
from .errors import ContaminationError, InvalidConfig, UnsupportedModel, first_line, is_out_of_memory
from .exactness import check, check_unpadding, proof_identity
from .kernels.lm_head.chunked import undo_head
from .kernels.lora import adapted_layers, describe_lora
from .patches.measured import results
from .patching.apply import (
    PatchOptions,
    PatchState,
    all_or_none,
    apply_patch,
    find_state,
    takes_padded_only,
    undo_patch,
)
from .patching.fused import describe_kernels
from .patching.inspect import inner_model, model_type, runnable
from .patching.named_models import NAME, runs_by_name
from .versions import tell_of_newer_versions

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
    """Make this model instance keep the documents of a packed row separate, on any device. Return the same model.

    Document boundaries are read from each call: from TRL's keys (`cu_seq_lens_q` and others) or from `position_ids`
    that restart. Calls without boundaries and `generate()` run the unpatched code. Padded batches do too, unless
    `unpad` is set. Works before or after PEFT wrapping, on quantized models, with activation checkpointing and under
    `torch.compile`. Idempotent.

    The model is checked first ([`check`]) if its architecture has no patch, if its code differs from the code that the
    patch was measured with, or if its adapter or quantization has not been measured.

    Args:
        model (`torch.nn.Module`):
            A transformers causal LM, bare or wrapped.
        backend (`str`, *optional*, defaults to `"auto"`):
            Attention backend: `"auto"` or one of `trl-packfa backends`.
        fused_lora (`bool`, *optional*, defaults to `True`):
            Compute LoRA layers together with their base layers in packed calls. The result is PEFT's within rounding.
            Layers that cannot be fused run PEFT's own forward; [`describe`] says why.
        fused_kernels (`bool`, *optional*, defaults to `True`):
            Compute RMSNorms, rotary embeddings and SwiGLU in fewer passes over memory in packed calls: on CUDA with
            liger-kernel if it is installed, on a CPU in chunks. `False` runs the model's own code; [`describe`] says
            what runs.
        unpad (`bool`, *optional*, defaults to `False`):
            Compute padded batches without their padding, whether it is on the left or on the right. The backbone
            computes one row of the real tokens. Callers see the shapes of the padded batch, with zeros at padding.
            Positions count from each row's first real token. Calls that get or ask for a cache run with padding.
            `patch` measures at once that outputs and gradients on this model are the same with and without padding.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            With `unpad`, compute the shared prefix of rows, and of documents in a packed row, only once, if it has 16
            tokens or more (the prompt of a preference pair, or of a group of completions; a system prompt). The other
            tokens of each row attend to the shared prefix and to their own row. The prefix gets the sum of all rows'
            gradients. `patch` measures at once that outputs and gradients are those of separate rows. Rows are
            computed separately if more than attention mixes tokens (recurrent state, documents run one by one), and
            while dropout or noise draws random numbers. [`describe`] and a warning say so.

    Raises:
        [`InvalidConfig`]: if `share_prefixes` comes without `unpad`.
        [`UnsupportedModel`]: if the architecture has no patch and no general patch is exact on it; if the adapter or
            the quantization cannot be packed; with `unpad`, if the backbone gets no attention mask.
        [`ContaminationError`]: if the architecture's code has changed and packing is not exact on it; if padded
            batches without padding, or rows with a shared prefix, are not exact.
        [`NoBackend`]: if the named backend does not exist.
    """
    if (inside := runnable(model)) is not model:
        patch(
            inside, backend=backend, fused_lora=fused_lora, fused_kernels=fused_kernels, unpad=unpad,
            share_prefixes=share_prefixes,
        )  # fmt: skip
        return model
    tell_of_newer_versions()
    options = PatchOptions(backend, fused_lora, fused_kernels, unpad, share_prefixes)
    # These checks come before any change, so that a refused model stays as it was.
    if share_prefixes and not unpad:
        raise InvalidConfig(
            "share_prefixes=True needs unpad=True: shared prefixes are found while padding is removed.",
            do="Pass unpad=True as well.",
        )
    refuse_adapters(model)
    refuse_quantized(model)
    kinds = adapter_kinds(model)
    state = find_state(model)
    if (
        state is not None
        and state.options == options
        and state.adapter_kinds == kinds
        and not _has_new_lora(state, model)
    ):
        return model
    with all_or_none([model]):
        # An older patch has other options or lacks a new adapter. It is undone completely, so that edits never add up.
        undo_patch(model)
        state = _apply_first_exact(model, options)
        state.adapter_kinds = kinds
        if unpad and state.unpadding_report is None:
            _require_unpadded(model, state)
    if state.unpadding is not None and state.unpadding.sharing is not None:
        state.unpadding.sharing.tell_of_refusal(model)
    return model


def _has_new_lora(state: PatchState, model: nn.Module) -> bool:
    """Tell whether LoRA layers were added after the patch. `add_adapter` replaces a linear layer under its name."""
    known = {id(layer) for layer in state.adapted}
    return state.options.fused_lora and any(id(layer) not in known for layer in adapted_layers(model))


def _apply_first_exact(model: nn.Module, options: PatchOptions) -> PatchState:
    """Patch a model with the first candidate that is trusted, or that the check finds exact on this model.

    Raises:
        [`PackingError`]: of the patch of its type.
        [`UnsupportedModel`]: if the type has no patch, with the result of each general level.
    """
    name = model_type(model)
    candidates, refusal = list_candidates(model, name, unpad=options.unpad)
    tried = []
    for candidate in candidates:
        try:
            state = _apply(model, name, candidate, options)
        except BaseException as error:  # unknown code may raise anything
            undo_patch(model)
            if candidate.is_final or not isinstance(error, Exception) or is_out_of_memory(error):
                raise  # the candidate is not at fault, so the next one is not tried
            tried.append(f"level {candidate.patch.level}: {first_line(error)}")
            if candidate.on_failure:
                logger.info(candidate.on_failure, error)
            continue
        if candidate.on_success:
            logger.warning(candidate.on_success)
        return state
    assert refusal is not None, "the patch of a known type is final"
    if results().get(name, {}).get("verdict") == "refused":  # measured before: no level is exact
        raise refusal
    if not tried:
        raise refusal
    raise UnsupportedModel(f"{refusal}\nTried on this model:", why=tried)


def _apply(model: nn.Module, name: str, candidate: Candidate, options: PatchOptions) -> PatchState:
    """Apply a candidate, and check the model if it has not been measured.

    Raises:
        [`ContaminationError`]: if the check finds packing not exact.
        [`UnsupportedModel`]: if the patch does not fit the model's code.
    """
    try:
        state = apply_patch(model, candidate.patch, options)
    except (UnsupportedModel, AttributeError) as error:
        if candidate.may_not_fit:
            raise does_not_fit(name, error) from error
        raise
    if candidate.unmeasured:
        if candidate.is_final:
            # It is a warning, because Python shows no lower level by default, and users should know why patching takes
            # long.
            logger.warning(
                "trl-packfa: %s has not been measured under packing: checking this model first.", candidate.unmeasured
            )
        _require_exact(model, state)
    return state


def _require_exact(model: nn.Module, state: PatchState) -> None:
    _require_weights(model)
    if state.unpadding is not None:
        _require_unpadded(model, state)
        if takes_padded_only(model, state.patch):  # the check of packed rows compares logits of an LM head
            return
    report, refusal = None, ""
    try:
        report = check(model)
    except Exception as error:  # the code of a model with images may need more than a text, and raise anything
        if not state.takes_images or is_out_of_memory(error):
            raise
        refusal = first_line(error)
    if state.takes_images and (report is None or not report.is_exact):
        # Padded batches are what such a model is patched for, and they are exact.
        state.packed_refusal = refusal or str(report)
        logger.info("trl-packfa: packed rows of text are not exact: %s", state.packed_refusal)
        return
    assert report is not None
    report.require_exact()
    logger.warning("trl-packfa: %s in %.1f s", report, report.seconds)
    state.report = replace(report, identity=proof_identity(model))


def _require_unpadded(model: nn.Module, state: PatchState) -> None:
    """Require that padded batches give the same results with and without padding. Keep the report for [`describe`]."""
    _require_weights(model)
    report = check_unpadding(model)
    report.require_exact()
    state.unpadding_report = report
    assert state.unpadding is not None
    state.unpadding.takes_left = report.takes_left
    if report.pads_seen:
        logger.warning("trl-packfa: %s: %s", type(inner_model(model)).__name__, report)


def _require_weights(model: nn.Module) -> None:
    if any(parameter.device == torch.device("meta") for parameter in model.parameters()):
        raise ContaminationError(
            f"{type(model).__name__} cannot be checked: its weights are on the meta device.",
            do="Load its weights before you patch it.",
        )


def unpatch(model: Model) -> Model:
    """Restore a patched model bit for bit and return the same model. Idempotent.

    A model from a [`PackedSFTTrainer`] keeps the changes that TRL made to it.
    """
    undo_patch(model)
    # A `PackedSFTTrainer` replaces the LM head before it patches the model, so the patch is undone first.
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
    """Apply [`patch`] for a `with` block. A model that was patched before stays patched."""
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
    """Describe how mixers of this class run: on their own kernels or document by document.

    Training and evaluation are decided separately.
    """
    native = {is_training for (kind, is_training), offer in state.native.items() if kind.__name__ == name and offer}
    other = {is_training for (kind, is_training), offer in state.native.items() if kind.__name__ == name and not offer}
    if not native:
        return "document by document"
    if not other:
        return "on its own kernels"
    mode = "training" if True in native else "evaluation"
    return f"on its own kernels in {mode}, otherwise document by document"


def _describe_sharing(state: PatchState) -> list[str]:
    """Describe in one line whether rows share their prefixes. Return no line if `share_prefixes` is off."""
    sharing = None if state.unpadding is None else state.unpadding.sharing
    if sharing is None:
        return []
    if sharing.refusal:
        return [f"shared prefixes: not used, rows are computed separately: {sharing.refusal}"]
    return [f"shared prefixes: computed once, {state.unpadding_report.sharing}"]


def describe(model: nn.Module) -> str:
    """Describe the patch of a model, one fact per line: level, modules, attention arguments and backends."""
    state = find_state(model)
    if state is None:
        return f"runs by name, attn_implementation='{NAME}'" if runs_by_name(model) else "not patched"
    windows = Counter(f"window {window}" if window else "full" for window in state.windows)
    lines = [
        f"model type {model_type(model)} (patch from {state.patch.origin})",
        f"level: {state.patch.level}",
        "backbone: document boundaries are read once per call, no attention mask is built",
        f"backend asked for: {state.options.backend}",
    ]
    if state.unpadding is not None:
        lines.append(f"padded batches: computed without padding, {state.unpadding_report}")
        lines += _describe_sharing(state)
    if windows:
        modules = ", ".join(f"{n} x {window}" for window, n in windows.items())
        lines.insert(3, f"{len(state.attention)} attention modules: {modules}")
    by_document = Counter(type(module).__name__ for module in state.mixers.values())
    for name, n in by_document.items():
        how = _how_it_runs(name, state)
        lines.append(f"{n} x {name}: {how}")
    lines += [f"backend used: {name} for {request.describe()}" for request, name in state.backends.resolved.items()]
    lines += describe_lora(state.adapted, state.options.fused_lora)
    return "\n".join([*lines, *describe_kernels(state)])
