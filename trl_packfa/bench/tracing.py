"""Trace of one step: host waits for the device, recompiled graphs, and operations by time."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Operations that make the host wait for a device, then CUDA's own calls that do so.
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
_CUDA_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LISTED = 15


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def start_trace() -> profile:
    """Start torch's profiler and return it."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    trace = profile(activities=kinds, acc_events=True)
    trace.start()
    return trace


def summary(trace: profile) -> dict[str, Any]:
    """Return host waits and aten calls of the traced step, and its operations by their own time in milliseconds."""
    events: Any = trace.key_averages()
    counts = {event.key: event.count for event in events}
    waits = _CUDA_WAITS if torch.cuda.is_available() else WAITS
    on_device = any(getattr(event, "self_device_time_total", 0) for event in events)
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    by_time = sorted(events, key=lambda event: -getattr(event, field))[:_LISTED]
    return {
        "host_syncs": sum(counts.get(name, 0) for name in waits),
        "aten_calls": sum(count for name, count in counts.items() if name.startswith("aten::")),
        "operations": [[e.key, e.count, round(getattr(e, field) / 1000, 2)] for e in by_time],
    }
