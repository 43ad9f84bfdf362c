"""Random weights that make every token depend strongly on the tokens before it, near and far."""

from __future__ import annotations

import math

import torch
from torch import nn

# Parameters of decaying states, by the end of their name: the interval of their uniform values. The decay is slow, so
# that the state lasts for tens of tokens. Steps near one let every token write into the state.
_STATES: dict[str, tuple[float, float]] = {
    "A_log": (math.log(0.02), math.log(0.1)),
    "dt_bias": (-1.0, 1.0),
    "dt_proj.bias": (-1.0, 1.0),
    "dt_proj_bias": (-1.0, 1.0),
    "time_decay": (-5.0, -3.0),
    "time_mix_key": (0.2, 0.8),
    "time_mix_value": (0.2, 0.8),
    "time_mix_receptance": (0.2, 0.8),
    "fgate_preact.bias": (3.0, 5.0),
    "igate_preact.bias": (-1.0, 0.0),
    # keep the model's own value, which decays slowly
    "recurrent_param": (0.0, 0.0),
    # keep Dory's scales, which are multiplied by the inverse of their own initial values
    "lambda_1": (0.0, 0.0),
    "lambda_2": (0.0, 0.0),
    "sqk": (0.0, 0.0),
    "s_gate": (0.0, 0.0),
    "logit_scale": (0.0, 0.0),
}
# A vector with only smaller elements turns something off: a gate, a query, or the scale of a mixer.
_OFF = 0.1


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    """Draw new weights for the model from torch's current random state."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # tied parameters appear once
        module = modules[name.rpartition(".")[0]]
        interval = next((interval for end, interval in _STATES.items() if name.endswith(end)), None)
        if "Sinusoidal" in type(module).__name__:
            pass  # fixed positions, or the angles of a rotation
        elif interval is not None:
            if interval[0] < interval[1]:
                nn.init.uniform_(parameter, *interval)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=_std(module, parameter))
        elif not name.endswith(("weight", "bias")) and parameter.abs().max() < _OFF:
            nn.init.normal_(parameter)
        else:
            parameter += 0.1 * torch.randn_like(parameter)


def _std(module: nn.Module, weight: torch.Tensor) -> float:
    if isinstance(module, nn.Embedding):
        return 1.0
    convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return 1.5 / (math.prod(weight.shape[1:]) if convolution else weight.shape[-1]) ** 0.5
