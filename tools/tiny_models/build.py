"""Build the small models: a config from the tables of sizes, and weights that mix tokens strongly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny_models.sizes import DEPTH, GENERIC, NOT_BUILDABLE
from tiny_models.special import SPECIAL
from tiny_models.weights import redraw
from trl_packfa.errors import UnsupportedModel

_MOST_PARAMETERS = 3_000_000


def all_types() -> tuple[str, ...]:
    """Return every model type with a causal LM in transformers, also those that cannot be built here."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of the small model; `changes` override its attributes, or those of its text part.

    A change of `num_hidden_layers` shortens or repeats the lists of layer kinds. `attn_implementation` goes to every
    part.
    """
    reason = NOT_BUILDABLE.get(model_type, "" if model_type in all_types() else "transformers has no such causal LM")
    if reason:
        raise UnsupportedModel(f"No small text model of type {model_type!r} can be built.", why=[reason])
    attention = changes.pop("attn_implementation", None)
    cls = CONFIG_MAPPING[model_type]
    config = config_of(cls, {"text_config": changes} if "text_config" in _parts(cls) else changes)
    if attention is not None:
        config._attn_implementation = attention
    return config


def small_model(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return the model in eval mode; equal seed and changes give equal weights. torch's random state stays."""
    return built(AutoModelForCausalLM, small_config(model_type, **changes), _MOST_PARAMETERS, seed=seed)


def built(auto: Any, config: PreTrainedConfig, most: int, *, seed: int) -> PreTrainedModel:
    """Return the model of a config in eval mode with weights drawn anew; refuse one with more parameters than `most`.

    `auto` is transformers' class that makes models of configs.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            parameters = sum(p.numel() for p in auto.from_config(config).parameters())
        if parameters > most:
            raise UnsupportedModel(
                f"The model of type {config.model_type!r} is not small.",
                why=[f"it has {parameters:,} parameters, more than {most:,}"],
            )
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32).eval()
        redraw(model)
    return model


def config_of(
    cls: type[PreTrainedConfig],
    changes: Mapping[str, Any],
    generic: Mapping[str, Any] = GENERIC,
    of_types: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> PreTrainedConfig:
    """Return a config of this class with the small sizes of the tables.

    `generic` holds the sizes of all classes, `of_types` more of single types than `SPECIAL` has.
    """
    default = cls()
    # Config classes modify the lists and dicts that they get.
    special = deepcopy(SPECIAL.get(cls.model_type, {}) | of_types.get(cls.model_type, {}))
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    sizes = {name: size for name, size in generic.items() if name in known or name in cls.attribute_map}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        # Latent attention expands its keys to all heads.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {name: layers for name, layers in _layer_kinds(default).items() if name in known}
    if cls.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # Set these even if the class does not declare them: trainers and collators read them from every config.
        sizes |= {name: GENERIC[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    # An alias of a size that the type has for itself would overwrite it.
    sizes = {name: size for name, size in sizes.items() if cls.attribute_map.get(name) not in special}
    sizes |= special
    if (depth := changes.get("num_hidden_layers", DEPTH)) != DEPTH:
        lists = {name: kinds for name, kinds in sizes.items() if isinstance(kinds, list) and len(kinds) == DEPTH}
        sizes |= {name: list(islice(cycle(kinds), depth)) for name, kinds in lists.items()}
    for name, kind in _parts(cls).items():
        part = getattr(default, name, None)
        if part is not None or (name in changes and kind is not AutoConfig):
            parts = {**special.get(name, {}), **changes.get(name, {})}
            sizes[name] = config_of(kind if part is None else type(part), parts, generic, of_types)
    return cls(**{**sizes, **{name: value for name, value in changes.items() if name not in _parts(cls)}})


def _parts(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    return cast("dict[str, Any]", cls.sub_configs)  # transformers declares a type without keys


def _layer_kinds(default: PreTrainedConfig) -> dict[str, list[str]]:
    """Return every layer kind of the full-size model: mixers in turn, feed-forwards mostly the last kind (experts)."""
    kinds = {}
    if mixers := getattr(default, "layer_types", None):
        kinds["layer_types"] = list(islice(cycle(dict.fromkeys(mixers)), DEPTH))
    if feeds := getattr(default, "mlp_layer_types", None):
        feeds = list(dict.fromkeys(feeds))
        kinds["mlp_layer_types"] = (feeds + feeds[-1:] * DEPTH)[:DEPTH]
    return kinds
