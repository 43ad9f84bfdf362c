"""Changes of a model's code besides our patch: Liger's own patch, and layers that torch compiles.

The Trainer would apply Liger's when training starts. That is too late: the check would have checked another
model, and Liger's forwards would replace those that keep documents apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend
from transformers.integrations.liger import apply_liger_kernel

from ...compile import allow_graphs_of_layers
from ...config.sft import PackedSFTConfig
from ...override import set_inside
from ...patching.apply import compile_layers
from ...patching.inspect import model_config

logger = get_logger(__name__)


def apply_liger(model: Any, args: PackedSFTConfig) -> None:
    """Apply Liger's own patch as the Trainer would, if the arguments ask for it."""
    if not args.use_liger_kernel:
        return
    apply_liger_kernel(model, args.liger_kernel_config)
    logger.info(
        "trl-packfa: use_liger_kernel=True: Liger has patched the model, and it is checked so. "
        "Without it, packed calls on CUDA use the same kernels, and gated MLPs with LoRA run fused."
    )


def compile_by_layer(model: Any, args: PackedSFTConfig, accelerator: Accelerator) -> None:
    """Compile the layers of a patched model one by one, so that a deep model compiles as fast as a single layer.

    Backend and mode are those of the accelerator's `TorchDynamoPlugin`. accelerate's own regional compilation replaces
    modules by copies that a patch does not know. This function keeps the modules.
    """
    if not args.torch_compile:
        return
    plugin: Any = accelerator.state.dynamo_plugin
    layers = compile_layers(model, **plugin.to_kwargs())
    if not layers:  # none was found
        return
    # Otherwise accelerate would also compile the model around its layers when it prepares it.
    plugin.backend = DynamoBackend.NO
    logger.info("trl-packfa: torch_compile: %d layers, each by itself; layers of one kind share graphs.", layers)


@contextmanager
def changed_already(model: Any, args: PackedSFTConfig) -> Iterator[None]:
    """Keep the Trainer from applying Liger's patch again inside a `with` block, and let every layer have a graph."""
    graphs: AbstractContextManager[Any] = nullcontext()
    if args.packing and args.torch_compile:  # in case layers share none
        graphs = allow_graphs_of_layers(model_config(model).get_text_config().num_hidden_layers)
    # The Trainer reads the argument when it prepares the model for training.
    with graphs, set_inside(args, use_liger_kernel=args.use_liger_kernel and not args.packing):
        yield
