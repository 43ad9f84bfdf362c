"""Terms that depend on a whole padded micro-batch: the routers' auxiliary loss and NEFTune's noise.

A packed micro-batch may hold examples of several padded ones. Both terms are computed as in the padded micro-batches,
from the padded micro-batch of each example ([`Origins`]).

Shape letters: B rows, L row length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedModel
from ...exactness import quiet
from ...layout.shard import RowShard
from ...patching import inspect
from ...patching.router_loss import BalancedModel
from ...runtime.neftune import EmbeddingNoise
from ...runtime.sequence_parallel import local_part
from ..common.parallelism import row_group
from ..common.step_cutting import ORIGINS, Origins
from .config import PackedSFTConfig

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
            groups, tokens = origins.of_tokens(ids.numel(), ids.device), origins.tokens
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
        return origins.spread(padded, ids.numel(), ids.device, padding=1).view(ids.shape)

    def find_routers(self, *, has_own_head: bool) -> bool:
        """Tell whether the model can compute the routers' auxiliary loss, by a trial on a few tokens.

        It cannot if no layer returns router logits, whatever the config says, or if TRL's head does not serve the
        model and the model computes no auxiliary loss itself (Llama-4).
        """
        weight = self.model.get_input_embeddings().weight
        ids = torch.ones((1, _TRIED_TOKENS), dtype=torch.long, device=weight.device)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        # With a mask, like a padded batch, because this is a trial of routers, not of packing.
        balanced = self.wrap(self.model, batch)
        with quiet(self.model), torch.no_grad(), self.accelerator.autocast():
            balanced(**batch, fused_lm_head=True)
            makes = not has_own_head or self.model(ids, output_router_logits=True).aux_loss is not None
        self.balances_experts = bool(balanced.layers) and makes
        return self.balances_experts

    def add_noise(self, handle: Any) -> Any:
        """Replace the Trainer's hook of NEFTune on the embedding by noise that is scaled as in padded training."""
        assert self.args.neftune_noise_alpha is not None, "asked for noise"
        # Otherwise both hooks would add noise.
        handle.remove()
        self.noise = EmbeddingNoise(self.args.neftune_noise_alpha)
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
