"""How a packed optimizer step is run and counted: the part of the trainer between the data and the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from trl import SFTTrainer

from ..errors import UnsupportedModel
from ..exactness import quiet
from ..kernels.lm_head.chunked import TrainedHead
from ..patching import inspect
from ..patching.router_loss import BalancedModel
from .batching import FREE, TOGETHER
from .checkpointing import count_batch
from .config import PackedSFTConfig
from .guards import LossWatch, memory_advice
from .lm_head import OwnHead
from .loss_weighting import SOURCES, WeightedModel, as_example_labels, example_weights, losses_by_source
from .neftune import EmbeddingNoise
from .origins import ORIGINS, Origins
from .step_packing import Slot, StepCutter, how_to_cut
from .throughput import SpeedMeter

logger = get_logger(__name__)

# Of a document on which routers are tried.
_TRIED_TOKENS = 4


class SteppingTrainer(SFTTrainer):
    """TRL's trainer, running micro-batches that are cut from a whole step, and weighting their losses."""

    # What the Trainer declares more loosely.
    args: PackedSFTConfig
    model: Any
    data_collator: Any
    _tokenizer: Any
    _step_cutter: StepCutter
    # The head that scores trained positions, unless it is TRL's or the model's own.
    _head: Any = None
    # NEFTune's, while a packed run trains.
    _noise: EmbeddingNoise | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By mode and source: summed loss and trained tokens since the last log.
        self._source_losses: dict[str, dict[str, list[float]]] = {"train": {}, "eval": {}}
        self._speed = SpeedMeter(self.model, self.args, world_size=self.args.world_size)
        self._loss_watch = LossWatch()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of one optimizer step, and the number of tokens that it trains over all ranks."""
        if not self.args.packs_steps:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return [], None
        slots = self._step_cutter.cut(batches, self.data_collator)
        micro_batches = slots[-1].micro_batches
        _, num_items = super().get_batch_samples(iter(micro_batches), len(micro_batches), device)
        return slots, num_items

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        if self.args.loss_weighting == "example":
            batch_samples = [as_example_labels(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's, whose time is no training's."""
        with self._speed.paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with self._speed.paused():
            super()._save_checkpoint(model, trial)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """TRL's training step; for the slot that holds a whole optimizer step, one per micro-batch."""
        self._speed.start(self._total_train_tokens)
        if not isinstance(inputs, Slot):
            return self._run_micro_batch(model, inputs, num_items_in_batch)
        loss = torch.zeros((), device=self.args.device)
        self.current_gradient_accumulation_steps = len(inputs.micro_batches)
        for i, micro_batch in enumerate(inputs.micro_batches):
            is_last = i + 1 == len(inputs.micro_batches)
            # DeepSpeed reduces and steps where it is told that a step ends; all others defer what they reduce.
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or self.is_deepspeed_enabled else self.accelerator.no_sync(model):
                loss += self._run_micro_batch(model, micro_batch, num_items_in_batch)
        if inputs.micro_batches:
            self._metrics["train"]["micro_batches"].append(len(inputs.micro_batches))
            self._metrics["train"]["imbalance"].append(inputs.imbalance)
        return loss

    def _run_micro_batch(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """TRL's training step, with what a user needs to know where it fails."""
        self._speed.add(inputs)
        # Where padded micro-batches stay together, a smaller budget would tear them.
        budget = self._step_cutter.budget if self.args.packs_steps and self._step_cutter.how == FREE else None
        with memory_advice(self.args, inputs, budget=budget):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.packing:
            self._loss_watch.add(self.state.global_step + 1, inputs, loss)
            if self._loss_watch.is_full:
                self._loss_watch.require_finite(self._tokenizer)
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """TRL's loss, weighted as asked; counts what the batch holds on the way."""
        is_training = self.model.training
        mode = "train" if is_training else "eval"
        self._uncount_padding(inputs, mode)
        rows = self.args.per_device_train_batch_size if self.args.packs_rows and is_training else 0
        count_batch(self._metrics[mode], inputs, capacity=rows * (self.args.max_length or 0))
        measures = self._measures(is_training)
        by_example = self.args.loss_weighting == "example" and is_training
        sources = {name: inputs[name] for name in ("labels", "packed_layout", SOURCES) if name in inputs}
        inputs.pop(SOURCES, None)
        called: Any = self._as_padded(model, inputs)
        weighted = None
        if by_example or SOURCES in sources:
            called = weighted = WeightedModel(called, example_weights(inputs) if by_example else None)
        result = super().compute_loss(called, inputs, return_outputs, num_items_in_batch)
        self._drop_unmeasured(mode, measures)
        if weighted is not None and SOURCES in sources and weighted.log_probs is not None:
            for source, (loss, count) in losses_by_source(sources, weighted.log_probs).items():
                total = self._source_losses[mode].setdefault(source, [0.0, 0.0])
                total[0], total[1] = total[0] + loss, total[1] + count
        return result

    def _as_padded(self, model: Any, inputs: dict[str, Any]) -> Any:
        """The model, with what depends on the whole of a padded micro-batch computed of that."""
        origins: Origins | None = inputs.pop(ORIGINS, None)
        if not self.args.packing or not (self.aux_loss_enabled or self._noise):
            return model
        ids = inputs["input_ids"]
        if "attention_mask" in inputs:  # padded, for metrics or predictions
            padding = inputs["attention_mask"].flatten() == 0
            groups, tokens = padding.long(), (~padding).sum()[None]
            lengths = None
        else:
            origins = Origins.of_whole(inputs) if origins is None else origins
            groups, tokens = origins.of_tokens(ids.numel(), ids.device), origins.tokens
            lengths = self._padded_lengths(origins, ids)
        if self._noise is not None:
            self._noise.lengths = lengths
        if not self.aux_loss_enabled:
            return model
        return BalancedModel(
            model,
            groups,
            tokens,
            experts_per_token=self._experts_per_token,
            share=1.0 if origins is None else origins.share,
            reduce=self.accelerator.reduce if origins is not None and origins.shared else None,
        )

    @cached_property
    def _experts_per_token(self) -> int:
        inner: Any = inspect.inner_model(self.model)
        for named in (inner.config.get_text_config(), inner):
            if getattr(named, "num_experts_per_tok", None) is not None:
                return named.num_experts_per_tok
        raise UnsupportedModel(
            f"{type(inner).__name__} does not say how many experts a token goes to (num_experts_per_tok).",
            do="Set router_aux_loss_coef=0.0 to train without the routers' auxiliary loss.",
        )

    @cached_property
    def _cut(self) -> str:
        """How `step` may cut so that the loss is the padded run's."""
        cut, why = how_to_cut(
            self.args,
            balances_experts=self.aux_loss_enabled,
            counts_tokens=self.model_accepts_loss_kwargs,
            own_loss=self.compute_loss_func is not None,
            world_size=self.accelerator.num_processes,
        )
        if self.args.packs_steps and cut != FREE:
            kept = "run at the same time" if cut == TOGETHER else "stay one micro-batch"
            logger.info("trl-packfa: examples of a padded micro-batch %s: %s.", kept, why)
        return cut

    def _require_balancing(self) -> None:
        """What the routers say must be what their auxiliary loss is made of: tried on a few tokens. A model without
        routers has none, whatever its config says, nor has one that TRL's head cannot serve and that makes none itself
        (Llama-4)."""
        ids = torch.ones((1, _TRIED_TOKENS), dtype=torch.long, device=self.model.get_input_embeddings().weight.device)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        balanced = self._as_padded(self.model, batch)
        with quiet(self.model), torch.no_grad(), self.accelerator.autocast():
            balanced(**batch, fused_lm_head=True)
            makes = (
                not isinstance(self._head, OwnHead) or self.model(ids, output_router_logits=True).aux_loss is not None
            )
        if not balanced.layers or not makes:
            inspect.model_config(self.model).get_text_config().output_router_logits = self.aux_loss_enabled = False

    def _scale_noise(self) -> None:
        """NEFTune's hook, which the Trainer has put on the embedding, in terms of padded rows."""
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
            self._noise = EmbeddingNoise(self.neftune_noise_alpha)
            embedding = inspect.inner_model(self.model).get_input_embeddings()
            self.neftune_hook_handle = embedding.register_forward_hook(self._noise)

    def _padded_lengths(self, origins: Origins, ids: torch.Tensor) -> torch.Tensor:
        """For each token how long its example's padded row would be; rows that are filled over the whole dataset
        replace no padded micro-batch: there it is the example's own."""
        multiple: Any = self.args.pad_to_multiple_of or 1
        rows: Any = origins.sizes if self.args.packs_rows else [origins.longest[group] for group in origins.groups]
        padded = [-(-row // multiple) * multiple for row in rows]
        return origins.spread(padded, ids.numel(), ids.device, padding=1).view(ids.shape)

    def _measures(self, is_training: bool) -> bool:
        """Whether entropy and accuracy of the batch will be seen: while training, those of logged steps."""
        if not isinstance(self._head, TrainedHead):
            return True
        step, every = self.state.global_step + 1, max(self.state.logging_steps, 1)
        by_steps = self.args.logging_strategy == "steps"
        first, last = step == 1 and self.args.logging_first_step, step >= self.state.max_steps
        self._head.measures = not is_training or not by_steps or first or last or step % every == 0
        return self._head.measures

    def _drop_unmeasured(self, mode: str, measured: bool) -> None:
        """Take back the zeros that TRL has noted of a batch that was not measured."""
        for name in () if measured else ("entropy", "mean_token_accuracy"):
            self._metrics[mode][name].pop()
            if not self._metrics[mode][name]:
                del self._metrics[mode][name]

    def _uncount_padding(self, inputs: dict[str, Any], mode: str) -> None:
        """TRL is about to count every token of the batch, on all ranks."""
        layout = inputs.get("packed_layout")
        if mode != "train" or layout is None:
            return
        padding = layout.padding
        if self.accelerator.num_processes > 1:
            counts: Any = self.accelerator.gather(torch.tensor([padding], device=self.accelerator.device))
            padding = int(counts.sum())
        self._total_train_tokens -= padding

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics, true tokens a second and MFU, and the mean loss of each source since the last time."""
        mode = "train" if self.model.training else "eval"
        mine = [self._source_losses[mode]] if self.args.loss_by else []
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for losses in gather_object(mine) if self.accelerator.num_processes > 1 else mine:
            for source, (loss, count) in losses.items():
                totals[source][0] += loss
                totals[source][1] += count
        self._source_losses[mode] = {}
        prefix = "" if mode == "train" else "eval_"
        logs.update({f"{prefix}loss/{source}": loss / n for source, (loss, n) in sorted(totals.items()) if n})
        if "loss" in logs:
            self._loss_watch.require_finite(self._tokenizer)
            logs.update(self._speed.read(self._total_train_tokens))
        super().log(logs, start_time)
