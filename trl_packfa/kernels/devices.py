"""Facts about devices that the products of kernels depend on."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from ..errors import first_line

logger = logging.getLogger(__name__)

# The environment variable that turns our Triton kernels off with `0`: torch's operators run in their place.
TRITON = "TRL_PACKFA_TRITON"


def is_cpu(device: torch.device) -> bool:
    """Tell whether a device is the CPU. Tests and the model of a GPU step replace it."""
    return device.type == "cpu"


def makes_float32(device: torch.device) -> bool:
    """Tell whether a device multiplies half precision into float32: CUDA does, from torch 2.8 on; ROCm does not."""
    return device.type == "cuda" and torch.version.hip is None and "dtype" in torch.ops.aten.mm.overloads()


@cache
def runs_triton(device: torch.device) -> bool:
    """Tell whether our Triton kernels run on a device: CUDA or ROCm with Triton, where the smallest of them is tried.

    Triton compiles at the first launch, for which some machines lack a C compiler or a driver's headers.
    """
    if device.type != "cuda" or os.environ.get(TRITON) == "0" or find_spec("triton") is None:
        return False
    try:
        logits, targets = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.long, device=device)
        kernel = import_module(".lm_head.triton_kernel", __package__)
        kernel.score_rows(logits, targets, torch.zeros(3, 1, device=device), measures=True, slopes=True)
    except Exception as error:  # of Triton, of a compiler, or of a driver
        logger.warning("trl-packfa: Triton does not run on %s, so torch's operators do: %s", device, first_line(error))
        return False
    return True
