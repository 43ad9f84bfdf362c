"""`torch_compile=True`: compile each layer by itself, so that a deep model compiles as fast as a single layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend

from ...patching.apply import compile_layers
from ...patching.inspect import model_config
from ...runtime.compile import allow_graphs_of_layers
from .config import CommonConfig

logger = get_logger(__name__)


def compile_by_layer(model: Any, args: CommonConfig, accelerator: Accelerator, *, whole: bool) -> None:
    """Compile the layers of a patched model one by one, and stop accelerate from compiling the whole model.

    Backend and mode are those of the accelerator's `TorchDynamoPlugin`. accelerate's own regional compilation replaces
    modules by copies that a patch does not know. This function keeps the modules. `whole` leaves the model to
    accelerate, as under ZeRO-3.
    """
    if not args.torch_compile or whole:
        return
    plugin: Any = accelerator.state.dynamo_plugin
    layers = compile_layers(model, **plugin.to_kwargs())
    if not layers:  # none was found
        return
    # Otherwise accelerate would also compile the model around its layers when it prepares it.
    plugin.backend = DynamoBackend.NO
    logger.info("trl-packfa: torch_compile: %d layers, each by itself; layers of one kind share graphs.", layers)


def graphs_for_every_layer(model: Any, args: CommonConfig) -> AbstractContextManager[None]:
    """Let torch compile a graph for every layer inside a `with` block, in case layers share none."""
    if not (args.packing and args.torch_compile):
        return nullcontext()
    return allow_graphs_of_layers(model_config(model).get_text_config().num_hidden_layers)
