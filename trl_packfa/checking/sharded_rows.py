"""Compare a row that several processes share with the same row on one process: log-probabilities and gradients.

The other parts of the check run documents on one process. This one measures the exchange between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comparison import Comparison
from ..compile import uncompiled
from ..layout.shard import RowShard
from ..parallel.sequence_parallel import ShardedRowModel
from ..parallel.zero3 import gradients_taken
from ..patching.inspect import max_positions
from ..patching.state import find_state
from .documents import draw_documents, known_tokens
from .engine import compare
from .first_batch import trained_outputs
from .modes import without_random_numbers
from .probe import Collator, vocabulary_of
from .runs import Result, Run, take_gradients
from .subject import Subject, device_of

# Lengths of the documents in the row: some end inside a part, some are longer than a part, one is a single token.
LENGTHS = (150, 24, 1, 66, 37, 5, 130)


def check_sharded_row(
    model: nn.Module,
    group: distributed.ProcessGroup | distributed.DeviceMesh,
    *,
    collator: Collator,
    documents: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> list[Comparison]:
    """Run a packed row on one process and on all of a group, forwards and backwards; measure what rounding changes.

    All processes of the group call it. The patched `model` must accept `fused_lm_head=True`. `collator`, `documents`
    and `seed` are those of [`check`].
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    state, shard = find_state(model), RowShard.of(group)
    assert state is not None
    most, vocabulary = max_positions(state.parts.backbone), vocabulary_of(model)
    lengths = [min(length, most or length) for length in LENGTHS]
    tokens, _ = draw_documents(lengths, known_tokens(documents, None, vocabulary), vocabulary, seed)
    examples = [{"input_ids": ids.tolist()} for ids in tokens]
    batch: Any = send_to_device(collator(examples), device_of(model))
    shared = ShardedRowModel(model, group)

    def run(called: Callable[..., Any], sign: float | None, handed: Run) -> Run:
        log_probs = trained_outputs(model, batch, called).log_probs
        if subject.trained and sign is not None:
            take_gradients([-log_probs.mean()], sign * subject.loss_scale)
        return {0: Result(log_probs[0, :, None].detach().float())}

    def run_shared(sign: float | None, handed: Run) -> Run:
        found = run(shared, sign, handed)
        for parameter in subject.trained:
            # As data parallel training does. FSDP2 has averaged its own, and ZeRO-3's are not kept here.
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                shard.average(parameter.grad)
        return found

    with (
        gradients_taken(model, shard) as gradient_parts,
        without_random_numbers(model, training=True),
        uncompiled(model),
        torch.enable_grad(),
    ):
        subject = Subject(model, state, gradient_parts)
        return compare(subject, partial(run, model), [run_shared]).rows("shared row", str(shard.size))
