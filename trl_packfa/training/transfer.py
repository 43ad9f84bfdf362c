"""From the host to the device without a wait.

A copy from ordinary memory makes the host wait until the device has done all work before it, every micro-batch anew. A
copy from page-locked memory is queued behind that work. Data loaders lock pages; batches that are made between two
steps, as `packing_strategy="step"` makes them, are locked here.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

from ..layout import PackedLayout
from .config import PackedSFTConfig


def copies_without_waiting(args: PackedSFTConfig) -> bool:
    """Whether a run's batches go to the device from page-locked memory. DeepSpeed moves them itself."""
    return args.packing and args.device.type == "cuda" and args.dataloader_pin_memory and args.deepspeed is None


def send(data: Any, device: torch.device) -> Any:
    """Tensors and layouts in nested dictionaries and lists, on the device; what else there is stays as it is."""
    pinned = recursively_apply(lambda value: value.pin_memory(), data, test_type=_is_pageable)
    return send_to_device(pinned, device, non_blocking=True)


def _is_pageable(value: Any) -> bool:
    # A layout is no tensor, but has `pin_memory` and `to`, which are called on it here as on one.
    tensor = value.cu_seqlens if isinstance(value, PackedLayout) else value
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned()
