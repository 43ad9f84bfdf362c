"""`torch_compile=True`: every layer compiled by itself, so that a model of any depth takes as long as one layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend

from ..patching.apply import compile_layers
from ..patching.inspect import model_config
from ..runtime.compile import allow_graphs_of_layers
from .config import PackedSFTConfig

logger = get_logger(__name__)


def compile_by_layer(model: Any, args: PackedSFTConfig, accelerator: Accelerator, *, whole: bool) -> None:
    """Compile the layers of a patched model in place of what accelerate would compile: the whole model.

    accelerate's own regional compilation puts copies of modules into the model, which a patch does not know; this one
    leaves them where they are.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A patched model.
        args ([`PackedSFTConfig`]), accelerator (`Accelerator`):
            Of the trainer; backend and mode are those of its `TorchDynamoPlugin`.
        whole (`bool`):
            Whether the model is left to accelerate, as DeepSpeed's engine is under ZeRO-3.
    """
    if not args.torch_compile or whole:
        return
    plugin: Any = accelerator.state.dynamo_plugin
    layers = compile_layers(model, **plugin.to_kwargs())
    if not layers:  # of a class of its own
        return
    # Without this accelerate compiles the model around its layers when it prepares it.
    plugin.backend = DynamoBackend.NO
    logger.info("trl-packfa: torch_compile: %d layers, each by itself; those of one kind share graphs.", layers)


def graphs_for_every_layer(model: Any, args: PackedSFTConfig) -> AbstractContextManager[None]:
    """For the length of a `with` block torch compiles as many graphs as layers that share none need."""
    if not (args.packing and args.torch_compile):
        return nullcontext()
    return allow_graphs_of_layers(model_config(model).get_text_config().num_hidden_layers)
