"""TRL's `activation_offloading` moves what passes `saved_tensors_hooks`. So all that a GPU keeps for the backward must
pass them, but for narrow products."""

from dataclasses import replace

import pytest
import torch
from gpu import model
from torch.autograd.graph import saved_tensors_hooks

from trl_packfa.kernels.lora.products import ProjectTogether

SETTINGS = {
    "LoRA": model.LORA,
    "dropout": replace(model.LORA, dropout=0.05),
    "QLoRA": replace(model.LORA, four_bits=True, adapters="bfloat16"),
    "head that measures": replace(model.LORA, logs=True),
}
# Of the bytes that a forward keeps. The products with `lora_A` stay, 16 features of each of 8,192 tokens in a layer.
STAYS = 1e-3


class Elsewhere(saved_tensors_hooks):
    """Hooks that keep a tensor's shape only, as if it were on the host."""

    def __init__(self):
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        if isinstance(tensor, torch.nn.Parameter):  # as TRL
            return tensor
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.empty_strided(*packed[:2], dtype=packed[2])


def share_that_stays(setting):
    """Return the share of kept bytes that passed no hook, of two layers and the head."""
    setting = replace(setting, layers=2)
    return model.count(setting, Elsewhere()).kept_bytes / model.count(setting).kept_bytes


@pytest.mark.parametrize("name", SETTINGS)
def test_all_that_is_kept_passes_hooks_of_saved_tensors(name):
    assert share_that_stays(SETTINGS[name]) < STAYS


def test_what_passes_no_hook_is_seen(monkeypatch):
    """The control: one function keeps its input as an attribute."""
    forward = ProjectTogether.forward

    def keeping(ctx, x_TD, *inputs):
        ctx.kept = x_TD.clone()
        return forward(ctx, x_TD, *inputs)

    monkeypatch.setattr(ProjectTogether, "forward", keeping)
    assert share_that_stays(model.LORA) > 10 * STAYS
