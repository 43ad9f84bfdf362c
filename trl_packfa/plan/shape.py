"""Shape of a named model, from its config alone: it is built on the meta device, without weights."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ..errors import InvalidConfig, PackingError
from ..trainers.common.model_loading import init_kwargs
from ..trainers.common.validation import refuse_model
from ..trainers.sft.config import PackedSFTConfig
from ..trainers.sft.model_shape import ModelShape, shape_of


def read_shape(args: PackedSFTConfig) -> ModelShape:
    """Return the shape of `args.model_name_or_path` with the adapter of the arguments.

    Raises:
        [`InvalidConfig`]: if there is no such model, or the adapter does not fit it.
        [`UnsupportedModel`]: if its type cannot be packed.
    """
    name = args.model_name_or_path
    assert name is not None, "asked for a model"
    try:
        config = AutoConfig.from_pretrained(
            name, revision=init_kwargs(args).get("revision"), trust_remote_code=args.trust_remote_code
        )
        if args.packing:
            refuse_model(config.model_type, args)
        with torch.device("meta"):
            kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
            model = kind.from_config(config, trust_remote_code=args.trust_remote_code)
        return shape_of(model, args)
    except PackingError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfig(
            f"cannot make the model '{name}' from its config.",
            why=[str(error)],
            do="Check the name, or pass --tokenizer without a model, for a plan without memory and attention cost.",
        ) from error
