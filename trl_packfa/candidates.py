"""The patches to try on a model: that of its type, or the general levels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from .adapters import unmeasured_adapters, unread_quantizers
from .errors import TRAIN_PADDED, UnsupportedModel, first_line
from .patches.base import Patch
from .patches.measured import fingerprint, known_sources, measured_transformers, results
from .patching.inspect import attends_both_ways, get_patch, inner_model, model_type, text_decoder
from .versions import installed_version, newer_than_tested


class Candidate(NamedTuple):
    """A patch to try on a model.

    Attributes:
        patch ([`Patch`]): the patch.
        unmeasured (`str`): what of this model nobody has measured under packing; if any, the model is checked.
        is_final (`bool`): whether an error is the user's to see. If not, the next candidate is tried.
        may_not_fit (`bool`): whether the installed code differs from the code that the patch was written for.
        on_success (`str`), on_failure (`str`): what the log then says.
    """

    patch: Patch
    unmeasured: str
    is_final: bool = False
    may_not_fit: bool = False
    on_success: str = ""
    on_failure: str = ""


def list_candidates(model: nn.Module, name: str, *, unpad: bool) -> tuple[list[Candidate], UnsupportedModel | None]:
    """List the patches to try on a model of this type, and the error that says why its type has none."""
    code = f"{type(model).__name__}'s code"
    found: list[Candidate] = []
    decoder = text_decoder(model) if unpad else None
    if decoder is not None:
        # The decoder gets the merged embeddings of images and text. So a padded batch with images can run without its
        # pads if the decoder alone is patched.
        failed = f"trl-packfa: only text runs without its pads in {name}: %s"
        found.append(Candidate(_patch_of_decoder(decoder), code, on_failure=failed))
    # Padded batches of an encoder run without pads in its stack of layers, or with few pads in groups of rows.
    stack, groups = Patch(model_types=(name,), encoder=True), Patch(model_types=(name,), by_length=True)
    if inner_model(model).config.is_encoder_decoder:
        # A patch of its type is for its decoder as a causal model. Whole rows in groups see the model's own masks.
        refusal = UnsupportedModel(
            f"{type(inner_model(model)).__name__} has an encoder and a decoder.",
            do="Train an encoder-decoder model padded.",
        )
        return [Candidate(groups, code)] if unpad else [], refusal
    if unpad and decoder is None and attends_both_ways(model):  # a patch of its type is for its causal models
        refusal = UnsupportedModel(
            f"{type(model).__name__} attends in both directions.", do=f"{TRAIN_PADDED[0].upper()}{TRAIN_PADDED[1:]}."
        )
        return [Candidate(patch, code) for patch in (stack, groups)], refusal
    try:
        patch = get_patch(model)
    except UnsupportedModel as refusal:
        if results().get(name, {}).get("verdict") != "refused":
            # The fast level comes first. Level `rebatch` runs the whole backbone document by document, which is exact
            # for every causal model.
            general = [Patch(model_types=(name,)), Patch(model_types=(name,), rebatch=True)]
            for patch in [general[0], stack, general[1], groups] if unpad else general:
                said = f"trl-packfa: no patch for model type '{name}'; level {patch.level} checked and used."
                found.append(Candidate(patch, code, on_success=said))
        return found, refusal
    # Our tables hold no measurement of a third party's patch.
    is_known = patch.origin == "trl_packfa" and fingerprint(model) in known_sources().get(name, ())
    unmeasured = [] if is_known else [code]
    unmeasured += [f"PEFT's {kind}" for kind in unmeasured_adapters(model)] + unread_quantizers(model)
    # Masks and the attention interface are not part of a model's code: a newer release may have changed only those.
    unmeasured += newer_than_tested()
    may_not_fit = not is_known and patch.origin == "trl_packfa"
    found.append(Candidate(patch, ", ".join(unmeasured), is_final=True, may_not_fit=may_not_fit))
    return found, None


def _patch_of_decoder(decoder: nn.Module) -> Patch:
    """Return the patch for the text decoder of a model with images or sounds."""
    try:
        found = get_patch(decoder)
    except UnsupportedModel:
        found = Patch(model_types=(model_type(decoder),))
    return replace(found, backbone=type(decoder).__name__)


def does_not_fit(name: str, error: Exception) -> UnsupportedModel:
    """Return the error for a supported model type whose installed code does not fit its patch."""
    if name not in results():  # registered by the user
        return UnsupportedModel(str(error))
    return UnsupportedModel(
        f"the patch for '{name}' does not fit its code in transformers {installed_version('transformers')}.",
        why=[first_line(error), f"it was tested with transformers {', '.join(measured_transformers())}"],
        do=f"Install transformers {measured_transformers()[-1]}, or report it.",
    )
