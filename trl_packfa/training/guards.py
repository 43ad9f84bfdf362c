"""What a training run says when it goes wrong: memory that does not suffice, a loss that is no number, a second run in
its folder. Nothing here costs a wait for the device outside of logging steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ..errors import InvalidConfig, NonFiniteLoss, is_out_of_memory
from .config import PackedSFTConfig

# Underscored: transformers leaves such files out when it uploads the folder.
LOCK = "_training.lock"
_SHOWN = 8
_REMEMBERED = 1024


@contextmanager
def memory_advice(args: PackedSFTConfig, inputs: dict[str, Any], *, budget: int | None) -> Iterator[None]:
    """Adds to an out-of-memory error which argument to lower, and to what. The error keeps its type.

    Args:
        args ([`PackedSFTConfig`]):
            The run's arguments.
        inputs (`dict[str, Any]`):
            The micro-batch that runs inside.
        budget (`int` or `None`):
            Tokens that a micro-batch may hold, where one is cut to a budget.
    """
    try:
        yield
    # torch's own error on accelerators is a RuntimeError, and its CPU allocator raises a plain one.
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            _add_note(error, _advice(args, inputs, budget))
        raise


def _advice(args: PackedSFTConfig, inputs: dict[str, Any], budget: int | None) -> str:
    tokens, layout = inputs["input_ids"].numel(), inputs.get("packed_layout")
    longest = tokens if layout is None else layout.max_seqlen
    held = f"trl-packfa: memory did not suffice for a micro-batch of {tokens} tokens (longest document {longest})."
    # Half as many tokens, but no document can be cut.
    if budget is not None and tokens > longest:
        lower = max(longest, tokens // 2)
        return f"{held} Lower max_tokens_per_microbatch from {budget} to {lower}: the same examples make each step."
    batch = args.per_device_train_batch_size
    if batch > 1 and tokens > longest:
        accumulation = args.gradient_accumulation_steps
        return (
            f"{held} Lower per_device_train_batch_size from {batch} to {batch // 2} and raise "
            f"gradient_accumulation_steps from {accumulation} to {math.ceil(accumulation * batch / (batch // 2))}."
        )
    more = "" if args.gradient_checkpointing else ", or set gradient_checkpointing=True"
    return f"{held} It is one document: lower max_length to {longest // 2}{more}."


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)  # type: ignore[attr-defined]  # Python 3.11
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])


class LossWatch:
    """Remembers the losses of the micro-batches since the last log, on their device, and what was in them."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.where: list[tuple[int, dict[str, Any]]] = []

    def add(self, step: int, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Remember a micro-batch of this step; keeps its token ids, which are small, alive until the next log."""
        self.losses.append(loss.detach())
        self.where.append((step, {name: inputs.get(name) for name in ("input_ids", "packed_layout")}))

    @property
    def is_full(self) -> bool:
        """Whether it is time to look without a log: runs that log rarely or never must not gather losses for ever."""
        return len(self.losses) >= _REMEMBERED

    def require_finite(self, tokenizer: Any) -> None:
        """Called where the host waits for the loss anyway; forgets what it has seen.

        Raises:
            [`NonFiniteLoss`]: naming the first step whose loss is none, and its documents.
        """
        losses, where = self.losses, self.where
        self.losses, self.where = [], []
        if not losses:
            return
        # All at once: one wait for the device, where one a micro-batch would slow every step.
        bad = (~torch.isfinite(torch.stack(losses))).nonzero().flatten()
        if not len(bad):
            return
        first = int(bad[0])
        step, inputs = where[first]
        raise NonFiniteLoss(
            f"the loss is {float(losses[first])} at step {step} (transformers would log the mean of the others).",
            why=_documents(inputs, tokenizer),
            do="Look at these documents; lower the learning rate or max_grad_norm, or train in bfloat16, not float16.",
        )


def _documents(inputs: dict[str, Any], tokenizer: Any) -> list[str]:
    """Each document's length and first tokens."""
    layout, ids = inputs["packed_layout"], inputs["input_ids"]
    documents = list(layout.split(ids)) if layout is not None else list(ids)
    lines = [
        f"document of {len(document)} tokens: {tokenizer.decode(document[:_SHOWN].tolist())!r} ..."
        for document in documents[:_SHOWN]
    ]
    return lines + ([f"and {len(documents) - _SHOWN} more"] if len(documents) > _SHOWN else [])


@contextmanager
def only_run_in(folder: str | Path) -> Iterator[None]:
    """For the length of a `with` block no other process trains into this folder.

    Raises:
        [`InvalidConfig`]: if one does, or nothing can be written there.
    """
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
        (Path(folder) / LOCK).unlink(missing_ok=True)  # while it is held, so that nobody has just taken it
        lock.release()
