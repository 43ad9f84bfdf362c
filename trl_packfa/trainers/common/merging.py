"""Merging of a trained adapter into its base model, with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ...errors import InvalidConfig, UnsupportedModel
from .hub import load_tokenizer, telling_of_model


def merge_adapter(
    adapter: str, output: str | Path, *, base: str | None = None, dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Merge an adapter into its base model and save model and tokenizer into a folder, new or empty.

    The base is loaded again, unquantized. A QLoRA adapter was trained on the base's weights rounded to 4 bits. So the
    merged model differs from the trained one by that rounding, and is nearer to the original base.

    `base` is its name or path, if it has moved since the adapter was saved. `dtype` is that of the merged weights;
    `"auto"` is the dtype that the base was saved in. Returns the merged `PreTrainedModel`, and its tokenizer if the
    adapter or the base has one.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidConfig(f"{output} is not empty.", do="Name a new folder.")
    named = _adapter_config(adapter).base_model_name_or_path
    base = base or named
    merged = _adapted(adapter, base, named, dtype).merge_and_unload()
    # The one that was saved with the adapter, else the base's.
    found = (load_tokenizer(name) for name in (adapter, base) if name is not None)
    tokenizer = next((tokenizer for tokenizer in found if tokenizer is not None), None)
    merged.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    return merged, tokenizer


def _adapter_config(adapter: str) -> Any:
    try:
        config: Any = PeftConfig.from_pretrained(adapter)
    except (ValueError, OSError) as error:
        raise UnsupportedModel(
            f"there is no adapter in '{adapter}'.",
            why=[str(error)],
            do="Name the output_dir of a run with use_peft=True. A full fine-tune has no adapter to merge.",
        ) from error
    if config.is_prompt_learning:
        raise InvalidConfig(
            f"{config.peft_type.value} has no weights to merge: it adds tokens.",
            do="Use it together with its base: peft.AutoPeftModelForCausalLM loads both.",
        )
    return config


def _adapted(adapter: str, base: str | None, named: str | None, dtype: str) -> PeftModel:
    """Load the base that the adapter names, or another one, with the adapter on it.

    PEFT resizes the embeddings if a chat template has added tokens.
    """
    if base is not None and base != named:
        with telling_of_model(base):
            model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        return PeftModel.from_pretrained(model, adapter)
    try:
        return AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"cannot load the base '{named}' of the adapter '{adapter}'.", why=[str(error)], do="Name it with --base."
        ) from error
