"""TRL's preference trainers as sides: the pairs that they train on, tokenized once, and how each side is built.

A side of these is TRL's own trainer, padded, the same through [`padding_free`], or our packed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import numpy as np
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    Trainer,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, get_peft_config

from ..errors import InvalidConfig, InvalidDataset
from ..packing import STEP
from ..trainers.dpo import PackedDPOConfig, PackedDPOTrainer
from ..trainers.kto import PackedKTOConfig, PackedKTOTrainer
from ..trainers.overflow import Rows
from ..trainers.overflow import row_lengths as lengths_of_pairs
from ..trainers.padding_free import padding_free
from ..trainers.reward import PackedRewardConfig, PackedRewardTrainer
from ..training.config import PackedSFTConfig
from ..training.model_loading import init_kwargs, model_type, quantization_of
from .sides import Side, upstream_kwargs

_SMALL: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
# Fields that `SFTConfig` has too and means otherwise.
_OTHERWISE = ("loss_type", "padding_free", "use_liger_kernel")


class Preference(NamedTuple):
    """A trainer of pairs.

    Attributes:
        trainer (`type`), config (`type`): TRL's.
        packed (`type`), packed_config (`type`): ours.
        columns (`tuple[str, ...]`): of its tokenized dataset.
        task (`str`): of a LoRA adapter.
        has_reference (`bool`): whether it runs a reference model.
        options (`dict`): arguments that it needs.
    """

    trainer: type[Trainer]
    config: Any
    packed: Any
    packed_config: Any
    columns: tuple[str, ...]
    task: str
    has_reference: bool
    options: dict[str, Any] = {}

    @property
    def rows(self) -> Rows:
        """The columns that make each row which goes through the model."""
        return self.packed._rows


PREFERENCES = {
    "dpo": Preference(
        DPOTrainer, DPOConfig, PackedDPOTrainer, PackedDPOConfig, ("prompt_ids", "chosen_ids", "rejected_ids"),
        "CAUSAL_LM", True,
    ),
    "reward": Preference(
        RewardTrainer, RewardConfig, PackedRewardTrainer, PackedRewardConfig, ("chosen_ids", "rejected_ids"),
        "SEQ_CLS", False,
    ),
    "kto": Preference(
        KTOTrainer, KTOConfig, PackedKTOTrainer, PackedKTOConfig,
        ("prompt_ids", "completion_ids", "KL_completion_ids", "label"), "CAUSAL_LM", True,
        {"train_sampling_strategy": "sequential"},
    ),
}  # fmt: skip


def row_lengths(dataset: Dataset, trainer: str) -> np.ndarray:
    """Tokens of every row that a step trains, int64."""
    return lengths_of_pairs(dataset, PREFERENCES[trainer].rows).T.ravel()


def pairs_of(dataset: Dataset) -> Dataset:
    """Preference pairs of any dataset for fine-tuning: an example's own answer is chosen, the next one's is rejected.
    A dataset that has pairs comes back as it is.

    Raises:
        [`InvalidDataset`]: if examples have no answer.
    """
    columns = set(dataset.column_names)
    if "chosen" in columns or {"completion", "label"} <= columns:
        return dataset
    if {"prompt", "completion"} <= columns:
        prompts, answers = dataset["prompt"], dataset["completion"]
    elif "messages" in columns:
        turns = [_answered(messages) for messages in dataset["messages"]]
        prompts, answers = zip(*(turn for turn in turns if turn is not None), strict=True)
    else:
        raise InvalidDataset(
            f"no pairs can be made of the columns {sorted(columns)}.",
            why=["wanted: 'chosen' and 'rejected', 'prompt' and 'completion', or 'messages'"],
            do="Bring preference pairs, or examples with an answer.",
        )
    rows = [
        {"prompt": prompt, "chosen": own, "rejected": other}
        for prompt, own, other in zip(prompts, answers, [*answers[1:], answers[0]], strict=True)
    ]
    return Dataset.from_list(rows)


def _answered(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """What stands before the last answer, and the answer."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    return (messages[:last], [messages[last]]) if last else None


def tokenized(
    parts: dict[str, Dataset], trainer: str, tokenizer: PreTrainedTokenizerBase, args: PackedSFTConfig
) -> dict[str, Dataset]:
    """Pairs of text or messages as TRL's trainer tokenizes them, cut to `max_length` as its collator does."""
    wanted = PREFERENCES[trainer]
    cls: Any = LlamaForSequenceClassification if trainer == "reward" else LlamaForCausalLM
    shape: Any = {**_SMALL, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    config = LlamaConfig(**shape)
    reference = {"ref_model": cls(config)} if wanted.has_reference else {}
    pairs: dict[str, Any] = dict(parts)
    made: Any = cast(Any, wanted.trainer)(
        cls(config),
        args=wanted.config(args.output_dir, use_cpu=True, bf16=False, report_to="none", max_length=args.max_length,
                           per_device_train_batch_size=args.per_device_train_batch_size,
                           per_device_eval_batch_size=args.per_device_eval_batch_size),
        train_dataset=pairs["train"],
        eval_dataset=pairs.get("eval"),
        processing_class=tokenizer,
        **reference,
    )  # fmt: skip
    prepared = {"train": made.train_dataset, "eval": made.eval_dataset}
    return {name: _cut(prepared[name].select_columns(wanted.columns), args.max_length) for name in parts}


def _cut(dataset: Dataset, max_length: int | None) -> Dataset:
    """Answers cut where their row is full."""
    if max_length is None:
        return dataset

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        room = max_length - len(row.get("prompt_ids", ()))
        answers = [name for name in row if name.endswith("_ids") and name != "prompt_ids"]
        return {name: row[name][:room] for name in answers}

    return dataset.map(cut)


def random_pairs(lengths: list[int], trainer: str, *, vocab_size: int, first: int, seed: int) -> Dataset:
    """Pairs of random tokens: two of these lengths are the rows of a pair, which shares half of the shorter one."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return rng.integers(min(first, vocab_size - 1), vocab_size, size=count).tolist()

    rows: list[dict[str, Any]] = []
    for one, other in zip(lengths[::2], lengths[1::2], strict=False):
        prompt = draw(max(min(one, other) // 2, 1))
        chosen, rejected = (draw(max(length - len(prompt), 1)) for length in (one, other))
        if trainer == "dpo":
            rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        elif trainer == "reward":
            rows.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
        else:
            own = {"prompt_ids": prompt, "label": True, "completion_ids": chosen, "KL_completion_ids": rejected}
            rows += [own, {**own, "label": False, "completion_ids": rejected, "KL_completion_ids": chosen}]
    return Dataset.from_list(rows)


def build_preference_trainer(
    side: Side,
    args: PackedSFTConfig,
    *,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    evaluation: Dataset | None,
    **overrides: Any,
) -> Any:
    """The trainer of a side, on pairs that are tokenized and cut already.

    Raises:
        [`InvalidConfig`]: for arguments that these trainers do not have.
    """
    wanted = PREFERENCES[side.trainer]
    if args.use_liger_kernel:
        raise InvalidConfig("use_liger_kernel=True: its fused losses compute every position.", do="Drop it.")
    known = {f.name for f in fields(wanted.config) if f.init} & {f.name for f in fields(PackedSFTConfig) if f.init}
    given = {name: getattr(args, name) for name in known - set(_OTHERWISE)}
    given |= {**wanted.options, "eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False}
    adapter = get_peft_config(args)
    if adapter is not None:
        adapter.task_type = wanted.task
    packs = side.kind.strategy == STEP
    options: dict[str, Any] = {
        "model_init_kwargs": init_kwargs(args) if side.kind.ours else upstream_kwargs(side, model, args)
    }
    if packs:
        options |= {"attention_backend": side.backend}
        options |= {name: getattr(args, name) for name in ("max_tokens_per_microbatch", "fused_lora", "fused_kernels")}
        # What loads the model here is given by the adapter and the quantization below.
        options |= {"use_peft": False, "dtype": args.dtype, "check_packing": args.check_packing}
    # Seeds where TRL does, so that a classifier's new head is the same on every side.
    made = as_prepared(wanted.packed if packs else wanted.trainer)(
        model,
        args=(wanted.packed_config if packs else wanted.config)(**{**given, **overrides, **options}),
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        quantization_config=quantization_of(model_type(model, args), args),
        peft_config=adapter,
    )
    if packs or not side.kind.ours:
        return made
    options = {**args.patch_options, "backend": side.backend, **side.kind.options}
    return padding_free(made, check_first_batch=args.check_packing, **options)


def as_prepared(cls: type) -> Callable[..., Any]:
    """A trainer of TRL's that takes its dataset as it is: tokenized."""

    def prepared(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    return type(cls.__name__, (cls,), {"_prepare_dataset": prepared})
