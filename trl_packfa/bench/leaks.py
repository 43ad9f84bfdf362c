"""Whether documents of a side see each other, measured on its own model with its own batches."""

from __future__ import annotations

from typing import Any

import torch

from ..exactness.probe import vocabulary_of
from .sides import Side

# Tokens of the two documents; a change of the first must not move the second.
_LENGTHS = (7, 9)
# In units of the logits' standard deviation: rounding stays below, a leak is far above.
_MOVED = 1e-2


def leaks(trainer: Any, side: Side) -> bool:
    """Replace a document and see whether its neighbour's logits move; never so where each has a row of its own."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(1, vocabulary_of(trainer.model), (n,), generator=generator).tolist() for n in _LENGTHS * 2]
    was_training = trainer.model.training
    # In training mode, dropout the same in both: some quantized weights cannot be trained once they were evaluated.
    trainer.model.train()
    try:
        with torch.no_grad(), trainer.accelerator.autocast(), torch.random.fork_rng():
            first, changed = (_logits(trainer, side, [draw[i], draw[1]]) for i in (0, 2))
    finally:
        trainer.model.train(was_training)
    return bool((first - changed).abs().max() > _MOVED * first.std())


def _logits(trainer: Any, side: Side, documents: list[list[int]]) -> torch.Tensor:
    """Logits of the second document, from the batch that the side's collator makes of both."""
    joined = [token for document in documents for token in document]
    if side.kind.strategy.fills_rows and not side.kind.ours:
        lengths = {} if side.kind.strategy.wraps else {"seq_lengths": [len(document) for document in documents]}
        examples = [{"input_ids": joined, "labels": joined, **lengths}]
    else:
        examples = [{"input_ids": document, "labels": document} for document in documents]
    batch = trainer._prepare_inputs(trainer.data_collator(examples))
    torch.manual_seed(0)
    batch.pop("labels")
    logits = trainer.model(**batch, use_cache=False).logits
    return (logits[1] if logits.shape[0] == 2 else logits[0])[-_LENGTHS[1] :].float()
