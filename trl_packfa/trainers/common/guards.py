"""Help when a training run goes wrong: out of memory, a loss that is NaN or infinite, a second run in its folder.

Nothing here waits for the device outside of logging steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ...errors import InvalidConfig, NonFiniteLoss, is_out_of_memory
from .config import CommonConfig

# With an underscore, because transformers leaves such files out when it uploads the folder.
LOCK = "_training.lock"
_SHOWN = 8
_REMEMBERED = 1024


@contextmanager
def memory_advice(args: CommonConfig, inputs: dict[str, Any], *, budget: int | None) -> Iterator[None]:
    """Add advice to an out-of-memory error in a `with` block: the argument to lower, and its new value."""
    try:
        yield
    # torch's error on accelerators is a subclass of RuntimeError, and its CPU allocator raises a plain RuntimeError.
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            error.add_note(_advice(args, inputs, budget))
        raise


def _advice(args: CommonConfig, inputs: dict[str, Any], budget: int | None) -> str:
    tokens, layout, mask = inputs["input_ids"].numel(), inputs.get("packed_layout"), inputs.get("attention_mask")
    longest = tokens if layout is None else layout.max_seqlen
    if layout is None and mask is not None:  # padded rows
        tokens, longest = int(mask.sum()), int(mask.sum(-1).max())
    held = f"trl-packfa: out of memory with a micro-batch of {tokens} tokens (longest document {longest})."
    # Advise half as many tokens, but not fewer than the longest document, which cannot be cut.
    if budget is not None and tokens > longest:
        # Without a layout the batch has images, and the budget counts their patches as well.
        lower = budget // 2 if layout is None else max(longest, tokens // 2)
        return f"{held} Lower max_tokens_per_microbatch from {budget} to {lower}: each step keeps the same examples."
    batch = args.per_device_train_batch_size
    if batch > 1 and tokens > longest:
        accumulation = args.gradient_accumulation_steps
        return (
            f"{held} Lower per_device_train_batch_size from {batch} to {batch // 2} and raise "
            f"gradient_accumulation_steps from {accumulation} to {math.ceil(accumulation * batch / (batch // 2))}."
        )
    more = "" if args.gradient_checkpointing else ", or set gradient_checkpointing=True"
    return f"{held} The micro-batch is one document: lower max_length to {longest // 2}{more}."


class LossWatch:
    """A record of the micro-batches since the last log: their losses, on the device, and their token ids."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.where: list[tuple[int, dict[str, Any]]] = []

    def add(self, step: int, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Remember a micro-batch of this step. Its token ids, which are small, stay in memory until the next log."""
        self.losses.append(loss.detach())
        self.where.append((step, {name: inputs.get(name) for name in ("input_ids", "packed_layout")}))

    @property
    def is_full(self) -> bool:
        """`True` after many micro-batches without a log. Runs that rarely log must not collect losses without end."""
        return len(self.losses) >= _REMEMBERED

    def require_finite(self, tokenizer: Any) -> None:
        """Require that all remembered losses are finite, then forget them. The host waits for the losses here."""
        losses, where = self.losses, self.where
        self.losses, self.where = [], []
        if not losses:
            return
        # Check all at once, with one wait for the device. A wait per micro-batch would slow every step.
        bad = (~torch.isfinite(torch.stack(losses))).nonzero().flatten()
        if not len(bad):
            return
        first = int(bad[0])
        step, inputs = where[first]
        raise NonFiniteLoss(
            f"the loss is {float(losses[first])} at step {step} (transformers would log the mean of the others).",
            why=_documents(inputs, tokenizer),
            do="Look at these documents. Lower the learning rate or max_grad_norm, or train in bfloat16, not float16.",
        )


def _documents(inputs: dict[str, Any], tokenizer: Any) -> list[str]:
    """Describe each document of a micro-batch by its length and first tokens."""
    layout, ids = inputs["packed_layout"], inputs["input_ids"]
    documents = list(layout.split(ids)) if layout is not None else list(ids)
    lines = [
        f"document of {len(document)} tokens: {tokenizer.decode(document[:_SHOWN].tolist())!r} ..."
        for document in documents[:_SHOWN]
    ]
    return lines + ([f"and {len(documents) - _SHOWN} more"] if len(documents) > _SHOWN else [])


@contextmanager
def only_run_in(folder: str | Path) -> Iterator[None]:
    """Lock a folder inside a `with` block, so that no other process trains into it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(folder) / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise InvalidConfig(
            f"another run is training into {folder}.",
            why=["both would write, and remove, the same checkpoints"],
            do="Give this run another output_dir, or end the other one.",
        ) from error
    except OSError as error:
        raise InvalidConfig(
            f"output_dir {folder} cannot be written to: {error.strerror or error}.",
            do="Name a folder that can be written to, or pass save_strategy='no'.",
        ) from error
    try:
        yield
    finally:
        (Path(folder) / LOCK).unlink(missing_ok=True)  # before the release, so that no other process holds it yet
        lock.release()
