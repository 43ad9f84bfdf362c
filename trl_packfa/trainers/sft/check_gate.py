"""The check before the first step: on the model as it will train, then on the first batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import Dataset

from ...checking import (
    CheckReport,
    check,
    check_batch,
    check_identity,
    check_of_machine,
    check_sharded_row,
    keep_check,
    reusable_check,
)
from ...comparison import Comparison
from ...compile import uncompiled
from ...config.sft import PackedSFTConfig
from ...data.collator import FIRST_LABELS, LOSSES, SOURCES, DataCollatorForPacking
from ...data.steps import micro_batches_of
from ...errors import UnsupportedModel
from ...parallel.ranks import agree, from_main_rank, row_group
from ...patching.state import find_state
from ...terminal.progress import checking
from ...terminal.telling import tell
from .selective import save_attention

logger = get_logger(__name__)

# Number of tokens of the run's documents that the check gets: twice as many as its own documents, cut from them, hold.
_KNOWN_TOKENS = 2048


class CheckGate:
    """The check that lets a trainer's run start only if packing is exact on its model, on every rank."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.args: PackedSFTConfig = trainer.args
        self.accelerator: Accelerator = trainer.accelerator
        self._group = row_group(self.args, self.accelerator)
        self.report: CheckReport | None = None
        self._has_checked_batch = False

    def check(self, checkpoint: str | None = None) -> CheckReport:
        """Run the check on every rank, and keep the report; see [`PackedSFTTrainer.check`]."""
        model = self.trainer.model
        # DeepSpeed's engine runs the model if its weights are sharded.
        engine = self.trainer.deepspeed if self.trainer.is_zero3_enabled else model
        if engine is None:
            raise UnsupportedModel(
                "DeepSpeed ZeRO-3 has not wrapped the model yet.",
                why=["its weights are sharded, and only DeepSpeed's engine can gather them where they are used"],
                do="Call train(), which runs the check on the engine before the first step.",
            )
        self.switch_checkpointing(model)
        identity = self._identity()
        saved = from_main_rank(self.accelerator, lambda: self._checked_before(checkpoint, identity))
        if saved is not None:
            logger.info("trl-packfa: %s; checked %s, nothing has changed since", saved, saved.taken_from)
            self.report = saved
            return saved
        report = self._checked_by_patch() if engine is model else None
        # All ranks must make the same calls.
        everywhere: Any = self.accelerator.gather(torch.tensor([report is not None], device=self.accelerator.device))
        if not everywhere.all():
            report = self._check(engine)
            logger.info("trl-packfa: %s in %.1f s", report, report.seconds)
        else:
            assert report is not None
            logger.info("trl-packfa: %s; checked when the model was patched", report)
        self.report = self._with_sharded_rows(replace(report, identity=identity), engine)
        if self._is_kept and self.accelerator.is_main_process:
            keep_check(model, self.report)
        return self.report

    @property
    def _is_kept(self) -> bool:
        """`True` if the check serves later runs on this machine: of one process, whose weights are whole."""
        return self.accelerator.num_processes == 1

    def _checked_before(self, checkpoint: str | None, identity: str) -> CheckReport | None:
        """Return the report of the checkpoint to resume from, or of an earlier run on this machine."""
        if checkpoint is not None and (saved := reusable_check(checkpoint, identity)) is not None:
            return saved
        known = self._is_kept and not self.args.recheck
        return check_of_machine(self.trainer.model, identity) if known else None

    def tell(self, report: CheckReport) -> None:
        """Tell the verdict of the check before a run."""
        measured = (
            f". Packed documents differ by {report['parity'].difference:.1e} from the same alone; in a row without "
            f"boundaries by {report['control'].difference:.1e}"
        )
        tell(self.args, report.headline + ("" if report.taken_from else measured))

    def _on_this_run(self) -> dict[str, Any]:
        """Return the arguments of a check that are this run's: its packed rows, its first documents and its seed."""
        documents = _first_documents(self.trainer.train_dataset)
        return {"collator": self.trainer.data_collator, "documents": documents, "seed": self.args.seed}

    def _check(self, engine: Any) -> CheckReport:
        def run_check(progress: Callable[[str, float], None]) -> CheckReport:
            # Under FSDP2 the model is compiled by now. Compiling graphs for the check would take minutes, and training
            # would not use them.
            with self.accelerator.autocast(), uncompiled(engine):
                tokenizer = self.trainer._tokenizer
                report = check(engine, processing_class=tokenizer, progress=progress, **self._on_this_run())
            report.require_exact()
            return report

        shown = self.accelerator.is_main_process and not self.args.disable_tqdm
        with checking("checking on this model that no document sees another", shown=shown) as progress:
            return agree(self.accelerator, lambda: run_check(progress))

    def _with_sharded_rows(self, report: CheckReport, engine: Any) -> CheckReport:
        """Return the report with the check of rows that processes share; unchanged if none do."""
        group = self._group
        if group is None:
            return report

        def compared() -> list[Comparison]:
            with self.accelerator.autocast():
                return _required(check_sharded_row(engine, group, **self._on_this_run()))

        rows = agree(self.accelerator, compared)
        logger.info("trl-packfa: %s", ", ".join(map(str, rows)))
        return report.with_rows(rows)

    def switch_checkpointing(self, model: Any) -> None:
        """Switch activation checkpointing on as training will, because TRL does so only later."""
        args = self.args
        if not args.gradient_checkpointing:
            return
        switch = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5.23
        given = dict(args.gradient_checkpointing_kwargs or {})
        if given.get("selective"):
            save_attention(model)
        # The Trainer takes these out, too: they are not torch's.
        options = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
        (switch or model.gradient_checkpointing_enable)(given or None, **options)

    def _checked_by_patch(self) -> CheckReport | None:
        """Return the report of `patch`, if `patch` had to check this model and nothing has changed since."""
        model, collator = self.trainer.model, self.trainer.data_collator
        state = find_state(model)
        if state is None or state.report is None or type(collator) is not DataCollatorForPacking:
            return None
        with self.accelerator.autocast():
            same = state.report.identity == check_identity(model)
        return state.report if same and not collator.pad_to_multiple_of else None

    def _identity(self) -> str:
        """Hash everything that the check depends on."""
        args, collator = self.args, self.trainer.data_collator
        # The check holds for the run's autocast only, so the autocast is part of the hash.
        with self.accelerator.autocast():
            return check_identity(
                self.trainer.model,
                collator=(type(collator).__module__, type(collator).__qualname__),
                engine=(self.accelerator.distributed_type, self.accelerator.num_processes, args.sequence_parallel),
                checkpointing=(args.gradient_checkpointing, args.gradient_checkpointing_kwargs),
                compiled=args.torch_compile,
            )

    def check_first_batch(self, model: Any, inputs: dict[str, Any]) -> None:
        """Compare the first packed batch, before it trains, with its documents run alone. Later batches pass."""
        if self._has_checked_batch or not self.args.check_packing:
            return
        batches = micro_batches_of(inputs)
        if not batches:
            return
        # All ranks come here with the same batch number, because `agree` below waits for all of them.
        self._has_checked_batch = True
        names = (FIRST_LABELS, LOSSES, SOURCES)
        # The trainer removes these before it calls the model.
        batch = {name: value for name, value in batches[0].items() if name not in names}

        def compared() -> list[Comparison]:
            return _required(check_batch(model, self.trainer._prepare_inputs(batch), self._group))

        rows = agree(self.accelerator, compared)
        if self.report is not None:
            self.report = self.report.with_rows(rows)


def _required(rows: list[Comparison]) -> list[Comparison]:
    """Return the comparisons if all hold; raise [`ContaminationError`] with the first that does not."""
    for row in rows:
        row.require()
    return rows


def _first_documents(dataset: Any) -> list[Any] | None:
    """Read token ids of a dataset's first documents, as many as the check can use; `None` for a stream."""
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
