"""Models and adapters by name or path, for the commands `check` and `merge`; errors say what to change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, TaskType, get_peft_model_state_dict, load_peft_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..data.files import missing_path
from ..errors import InvalidConfig, UnsupportedModel
from ..trainers.loading import telling_of_model

# Ends of the names of classes with a head that is no LM head.
_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM",
)  # fmt: skip
# Classes of the tasks that an adapter names. A causal LM's may also be one with images, so its base tells.
_BY_TASK: dict[str | None, Any] = {
    TaskType.SEQ_CLS: AutoModelForSequenceClassification,
    TaskType.TOKEN_CLS: AutoModelForTokenClassification,
    TaskType.QUESTION_ANS: AutoModelForQuestionAnswering,
    TaskType.SEQ_2_SEQ_LM: AutoModelForSeq2SeqLM,
    TaskType.FEATURE_EXTRACTION: AutoModel,
}


def load_for_check(name: str, *, dtype: str, adapter: str | None) -> nn.Module:
    """Load a model by name or path, of the class that it was saved with, optionally with a PEFT adapter."""
    if adapter is not None:
        return _adapted(adapter, _adapter_config(adapter), name, dtype=dtype, is_trainable=True)
    with telling_of_model(name):
        return class_of(AutoConfig.from_pretrained(name)).from_pretrained(name, dtype=dtype)


def class_of(config: PretrainedConfig, adapter: PeftConfig | None = None) -> Any:
    """Return the class that loads a model of this config: an adapter was trained on its own, else the saved one.

    transformers' class for causal LMs loads every model that was not saved with another head, or with images.
    """
    if adapter is not None and adapter.task_type in _BY_TASK:
        return _BY_TASK[adapter.task_type]
    trained = (adapter.auto_mapping or {}).get("base_model_class") if adapter is not None else None
    saved = trained or next(iter(config.architectures or ()), "")
    takes_more = config.get_text_config() is not config and config.get_text_config().model_type != config.model_type
    is_other = trained or takes_more or saved.endswith(_HEADS)
    if is_other or (is_encoder(config) and not saved.endswith(("ForCausalLM", "LMHeadModel"))):
        # A name that the folder holds. Of the model's own code transformers knows no class by name.
        return getattr(transformers, saved, AutoModelForImageTextToText if takes_more else AutoModel)
    return AutoModelForCausalLM


def is_encoder(config: PretrainedConfig) -> bool:
    """Tell whether a model of this type is an encoder, unless its class makes a causal LM of it."""
    # Decoders of other types have no such attribute.
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | ProcessorMixin | None:
    """Load the processor of a model by name or path, else its tokenizer; return `None` if there is none."""
    # Both are tried: a folder with an adapter has no config that leads from one to the other.
    for cls in (AutoProcessor, AutoTokenizer):
        try:
            return cls.from_pretrained(name)
        except (OSError, ValueError, KeyError):  # transformers raises these for a folder that holds only weights
            continue
    return None


def merge_adapter(
    adapter: str, output: str | Path, *, base: str | None = None, dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase | ProcessorMixin | None]:
    """Merge an adapter into its base model and save model and tokenizer into a folder, new or empty; return both.

    The base is loaded again, unquantized. A QLoRA adapter was trained on the base's weights rounded to 4 bits. So the
    merged model differs from the trained one by that rounding, and is nearer to the original base.

    `base` is its name or path, if it has moved since the adapter was saved. `dtype` is that of the merged weights;
    `"auto"` is the dtype that the base was saved in.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidConfig(f"{output} is not empty.", do="Name a new folder.")
    config = _adapter_config(adapter)
    if config.is_prompt_learning:
        raise InvalidConfig(
            f"{getattr(config.peft_type, 'value', config.peft_type)} has no weights to merge: it adds tokens.",
            do="Use it together with its base: PEFT's classes for a task load both.",
        )
    named = base or config.base_model_name_or_path
    merged = _adapted(adapter, config, named, dtype=dtype).merge_and_unload()
    # The one that was saved with the adapter, else the base's.
    found = (load_tokenizer(name) for name in (adapter, named) if name is not None)
    tokenizer = next((tokenizer for tokenizer in found if tokenizer is not None), None)
    merged.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    return merged, tokenizer


def _adapter_config(adapter: str) -> PeftConfig:
    try:
        return PeftConfig.from_pretrained(adapter)
    except (ValueError, OSError) as error:
        raise UnsupportedModel(
            f"there is no adapter in '{adapter}'.",
            why=missing_path(adapter) or [str(error)],
            do="Name the output_dir of a run with use_peft=True. A full fine-tune has no adapter to merge.",
        ) from error


def _adapted(
    adapter: str, config: PeftConfig, base: str | None, *, dtype: str, is_trainable: bool = False
) -> PeftModel:
    """Load the model that an adapter was trained on, from a base that may have moved, with the adapter on it.

    Raises:
        [`UnsupportedModel`]: if there is no such base, it has no place for some of the adapter's weights, or weights
            of the model would be random, unless it is to be trained.
    """
    if base is None:
        raise UnsupportedModel(f"the adapter '{adapter}' names no base model.", do="Name it with --base.")
    options: dict[str, Any] = {"revision": config.revision} if base == config.base_model_name_or_path else {}
    saved = load_peft_weights(adapter, device="cpu")
    with telling_of_model(base, adapter=adapter):
        loaded = AutoConfig.from_pretrained(base, **options)
        cls = class_of(loaded, config)
        options |= _labels(cls, loaded, saved)
        model, info = cls.from_pretrained(base, dtype=dtype, output_loading_info=True, **options)
    random = sorted(key for key in info["missing_keys"] if not any(name.endswith(f".{key}") for name in saved))
    if random and not is_trainable:
        raise UnsupportedModel(
            f"neither the base '{base}' nor the adapter '{adapter}' holds all weights of {type(model).__name__}.",
            why=[f"{', '.join(random[:3])} would be random, and the adapter was trained with other numbers"],
            do="Train with modules_to_save naming these modules, or name a base that has them.",
        )
    tokenizer = load_tokenizer(adapter)
    words: Any = getattr(tokenizer, "tokenizer", tokenizer)
    if words is not None and len(words) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(words))  # tokens were added for the training
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)
    lost = saved.keys() - get_peft_model_state_dict(adapted, save_embedding_layers=True).keys()
    if lost:
        raise UnsupportedModel(
            f"{len(lost)} of {len(saved)} weights of the adapter '{adapter}' have no place in {type(model).__name__}.",
            why=[f"for example {min(lost)}"],
            do=f"Name the base that it was trained on, of task {config.task_type}.",
        )
    return adapted


def _labels(cls: Any, config: PretrainedConfig, saved: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments to load a base with as many labels as a head that an adapter brings, `{}` if it has them.

    The head of a reward model has one label, but its base's config does not say so, and transformers then makes two.
    """

    def shapes(labels: int) -> dict[str, torch.Size]:
        sized = copy.deepcopy(config)
        sized.num_labels = labels
        with torch.device("meta"):
            made = cls.from_config(sized) if hasattr(cls, "from_config") else cls(sized)
        return {name: parameter.shape for name, parameter in made.named_parameters()}

    if isinstance(cls, type) and cls in (AutoModelForCausalLM, AutoModelForImageTextToText):
        return {}
    few, more = shapes(2), shapes(3)
    heads = [name for name, shape in few.items() if shape != more[name]]
    found = {len(weight) for key, weight in saved.items() if any(key.endswith(f".{name}") for name in heads)}
    if len(found) != 1 or found == {config.num_labels}:
        return {}
    return {"num_labels": found.pop(), "ignore_mismatched_sizes": True}  # another head, which the adapter's replaces
