"""A patch is trusted for code that it was measured with; anything else is measured before it is trusted.

When transformers moves, the failure is a refusal, never a leak.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from .adapters import unmeasured_adapters, unread_quantizers
from .declaration import Patch
from .errors import ContaminationError, UnsupportedModel, is_out_of_memory
from .exactness import check
from .finding import model_type
from .patching import apply_patch, undo_patch
from .results import fingerprint, known_sources, results

logger = logging.getLogger(__name__)


def apply_trusted(model: nn.Module, patch: Patch, backend: str, *, fused_lora: bool = True) -> None:
    """Patch a model; if its code is not the code that the patch was measured with, or its adapter or
    quantization is of a kind that was never measured, only if the check finds it exact.

    Raises:
        [`ContaminationError`]: if it does not; the model is unpatched again.
    """
    apply_patch(model, patch, backend, fused_lora=fused_lora)
    unmeasured = [f"PEFT's {kind}" for kind in unmeasured_adapters(model)] + unread_quantizers(model)
    known = patch.origin == "trl_packfa" and fingerprint(model) in known_sources().get(model_type(model), ())
    if known and not unmeasured:
        return
    what = ", ".join(unmeasured) if known else f"{type(model).__name__}'s code"
    logger.info("trl-packfa: %s was never measured under packing: checking this model.", what)
    try:
        _require_exact(model)
    except BaseException:  # interrupted, or out of memory: what was not proven does not stay patched
        undo_patch(model)
        raise


def apply_unknown(model: nn.Module, backend: str, refusal: UnsupportedModel, *, fused_lora: bool = True) -> None:
    """Patch a model of a type without a patch by the first general level that the check finds exact on it.

    Raises:
        [`UnsupportedModel`]: `refusal`, with what each level came to.
    """
    name = model_type(model)
    if name in results():  # measured before: no general level serves it
        raise refusal
    tried = []
    for patch in (Patch(model_types=(name,)), Patch(model_types=(name,), rebatch=True)):
        try:
            apply_patch(model, patch, backend, fused_lora=fused_lora)
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
    if any(parameter.device == torch.device("meta") for parameter in model.parameters()):
        raise ContaminationError(
            f"{type(model).__name__} cannot be checked: its weights are on the meta device.",
            do="Load its weights before patching it.",
        )
    check(model).require_exact()
