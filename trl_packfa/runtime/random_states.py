"""The states of torch's random generators, of the host and of any kind of accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def devices_of(module: nn.Module) -> list[torch.device]:
    """The accelerators that a module's parameters lie on."""
    devices = {parameter.device for parameter in module.parameters()}
    return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)


def random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """The host's state, then those of the devices."""
    return [torch.get_rng_state(), *(_module(d).get_rng_state(*_index(d)) for d in devices)]


@contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """After a `with` block the host and the devices draw what they would have drawn without it."""
    # `torch.random.fork_rng` does so for one kind of device that numbers its states, which Apple's does not.
    devices = list(devices)
    host, *others = random_states(devices)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        for device, state in zip(devices, others, strict=True):
            _module(device).set_rng_state(state, *_index(device))


def _module(device: torch.device) -> Any:
    """`torch.cuda`, `torch.xpu`, `torch.mps`, ..."""
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """What says which device: nothing where there is one only."""
    return () if device.type == "mps" else (device,)
