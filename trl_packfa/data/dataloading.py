"""`PackedData`: the datasets of a packed run, cut with every dropped token counted, and its samplers and loaders.

The way of a batch: TRL tokenizes, [`PackedData.prepare`] cuts, a sampler, plan or stream decides which documents share
a micro-batch, a collator makes rows of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ..config.sft import PackedSFTConfig
from ..errors import InvalidConfig
from ..layout import PackedLayout
from ..layout.from_call import layout_of
from ..packing import PackedBatchSampler, PackingReport
from ..patching.inspect import known_ids, known_labels
from .batching import Batching
from .collator import LOSSES, SAVED, DataCollatorForPacking
from .dataset import AnyDataset, cut_dataset, cut_stream, read_lengths, take_apart, tell_counts
from .flops import quadratic_weight
from .prepared import Prepared, settings_of
from .raw_dataset import require_known
from .stream_state import read_stream_state, write_stream_state
from .streaming import PackedStream, StreamBatches, as_it_is, resumes_by_state
from .turns import TurnExpander, join

# Columns of an example that collators read.
_SEEN = ("input_ids", "labels", "seq_lengths")
# Number of tokens of a document that a preview shows.
_SHOWN = 400


class PackedData:
    """The datasets of a run, and the batches that are made of them.

    `packs_eval` tells whether evaluation batches are packed, too, as the trainer is now. `padding_collator` is a copy
    of TRL's own collator, once the model is known.
    """

    def __init__(self, args: PackedSFTConfig, *, packs_eval: Callable[[], bool]) -> None:
        self.args, self.packs_eval = args, packs_eval
        self.reports: dict[str, PackingReport] = {}  # by dataset name
        self.sampler: PackedBatchSampler | None = None  # of filled rows, once the loader has made it
        # Columns that the collator reads in addition to TRL's.
        self.columns = [LOSSES, SAVED, *([args.loss_by] if args.loss_by else [])]
        # Tokenized datasets by name, kept until `meet` has checked their tokens against the model.
        self._uncut: dict[str, Any] = {}
        self._stream: StreamBatches | None = None
        self._passes = 0  # of the stream, after which an epoch has ended
        # Of one device, once the Trainer has chosen it.
        self.batch_size: int | None = None
        self._quadratic = 0.0
        self.padding_collator: Any = None

    def prepare(self, tokenize: Callable[[PackedSFTConfig], AnyDataset], *, name: str) -> AnyDataset:
        """Cut the documents of a dataset to fit, and count every dropped token.

        `tokenize` is TRL's preparation, which also labels. It is called with arguments under which it cuts nothing.
        `name` is `"train"`, or the name of an evaluation dataset.
        """
        args = self.args
        # TRL would truncate without counting, and would shuffle before the cut.
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        dataset = tokenize(uncut)
        fills_rows, limits = self._fills_rows(name), self._limits(name)
        # Rows that were packed before stay whole as examples of a step. For filled rows and padded batches they are
        # taken apart into documents.
        padded = name != "train" and (not self.packs_eval() or isinstance(dataset, IterableDataset))
        if padded or (fills_rows and not args.expand_turns):
            dataset = take_apart(dataset, name=name)
        if isinstance(dataset, IterableDataset):
            # The turns of a stream are cut when they are expanded, because their rows have to stay together.
            dataset = dataset if args.expand_turns else cut_stream(dataset, **limits)
        else:
            self._uncut[name] = dataset
            dataset, report = cut_dataset(dataset, name=name, **limits)
            if args.expand_turns and not padded:
                dataset, report = join(dataset, report, limit=self._row_limit(name), name=name)
            self.reports[name] = report
            tell_counts(report, name)
        # Shuffle after the cut, as TRL does, because the random order depends on the number of documents.
        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

    def take(self, dataset: Any, prepared: Prepared, tokenizer: Any, chat_template: str | None, *, name: str) -> Any:
        """Take a dataset that was prepared for these arguments, with its report; refuse one of others."""
        prepared.require_same(settings_of(self.args, tokenizer, chat_template, name=name), name=name)
        self._uncut[name] = dataset
        self.reports[name] = prepared.report
        tell_counts(prepared.report, name)
        return dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset

    def expand(
        self, dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, *, name: str
    ) -> AnyDataset:
        """Make an example of each assistant turn, if `expand_turns` says so. Those of a stream are cut and joined."""
        if not self.args.expand_turns:
            return dataset
        expander = TurnExpander(tokenizer, chat_template=chat_template, keep=self.args.loss_by)
        if isinstance(dataset, IterableDataset):
            return expander.expand_stream(dataset, limit=self._row_limit(name), **self._limits(name))
        return expander.expand(dataset, name=name, num_proc=self.args.dataset_num_proc)

    def _fills_rows(self, name: str) -> bool:
        return self.args.strategy.fills_rows and name == "train"

    def _row_limit(self, name: str) -> int | None:
        """Return the computed tokens that a row of a conversation's turns may have."""
        return self.args.max_length if self._fills_rows(name) else None

    def _limits(self, name: str) -> dict[str, Any]:
        """Return the arguments with which documents are cut."""
        args, fills_rows = self.args, self._fills_rows(name)
        wraps = fills_rows and args.strategy.wraps
        overflow = args.strategy.overflow if wraps else args.overflow
        return {"max_length": args.max_length, "overflow": overflow, "as_padded": not fills_rows}

    def meet(
        self, model: Any, *, pad_token_id: int, padding_collator: Any, collator: Any, counts_first_labels: bool
    ) -> Any:
        """Check the datasets' tokens against the model, measure its cost of attention, and return the collator.

        These steps wait for the model, because TRL builds it after the datasets. `padding_collator`, TRL's own, is for
        evaluation batches that are not packed. `collator` is the user's own packing collator, if there is one.
        `counts_first_labels` tells whether the Trainer divides the loss by labels of first tokens, too.
        """
        for name, dataset in self._uncut.items():
            require_known(dataset, name=name, ids=known_ids(model), labels=known_labels(model))
        self._uncut = {}
        self._quadratic = quadratic_weight(model)
        # A copy, so that TRL's own stays unchanged. With `padding_free` it would flatten evaluation batches into one
        # row.
        self.padding_collator = copy.copy(padding_collator)
        self.padding_collator.padding_free = False
        return collator or DataCollatorForPacking(
            pad_token_id=pad_token_id,
            pad_to_multiple_of=self.args.pad_to_multiple_of,  # type: ignore[arg-type]  # SFTConfig has made it an int
            source_column=self.args.loss_by,
            vocab_size=known_ids(model),
            return_flash_attn_kwargs=False,
            share_prefixes=self.args.share_prefixes,
            # Filled rows are compared with TRL's packed rows, which have no such labels.
            count_first_labels=counts_first_labels and not self.args.strategy.fills_rows,
        )

    @property
    def batching(self) -> Batching:
        """The settings that decide how documents become micro-batches, with the batch size in use."""
        size = {} if self.batch_size is None else {"batch_size": self.batch_size}
        return Batching.of(self.args, quadratic=self._quadratic, **size)

    def row_sampler(self, dataset: Any) -> Any:
        """Build this rank's sampler of rows that are filled over the dataset, and keep it in `sampler`."""
        rank = self.args.data_parallel_rank
        self.sampler = self.batching.row_sampler(read_lengths(dataset), rank=rank)
        return self.sampler

    def stream_loader(self, dataset: Any, collator: Callable[[list[Any]], Any], *, resumed_from: Any) -> DataLoader:
        """Build the loader of a stream, at the position of the checkpoint `resumed_from` if it is given."""
        stream, self._passes = PackedStream(dataset, self.batching, rank=self.args.data_parallel_rank), 0
        if resumed_from is not None:
            state, self._passes = read_stream_state(resumed_from, self.args)
            stream.load_state_dict(state)
        self._stream = StreamBatches(stream, collator, self.args)
        return DataLoader(self._stream, batch_size=None, collate_fn=as_it_is)

    def ends_epoch(self, accelerator: Accelerator) -> bool:
        """Tell whether the last step has read the end of a stream's pass, on every rank. Then the next one begins."""
        if self._stream is None:
            return False
        passes = self._stream.passes
        if self._stream.stream.is_sharded:  # otherwise every rank reads the same documents
            found: Any = accelerator.gather(torch.tensor([passes], device=accelerator.device))
            passes = int(found.min())
        if passes <= self._passes:
            return False
        self._passes = passes
        self._stream.end_epoch()
        return True

    def save_state(self, folder: Any) -> None:
        """Write the position of a stream into a checkpoint's folder."""
        first = self.args.process_index % self.args.sequence_parallel == 0  # the others would write the same file
        if self._stream is not None and first:
            stream = self._stream.stream
            state = stream.state_dict() if resumes_by_state(stream.source) else None
            write_stream_state(folder, self.args, state, passes=self._stream.passes)

    def preview(self, dataset: Any, collator: Any, tokenizer: PreTrainedTokenizerBase) -> str:
        """Show a packed batch of the first documents as text; see [`PackedSFTTrainer.preview_batch`]."""
        if not self.args.packing:
            raise InvalidConfig("packing=False: there is no packed batch.", do="Look at get_train_dataloader().")
        # Copy a stream, because reading it would move its position.
        documents = copy.deepcopy(dataset) if isinstance(dataset, IterableDataset) else dataset
        examples = list(islice(iter(documents), self.args.per_device_train_batch_size))
        kept = [{name: example[name] for name in _SEEN if name in example} for example in examples]
        return _describe(collator(kept), tokenizer)


def _describe(batch: Mapping[str, Any], tokenizer: Any) -> str:
    """Decode each document of a packed batch on its own line, with trained text in double brackets."""
    layout = layout_of(dict(batch))
    assert layout is not None, "the trainer has refused collators that do not mark where documents begin"
    padding = f", the last of them {layout.padding} tokens of padding" if layout.padding else ""
    lines = [f"{layout.num_tokens} tokens, {layout.num_documents} documents{padding}; [[trained]]"]
    documents = zip(layout.split(batch["input_ids"]), layout.split(batch["labels"]), strict=True)
    for number, (ids, labels) in enumerate(documents):
        trained = int((labels != -100).sum())
        text = "".join(_runs(ids[:_SHOWN], labels[:_SHOWN], tokenizer)) + (" ..." if len(ids) > _SHOWN else "")
        lines.append(f"document {number}, {len(ids)} tokens, {trained} trained: {text}")
    return "\n".join(lines)


def _runs(ids: torch.Tensor, labels: torch.Tensor, tokenizer: Any) -> Iterator[str]:
    """Decode runs of neighbouring tokens that are all trained or all not trained."""
    pairs = zip(ids.tolist(), labels.tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != -100):
        text = tokenizer.decode([token for token, _ in run])
        yield f"[[{text}]]" if trained else f" {text} "


def copies_without_waiting(args: PackedSFTConfig) -> bool:
    """Tell whether a run copies its batches from page-locked memory. DeepSpeed moves them itself.

    For a copy from ordinary memory, the host waits until the device has finished all earlier work. A copy from
    page-locked memory is queued after it. Data loaders use it; `send` does for batches that are made between two
    steps.
    """
    return args.packing and args.device.type == "cuda" and args.dataloader_pin_memory and args.deepspeed is None


def send(data: Any, device: torch.device) -> Any:
    """Copy the tensors and layouts in nested dictionaries and lists to the device; leave other values unchanged."""
    pinned = recursively_apply(lambda value: value.pin_memory(), data, test_type=_is_pageable)
    return send_to_device(pinned, device, non_blocking=True)


def _is_pageable(value: Any) -> bool:
    # A layout is not a tensor, but it has `pin_memory` and `to` like a tensor.
    tensor = value.cu_seqlens if isinstance(value, PackedLayout) else value
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned()
