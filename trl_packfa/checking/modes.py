"""Run a model as it trains, without random numbers, and restore its state afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..kernels.random_states import devices_of, restoring_random_states
from ..override import attributes_set, set_inside
from ..patching.bitsandbytes import unconverted
from ..patching.inspect import own_config
from ..patching.rotary import fresh_frequencies
from ..patching.state import unpadding_of
from .products import fast_half_products

# Names of rates at which random numbers are drawn in training: dropout, dropped layers, router jitter, noise.
_DRAWS = re.compile(r"drop|jitter|noise|neftune")


@contextmanager
def without_random_numbers(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Run a model without random numbers inside a `with` block, and restore its state afterwards.

    Calls in the block do not depend on the lengths of earlier calls, and multiply half precision fast on a CPU.
    Afterwards every module's mode, gradient, 4-bit layer, shard and rotary frequencies, what was counted of padded
    calls and the random state are as before. With `training`, the model is in training mode, where some models run
    other kernels and layers are checkpointed, and every rate at which random numbers are drawn is set to 0.
    """
    unpadding = unpadding_of(model)
    try:
        with (
            ExitStack() as silenced,
            restoring_modes(model),
            attributes_set((parameter, "grad", parameter.grad) for parameter in model.parameters()),
            restoring_random_states(devices_of(model)),
            unconverted(model),
            fresh_frequencies(model),
            fast_half_products(model),
            nullcontext() if unpadding is None else set_inside(unpadding, **vars(unpadding)),
        ):
            model.train(training)
            for config in map(own_config, model.modules()):
                if getattr(config, "return_dict", None) is False:  # every part must return its outputs by name
                    silenced.enter_context(set_inside(config, return_dict=True))
            if training:
                _silence(model, silenced)
            yield
    finally:
        # After a forward without a backward FSDP2 keeps its root's weights whole. Then a resumed run would not be
        # bit for bit the same as an uninterrupted one.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def restoring_modes(model: nn.Module) -> AbstractContextManager[None]:
    """Put back the mode of each module after a `with` block: parts may be in another mode than the model."""
    return attributes_set((module, "training", module.training) for module in model.modules())


def _silence(model: nn.Module, silenced: ExitStack) -> None:
    """Set every rate at which a model draws random numbers to 0 until the stack is closed."""
    owners: dict[int, Any] = {}
    for name, module in model.named_modules():
        if "drop" in type(module).__name__.lower():
            module.training = False
            # A LoRA layer with dropout runs other code, and the check must run it as well, so its rate stays.
            if "lora_dropout" not in name and isinstance(getattr(module, "p", None), float):
                silenced.enter_context(set_inside(module, p=0.0))
        if isinstance(module, nn.Embedding):
            module.training = False  # hooks that add noise (NEFTune) read this flag
        owners[id(module)] = module
        config = own_config(module)
        if config is not None:
            owners[id(config)] = config
            owners |= {id(part): part for part in vars(config).values() if hasattr(part, "model_type")}
    for owner in owners.values():
        for name, rate in list(vars(owner).items()):
            if isinstance(rate, float) and rate and _DRAWS.search(name):
                silenced.enter_context(set_inside(owner, **{name: 0.0}))
