"""What a packed training is fed with: datasets cut with every loss counted, samplers and loaders of packed batches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from accelerate.logging import get_logger
from datasets import IterableDataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..collator import LOSSES
from ..errors import InvalidConfig
from ..packing import WRAP, PackedBatchSampler, PackingReport
from ..patching.inspect import known_ids, known_labels
from .batching import Batching
from .chat_templates import left_out_by_template
from .checkpointing import read_stream_state
from .config import PackedSFTConfig
from .contents import require_known
from .dataset import cut_dataset, cut_stream, read_lengths
from .flops import quadratic_weight
from .model_loading import AnyDataset, asked_for
from .preview import told_batch
from .sampler import RankAwareSampler
from .step import SteppingTrainer
from .step_packing import Documents
from .streaming import PackedStream, stream_loader

logger = get_logger(__name__)

# The logger that tells what packing does to each dataset; whoever shows it otherwise turns it off.
COUNTS = "trl_packfa.counts"

# What collators read of an example.
_SEEN = ("input_ids", "labels", "seq_lengths")


class FeedingTrainer(SteppingTrainer):
    """TRL's trainer on documents that are cut, packed and dealt by us."""

    # What the Trainer declares more loosely.
    train_dataset: Any
    _signature_columns: Any
    packing_reports: dict[str, PackingReport]
    packing_sampler: PackedBatchSampler | None
    _stream: PackedStream | None
    _resumed_from: str | None
    # By name, tokenized, until they are compared with the model.
    _uncut: dict[str, Any]
    _packs_eval: bool
    _padding_collator: Any
    eval_dataset: Any

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: PackedSFTConfig,
        packing: bool,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> AnyDataset:
        """Tokenized and labelled by TRL, cut by us, so that no token is lost without being counted."""
        for sentence in left_out_by_template(dataset, processing_class, self.chat_template):
            logger.warning("trl-packfa: %s: %s", dataset_name, sentence)
        if not args.packing:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        dataset = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)
        wraps = args.packing_strategy == "wrapped" and dataset_name == "train"
        limits = {"max_length": args.max_length, "overflow": WRAP if wraps else args.overflow}
        if isinstance(dataset, IterableDataset):
            dataset = cut_stream(dataset, **limits)
            return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
        self._uncut[dataset_name] = dataset
        dataset, report = cut_dataset(dataset, name=dataset_name, **limits)
        self.packing_reports[dataset_name] = report
        counts = ", ".join(f"{label} {value}" for label, value in report.lines())
        level = logging.WARNING if report.tokens_lost else logging.INFO
        get_logger(COUNTS).log(level, "trl-packfa: %s: %s", dataset_name, counts)
        # After the cut, as TRL does: an order drawn for other documents is another order.
        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

    def _require_known_tokens(self) -> None:
        """Every token is one of the model's, which TRL has built by now."""
        for name, dataset in self._uncut.items():
            require_known(dataset, name=name, ids=known_ids(self.model), labels=known_labels(self.model))
        self._uncut = {}

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        ours = [LOSSES, *([self.args.loss_by] if self.args.loss_by else [])]
        self._signature_columns += [name for name in ours if name not in self._signature_columns]

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if not self.args.packs_rows:
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        rank = self.args.process_index
        self.packing_sampler = self._batching().row_sampler(read_lengths(dataset), rank=rank, kind=RankAwareSampler)
        return self.packing_sampler  # type: ignore[return-value]  # it is one of the Trainer's too

    def _batching(self) -> Batching:
        return Batching.of(self.args, quadratic=quadratic_weight(self.model))

    def get_train_dataloader(self) -> DataLoader:
        """Under `step`, the padded run's examples in its order, collated once the step is cut."""
        collator = Documents if self.args.packs_steps else self.data_collator
        if self.args.packing and isinstance(self.train_dataset, IterableDataset):
            return self._stream_loader(self._get_collator_with_removed_columns(collator, description="training"))
        with self._collating_with(collator):
            return super().get_train_dataloader()

    def preview_batch(self) -> str:
        """A packed batch of the first training documents as text: where each begins, and what of it is trained.

        It is made for looking: in the order of the dataset, not the run's, and without a random number.

        Raises:
            [`InvalidConfig`]: with `packing=False`.
        """
        if not self.args.packing:
            raise InvalidConfig("packing=False: there is no packed batch.", do="Look at get_train_dataloader().")
        # A stream's place in its data is kept in the stream itself.
        streamed = isinstance(self.train_dataset, IterableDataset)
        documents = copy.deepcopy(self.train_dataset) if streamed else self.train_dataset
        examples = list(islice(iter(documents), self.args.per_device_train_batch_size))
        kept = [{name: example[name] for name in _SEEN if name in example} for example in examples]
        return told_batch(self.data_collator(kept), self._tokenizer)

    def _stream_loader(self, collator: Callable[[list[Any]], Any]) -> DataLoader:
        batching = self._batching()
        self._stream = PackedStream(
            self.train_dataset,
            batch_size=batching.batch_size,
            capacity=batching.max_length if self.args.packs_rows else None,
            wrapped=batching.strategy == "wrapped",
            rank=self.args.process_index,
            world_size=batching.world_size,
            seed=batching.seed,
            quadratic=batching.quadratic,
        )
        if self._resumed_from is not None:
            self._stream.load_state_dict(read_stream_state(self._resumed_from, self.args))
        return stream_loader(self._stream, collator, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Evaluation batches hold the examples they would hold padded, packed unless metrics need the logits or the
        dataset is a stream: of those the Trainer counts rows, one a packed batch, and would weigh losses wrongly."""
        streamed = isinstance(asked_for(eval_dataset, self.eval_dataset), IterableDataset)
        if not self.args.packing or (self._packs_eval and not streamed):
            return super().get_eval_dataloader(eval_dataset)
        with self._collating_with(self._padding_collator):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Predictions are rows of logits, one an example: never packed."""
        with self._collating_with(self._padding_collator if self.args.packing else self.data_collator):
            return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _collating_with(self, collator: Any) -> Iterator[None]:
        packing_collator, self.data_collator = self.data_collator, collator
        try:
            yield
        finally:
            self.data_collator = packing_collator
