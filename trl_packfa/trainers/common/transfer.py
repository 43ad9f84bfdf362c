"""Copies of batches to the device without waiting.

For a copy from ordinary memory, the host waits until the device has finished all earlier work, in every micro-batch. A
copy from page-locked memory is queued after that work. Data loaders use page-locked memory. Batches that are made
between two steps, as by `packing_strategy="step"`, are put into page-locked memory here.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

from ...layout import PackedLayout
from .config import CommonConfig


def copies_without_waiting(args: CommonConfig) -> bool:
    """Tell whether a run copies its batches from page-locked memory. DeepSpeed moves them itself."""
    return args.packing and args.device.type == "cuda" and args.dataloader_pin_memory and args.deepspeed is None


def send(data: Any, device: torch.device) -> Any:
    """Copy the tensors and layouts in nested dictionaries and lists to the device; leave other values unchanged."""
    pinned = recursively_apply(lambda value: value.pin_memory(), data, test_type=_is_pageable)
    return send_to_device(pinned, device, non_blocking=True)


def _is_pageable(value: Any) -> bool:
    # A layout is not a tensor, but it has `pin_memory` and `to` like a tensor.
    tensor = value.cu_seqlens if isinstance(value, PackedLayout) else value
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned()
