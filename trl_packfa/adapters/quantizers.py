"""Verdicts on transformers' quantizers: does a token's result depend on the other tokens of its batch?

Source: the code of transformers 5.23 and bitsandbytes 0.50 and the documentation of the configs; bitsandbytes was also
measured. Quantized weights are exact, and so are activations that are quantized token by token or with constants. A
scale for all tokens of a batch, or columns chosen by all of them, are not exact: a document changes the results of
other documents. This happens in padded batches too, and packing cannot repair it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ROWWISE, TRAIN_PADDED, UnsupportedModel
from ..patching.inspect import model_config
from .table import EXACT, REFUSED, UNKNOWN


@dataclass(frozen=True)
class Quantizer:
    """The verdict on one `quant_method`."""

    verdict: str  # for `unknown` the check on the user's model decides
    what: str  # what is quantized, and which tokens share a scale
    do: str = ""  # what to do about a refusal


_WEIGHTS = Quantizer(EXACT, "weights only")
_BY_TOKEN = Quantizer(EXACT, "weights; activations token by token")
_CONSTANT = Quantizer(EXACT, "weights; activations with constants")
_OWN_KERNELS = Quantizer(UNKNOWN, "weights and activations, in its own kernels")
_OUTLIERS = Quantizer(
    REFUSED,
    "LLM.int8 computes a column in higher precision for all tokens of a batch if one token has an outlier in it",
    "Load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), which is exact, load it in 4 bits, "
    f"or {TRAIN_PADDED}.",
)
_OF_THE_BATCH = Quantizer(
    REFUSED,
    "activations are quantized with one scale for all tokens of a batch",
    f"Quantize them token by token, quantize weights only, or {TRAIN_PADDED}.",
)


def _bitsandbytes(config: Any) -> Quantizer:
    # In 4 bits only weights are quantized, and products are computed in the compute dtype.
    if not _get(config, "load_in_8bit"):
        return _WEIGHTS
    # With a threshold of 0, bitsandbytes separates no columns and quantizes each token's activations with its own
    # scale.
    return _OUTLIERS if (_get(config, "llm_int8_threshold") or 0.0) > 0 else _BY_TOKEN


def _torchao(config: Any) -> Quantizer:
    kind = _get(config, "quant_type")
    name = kind if isinstance(kind, str) else type(kind).__name__
    if "WeightOnly" in name or "weight_only" in name:
        return _WEIGHTS
    # torchao accepts one granularity for both, or one for activations and one for weights.
    granularity = getattr(kind, "granularity", None)
    of_activations = granularity[0] if isinstance(granularity, (list, tuple)) else granularity
    scales = type(of_activations).__name__ if of_activations is not None else ""
    if scales == "PerTensor" or (not scales and name.startswith("Float8DynamicActivation")):  # its default
        return _OF_THE_BATCH
    by_token = scales in ("PerRow", "PerToken") or (not scales and name.startswith("Int8DynamicActivation"))
    return _BY_TOKEN if by_token else _OWN_KERNELS


def _compressed_tensors(config: Any) -> Quantizer:
    inner = _get(config, "quantization_config") or config
    groups = _get(inner, "config_groups") or {}
    activations = [_get(group, "input_activations") for group in groups.values() if not isinstance(group, (list, str))]
    found = [_quantized_activations(scheme) for scheme in activations if scheme is not None]
    # Groups of layers may differ, so the worst verdict decides. Unknown is worse than exact.
    return next((q for verdict in (REFUSED, UNKNOWN) for q in found if q.verdict == verdict), (found or [_WEIGHTS])[0])


def _quantized_activations(scheme: Any) -> Quantizer:
    strategy = _get(scheme, "strategy")
    strategy = getattr(strategy, "value", strategy)
    dynamic = _get(scheme, "dynamic")
    # `dynamic` means that scales are computed for each batch. Then the question is what one scale covers: the whole
    # tensor or a token. Scales from calibration are constants.
    if dynamic is False:
        return _CONSTANT
    if dynamic is True:
        return {"tensor": _OF_THE_BATCH, "token": _BY_TOKEN, "group": _BY_TOKEN}.get(strategy, _OWN_KERNELS)
    return _OWN_KERNELS


# Verdicts by `quant_method`; a function reads the config. Methods that transformers never trains are listed too,
# because they appear under PEFT's adapters and in `patch` on a plain model.
QUANTIZERS: dict[str, Quantizer | Callable[[Any], Quantizer]] = {
    **dict.fromkeys(("aqlm", "auto-round", "awq", "eetq", "gguf", "gptq", "higgs", "hqq", "metal"), _WEIGHTS),
    **dict.fromkeys(("mxfp4", "quanto", "sinq", "spqr", "vptq"), _WEIGHTS),
    **dict.fromkeys(("bitnet", "fbgemm_fp8", "fp8", "mxfp8"), _BY_TOKEN),
    **dict.fromkeys(("fouroversix", "fp_quant", "nvfp4", "quark"), _OWN_KERNELS),
    **dict.fromkeys(("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"), _bitsandbytes),
    "compressed-tensors": _compressed_tensors,
    "gemma": _CONSTANT,
    "torchao": _torchao,
}


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def quantizer_of(config: Any) -> tuple[str, Quantizer]:
    """Return the method of a quantization config, and the verdict on it with these settings."""
    method = _get(config, "quant_method")
    # Configs that were saved before `quant_method` existed have other fields.
    if method is None and (_get(config, "load_in_8bit") or _get(config, "load_in_4bit")):
        method = "bitsandbytes"
    method = str(getattr(method, "value", method))
    known = QUANTIZERS.get(method, Quantizer(UNKNOWN, "not known to trl-packfa"))
    return method, known if isinstance(known, Quantizer) else known(config)


def refuse_quantization(config: Any) -> None:
    """Raise [`UnsupportedModel`] if a quantization config (or `None`) makes a document's result depend on others."""
    if config is None:
        return
    method, quantizer = quantizer_of(config)
    if quantizer.verdict == REFUSED:
        raise UnsupportedModel(
            f"a model that is quantized with {method} and these settings cannot be packed exactly.",
            why=[quantizer.what],
            do=quantizer.do,
        )


def refuse_quantized(model: nn.Module) -> None:
    """Raise [`UnsupportedModel`] if a loaded model's config or layers make a document's result depend on others."""
    refuse_quantization(getattr(model_config(model), "quantization_config", None))
    # The config does not list layers that a user put in by hand.
    for name, module in model.named_modules():
        if (found := _shared_scale(module)) is not None:
            what, why, do = found
            raise UnsupportedModel(
                f"layer '{name}' is {what}: it cannot be packed exactly.", why=[why], do=f"{do}, or {TRAIN_PADDED}."
            )


def _shared_scale(layer: Any) -> tuple[str, str, str] | None:
    """Describe a layer whose activations share a scale: what it is, why that leaks, and what to use instead."""
    # By name, because the packages may not be installed; other packages have layers of these names, too.
    kind = type(layer).__name__
    threshold = getattr(getattr(layer, "state", None), "threshold", 0.0)
    if kind == "Linear8bitLt" and threshold:
        do = "Create it with threshold=0.0, which is exact, quantize it in 4 bits"
        return f"bitsandbytes' Linear8bitLt with a threshold of {threshold}", _OUTLIERS.what, do
    if kind == "Float8Linear" and layer.config.cast_config_input.scaling_granularity.name != "AXISWISE":
        do = f"Convert the model with {ROWWISE}, which is exact"
        return "torchao's Float8Linear with one scale for each tensor", _OF_THE_BATCH.what, do
    return None


def unread_quantizers(model: nn.Module) -> list[str]:
    """List the quantization method of a model if its verdict is `unknown`."""
    config = getattr(model_config(model), "quantization_config", None)
    if config is None:
        return []
    method, quantizer = quantizer_of(config)
    return [method] if quantizer.verdict == UNKNOWN else []
