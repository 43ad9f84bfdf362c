"""How fast a run trains: true tokens a second, and the share of the machine's arithmetic that they need (MFU)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .config import PackedSFTConfig
from .flops import ModelFlops, peak_flops

# What measuring the machine may take, once a run, in seconds.
_MEASURING = 0.05


class SpeedMeter:
    """Counts what one rank trains between two logs; reads the device only when it is read.

    Args:
        model (`torch.nn.Module`): what trains, not wrapped by an engine.
        args ([`PackedSFTConfig`]): MFU is a share of its `peak_tflops`, or of what a matrix product reaches here.
        world_size (`int`): ranks that train together, each on a device of its own.
    """

    def __init__(self, model: Any, args: PackedSFTConfig, *, world_size: int) -> None:
        self._flops, self._config = ModelFlops.of(model), model.config
        self._args, self._world_size = args, world_size
        self._peak: float | None = None
        self._since: tuple[float, int] | None = None
        self._pauses = 0
        self._forget()

    def _forget(self) -> None:
        # Tensors where a padded batch's mask had to be counted on its device.
        self._tokens, self._squares, self._trained = [0, 0, 0]
        self._paused = 0.0

    def start(self, tokens: int) -> None:
        """The clock runs from the first call on; `tokens` is how many all ranks had trained by then."""
        if self._since is None:
            # An evaluation before training, say, takes nothing off its time.
            self._since, self._paused = (time.perf_counter(), tokens), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For the length of a `with` block the clock stands still: what runs inside is not training."""
        self._pauses += 1
        began = time.perf_counter()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused += time.perf_counter() - began

    def add(self, inputs: dict[str, Any]) -> None:
        """A micro-batch: the tokens of its documents, their squares, and those that the LM head scores."""
        layout, labels = inputs.get("packed_layout"), inputs["labels"]
        if layout is not None:
            # From the host's lengths, where a tensor would be read back from the device.
            lengths = layout.lengths[:-1] if layout.padding else layout.lengths
            tokens: Any = sum(lengths)
            squares: Any = sum(length * length for length in lengths)
        else:
            lengths = (
                inputs["attention_mask"].sum(-1)
                if "attention_mask" in inputs
                else labels.new_full((len(labels),), labels.shape[-1])
            )
            tokens, squares = lengths.sum(), (lengths**2).sum()
        self._tokens, self._squares = self._tokens + tokens, self._squares + squares
        self._trained = self._trained + (labels[..., 1:] != -100).sum()  # the first is predicted from nothing

    def read(self, tokens: int) -> dict[str, float]:
        """`tokens_per_second` of all ranks and `mfu` since the last time; nothing where nothing was trained.

        This rank's documents speak for all of them in what attention needs.
        """
        now, since, counted = time.perf_counter(), self._since, float(self._tokens)
        figures: dict[str, float] = {}
        if since is not None and tokens > since[1] and counted:
            rate = (tokens - since[1]) / (now - since[0] - self._paused)
            # The mean document of a token is longer than the mean document: lengths 1 and 3 give (1 + 9) / 4 = 2.5,
            # not 2.
            needed = self._flops.per_token(seen=float(self._squares) / counted, trained=float(self._trained) / counted)
            if self._peak is None:
                self._peak = peak_flops(self._config, self._args, seconds=_MEASURING)
            figures = {"tokens_per_second": rate, "mfu": rate * needed / (self._peak * self._world_size)}
        self._since = (time.perf_counter(), tokens)
        self._forget()
        return figures
