"""Save and restore the states of torch's random generators, on the host and on any kind of accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the accelerators that hold a module's parameters."""
    devices = {parameter.device for parameter in module.parameters()}
    return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's generator, without waiting for the device."""
    return (
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(*_index(device))
    )


def random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the host's state, then those of the devices."""
    return [torch.get_rng_state(), *map(random_state, devices)]


@contextmanager
def restoring_random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random states of host and devices after a `with` block, so that they draw as if it had not run."""
    # `torch.random.fork_rng` serves one kind of device only, and needs device numbers, which Apple's devices lack.
    devices = list(devices)
    host, *others = random_states(devices)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        for device, state in zip(devices, others, strict=True):
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that name the device; none for Apple's, which have only one."""
    return () if device.type == "mps" else (device,)
