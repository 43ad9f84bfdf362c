"""Compare a row that several processes share with the same row on one process: log-probabilities and gradients.

The other parts of the check run documents on one process. This one measures the exchange between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..compile import uncompiled
from ..layout.shard import RowShard
from ..parallel.sequence_parallel import ShardedRowModel
from ..parallel.zero3 import gradients_taken
from ..patching.apply import find_state
from ..patching.inspect import find_backbone, max_positions
from .compare import nan_as_inf, relative_gradients, worst_gradient
from .comparison import NOISE_FACTOR, TOLERANCES, Comparison
from .documents import draw_documents, known_tokens
from .first_batch import trained_outputs
from .probe import Collator, vocabulary_of
from .products import fast_half_products
from .quiet import quiet
from .rounding import last_places_off
from .subject import Subject, device_of, rounding_dtype

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
    most, vocabulary = max_positions(find_backbone(model, state.patch)), vocabulary_of(model)
    lengths = [min(length, most or length) for length in LENGTHS]
    tokens, _ = draw_documents(lengths, known_tokens(documents, None, vocabulary), vocabulary, seed)
    examples = [{"input_ids": ids.tolist()} for ids in tokens]
    batch: Any = send_to_device(collator(examples), device_of(model))
    shared = ShardedRowModel(model, group)
    with (
        gradients_taken(model, shard) as gradient_parts,
        quiet(model, training=True),
        uncompiled(model),
        fast_half_products(model),
        torch.enable_grad(),
    ):
        subject = Subject(model, state, gradient_parts)

        def run(sign: float, called: Callable[..., Any] = model) -> torch.Tensor:
            found = trained_outputs(model, batch, called).log_probs
            if subject.trained:
                (-sign * found.sum() / found.numel()).backward()
            return found.detach().float()

        whole, norms = run(1.0), subject.norms()
        apart = _rms(run(-1.0, shared) - whole)
        for parameter in subject.trained:
            # As data parallel training does. FSDP2 has averaged its own, and ZeRO-3's are not kept here.
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                shard.average(parameter.grad)
        changed = relative_gradients(subject.dimensions, subject.norms(), norms)
        subject.clear()
        with last_places_off(model, by=0.0):
            as_it_is = run(-1.0)
        with last_places_off(model):
            rounding = _rms(run(1.0) - as_it_is)
        noise, dtype = relative_gradients(subject.dimensions, subject.norms(), norms), rounding_dtype(model)
    of = str(shard.size)
    allowed = max(NOISE_FACTOR * rounding, TOLERANCES[dtype].log_probs)
    found = [Comparison("shared row", apart, allowed, noise=rounding, of=of)]
    if sum(norms):
        worst = worst_gradient(changed, noise, dtype, subject.dimensions)
        found.append(worst.named("shared row gradients", of=of))
    return found


def _rms(difference: torch.Tensor) -> float:
    return nan_as_inf(float(difference.square().mean().sqrt()))
