"""Which quantizers of transformers make a token's result depend on the other tokens of its batch.

Found by reading transformers 5.23, bitsandbytes 0.50 and the configs' own documents, and measured for bitsandbytes.
Quantized weights are the same for every token. Activations that are quantized token by token, or with constants, are
too. Scales of all tokens at once, or columns chosen by all of them, are not: one document changes another's numbers,
padded just as packed, and nothing that packing does can mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import TRAIN_PADDED, UnsupportedModel
from ..patching.inspect import model_config
from .table import EXACT, REFUSED, UNKNOWN


@dataclass(frozen=True)
class Quantizer:
    """What is known of one `quant_method`.

    Attributes:
        verdict (`str`): `exact`, `refused`, or `unknown`: for the check on the user's model to judge.
        what (`str`): what is quantized, and by which tokens.
        do (`str`): what to do about a refusal.
    """

    verdict: str
    what: str
    do: str = ""


_WEIGHTS = Quantizer(EXACT, "weights only")
_BY_TOKEN = Quantizer(EXACT, "weights; activations token by token")
_CONSTANT = Quantizer(EXACT, "weights; activations with constants")
_OWN_KERNELS = Quantizer(UNKNOWN, "weights and activations, in kernels of its own")
_OUTLIERS = Quantizer(
    REFUSED,
    "LLM.int8 takes a column apart for all tokens of a batch once one of them has an outlier in it",
    "Load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), which is exact, in 4 bits, or "
    f"{TRAIN_PADDED}.",
)
_OF_THE_BATCH = Quantizer(
    REFUSED,
    "activations are quantized with one scale for all tokens of a batch",
    f"Quantize them token by token, quantize weights only, or {TRAIN_PADDED}.",
)


def _bitsandbytes(config: Any) -> Quantizer:
    # 4 bits: weights alone are quantized, and multiplied in the compute dtype.
    if not _get(config, "load_in_8bit"):
        return _WEIGHTS
    # At a threshold of 0 bitsandbytes takes no columns apart, and quantizes each token's activations with a scale of
    # its own.
    return _OUTLIERS if (_get(config, "llm_int8_threshold") or 0.0) > 0 else _BY_TOKEN


def _torchao(config: Any) -> Quantizer:
    kind = _get(config, "quant_type")
    name = kind if isinstance(kind, str) else type(kind).__name__
    if "WeightOnly" in name or "weight_only" in name:
        return _WEIGHTS
    # torchao takes one granularity for both, or one for activations and one for weights.
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
    # Groups of layers may differ: the worst decides, and one that nobody has read counts as worse than exact.
    return next((q for verdict in (REFUSED, UNKNOWN) for q in found if q.verdict == verdict), (found or [_WEIGHTS])[0])


def _quantized_activations(scheme: Any) -> Quantizer:
    strategy = _get(scheme, "strategy")
    strategy = getattr(strategy, "value", strategy)
    dynamic = _get(scheme, "dynamic")
    # `dynamic`: whether scales are made anew for each batch. Those kept from calibration are the same for every token;
    # of those made anew it matters what one scale covers, the whole tensor or a token.
    if dynamic is False:
        return _CONSTANT
    if dynamic is True:
        return {"tensor": _OF_THE_BATCH, "token": _BY_TOKEN, "group": _BY_TOKEN}.get(strategy, _OWN_KERNELS)
    return _OWN_KERNELS


# By `quant_method`; a function reads the config. What transformers never trains is in here too: PEFT's adapters and
# `patch` on a plain model ask as well.
QUANTIZERS: dict[str, Quantizer | Callable[[Any], Quantizer]] = {
    "aqlm": _WEIGHTS,
    "auto-round": _WEIGHTS,
    "awq": _WEIGHTS,
    "bitnet": _BY_TOKEN,
    "bitsandbytes": _bitsandbytes,
    "bitsandbytes_4bit": _bitsandbytes,
    "bitsandbytes_8bit": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "eetq": _WEIGHTS,
    "fbgemm_fp8": _BY_TOKEN,
    "fouroversix": _OWN_KERNELS,
    "fp8": _BY_TOKEN,
    "fp_quant": _OWN_KERNELS,
    "gemma": _CONSTANT,
    "gguf": _WEIGHTS,
    "gptq": _WEIGHTS,
    "higgs": _WEIGHTS,
    "hqq": _WEIGHTS,
    "metal": _WEIGHTS,
    "mxfp4": _WEIGHTS,
    "mxfp8": _BY_TOKEN,
    "nvfp4": _OWN_KERNELS,
    "quanto": _WEIGHTS,
    "quark": _OWN_KERNELS,
    "sinq": _WEIGHTS,
    "spqr": _WEIGHTS,
    "torchao": _torchao,
    "vptq": _WEIGHTS,
}


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def quantizer_of(config: Any) -> tuple[str, Quantizer]:
    """A quantization config's method, and what is known of it as it is configured."""
    method = _get(config, "quant_method")
    # Configs that were saved before `quant_method` existed.
    if method is None and (_get(config, "load_in_8bit") or _get(config, "load_in_4bit")):
        method = "bitsandbytes"
    method = str(getattr(method, "value", method))
    known = QUANTIZERS.get(method, Quantizer(UNKNOWN, "nobody has read it"))
    return method, known if isinstance(known, Quantizer) else known(config)


def refuse_quantization(config: Any) -> None:
    """A quantization under which a document's numbers depend on the other documents of its batch.

    Args:
        config (`QuantizationConfigMixin`, `dict` or `None`):
            What the model is, or is to be, quantized with.

    Raises:
        [`UnsupportedModel`]: naming the method, the reason and what to do.
    """
    if config is None:
        return
    method, quantizer = quantizer_of(config)
    if quantizer.verdict == REFUSED:
        raise UnsupportedModel(
            f"a model quantized with {method} as it is configured cannot be packed exactly.",
            why=[quantizer.what],
            do=quantizer.do,
        )


def refuse_quantized(model: nn.Module) -> None:
    """Refuse a loaded model that is quantized so that documents of a batch are not alone, by its config or its layers.

    Raises:
        [`UnsupportedModel`]: naming the method or the layer, the reason and what to do.
    """
    refuse_quantization(quantization_config_of(model))
    for name, module in model.named_modules():
        # bitsandbytes need not be installed. Layers that were put in by hand are in no config.
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold:
            raise UnsupportedModel(
                f"layer '{name}' is bitsandbytes' Linear8bitLt with a threshold of {threshold}: it cannot be packed "
                "exactly.",
                why=[_OUTLIERS.what],
                do="Make it with threshold=0.0, which is exact, quantize it in 4 bits, or train padded with "
                "packing=False.",
            )


def quantization_config_of(model: nn.Module) -> Any:
    """What a loaded model says that it is quantized with, `None` if it is not."""
    return getattr(model_config(model), "quantization_config", None)


def unread_quantizers(model: nn.Module) -> list[str]:
    """The quantization method of a model, if nobody can say whether it keeps tokens apart."""
    config = quantization_config_of(model)
    if config is None:
        return []
    method, quantizer = quantizer_of(config)
    return [method] if quantizer.verdict == UNKNOWN else []
