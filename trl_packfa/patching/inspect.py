"""Read facts about any model and its modules: type, config, decoder, direction of attention, positions, vocabulary."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModel
from ..parallel.zero3 import whole_shape


class Target(NamedTuple):
    """A model to patch, and what is read of it once, before any change."""

    model: nn.Module  # takes a batch by name
    inner: PreTrainedModel  # the outermost transformers model in it
    decoder: PreTrainedModel | None  # the text decoder, if `inner` also has encoders of images or sounds

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """Look at a model; raise [`UnsupportedModel`] if there is no transformers model in it."""
        if isinstance(model, nn.Sequential):
            # sentence-transformers: its models are sequences of modules that take a dictionary of features.
            wrapped = (module for module in model.modules() if isinstance(module, (PeftModel, PreTrainedModel)))
            model = next(wrapped, model)
        return cls(model, inner_model(model), text_decoder(model))

    @property
    def type(self) -> str:
        """`config.model_type` of the transformers model."""
        return self.inner.config.model_type

    @property
    def class_name(self) -> str:
        """Name of the transformers model's class."""
        return type(self.inner).__name__

    @property
    def attends_both_ways(self) -> bool:
        """`True` if the model says that its attention sees later tokens, as that of an encoder does.

        A model may say nothing and ask for such a mask all the same; the check finds that.
        """
        inner = self.inner
        if inner.config.is_encoder_decoder:
            return False
        own = [m for name, m in inner.named_modules() if uses_interface(m) and not is_elsewhere(name, m)]
        if not own:  # some types are encoders unless their config says that they are decoders
            is_lm = self.class_name.endswith(("ForCausalLM", "LMHeadModel"))
            says = [getattr(inner.config, name, None) for name in ("is_decoder", "causal")]  # `causal` is XLM's
            return False in says and True not in says and not (is_lm and says[1] is None)
        return not any(map(is_causal, own))


def model_type(model: nn.Module) -> str:
    """Return `config.model_type` of the outermost transformers model in `model`."""
    return model_config(model).model_type


def model_config(model: nn.Module) -> PreTrainedConfig:
    """Return the `config` of the outermost transformers model in `model`."""
    return inner_model(model).config


def own_config(module: nn.Module) -> Any:
    """Return the config object that a module itself holds, `None` if it has none.

    Some modules hold something else under this name: DeepSpeed's engine a dictionary, which has no attributes.
    """
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in `model`, or raise [`UnsupportedModel`] if there is none."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise UnsupportedModel(
            f"{type(model).__name__} holds no transformers model.",
            do="Pass a transformers causal LM, or a PEFT, compiled or wrapped one.",
        )
    return inner


def text_decoder(model: nn.Module) -> PreTrainedModel | None:
    """Return the text decoder of a model that also has encoders of images or sounds, `None` for any other model."""
    inner: Any = inner_model(model)
    if inner.config.get_text_config() is inner.config or inner.config.is_encoder_decoder:
        return None
    decoder = inner.get_decoder()
    is_separate = isinstance(decoder, PreTrainedModel) and decoder is not inner and decoder is not inner.base_model
    return decoder if is_separate else None


def known_ids(model: Any) -> int:
    """Return the size of the vocabulary that a model can read."""
    # The size of the embedding table: a larger id is an index error, whatever vocabulary the config states.
    return _rows(model.get_input_embeddings()) or model_config(model).get_text_config().vocab_size


def known_labels(model: Any) -> int:
    """Return the size of the vocabulary that a model can predict."""
    return _rows(model.get_output_embeddings()) or known_ids(model)


def _rows(layer: Any) -> int | None:
    """Return the number of rows of an embedding or LM head, from its weight; `None` for a layer of another kind."""
    weight = getattr(layer, "weight", None)
    # 4-bit weights are flat.
    shape = getattr(getattr(weight, "quant_state", None), "shape", None)
    shape = shape or (whole_shape(weight) if isinstance(weight, torch.Tensor) else ())
    # Not `out_features`, if there is a weight: PEFT swaps the features of a head that it ties to the embedding.
    return shape[0] if len(shape) == 2 else getattr(layer, "out_features", getattr(layer, "num_embeddings", None))


def forward_takes(module: nn.Module, name: str) -> bool:
    """Tell whether the forward of a module's class has an argument of this name."""
    return name in inspect.signature(type(module).forward).parameters


def uses_interface(module: nn.Module) -> bool:
    """Tell whether a module computes attention through transformers' attention interface."""
    return hasattr(module, "config") and _reads_interface(type(module).forward)


@cache
def _reads_interface(forward: Callable[..., Any]) -> bool:
    """Tell whether a forward reads a global `AttentionInterface`, as transformers' `ALL_ATTENTION_FUNCTIONS` is."""
    function = inspect.unwrap(forward)  # transformers decorates forwards whose arguments were renamed
    if not inspect.isfunction(function):  # compiled to C: nothing can be read
        return False
    return any(isinstance(value, AttentionInterface) for value in inspect.getclosurevars(function).globals.values())


def is_causal(module: Any, option: bool | None = None) -> bool:
    """Tell whether a module attends backwards only, by a call's option, by itself or, in a decoder, by its mask."""
    if option is not None:
        return option
    return getattr(module, "is_causal", True) is not False or bool(getattr(module, "is_decoder", False))


# Words in the names of modules that do not attend to the text's own tokens. Not `VisionText`: the text part of a model
# with vision in its name.
_ELSEWHERE = re.compile(
    r"cross|encoder_attn|vision(?!text)|visual|image|audio|speech|video|vq|embed_tokens_extend", re.IGNORECASE
)


def is_elsewhere(name: str, module: nn.Module) -> bool:
    """Tell whether a module attends to an encoder, or is inside the encoder of another modality."""
    return bool(_ELSEWHERE.search(f"{name} {type(module).__name__}"))


def class_names(module: nn.Module) -> list[str]:
    """Return the names of the module's class and its bases: wrappers such as FSDP2 make subclasses at run time."""
    return [cls.__name__ for cls in type(module).__mro__]


# Tables of positions, not of distances between tokens.
_POSITIONS = re.compile(r"wpe|pos(ition)?s?_(emb|enc)|embed_positions", re.IGNORECASE)


def max_positions(backbone: nn.Module) -> int | None:
    """Return the number of positions in the smallest table of positions, `None` without a table.

    A position beyond it is an index error on a CPU. On CUDA it makes the device unusable for the process.
    """
    sizes = []
    for name, table in backbone.named_modules():
        own_name = name.rpartition(".")[2]
        elsewhere = _ELSEWHERE.search(name)
        if isinstance(table, nn.Embedding) and _POSITIONS.search(own_name) and "rel" not in own_name and not elsewhere:
            # Some rows are for no position: OPT and BART add an `offset` of 2, RoBERTa's positions begin after its
            # padding index (514 rows, padding index 1: 512 positions).
            before = getattr(table, "offset", 0) + (0 if table.padding_idx is None else table.padding_idx + 1)
            sizes.append(table.num_embeddings - before)
    # GPT-J, CodeGen and CTRL compute their tables once, up to the positions of the config.
    sizes += [
        len(table)
        for name, table in backbone.named_buffers()
        if table.dim() == 2 and table.is_floating_point() and _POSITIONS.search(name.rpartition(".")[2])
    ]
    config = own_config(backbone)
    if getattr(config, "model_type", "") == "mpt":  # a backbone may be no model of transformers
        sizes.append(config.max_seq_len)  # it adds a bias of this many keys
    return min(sizes, default=None)
