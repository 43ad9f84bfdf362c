"""CPU stand-ins for the launches of our Triton kernels (`trl_packfa/kernels/lora/launches.py`): torch's operators with
the same arguments, which write the same memory. The kernels are compared with them."""

import torch


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
