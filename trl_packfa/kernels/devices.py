"""Facts about devices that the products of kernels depend on."""

from __future__ import annotations

import torch


def is_cpu(device: torch.device) -> bool:
    """Tell whether a device is the CPU. Tests and the model of a GPU step replace it."""
    return device.type == "cpu"


def makes_float32(device: torch.device) -> bool:
    """Tell whether a device multiplies half precision into float32: CUDA does, from torch 2.8 on; ROCm does not."""
    return device.type == "cuda" and torch.version.hip is None and "dtype" in torch.ops.aten.mm.overloads()
