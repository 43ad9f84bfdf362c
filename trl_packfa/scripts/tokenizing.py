"""Tokenization as the trainer does it, without the run's model: for a plan, a benchmark, or prepared data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTTrainer

from ..config.requirements import require
from ..config.sft import PackedSFTConfig
from ..data.dataset import TEXT_COLUMNS
from ..data.raw_dataset import require_whole
from ..data.templates import left_out_by_template
from ..data.turns import TurnExpander
from ..errors import InvalidDataset, PackingError
from ..trainers.requirements.data import DATA, TEXTS
from ..trainers.requirements.training import Training


def tokenized(dataset: Any, tokenizer: Any, args: PackedSFTConfig, *, name: str = "train") -> Tokenized:
    """Let TRL's trainer prepare the dataset, with a model of a few weights, and return the result.

    Raises:
        [`InvalidDataset`], [`InvalidConfig`]: for a stream, and for what [`PackedSFTTrainer`] or TRL refuses.
    """
    try:
        trainer = tokenizing_trainer(dataset, tokenizer, args, name=name)
    except Tokenized as found:
        return found
    return Tokenized(trainer.train_dataset)  # type: ignore[arg-type]  # if dataset_kwargs skips the preparation


def tokenizing_trainer(dataset: Any, tokenizer: Any, args: PackedSFTConfig, *, name: str = "train") -> _Tokenizing:
    """Build TRL's trainer of a padded run that cuts nothing; raise [`Tokenized`] for datasets without images.

    The errors are those of [`tokenized`].
    """
    if isinstance(dataset, IterableDataset):
        raise InvalidDataset(
            f"the {name} dataset is a stream: its documents are not known before they are read.",
            do="Drop dataset_streaming. A plan also takes the documents' lengths, with --lengths.",
        )
    given = {f"{name}_dataset": dataset, "processing_class": tokenizer}
    require((*DATA, *TEXTS), Training(args, "PackedSFTTrainer", given=given))
    require_whole(dataset, name=name, columns=(*TEXT_COLUMNS, args.dataset_text_field))
    args = copy.copy(args)
    args.packing, args.packing_strategy, args.padding_free, args.max_length = False, "bfd", False, None
    args.model_init_kwargs, args.gradient_checkpointing, args.shuffle_dataset = None, False, False
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    try:
        return _Tokenizing(LlamaForCausalLM(config), args=args, train_dataset=dataset, processing_class=tokenizer)
    except PackingError:
        raise
    except (RuntimeError, ValueError) as error:
        raise InvalidDataset(
            f"TRL cannot tokenize the {name} dataset with '{getattr(tokenizer, 'name_or_path', tokenizer)}'.",
            why=[str(error)],
        ) from error


class Tokenized(Exception):
    """Exception that stops TRL's constructor once the dataset is prepared.

    It holds the dataset, the chat template that TRL trains with, and remarks on the data.
    """

    def __init__(self, dataset: Dataset, remarks: Sequence[str] = (), chat_template: str | None = None) -> None:
        super().__init__()
        self.dataset, self.remarks, self.chat_template = dataset, remarks, chat_template


class _Tokenizing(SFTTrainer):
    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        remarks = left_out_by_template(dataset, processing_class, self.chat_template) or ()
        if args.expand_turns:
            expander = TurnExpander(self._tokenizer, chat_template=self.chat_template, keep=args.loss_by)  # type: ignore[arg-type]
            dataset = expander.expand(dataset, name="train", num_proc=args.dataset_num_proc)
        prepared: Any = super()._prepare_dataset(dataset, processing_class, args, *more, **kwargs)
        raise Tokenized(prepared, remarks, self.chat_template)
