"""The states of random generators, of the host and of accelerators that are stood in for by their functions."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_packfa.kernels.random_states import devices_of, random_states, restoring_random_states


@pytest.fixture
def generators(monkeypatch):
    """A state by device, and torch's functions of two kinds of devices: Apple's is one, and takes no number."""
    states = {"xpu:0": torch.tensor([1]), "xpu:1": torch.tensor([2]), "mps": torch.tensor([3])}

    def put(name, state):
        states[str(name)] = state.clone()

    modules = {
        "xpu": SimpleNamespace(get_rng_state=lambda device: states[str(device)].clone(),
                               set_rng_state=lambda state, device: put(device, state)),
        "mps": SimpleNamespace(get_rng_state=lambda: states["mps"].clone(), set_rng_state=lambda s: put("mps", s)),
    }  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    return states


DEVICES = [torch.device("xpu", 0), torch.device("xpu", 1), torch.device("mps")]


def test_every_device_draws_what_it_would_have_drawn(generators):
    host, before = torch.get_rng_state(), {name: state.clone() for name, state in generators.items()}
    with pytest.raises(ValueError, match="inside"), restoring_random_states(DEVICES):
        torch.rand(1)
        for name in generators:
            generators[name] = torch.tensor([9])
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), host)
    assert all(torch.equal(generators[name], before[name]) for name in before)


def test_a_device_that_has_drawn_is_seen(generators):
    before = random_states(DEVICES)
    generators["mps"] += 1
    moved = [not torch.equal(a, b) for a, b in zip(before, random_states(DEVICES), strict=True)]
    assert moved == [False, False, False, True]


def test_a_model_on_the_host_has_no_devices_to_ask():
    with torch.device("meta"):
        assert not devices_of(nn.Linear(2, 2))
    assert not devices_of(nn.Linear(2, 2))
