"""CPU stand-ins for the launches of our Triton kernels (`trl_packfa/kernels/lora/launches.py`): torch's operators with
the same arguments, which write the same memory. The kernels are compared with them."""

import torch

from trl_packfa.kernels import devices
from trl_packfa.kernels.lora import launches

STAND_INS = ("swiglu_backward", "gradient_products")


def written(tensor, values):
    """Write values as Triton writes them: autograd's count of a tensor's versions does not see it."""
    tensor.data.copy_(values)
    return tensor


def swiglu_backward(gate, up, grad, *, overwrites):
    wide, sigmoid = gate.float(), torch.sigmoid(gate.float())
    silu = wide * sigmoid
    by_gate, by_up = grad.float() * (silu * (1 - sigmoid) + sigmoid) * up.float(), grad.float() * silu
    product = silu.to(gate.dtype) * up
    into = (gate, up) if overwrites else (torch.empty_like(gate), torch.empty_like(up))
    return written(into[0], by_gate), written(into[1], by_up), written(grad, product)


def gradient_products(grad, B, inner, outer, scaling, dtype):
    written(outer, scaling * (grad.float() @ B.float()))
    return (grad.float().T @ inner.float()).to(dtype)


def pretend_triton(monkeypatch):
    """Run these stand-ins on a CPU during a test, as on a GPU."""
    for name in STAND_INS:
        monkeypatch.setattr(launches, name, globals()[name])
    monkeypatch.setattr(launches, "runs_on", lambda device: True)
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
