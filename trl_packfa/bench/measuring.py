"""Measurement of a side's steps: true tokens and their fingerprint, peak memory, and a trace of one step."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from ..data.collating import CountedBatch
from ..data.steps import micro_batches_of
from ..memory import resident_peak

# Token ids are mixed before they are added up, so that different sets of tokens have different sums.
_MIX = 2_654_435_761
_MODULUS = 2**31
# Operations that make the host wait for a device, then CUDA's own calls that do so.
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
_CUDA_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LISTED = 15


class Work(NamedTuple):
    """Counts of one optimizer step."""

    tokens: int  # true tokens
    computed: int  # tokens that went through the model, pads included
    documents: int  # parts of documents if rows cut them; rows if the batch has no boundaries
    micro_batches: int  # each one forward
    largest: int  # tokens of the largest micro-batch, pads included
    fingerprint: int  # equal for equal tokens in any order
    loss: float = 0.0  # sum of the micro-batches' losses


class StepCounter(TrainerCallback):
    """Counter of the batches and losses of a trainer's steps; it counts outside the timed part.

    Losses are those that `training_step` returns. To log each step would be unfair: some trainers compute entropy and
    accuracy only in the steps that they log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batches: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        trainer.add_callback(self)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Watch the steps. Before, a packed trainer would take these methods for a user's own, and pad their rows."""
        trainer = self._trainer
        get_batch_samples, training_step = trainer.get_batch_samples, trainer.training_step

        def samples(*args: Any, **kwargs: Any) -> Any:
            batches, number = get_batch_samples(*args, **kwargs)
            # Copies, because the trainer removes entries from its batches.
            self._batches = [copy(part) for batch in batches for part in micro_batches_of(batch)]
            self._losses = []
            return batches, number

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._losses.append(training_step(*args, **kwargs))
            return self._losses[-1]

        trainer.get_batch_samples, trainer.training_step = samples, step

    def take(self) -> Work:
        """Return the counts of the last step."""
        counted = [_count(batch) for batch in self._batches]
        return Work(
            tokens=sum(part.tokens for part in counted),
            computed=sum(part.computed for part in counted),
            documents=sum(part.documents for part in counted),
            micro_batches=len(counted),
            largest=max((part.computed for part in counted), default=0),
            fingerprint=sum(part.fingerprint for part in counted) % _MODULUS,
            loss=sum(float(loss) for loss in self._losses),
        )


def _count(batch: dict[str, Any]) -> Work:
    ids = batch["input_ids"].cpu()
    true, documents = _true_tokens(batch, ids)
    mixed = (ids[true].long() * _MIX + 1) % _MODULUS
    unpadded = isinstance(batch, CountedBatch) and batch.rows
    computed = int(true.sum()) if unpadded else ids.numel()
    return Work(int(true.sum()), computed, documents, 1, computed, int((mixed * mixed % _MODULUS).sum()))


def _true_tokens(batch: dict[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a mask `(B, L)` of the true tokens, and the number of documents."""
    layout = batch.get("packed_layout")
    if layout is not None:
        true = (torch.arange(ids.numel()) < ids.numel() - layout.padding).view_as(ids)
        return true, len(layout.lengths) - bool(layout.padding)
    if "attention_mask" in batch:
        return batch["attention_mask"].cpu().bool(), ids.shape[0]
    return torch.ones_like(ids, dtype=torch.bool), int((batch["position_ids"] == 0).sum())


def reset_peak() -> None:
    """Restart the count of [`peak_bytes`]; of resident memory if the system can do so."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak bytes since [`reset_peak`]: those that torch has allocated on a GPU, else resident ones."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak()


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


def summary(trace: profile, *, micro_batches: int) -> dict[str, Any]:
    """Return host waits of a micro-batch and aten calls of the traced step, and its operations by their own time in
    milliseconds.

    Sides have other numbers of micro-batches. The wait with which the measurement ends the step is not counted.
    """
    events: Any = trace.key_averages()
    counts = {event.key: event.count for event in events}
    waits, own = (_CUDA_WAITS, 1) if torch.cuda.is_available() else (WAITS, 0)
    on_device = any(getattr(event, "self_device_time_total", 0) for event in events)
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    by_time = sorted(events, key=lambda event: -getattr(event, field))[:_LISTED]
    return {
        "host_syncs": (sum(counts.get(name, 0) for name in waits) - own) / max(micro_batches, 1),
        "aten_calls": sum(count for name, count in counts.items() if name.startswith("aten::")),
        "operations": [[e.key, e.count, round(getattr(e, field) / 1000, 2)] for e in by_time],
    }
