"""Rows that several processes share: cut a packed batch, and put a model's results per token together again.

Labels are shifted before the row is cut, so that the last token of a part still predicts the first token of the next
part.

Shape letters: B rows, L row length, T packed tokens of the batch (B * L) with padding, N processes that share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from ..errors import InvalidLayout
from ..layout import PackedLayout
from ..layout.call_context import BOUNDARIES
from ..layout.from_call import layout_of
from ..layout.shard import RowShard


def shard_batch(
    batch: Mapping[str, Any], group: distributed.ProcessGroup | distributed.DeviceMesh | RowShard
) -> dict[str, Any]:
    """Cut a packed batch into equal parts, and return this process's part.

    All processes of the group must have the same batch. A patched model runs on the part: its attention exchanges
    tokens for heads between the processes. The loss of a part is a sum over its own labels; add the sums of all
    processes up.

    ```python
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "row"))
    outputs = model(**shard_batch(collator(documents), mesh["row"]))
    ```

    Args:
        batch (`Mapping[str, Any]`):
            A packed batch with tensors `(B, L, ...)` by token, and boundaries as [`DataCollatorForPacking`] sends.
        group (`torch.distributed.ProcessGroup` or `DeviceMesh`):
            The processes that share the row; a mesh has one dimension.

    Returns:
        `dict[str, Any]`: the tensors by token as `(1, T / N, ...)`; `shift_labels`, the label that each token
        predicts, where the batch has `labels`; `packed_layout` of the whole row; other values as they are.

    Raises:
        [`InvalidLayout`]: if the batch has no boundaries, or they contradict it.
    """
    layout = layout_of(dict(batch))
    if layout is None:
        raise InvalidLayout(
            "a batch without document boundaries cannot be shared by several processes.",
            do="Send packed_layout, cu_seq_lens_q or position_ids that restart, as DataCollatorForPacking does.",
        )
    shard = group if isinstance(group, RowShard) else RowShard.of(group)
    shape, padding = (layout.rows, layout.row_length), -layout.num_tokens % shard.size

    given = {name: value for name, value in batch.items() if name not in (*BOUNDARIES, "attention_mask")}
    positions = given.setdefault("position_ids", layout.position_ids())
    if positions.shape[:2] != shape:
        raise InvalidLayout(
            f"position_ids of shape {tuple(positions.shape)} cannot be cut: the batch has {shape[0]} x {shape[1]} "
            "tokens.",
            do="Send one position for each token of each row, or none: they count from 0 in each document.",
        )
    by_token = {name for name, value in given.items() if isinstance(value, torch.Tensor) and value.shape[:2] == shape}
    if "labels" in by_token and "shift_labels" not in by_token:
        given["shift_labels"] = shifted_labels(given["labels"], layout)
        by_token.add("shift_labels")
    fills = {name: -100 if "labels" in name else 0 for name in by_token}
    parts = {name: local_part(given[name].flatten(0, 1), shard, fill)[None] for name, fill in fills.items()}
    if padding:
        whole = PackedLayout.from_lengths(
            (*layout.lengths, padding), padding=layout.padding + padding, device=layout.cu_seqlens.device
        )
    else:
        whole = replace(layout, rows=1, prefix_tree=None, memo={})
    return {**given, **parts, "packed_layout": replace(whole, shard=shard, memo={})}


def local_part(tokens: torch.Tensor, shard: RowShard, fill: int) -> torch.Tensor:
    """Return this process's part of a tensor with a value for each token, padded with `fill` to N equal parts."""
    missing = -len(tokens) % shard.size
    return shard.local(torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), fill)]))


def shifted_labels(labels: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return for each token the label that it predicts, `(B, L)`: -100 at the last token of each document."""
    shifted = torch.nn.functional.pad(labels.flatten()[1:], (0, 1), value=-100)
    return shifted.index_fill(0, layout.cu_seqlens[1:].long().to(labels.device) - 1, -100).view_as(labels)


class ShardedRowModel:
    """A wrapper of a model that runs a whole row on the processes of a group, and returns all its tokens' results.

    The model is a patched causal LM with TRL's fused LM head. Every process of the group ([`shard_batch`]) calls it
    with the same batch and gets the same results, so losses are computed as on one process. The mean over processes of
    their gradients, as data parallel training takes it, is the gradient.
    """

    def __init__(self, model: Any, group: distributed.ProcessGroup | distributed.DeviceMesh) -> None:
        self.model, self.shard = model, RowShard.of(group)

    def __call__(self, **inputs: Any) -> Any:
        """Run the forward with `fused_lm_head=True`; return its outputs with log-probabilities `(B, L - 1)`."""
        labels = inputs["labels"]
        cut = shard_batch(inputs, self.shard)
        outputs = self.model(**cut)
        found = (outputs.log_probs, outputs.entropy, outputs.is_top1)
        scores = torch.stack([x.to(outputs.log_probs.dtype) for x in found])
        # (3, 1, T) with padding at the end; the last token of each row predicts nothing.
        scores = _Gathered.apply(scores, self.shard)[..., : labels.numel()].view(3, *labels.shape)[..., :-1]
        outputs.log_probs, outputs.entropy, is_top1 = scores[0], scores[1].detach(), scores[2]
        outputs.is_top1, outputs.loss = is_top1.detach().bool(), None
        outputs.label_mask = labels[:, 1:] != -100
        return outputs


class _Gathered(torch.autograd.Function):
    """Autograd function that puts the parts `(..., t)` of all processes together, `(..., T)`."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, shard: RowShard) -> torch.Tensor:
        ctx.shard = shard
        parts = [torch.empty_like(part) for _ in range(shard.size)]
        distributed.all_gather(parts, part.contiguous(), group=shard.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Each of the N processes has the same loss. The sum of their gradients is N times this process's.
        return ctx.shard.local(grad, dim=-1) * ctx.shard.size, None
