"""CPU stand-ins for the launches of our Triton kernels (`trl_packfa/kernels/lora/launches.py`): torch's operators with
the same arguments, which write the same memory. The kernels are compared with them."""

import torch

from trl_packfa.kernels import devices
from trl_packfa.kernels.lora import launches

STAND_INS = (
    "swiglu_backward", "gradient_products", "draw_bits", "dropped_inner", "dropped_grad_A", "dropped_grad_x"
)  # fmt: skip


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


def draw_bits(seed, layers, tokens, features, rate):
    generator = torch.Generator().manual_seed(int(seed))
    words = -(-features // 32)
    kept = torch.rand((layers, tokens, words, 32), generator=generator) >= rate
    return (kept * 2 ** torch.arange(32)).sum(-1).to(torch.int32)


def kept_by(bits, features):
    """Return the mask `(layers, T, D)` of bits."""
    return (bits[..., None] >> torch.arange(32, device=bits.device)).bitwise_and(1).bool().flatten(-2)[..., :features]


def dropped_inner(x, A, bits, scaling):
    kept = x.float() * kept_by(bits, x.shape[1])
    by_layer = scaling * kept @ A.float().unflatten(0, (len(bits), -1)).mT
    return by_layer.transpose(0, 1).flatten(1).to(x.dtype)


def dropped_grad_A(outer, x, bits):
    kept = x.float() * kept_by(bits, x.shape[1])
    return (outer.float().unflatten(1, (len(bits), -1)).permute(1, 2, 0) @ kept).flatten(0, 1)


def dropped_grad_x(outer, A, bits, out):
    by_layer = outer.float().unflatten(1, (len(bits), -1)).transpose(0, 1) @ A.float().unflatten(0, (len(bits), -1))
    written(out, (by_layer * kept_by(bits, out.shape[1])).sum(0))


def pretend_triton(monkeypatch):
    """Run these stand-ins on a CPU during a test, as on a GPU."""
    for name in STAND_INS:
        monkeypatch.setattr(launches, name, globals()[name])
    monkeypatch.setattr(launches, "runs_on", lambda device: True)
    monkeypatch.setattr(devices, "is_cpu", lambda device: False)
