"""The patches to try on a model: list them, apply them in turn, and verify the result.

A patch is trusted for the model code that it was measured with. For other code, the model is checked first. So a
change in transformers leads to an error, never to attention across documents.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .checking import check, check_identity, check_unpadding
from .config.options import PatchOptions
from .errors import TRAIN_PADDED, ContaminationError, PackingError, UnsupportedModel, first_line, is_out_of_memory
from .patches.base import DocumentPatch, GroupsPatch, InterfacePatch, Patch, StackPatch
from .patches.measured import fingerprint, known_sources, measured_transformers, results
from .patches.registry import get_patch
from .patching.apply import apply_patch
from .patching.inspect import Target
from .patching.state import PatchState
from .versions import installed_version, newer_than_tested

logger = logging.getLogger(__name__)

# How the levels run that are slower than attention through transformers' interface.
_SLOWER = {
    "document": "the backbone document by document",
    "stack": "padded batches without their pads, packed rows not at all",
    "groups": "padded batches in groups of rows, packed rows not at all",
}


class _Candidate(NamedTuple):
    """A patch to try on a model."""

    patch: Patch
    unmeasured: str  # what of this model nobody has measured under packing; if any, the model is checked
    is_final: bool = False  # whether an error is the user's to see; if not, the next candidate is tried
    may_not_fit: bool = False  # whether the installed code differs from the code that the patch was written for
    on_success: str = ""  # what the log then says
    on_failure: str = ""


def _get_decoder_patch(decoder: PreTrainedModel) -> Patch:
    """Return the patch for the text decoder of a model with images or sounds."""
    try:
        found = get_patch(decoder.config)
    except UnsupportedModel:
        found = InterfacePatch(model_types=(decoder.config.model_type,))
    return replace(found, backbone=type(decoder).__name__)


def _list_candidates(
    target: Target, added: Sequence[str], *, unpad: bool
) -> tuple[list[_Candidate], UnsupportedModel | None]:
    """List the patches to try on a model, and the error that says why its type has none."""
    name, config, code = target.type, target.inner.config, f"{type(target.model).__name__}'s code"
    found: list[_Candidate] = []
    if unpad and target.decoder is not None:
        # The decoder gets the merged embeddings of images and text. So a padded batch with images can run without its
        # pads if the decoder alone is patched.
        failed = f"trl-packfa: only text runs without its pads in {name}: %s"
        found.append(_Candidate(_get_decoder_patch(target.decoder), code, on_failure=failed))
    # Padded batches of an encoder run without pads in its stack of layers, or with few pads in groups of rows.
    stack, groups = StackPatch(model_types=(name,)), GroupsPatch(model_types=(name,))
    if config.is_encoder_decoder:
        # A patch of its type is for its decoder as a causal model. Whole rows in groups see the model's own masks.
        refusal = UnsupportedModel(
            f"{target.class_name} has an encoder and a decoder.",
            do="Train an encoder-decoder model padded.",
        )
        return [_Candidate(groups, code)] if unpad else [], refusal
    if unpad and target.decoder is None and target.attends_both_ways:  # a patch of its type is for its causal models
        refusal = UnsupportedModel(
            f"{type(target.model).__name__} attends in both directions.",
            do=f"{TRAIN_PADDED[0].upper()}{TRAIN_PADDED[1:]}.",
        )
        return [_Candidate(patch, code) for patch in (stack, groups)], refusal
    try:
        patch = get_patch(config)
    except UnsupportedModel as refusal:
        if results().get(name, {}).get("verdict") != "refused":
            # The fast level comes first. Level `document` runs the whole backbone document by document, which is exact
            # for every causal model.
            interface, by_document = InterfacePatch(model_types=(name,)), DocumentPatch(model_types=(name,))
            for patch in (interface, stack, by_document, groups) if unpad else (interface, by_document):
                slow = "" if patch is interface else f" It runs {_SLOWER[patch.level]}; see 'Writing a patch'."
                said = f"trl-packfa: model type '{name}' has no patch. The check found level {patch.level} exact."
                found.append(_Candidate(patch, code, on_success=said + slow))
        return found, refusal
    # Our tables hold no measurement of a third party's patch.
    is_known = patch.origin == "trl_packfa" and fingerprint(target.model) in known_sources().get(name, ())
    # Masks and the attention interface are not part of a model's code: a newer release may have changed only those.
    unmeasured = [*([] if is_known else [code]), *added, *newer_than_tested()]
    may_not_fit = not is_known and patch.origin == "trl_packfa"
    found.append(_Candidate(patch, ", ".join(unmeasured), is_final=True, may_not_fit=may_not_fit))
    return found, None


def apply_first_exact(target: Target, options: PatchOptions, added: Sequence[str]) -> PatchState:
    """Patch a model with the first candidate that is trusted, or that the check finds exact on it.

    `added` are the model's adapters and quantizers that nobody has measured: with one, no patch is trusted. The
    errors are those of [`trl_packfa.patch`].
    """
    candidates, refusal = _list_candidates(target, added, unpad=options.unpad)
    tried = []
    for candidate in candidates:
        try:
            state = _apply(target, candidate, options)
        except Exception as error:  # unknown code may raise anything
            if candidate.is_final or is_out_of_memory(error):
                raise  # the candidate is not at fault, so the next one is not tried
            tried.append(f"level {candidate.patch.level}: {first_line(error)}")
            if candidate.on_failure:
                logger.info(candidate.on_failure, error)
            continue
        if candidate.on_success:
            logger.warning(candidate.on_success)
        if options.unpad and state.unpadding_report is None:
            _require_unpadded(target.model, state)
        return state
    assert refusal is not None, "the patch of a known type is final"
    if not tried or results().get(target.type, {}).get("verdict") == "refused":  # measured before: no level is exact
        raise refusal
    raise UnsupportedModel(
        f"no patch is exact on this {target.class_name} (model type '{target.type}').",
        why=[refusal.what.removesuffix("."), *refusal.why, *tried],
        do=refusal.do,
    )


def _apply(target: Target, candidate: _Candidate, options: PatchOptions) -> PatchState:
    """Apply a candidate, and check the model if it has not been measured."""
    is_users = candidate.is_final and (candidate.patch.origin != "trl_packfa" or target.type not in results())
    try:
        state = apply_patch(target, candidate.patch, options)
    except (UnsupportedModel, AttributeError) as error:
        if is_users:
            raise _misfit(target, error) from error
        if not candidate.may_not_fit:
            raise
        tested, installed = measured_transformers(), installed_version("transformers")
        raise UnsupportedModel(
            f"the patch for '{target.type}' does not fit its code in transformers {installed}.",
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
        try:
            _require_exact(target.model, state)
        except Exception as error:  # the functions of a user's patch may raise anything
            if not is_users or isinstance(error, PackingError) or is_out_of_memory(error):
                raise
            raise _misfit(target, error) from error
    return state


def _misfit(target: Target, error: Exception) -> UnsupportedModel:
    """Return the error of a user's patch that does not fit the model's code."""
    return UnsupportedModel(
        f"the patch that was registered for '{target.type}' does not fit {target.class_name}.",
        why=[first_line(error)],
        do="Correct its fields. Where an AttentionPatch names no `arguments`, a module's `scaling` is read; where it "
        "names no `output` and `finish`, its `o_proj` is called, and the result is `(output, None)`.",
    )


def _require_exact(model: nn.Module, state: PatchState) -> None:
    if state.unpadding is None:
        _require_weights(model)
    else:
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
