"""Check of the first re-cut micro-batch on images: an example has the losses in it that it has alone.

The decoder's rows are checked apart ([`compare_padded_batch`]). This check runs the whole model, so it also finds a
vision tower that mixes the images of a micro-batch, and merged images that belong to another example.

Shape letters: B rows, L row length, n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ...errors import ContaminationError
from ...exactness import quiet
from ...exactness.compare import FLOORS, NOISE_FACTOR, relative_difference
from ...exactness.rounding import last_places_off
from ...exactness.subject import compute_dtype
from ...patching.apply import find_state


class ExampleProof(NamedTuple):
    """The relative difference between the losses of an example in a micro-batch and alone.

    Attributes:
        difference (`float`), allowed (`float`): relative, over its trained tokens.
        rows (`int`): number of rows of the micro-batch.
    """

    difference: float
    allowed: float
    rows: int

    def require_exact(self) -> None:
        """Require that the difference is allowed."""
        if self.difference <= self.allowed:
            return
        raise ContaminationError(
            f"the first re-cut micro-batch is not exact: the losses of one of its {self.rows} examples differ by "
            f"{self.difference:.2e} from those of the example alone (allowed {self.allowed:.2e}).",
            why=["the model, or its processor, lets the images of a micro-batch have an effect on each other"],
            do="Train with packing_strategy='minibatch', which keeps the padded run's micro-batches, and report it.",
        )


@torch.no_grad()
def compare_example(
    model: Any, together: dict[str, Any], alone: dict[str, Any], prepare: Callable[[Any], Any]
) -> ExampleProof:
    """Run a micro-batch and its last example alone, without dropout, and compare the example's losses.

    `model`, wrapped or not, has TRL's fused LM head. In `alone`, the batch of the last example of `together`, tokens
    begin in the first column. `prepare` moves a batch to the device.
    """
    state = find_state(model)
    counted = vars(state.unpadding).copy() if state is not None and state.unpadding is not None else {}

    def losses(batch: dict[str, Any], *, off: bool = False) -> torch.Tensor:
        with last_places_off(model) if off else nullcontext():
            return model(**prepare(dict(batch)), use_cache=False, fused_lm_head=True).log_probs[-1]

    with quiet(model, training=True):
        found, own, rounded = losses(together), losses(alone), losses(alone, off=True)
    if state is not None and state.unpadding is not None:  # these calls do not count in the logs
        vars(state.unpadding).update(counted)
    # All tokens together are one vector `(1, n)`: the loss of a single token may be near 0.
    found, own, rounded = (values[: len(own)][None] for values in (found, own, rounded))
    noise = relative_difference(rounded, own)
    allowed = max(NOISE_FACTOR * noise, FLOORS[compute_dtype(model, own.dtype)])
    return ExampleProof(relative_difference(found, own), allowed, len(together["input_ids"]))
