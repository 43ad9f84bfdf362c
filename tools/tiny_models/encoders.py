"""Small random encoders of every type that transformers has a head for, for tests, tools and tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from trl_packfa.errors import UnsupportedModel

# By the head's name: transformers' mapping of model types to classes.
HEADS = {
    "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "QuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "MultipleChoice": modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
}
# Models without a head, whose last hidden states an embedding model pools.
EMBEDDINGS = "Embeddings"
# Parts of a config that only models of images or sounds have: those are in the table of composites.
_OTHER_INPUTS = {"vision_config", "audio_config"}
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
# Sizes that a type has under other names, or that its other sizes must fit.
_OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "big_bird": {"attention_type": "original_full"},
    "convbert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
    "electra": {"embedding_size": 16},
    "eurobert": {"num_key_value_heads": 2},
    "longformer": {"attention_window": 8},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "sep_token_id": 1, "cls_token_id": 2},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8},
    "mt5": {"decoder_start_token_id": 0},
    "t5gemma": {"encoder": _GEMMA, "decoder": _GEMMA},
    "t5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "squeezebert": {"embedding_size": 32},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}


@cache
def encoder_types() -> tuple[str, ...]:
    """Return every type of texts with a masked-LM head, and those with a classifier and no causal LM."""
    known = {name for names in HEADS.values() for name in names}
    causal = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    configs: dict[str, Any] = {name: CONFIG_MAPPING[name] for name in known}
    takes_more = {name for name, of in configs.items() if _OTHER_INPUTS & {*of.sub_configs}} | {"t5gemma2"}
    decoders = {"mistral4"}
    return tuple(sorted(known - causal - takes_more - decoders))


def heads_of(model_type: str) -> tuple[str, ...]:
    """Return the heads that transformers has for a type, and last the model without a head."""
    return (*(head for head, names in HEADS.items() if model_type in names), EMBEDDINGS)


def _auto_class(model_type: str, head: str) -> Any:
    if head != EMBEDDINGS:
        return getattr(transformers, f"AutoModelFor{head}")
    # Of a type with an encoder and a decoder, the encoder alone.
    encodes = model_type in modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    return transformers.AutoModelForTextEncoding if encodes else transformers.AutoModel


def small_encoder(model_type: str, head: str, **sizes: Any) -> PreTrainedModel:
    """Build a small random encoder with a head, without dropout; raise [`UnsupportedModel`] if that cannot be done."""
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(model_type, **{**_SIZES, **_OWN.get(model_type, {}), **sizes})
        model: Any = _auto_class(model_type, head).from_config(config).eval()
    except Exception as error:  # a config class may refuse the sizes in any way
        raise UnsupportedModel(f"{model_type} cannot be built small: {type(error).__name__}: {error}") from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    drop_nothing(model)
    return model


def drop_nothing(model: PreTrainedModel) -> None:
    """Set all rates of dropout to 0, so that two runs in training mode can be compared."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for owner in (*model.modules(), *configs):
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(owner, name, 0.0)
