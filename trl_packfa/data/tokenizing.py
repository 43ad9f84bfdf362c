"""Tokenization as TRL's trainer does it, without the run's model: for a plan, and for a dataset that is prepared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTTrainer

from ..config.sft import PackedSFTConfig
from .templates import left_out_by_template
from .turns import TurnExpander


def tokenized(dataset: Dataset, tokenizer: Any, args: PackedSFTConfig) -> Tokenized:
    """Let TRL's trainer prepare the dataset, with a model of a few weights, and return the result."""
    try:
        trainer = tokenizing_trainer(dataset, tokenizer, args)
    except Tokenized as found:
        return found
    return Tokenized(trainer.train_dataset)  # type: ignore[arg-type]  # if dataset_kwargs skips the preparation


def tokenizing_trainer(dataset: Dataset, tokenizer: Any, args: PackedSFTConfig) -> _Tokenizing:
    """Build TRL's trainer of a padded run that cuts nothing; raise [`Tokenized`] for datasets without images."""
    args = copy.copy(args)
    args.packing, args.packing_strategy, args.padding_free, args.max_length = False, "bfd", False, None
    args.model_init_kwargs, args.gradient_checkpointing, args.shuffle_dataset = None, False, False
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return _Tokenizing(LlamaForCausalLM(config), args=args, train_dataset=dataset, processing_class=tokenizer)


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
