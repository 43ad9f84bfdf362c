"""Weights of the loss, the mean loss of each source, and terms that depend on a whole padded micro-batch.

TRL sums the log-probabilities of a step's trained tokens and divides by their number. With `loss_weighting="example"`
each token is weighted by one over the number of its example's trained tokens, and the sum is divided by the number of
examples. The result is the mean of the examples' own losses, like padded training with one example per micro-batch.

A packed micro-batch may hold examples of several padded ones. The routers' auxiliary loss and NEFTune's noise are
computed as in the padded micro-batches, from the padded micro-batch of each example ([`Origins`]).

Shape letters: B rows, L row length, S documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ...checking import without_random_numbers
from ...config.sft import PackedSFTConfig
from ...data.collator import FIRST_LABELS, SOURCES
from ...data.origins import ORIGINS, Origins
from ...errors import UnsupportedModel
from ...layout import PackedLayout
from ...layout.shard import RowShard
from ...parallel.ranks import row_group, summed
from ...parallel.sequence_parallel import local_part
from ...patching import inspect
from ...patching.neftune import EmbeddingNoise
from ...patching.router_loss import BalancedModel


def documents_of_labels(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each label `(B, L - 1)`, its document (a row, if not packed), and whether it is trained."""
    labels = inputs["labels"]
    layout: PackedLayout | None = inputs.get("packed_layout")
    if layout is None:
        documents = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    else:
        documents = layout.to(labels.device).document_ids().long()
    # Shift as TRL does: position i is the label that token i predicts. It belongs to the document of token i + 1.
    return documents[:, 1:], labels[:, 1:] != -100


def count_examples(inputs: Mapping[str, Any]) -> int:
    """Count the documents of a batch that train at least one token."""
    documents, trained = documents_of_labels(inputs)
    return int(documents[trained].unique().numel())


def counted_labels(inputs: Mapping[str, Any], weighting: str) -> Mapping[str, Any]:
    """Make a batch with the labels that the Trainer is to count, where those of the packed rows are others.

    With `weighting="example"` these are one for each trained example. Padded, first tokens have labels, which the
    Trainer counts for classes whose loss it does not know.
    """
    if weighting == "example":
        return _as_example_labels(inputs)
    if first := inputs.get(FIRST_LABELS):
        labels = inputs["labels"]
        return {"labels": torch.cat([labels, labels.new_zeros(1, first)], dim=1)}
    return inputs


def _as_example_labels(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make a batch with one label for each trained example, so that the Trainer counts examples."""
    # The Trainer counts labels that are not -100, so the labels are zeros. It counts `shift_labels` without shifting.
    labels = torch.zeros((1, count_examples(inputs)), dtype=torch.long, device=inputs["labels"].device)
    return {"labels": labels, "shift_labels": labels}


def example_weights(inputs: Mapping[str, Any], *, divided_by_tokens: bool = False) -> torch.Tensor:
    """Return, for each label `(B, L - 1)`, one over the number of trained tokens of its document.

    With `divided_by_tokens`, TRL divides the sum by the batch's trained tokens, not by the step's examples. Then the
    weights make the result the mean of the batch's examples.
    """
    documents, trained = documents_of_labels(inputs)
    # For example 4 trained tokens weigh 1/4 each. The weights of an example add up to 1.
    counts = torch.zeros(int(documents.max()) + 1, device=documents.device)
    counts.index_add_(0, documents[trained], torch.ones_like(documents[trained], dtype=counts.dtype))
    share = counts.sum() / (counts > 0).sum().clamp(min=1) if divided_by_tokens else 1.0
    return share / counts.clamp(min=1)[documents]


class WeightedModel:
    """A wrapper of a model that weights the log-probabilities for TRL's sum. It keeps the unweighted ones for metrics.

    `model` is a causal LM with TRL's fused LM head, `weights` `(B, L - 1)`, or `None` for TRL's own loss.
    """

    def __init__(self, model: torch.nn.Module, weights: torch.Tensor | None) -> None:
        self.model, self.weights = model, weights
        self.log_probs: torch.Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        """Run the model's forward, keep the log-probabilities, and weight them."""
        outputs = self.model(**inputs)
        self.log_probs = outputs.log_probs.detach()
        if self.weights is not None:
            outputs.log_probs = outputs.log_probs * self.weights.to(outputs.log_probs)
        return outputs


class SourceLosses:
    """The mean loss of each source since the last log, in training and in evaluation, over all ranks."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # By mode and source: summed loss and trained tokens.
        self._sums: dict[str, dict[str, np.ndarray]] = {"train": {}, "eval": {}}

    def add(self, mode: str, inputs: Mapping[str, Any], log_probs: torch.Tensor) -> None:
        """Count a batch: `inputs` with its `sources`, `log_probs` `(B, L - 1)`."""
        documents, trained = documents_of_labels(inputs)
        size = len(inputs[SOURCES])
        sums = torch.zeros(size, device=log_probs.device, dtype=torch.float32)
        sums.index_add_(0, documents[trained], -log_probs[trained].float())
        counts = torch.bincount(documents[trained], minlength=size)
        for source, *found in zip(inputs[SOURCES], sums.tolist(), counts.tolist(), strict=False):
            self._sums[mode][source] = self._sums[mode].get(source, 0) + np.array(found)

    def read(self, mode: str) -> dict[str, float]:
        """Return the mean losses of all ranks by `loss/<source>` or `eval_loss/<source>`, and reset the counts."""
        totals, self._sums[mode] = summed(self.accelerator, self._sums[mode]), {}
        prefix = "" if mode == "train" else "eval_"
        means = {source: float(loss / count) for source, (loss, count) in sorted(totals.items()) if count}
        return {f"{prefix}loss/{source}": mean for source, mean in means.items()}


# Tokens of the document on which routers are tried.
_TRIED_TOKENS = 4


class PaddedTerms:
    """The routers' auxiliary loss and NEFTune's noise of a run's micro-batches, computed as if they were padded.

    `balances_experts`: the routers' auxiliary loss is trained, as TRL has decided. The accelerator sums the parts of a
    padded micro-batch over ranks. `noise` is NEFTune's, once training has begun.
    """

    def __init__(self, args: PackedSFTConfig, accelerator: Accelerator, model: Any, *, balances_experts: bool) -> None:
        self.args, self.accelerator, self.model = args, accelerator, model
        self.balances_experts = balances_experts
        self.noise: EmbeddingNoise | None = None
        self._experts_per_token: int | None = None
        self._row_group: DeviceMesh | None = row_group(args, accelerator)

    def wrap(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Wrap the model for this batch so that the terms are computed as padded; remove `Origins` from the batch."""
        origins: Origins | None = inputs.pop(ORIGINS, None)
        if not (self.balances_experts or self.noise):
            return model
        ids = inputs["input_ids"]
        if "attention_mask" in inputs:  # padded, for metrics or predictions
            padding = inputs["attention_mask"].flatten() == 0
            # The batch is one padded micro-batch: its tokens are in group 0, its padding in group 1, which is G.
            groups, tokens = padding.long(), (~padding).sum()[None]
            lengths = None
        else:
            origins = Origins.of_whole(inputs) if origins is None else origins
            tokens = origins.tokens  # padding is in group G
            groups = origins.spread(origins.groups, ids, padding=len(tokens)).long().flatten()
            lengths = self._padded_lengths(origins, ids)
        if self.noise is not None:
            self.noise.lengths = lengths
        if not self.balances_experts:
            return model
        self._experts_per_token = self._experts_per_token or _experts_per_token(self.model)
        share, reduce = (1.0, None) if origins is None else (origins.share, self._reduction(origins))
        if origins is not None and (group := self._row_group) is not None:
            # Each process has the logits of its part of the row. The mean of the parts' losses over the processes,
            # times their number, is the row's.
            shard = RowShard.of(group)
            groups, share = local_part(groups, shard, len(tokens)), share * shard.size
        return BalancedModel(
            model, groups, tokens, experts_per_token=self._experts_per_token, share=share, reduce=reduce
        )

    def _reduction(self, origins: Origins) -> Callable[[torch.Tensor], Any] | None:
        """Return the sum over the ranks that hold tokens of the same padded micro-batches, `None` if only this one."""
        if origins.shared:
            return self.accelerator.reduce
        group = self._row_group

        def over_row(counts: torch.Tensor) -> torch.Tensor:
            distributed.all_reduce(counts, group=group.get_group())  # type: ignore[union-attr]
            return counts

        return None if group is None else over_row

    def _padded_lengths(self, origins: Origins, ids: torch.Tensor) -> torch.Tensor:
        """Return, for each token `(B, L)`, the length that its example's padded row would have.

        Filled rows replace no padded micro-batch; there it is the example's own length.
        """
        multiple: Any = self.args.pad_to_multiple_of or 1
        own = self.args.strategy.fills_rows
        # For example both rows of a padded micro-batch with documents of 3 and 5 tokens have length 5.
        rows: Any = origins.sizes if own else [origins.longest[group] for group in origins.groups]
        padded = [-(-row // multiple) * multiple for row in rows]
        return origins.spread(padded, ids, padding=1)

    def find_routers(self, *, has_own_head: bool) -> bool:
        """Tell whether the model can compute the routers' auxiliary loss, by a trial on a few tokens.

        It cannot if no layer returns router logits, whatever the config says, or if our head does not serve the
        model and the model computes no auxiliary loss itself (Llama-4).
        """
        weight = self.model.get_input_embeddings().weight
        ids = torch.ones((1, _TRIED_TOKENS), dtype=torch.long, device=weight.device)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        # With a mask, like a padded batch, because this is a trial of routers, not of packing.
        balanced = self.wrap(self.model, batch)
        with without_random_numbers(self.model), torch.no_grad(), self.accelerator.autocast():
            balanced(**batch, fused_lm_head=True)
            makes = not has_own_head or self.model(ids, output_router_logits=True).aux_loss is not None
        self.balances_experts = bool(balanced.layers) and makes
        return self.balances_experts

    def add_noise(self, handle: Any, alpha: float) -> Any:
        """Replace the Trainer's hook of NEFTune on the embedding by noise that is scaled as in padded training."""
        # Otherwise both hooks would add noise.
        handle.remove()
        self.noise = EmbeddingNoise(alpha)
        return inspect.inner_model(self.model).get_input_embeddings().register_forward_hook(self.noise)


def _experts_per_token(model: Any) -> int:
    inner: Any = inspect.inner_model(model)
    for named in (inner.config.get_text_config(), inner):
        if getattr(named, "num_experts_per_tok", None) is not None:
            return named.num_experts_per_tok
    raise UnsupportedModel(
        f"{type(inner).__name__} does not say how many experts a token goes to (num_experts_per_tok).",
        do="Set router_aux_loss_coef=0.0 to train without the routers' auxiliary loss.",
    )
