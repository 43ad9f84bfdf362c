"""The proof before the first step: the trainer chooses its head and runs the exactness check on the model as it will
train; must not know where documents come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset

from ..collator import LOSSES
from ..errors import UnsupportedModel
from ..exactness import ExactnessReport, check, check_batch, proof_identity, reusable_proof
from ..runtime.compile import uncompiled
from ..terminal.progress import proving
from .dataloading import FeedingTrainer
from .distributed import agree, from_main_rank
from .lm_head import ensure_own_loss
from .loss_weighting import SOURCES
from .origins import ORIGINS
from .step_packing import Slot

logger = get_logger(__name__)

# Of the documents that the check cuts its own out of: twice what these hold.
_KNOWN_TOKENS = 2048


class ProvingTrainer(FeedingTrainer):
    """A trainer of packed rows that proves, or refuses, before it trains."""

    exactness: ExactnessReport | None = None
    _has_head = False
    _has_proven_batch = False

    @property
    def is_zero3_enabled(self) -> bool:
        """Whether DeepSpeed keeps the weights in parts: only its engine, which `train` builds, runs the model."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return self.is_deepspeed_enabled and plugin is not None and plugin.zero_stage == 3

    @property
    def is_proven_wrapped(self) -> bool:
        """Whether the exactness check waits for the wrapped model: whole, it may fit no device."""
        return self.is_fsdp_enabled or self.is_zero3_enabled

    def _choose_head(self, model: Any) -> None:
        """The head that computes the model's own loss, once."""
        with self.accelerator.autocast():
            self._head = ensure_own_loss(model, seed=self.args.seed)
        self._has_head = True

    def compute_loss(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss, weighted as asked."""
        if self.args.packing and not self._has_head:  # evaluated before it is trained
            self._choose_head(model)
        return super().compute_loss(model, *args, **kwargs)

    def _require_proof(self) -> None:
        if self.args.packing and not self._has_head:
            self._choose_head(self.model_wrapped)
        if self.args.packing and self.args.check_packing and self.exactness is None:
            self.prove(self._resumed_from)

    def prove(self, checkpoint: str | None = None) -> ExactnessReport:
        """Run the exactness check on the model as it will train, on every rank, and keep the report.

        Args:
            checkpoint (`str`, *optional*):
                A checkpoint that is resumed from: its proof is taken if all that a proof depends on is the same.

        Raises:
            [`ContaminationError`]: if packing is not exact on this model, on every rank if it is not on one.
            [`UnsupportedModel`]: under DeepSpeed ZeRO-3 before training has begun.
        """
        if self.is_zero3_enabled and self.deepspeed is None:
            raise UnsupportedModel(
                "DeepSpeed ZeRO-3 has not wrapped the model yet.",
                why=["its weights are in parts, which only DeepSpeed's engine makes whole where they are used"],
                do="Call train(): it runs the check on the engine, before the first step.",
            )
        if self.args.gradient_checkpointing:  # as training will; TRL switches it on later
            switch = getattr(self.model, "activation_checkpointing_enable", None)  # its name since transformers 5.23
            (switch or self.model.gradient_checkpointing_enable)(self.args.gradient_checkpointing_kwargs)
        identity = self._proof_identity()
        if checkpoint is not None:
            self.exactness = from_main_rank(self.accelerator, lambda: reusable_proof(checkpoint, identity))
            if self.exactness is not None:
                logger.info("trl-packfa: %s; nothing has changed since %s", self.exactness, self.exactness.taken_from)
                return self.exactness
        shown = self.is_world_process_zero() and not self.args.disable_tqdm
        with proving("proving on this model that no document sees another", shown=shown) as progress:
            report = agree(self.accelerator, lambda: self._proof(progress))
        self.exactness = replace(report, identity=identity)
        logger.info("trl-packfa: %s in %.1f s", self.exactness, self.exactness.seconds)
        return self.exactness

    def _proof_identity(self) -> str:
        """What would have to be proven, under the autocast of the run."""
        args, collator = self.args, self.data_collator
        with self.accelerator.autocast():
            return proof_identity(
                self.model,
                collator=(type(collator).__module__, type(collator).__qualname__),
                engine=(self.accelerator.distributed_type, self.accelerator.num_processes),
                checkpointing=(args.gradient_checkpointing, args.gradient_checkpointing_kwargs),
                compiled=args.torch_compile,
            )

    def _proof(self, progress: Callable[[str, float], None]) -> ExactnessReport:
        model: Any = self.deepspeed if self.is_zero3_enabled else self.model
        # Under FSDP2 the model is compiled by now. Graphs of the check would take minutes, and none is used again.
        with self.accelerator.autocast(), uncompiled(model):
            report = check(
                model,
                collator=self.data_collator,
                documents=_first_documents(self.train_dataset),
                processing_class=self._tokenizer,
                seed=self.args.seed,
                progress=progress,
            )
        report.require_exact()
        return report

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's training step; the first packed batch is proven as it comes, before it trains."""
        if self.args.packing and self.args.check_packing and not self._has_proven_batch:
            batches = inputs.micro_batches if isinstance(inputs, Slot) else [inputs]
            if batches:
                self._has_proven_batch = True
                agree(self.accelerator, lambda: self._prove_batch(model, batches[0]))
        return super().training_step(model, inputs, *args, **kwargs)

    def _prove_batch(self, model: torch.nn.Module, batch: dict[str, Any]) -> None:
        batch = {name: value for name, value in batch.items() if name not in (LOSSES, ORIGINS, SOURCES)}
        with self.compute_loss_context_manager():
            proof = check_batch(model, self._prepare_inputs(batch))
        if proof is None:
            return
        proof.require_exact()
        if self.exactness is not None:
            self.exactness = replace(self.exactness, first_batch=proof.difference, first_batch_allowed=proof.allowed)


def _first_documents(dataset: Any) -> list[Any] | None:
    """Token ids of a map dataset's first documents, as many as the check can use; a stream is not begun for it."""
    if not isinstance(dataset, Dataset) or "input_ids" not in (dataset.column_names or ()):
        return None
    documents: list[Any] = []
    tokens = 0
    rows: Any = dataset.select_columns("input_ids").with_format(None)
    for row in rows:
        documents.append(row["input_ids"])
        tokens += len(documents[-1])
        if tokens >= _KNOWN_TOKENS:
            break
    return documents
