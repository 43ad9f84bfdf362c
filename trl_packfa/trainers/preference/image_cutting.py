"""Re-cutting of steps with images: each rank re-cuts its own pairs, and the loader processes each pair alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator

from ...packing import PackingReport
from ..common.image_cutting import OwnCutter
from ..common.image_examples import Merging, OneByOne
from ..common.image_rows import Example
from ..common.step_cutting import Documents, Slot
from ..padding_free.collating import CountingCollator
from .cutting import PairSlot, Part


class ImagePairCutter:
    """A cutter of a step's pairs with images, or of answers with images, into micro-batches of about equal cost.

    The default of the token budget `max_tokens_per_microbatch` is the size of the step's largest padded micro-batch,
    with its pads. Sizes are gathered over ranks; images and their outputs stay on their rank. `rows` is the number of
    rows of a pair.
    """

    gathers = False  # the outputs of a pair stay on its rank, as its images do

    def __init__(self, args: Any, *, rows: int, model: Any, accelerator: Accelerator, pad_token_id: int) -> None:
        self.own = OwnCutter(model, accelerator, budget=args.max_tokens_per_microbatch)
        self.rows, self.pad_token_id = rows, pad_token_id
        self._collator: CountingCollator | None = None

    @property
    def reports(self) -> dict[str, PackingReport]:
        """The report of the pairs that have trained, by dataset name."""
        return {"train": self.own.report}

    def loading(self, collate: Any) -> OneByOne:
        """Return the loader's collator, which processes each pair alone; `collate` is TRL's in its wrapper."""
        return OneByOne(collate.collator, self.own.weights)

    def cut(self, batches: Sequence[Documents], collate: Callable[[list[Example]], Any]) -> list[Slot]:
        """Re-cut a step; return one slot per padded micro-batch. The last slot holds the step, the others are idle."""
        cut = self.own.cut(batches, by_size=True)
        in_padded, merge = np.bincount(cut.padded), self.collator(collate)
        # A rank with fewer pairs than the others have micro-batches runs one untrained.
        parts = [Part((cut.shortest,), 0.0)] * (cut.count - len(cut.parts))
        # All pairs of a micro-batch come from padded micro-batches of the same size.
        parts += [Part(tuple(part), len(part) / int(in_padded[cut.padded[part[0]]])) for part in cut.parts]
        widths = np.array([example.width for example in cut.examples])
        last = PairSlot(
            [merge([cut.examples[i] for i in part.pairs]) for part in parts],
            cut.imbalance,
            parts=parts,
            padded=[np.flatnonzero(cut.padded == group).tolist() for group in range(len(batches))],
            examples=cut.examples,
            lengths=np.stack([example.lengths for example in cut.examples]),
            widths=np.array([widths[cut.padded == group].max() for group in cut.padded]),
        )
        return [*(Slot([]) for _ in batches[:-1]), last]

    def collator(self, collate: Callable[[list[Example]], Any]) -> CountingCollator:
        """Return the collator of processed pairs; `collate` is TRL's, with the processor."""
        if self._collator is None:
            self._collator = CountingCollator(Merging(collate, self.pad_token_id, rows=self.rows))
        return self._collator
