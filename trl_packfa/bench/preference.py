"""Sides for TRL's preference trainers: tokenize the pairs once, and build the trainer of each side.

Such a side is TRL's own padded trainer, the same trainer through [`padding_free`], or our packed trainer.
"""

from __future__ import annotations

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

from ..config.requirements import require
from ..config.sft import PackedSFTConfig
from ..errors import InvalidConfig
from ..packing import STEP
from ..trainers.loading import init_kwargs
from ..trainers.padding_free.padding_free import padding_free
from ..trainers.preference.cutting import row_lengths as lengths_of_pairs
from ..trainers.preference.dpo import PackedDPOTrainer
from ..trainers.preference.kto import PackedKTOTrainer
from ..trainers.preference.reward import PackedRewardTrainer
from ..trainers.requirements.data import DATA, TEXTS
from ..trainers.requirements.training import Training
from .sides import UNUSED, Side, quantization, shared_fields, upstream_kwargs

_SMALL: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
# Fields that have another meaning, or other values, in the config for texts.
_OTHERWISE = ("loss_type", "overflow", "padding_free", "use_liger_kernel")


class Preference(NamedTuple):
    """Classes of one preference trainer, and the columns of its tokenized dataset."""

    trainer: type[Trainer]  # TRL's
    config: Any
    packed: Any  # ours
    columns: tuple[str, ...]


PREFERENCES = {
    "dpo": Preference(DPOTrainer, DPOConfig, PackedDPOTrainer, ("prompt_ids", "chosen_ids", "rejected_ids")),
    "reward": Preference(RewardTrainer, RewardConfig, PackedRewardTrainer, ("chosen_ids", "rejected_ids")),
    "kto": Preference(
        KTOTrainer, KTOConfig, PackedKTOTrainer, ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
    ),
}


def row_lengths(dataset: Dataset, trainer: str) -> np.ndarray:
    """Return the tokens of every trained row, int64."""
    return lengths_of_pairs(dataset, PREFERENCES[trainer].packed._rows)[0].T.ravel()


def tokenized(
    parts: dict[str, Dataset], trainer: str, tokenizer: PreTrainedTokenizerBase, args: PackedSFTConfig
) -> dict[str, Dataset]:
    """Tokenize pairs of text or messages with TRL's trainer, and cut them to `max_length` as its collator does.

    Raise [`InvalidDataset`] for other columns than the trainer's.
    """
    wanted = PREFERENCES[trainer]
    for name, part in parts.items():
        given = {f"{name}_dataset": part, "processing_class": tokenizer}
        run = Training(args, wanted.packed.__name__, given=given, formats=wanted.packed._columns)
        require((*DATA, *TEXTS), run)
    cls: Any = LlamaForSequenceClassification if trainer == "reward" else LlamaForCausalLM
    shape: Any = {**_SMALL, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    config = LlamaConfig(**shape)
    reference = {} if trainer == "reward" else {"ref_model": cls(config)}
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
    """Cut the answers so that each row has at most `max_length` tokens."""
    if max_length is None:
        return dataset

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        room = max_length - len(row.get("prompt_ids", ()))
        answers = [name for name in row if name.endswith("_ids") and name != "prompt_ids"]
        return {name: row[name][:room] for name in answers}

    return dataset.map(cut)


def random_pairs(lengths: list[int], trainer: str, *, vocab_size: int, first: int, seed: int) -> Dataset:
    """Make pairs of random tokens: two lengths are the rows of a pair; half of the shorter row is their prompt."""
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
    side: Side, args: PackedSFTConfig, model: str, data: dict[str, Any], **overrides: Any
) -> Any:
    """Build the trainer of a side on pairs, as [`build_trainer`] does; refuse `use_liger_kernel`."""
    if args.use_liger_kernel:
        raise InvalidConfig("use_liger_kernel=True: its fused losses compute every position.", do="Remove it.")
    wanted = PREFERENCES[side.trainer]
    packs = side.kind.strategy == STEP
    cls, config = (wanted.packed, wanted.packed._config) if packs else (wanted.trainer, wanted.config)
    given = {name: value for name, value in shared_fields(args, config).items() if name not in _OTHERWISE}
    given |= {**UNUSED, **overrides}
    if side.trainer == "kto":
        given |= {"train_sampling_strategy": "sequential"}
    if packs:
        given |= {"attention_backend": side.backend}
        loading: dict[str, Any] = {}
    else:
        given |= {"model_init_kwargs": init_kwargs(args) if side.kind.ours else upstream_kwargs(side, model, args)}
        adapter = get_peft_config(args)
        if adapter is not None:
            adapter.task_type = "SEQ_CLS" if side.trainer == "reward" else "CAUSAL_LM"
        loading = {"peft_config": adapter, **quantization(model, args)}
    # The dataset is tokenized already.
    prepared = type(cls.__name__, (cls,), {"_prepare_dataset": lambda self, dataset, *args, **kwargs: dataset})
    # TRL's constructor seeds, so a classifier's new head has the same weights on every side.
    made: Any = prepared(model, args=config(**given), **data, **loading)
    if packs or not side.kind.ours:
        return made
    options = {**args.patch_options, "backend": side.backend, **side.kind.options}
    return padding_free(made, check_first_batch=args.check_packing, **options)
