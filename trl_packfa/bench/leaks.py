"""Test whether documents of a side see each other, on its own model with its own batches."""

from __future__ import annotations

from typing import Any

import torch

from ..exactness.probe import vocabulary_of
from .sides import Side

# Lengths of the two documents in tokens. A change of the first must not change the logits of the second.
_LENGTHS = (7, 9)
# Threshold in standard deviations of the logits: rounding stays below it, a leak is far above.
_MOVED = 1e-2


def leaks(trainer: Any, side: Side) -> bool:
    """Replace a document and tell whether the logits of its neighbour change; with one row each they never do."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(1, vocabulary_of(trainer.model), (n,), generator=generator).tolist() for n in _LENGTHS * 2]
    was_training = trainer.model.training
    # Use training mode with equal dropout: some quantized weights can no longer be trained after evaluation mode.
    trainer.model.train()
    try:
        with torch.no_grad(), trainer.accelerator.autocast(), torch.random.fork_rng():
            first, changed = (_logits(trainer, side, [draw[i], draw[1]]) for i in (0, 2))
    finally:
        trainer.model.train(was_training)
    return bool((first - changed).abs().max() > _MOVED * first.std())


def _logits(trainer: Any, side: Side, documents: list[list[int]]) -> torch.Tensor:
    """Return the logits of the second document, from the batch that the side's collator makes of both."""
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
