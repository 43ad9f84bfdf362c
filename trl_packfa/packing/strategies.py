"""The ways to make batches of documents, each as a value: code reads what a strategy does, never its name."""

from __future__ import annotations

from dataclasses import dataclass

from .overflow import WRAP


@dataclass(frozen=True)
class Strategy:
    """One way to make batches of documents."""

    name: str  # the `packing_strategy` that chooses it; `"padded"` is TRL without packing
    packs: bool = True  # whether documents share rows
    recuts_steps: bool = False  # whether the documents of an optimizer step are cut anew into micro-batches
    # Whether rows of `max_length` tokens are filled over the whole dataset. An optimizer step then holds other
    # documents than in the padded run.
    fills_rows: bool = False
    overflow: str | None = None  # its policy for documents longer than `max_length`; by default the user's

    @property
    def wraps(self) -> bool:
        """True if documents are cut wherever a row is full."""
        return self.overflow == WRAP

    def __str__(self) -> str:
        return self.name


PADDED = Strategy("padded", packs=False, overflow="truncate")
STEP = Strategy("step", recuts_steps=True)
MINIBATCH = Strategy("minibatch")
BFD = Strategy("bfd", fills_rows=True)
BFD_SPLIT = Strategy("bfd_split", fills_rows=True, overflow="split")
WRAPPED = Strategy("wrapped", fills_rows=True, overflow=WRAP)

# By `packing_strategy`.
STRATEGIES = {strategy.name: strategy for strategy in (STEP, MINIBATCH, BFD, BFD_SPLIT, WRAPPED)}
