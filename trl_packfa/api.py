"""The public functions `patch`, `unpatch` and `patched`.

`patch` lists the patches to try on a model, applies them in turn and verifies the result. A patch is trusted for the
model code that it was measured with. For other code, the model is checked first. So a change in transformers leads to
an error, never to attention across documents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .adapters import adapter_kinds, refuse_adapters, refuse_quantized, unmeasured_adapters, unread_quantizers
from .config.options import PatchOptions
from .errors import TRAIN_PADDED, ContaminationError, UnsupportedModel, first_line, is_out_of_memory
from .exactness import check, check_identity, check_unpadding
from .kernels.lm_head.chunked import undo_head
from .patches.base import DocumentPatch, GroupsPatch, InterfacePatch, Patch, StackPatch
from .patches.measured import fingerprint, known_sources, measured_transformers, results
from .patching import inspect
from .patching.apply import (
    PatchState,
    all_or_none,
    apply_patch,
    find_state,
    is_patched_with,
    restore_patch,
    undo_patch,
)
from .versions import installed_version, newer_than_tested, tell_of_newer_versions

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    backend: str = PatchOptions.backend,
    fused_kernels: bool = PatchOptions.fused_kernels,
    unpad: bool = PatchOptions.unpad,
    share_prefixes: bool = PatchOptions.share_prefixes,
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
            Attention backend: `"auto"`, or a name that `trl-packfa env` lists.
        fused_kernels (`bool`, *optional*, defaults to `True`):
            In packed calls, compute RMSNorms, rotary embeddings and SwiGLU in fewer passes over memory: on CUDA with
            liger-kernel if it is installed, on a CPU in chunks. Compute LoRA layers together with their base layers;
            the result is PEFT's within rounding. `False` runs the model's and PEFT's own code; [`describe`] says what
            runs, and which LoRA layers cannot be fused.
        unpad (`bool`, *optional*, defaults to `False`):
            Compute padded batches, padded on the left or on the right, as one row of their real tokens. Callers see
            the shapes of the padded batch, with zeros at padding. Positions count from each row's first real token.
            Calls that get or ask for a cache run with padding. `patch` measures at once that outputs and gradients on
            this model are the same with and without padding.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            With `unpad`, compute the shared prefix of rows, and of documents in a packed row, only once, if it has 16
            tokens or more (the prompt of a preference pair, or of a group of completions; a system prompt). `patch`
            measures at once that outputs and gradients are those of separate rows. Rows are computed separately if
            more than attention mixes tokens (recurrent state, documents run one by one), and while dropout or noise
            draws random numbers. [`describe`] and a warning say so.

    Raises:
        [`InvalidConfig`]: if `share_prefixes` comes without `unpad`.
        [`UnsupportedModel`]: if the architecture has no patch and no general patch is exact on it; if the adapter or
            the quantization cannot be packed; with `unpad`, if the backbone gets no attention mask.
        [`ContaminationError`]: if the architecture's code has changed and packing is not exact on it; if padded
            batches without padding, or rows with a shared prefix, are not exact.
        [`NoBackend`]: if the named backend does not exist.
    """
    tell_of_newer_versions()
    # These checks come before any change, so that a refused model stays as it was.
    options = PatchOptions(backend, fused_kernels, unpad, share_prefixes)
    target = inspect.runnable(model)
    name = inspect.model_type(target)
    refuse_adapters(target)
    refuse_quantized(target)
    kinds = adapter_kinds(target)
    if is_patched_with(target, options, kinds):
        return model
    with all_or_none([target]):
        # An older patch has other options or lacks a new adapter. It is undone completely, so that edits never add up.
        undo_patch(target)
        state = _apply_first_exact(target, name, options)
        state.adapter_kinds = kinds
        if unpad and state.unpadding_report is None:
            _require_unpadded(target, state)
    if state.unpadding is not None and state.unpadding.sharing is not None:
        state.unpadding.sharing.tell_of_refusal(target)
    return model


class _Candidate(NamedTuple):
    """A patch to try on a model."""

    patch: Patch
    unmeasured: str  # what of this model nobody has measured under packing; if any, the model is checked
    is_final: bool = False  # whether an error is the user's to see; if not, the next candidate is tried
    may_not_fit: bool = False  # whether the installed code differs from the code that the patch was written for
    on_success: str = ""  # what the log then says
    on_failure: str = ""


def _list_candidates(model: nn.Module, name: str, *, unpad: bool) -> tuple[list[_Candidate], UnsupportedModel | None]:
    """List the patches to try on a model of this type, and the error that says why its type has none."""
    code = f"{type(model).__name__}'s code"
    found: list[_Candidate] = []
    decoder = inspect.text_decoder(model) if unpad else None
    if decoder is not None:
        # The decoder gets the merged embeddings of images and text. So a padded batch with images can run without its
        # pads if the decoder alone is patched.
        failed = f"trl-packfa: only text runs without its pads in {name}: %s"
        found.append(_Candidate(inspect.get_decoder_patch(decoder), code, on_failure=failed))
    # Padded batches of an encoder run without pads in its stack of layers, or with few pads in groups of rows.
    stack, groups = StackPatch(model_types=(name,)), GroupsPatch(model_types=(name,))
    if inspect.inner_model(model).config.is_encoder_decoder:
        # A patch of its type is for its decoder as a causal model. Whole rows in groups see the model's own masks.
        refusal = UnsupportedModel(
            f"{type(inspect.inner_model(model)).__name__} has an encoder and a decoder.",
            do="Train an encoder-decoder model padded.",
        )
        return [_Candidate(groups, code)] if unpad else [], refusal
    if unpad and decoder is None and inspect.attends_both_ways(model):  # a patch of its type is for its causal models
        refusal = UnsupportedModel(
            f"{type(model).__name__} attends in both directions.", do=f"{TRAIN_PADDED[0].upper()}{TRAIN_PADDED[1:]}."
        )
        return [_Candidate(patch, code) for patch in (stack, groups)], refusal
    try:
        patch = inspect.get_patch(model)
    except UnsupportedModel as refusal:
        if results().get(name, {}).get("verdict") != "refused":
            # The fast level comes first. Level `document` runs the whole backbone document by document, which is exact
            # for every causal model.
            interface, by_document = InterfacePatch(model_types=(name,)), DocumentPatch(model_types=(name,))
            for patch in (interface, stack, by_document, groups) if unpad else (interface, by_document):
                said = f"trl-packfa: no patch for model type '{name}'; level {patch.level} checked and used."
                found.append(_Candidate(patch, code, on_success=said))
        return found, refusal
    # Our tables hold no measurement of a third party's patch.
    is_known = patch.origin == "trl_packfa" and fingerprint(model) in known_sources().get(name, ())
    unmeasured = [] if is_known else [code]
    unmeasured += [f"PEFT's {kind}" for kind in unmeasured_adapters(model)] + unread_quantizers(model)
    # Masks and the attention interface are not part of a model's code: a newer release may have changed only those.
    unmeasured += newer_than_tested()
    may_not_fit = not is_known and patch.origin == "trl_packfa"
    found.append(_Candidate(patch, ", ".join(unmeasured), is_final=True, may_not_fit=may_not_fit))
    return found, None


def _apply_first_exact(model: nn.Module, name: str, options: PatchOptions) -> PatchState:
    """Patch a model of this type with the first candidate that is trusted, or that the check finds exact on it."""
    candidates, refusal = _list_candidates(model, name, unpad=options.unpad)
    tried = []
    for candidate in candidates:
        try:
            state = _apply(model, name, candidate, options)
        except Exception as error:  # unknown code may raise anything
            if candidate.is_final or is_out_of_memory(error):
                raise  # the candidate is not at fault, so the next one is not tried
            undo_patch(model)
            tried.append(f"level {candidate.patch.level}: {first_line(error)}")
            if candidate.on_failure:
                logger.info(candidate.on_failure, error)
            continue
        if candidate.on_success:
            logger.warning(candidate.on_success)
        return state
    assert refusal is not None, "the patch of a known type is final"
    if not tried or results().get(name, {}).get("verdict") == "refused":  # measured before: no level is exact
        raise refusal
    raise UnsupportedModel(f"{refusal}\nTried on this model:", why=tried)


def _apply(model: nn.Module, name: str, candidate: _Candidate, options: PatchOptions) -> PatchState:
    """Apply a candidate, and check the model if it has not been measured."""
    try:
        state = apply_patch(model, candidate.patch, options)
    except (UnsupportedModel, AttributeError) as error:
        if not candidate.may_not_fit:
            raise
        if name not in results():  # registered by the user
            raise UnsupportedModel(str(error)) from error
        tested = measured_transformers()
        raise UnsupportedModel(
            f"the patch for '{name}' does not fit its code in transformers {installed_version('transformers')}.",
            why=[first_line(error), f"it was tested with transformers {', '.join(tested)}"],
            do=f"Install transformers {tested[-1]}, or report it.",
        ) from error
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
        if state.parts.padded_only:  # the check of packed rows compares logits of an LM head
            return
    report, refusal = None, ""
    try:
        report = check(model)
    except Exception as error:  # the code of a model with images may need more than a text, and raise anything
        if not state.parts.takes_images or is_out_of_memory(error):
            raise
        refusal = first_line(error)
    if state.parts.takes_images and (report is None or not report.is_exact):
        # Padded batches are what such a model is patched for, and they are exact.
        state.packed_refusal = refusal or str(report)
        logger.info("trl-packfa: packed rows of text are not exact: %s", state.packed_refusal)
        return
    assert report is not None
    report.require_exact()
    logger.warning("trl-packfa: %s in %.1f s", report, report.seconds)
    state.report = replace(report, identity=check_identity(model))


def _require_unpadded(model: nn.Module, state: PatchState) -> None:
    """Require that padded batches give the same results with and without padding. Keep the report for [`describe`]."""
    _require_weights(model)
    report = check_unpadding(model)
    report.require_exact()
    state.unpadding_report = report
    assert state.unpadding is not None
    state.unpadding.takes_left = report.takes_left
    if "pads seen" in report:
        logger.warning("trl-packfa: %s: %s", type(model).__name__, report)


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
    undo_head(inspect.inner_model(model))
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """Apply [`patch`] with these options for a `with` block. Afterwards the model is patched as it was before."""
    before = find_state(model)
    try:
        yield patch(model, **options)
    finally:
        if before is None:
            unpatch(model)
        else:
            restore_patch(model, before)
