"""Requirements of arguments alone."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from trl import RewardConfig

from ..errors import ROWWISE
from .requirements import Found, Requirement, Run

# Smallest allowed values. Neither TRL nor transformers checks these numbers before a loop divides by them.
_LEAST = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0, "lora_r": 1, "sequence_parallel": 1, "max_length": 2, "max_tokens_per_microbatch": 2,
}  # fmt: skip
_CHOICES = ("packing_strategy", "overflow", "loss_weighting")


def _not_a_choice(run: Run) -> Any:
    known = {f.name: f.metadata["choices"] for f in fields(run.args) if f.name in _CHOICES}
    return next(((n, getattr(run, n), of) for n, of in known.items() if getattr(run, n) not in (None, *of)), None)


def _too_small(run: Run) -> Any:
    given = ((name, getattr(run, name), least) for name, least in _LEAST.items())
    found = next((one for one in given if one[1] is not None and one[1] < one[2]), None)
    return found and Found(found, ["a document needs two tokens to train on one"] * (found[2] == 2))


def names_head(targets: Any) -> bool:
    """Tell whether an adapter's targets name the LM head."""
    return "lm_head" in ([targets] if isinstance(targets, str) else targets or ())


def _liger(run: Run) -> str:
    return next((name for name in ("use_liger_kernel", "use_liger_loss") if getattr(run, name)), "")


def _shares(run: Run) -> str:
    """Return the argument that makes documents of a row share prefixes; `""` if none does."""
    shares = "expand_turns" if run.expand_turns else "share_prefixes"
    return shares if run.is_sft and run.share_prefixes else ""


FLOAT8 = Requirement(
    # Older Trainers write the environment, newer ones an attribute.
    lambda r: (r.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8",
    "mixed_precision='fp8' of accelerate cannot be packed.",
    why="accelerate converts layers after the check, and scales the activations of a whole batch by one number",
    do=f"Launch with mixed_precision 'bf16', and give the trainer a model that you convert: {ROWWISE}.")  # fmt: skip

# Of whoever computes padded batches without pads: the configs of preference and online trainers, `padding_free`.
WITHOUT_PADS = (
    FLOAT8,
    Requirement(_liger,
        "{r.name} with {found}=True cannot run without its pads.",
        why="Liger replaces the model's forwards by its own, which were not measured without pads",
        do="Set {found}=False. TRL deprecates it and has a fused LM head of its own.",
        shown="use_liger_kernel=True or use_liger_loss=True"),
    Requirement(lambda r: (r.sequence_parallel or 1) > 1,
        "{r.name} with sequence_parallel={r.sequence_parallel} cannot run without its pads.",
        why="it runs padded rows, encoders' too, and only packed rows can be shared by several processes",
        do="Drop sequence_parallel, or train packed rows with PackedSFTTrainer.", shown="sequence_parallel above 1"),
)  # fmt: skip

ARGUMENTS = (
    Requirement(lambda r: r.overflow == "split" and not r.is_sft,
        "overflow='split' is not supported by {r.name}.",
        why="splitting an answer would invalidate its preference label", do="Use 'drop' or 'error'."),
    Requirement(_not_a_choice,
        "{found[0]}='{found[1]}' is not supported by {r.name}.", do="Choose one of {found[2]}.",
        shown="another packing_strategy, overflow or loss_weighting than the config's choices"),
    Requirement(_too_small,
        "{found[0]}={found[1]}: it must be {found[2]} or more.", do="Raise it.",
        shown="a number that is too small: batch sizes, accumulation, lora_r below 1; lengths and budgets below 2"),
    Requirement(lambda r: not r.use_peft and (r.load_in_4bit or r.load_in_8bit),
        "use_peft=False with a quantized model: quantized weights cannot be trained.",
        do="Drop use_peft=False to train a LoRA adapter, or drop load_in_4bit / load_in_8bit."),
    Requirement(lambda r: r.use_peft and names_head(r.lora_target_modules),
        "lora_target_modules names 'lm_head'.",
        why="TRL multiplies hidden states with lm_head.weight directly, so its adapter would never be trained",
        do="Remove 'lm_head'. To train it in full, name it in lora_modules_to_save."),
    Requirement(lambda r: isinstance(r.args, RewardConfig) and not r.bf16 and (r.load_in_4bit or r.load_in_8bit),
        "a quantized reward model without bf16=True.",
        why="TRL keeps the trained parts of a quantized model in bfloat16, and its head accepts no float32",
        do="Pass bf16=True, or drop load_in_4bit / load_in_8bit."),
    Requirement(lambda r: not r.packing and r.packing_strategy,
        "packing=False, but packing_strategy='{found}'.",
        do="Drop packing_strategy to train padded, or packing=False to pack."),
    Requirement(lambda r: not r.packing and r.sequence_parallel > 1,
        "sequence_parallel={r.sequence_parallel} with packing=False: only packed rows can be shared.",
        do="Drop sequence_parallel, or set packing=True."),
    Requirement(lambda r: not r.packing and _shares(r),
        "{found}=True with packing=False.",
        why="a prefix is computed once for the documents of a packed row", do="Drop packing=False, or {found}.",
        shown="share_prefixes=True or expand_turns=True with packing=False"),
    Requirement(lambda r: r.packing and r.truncation_mode == "keep_end" and r.max_length is not None,
        "truncation_mode='keep_end' with packing: documents are cut at their end only.",
        why="TRL has deprecated truncation_mode", do="Drop it, or cut the data yourself."),
    Requirement(lambda r: r.plan.wraps and r.overflow != "truncate",
        "overflow='{r.overflow}' has no effect under packing_strategy='wrapped'.",
        why="this strategy cuts every document where a row is full",
        do="Drop overflow, or use packing_strategy='bfd'."),
    Requirement(lambda r: r.plan.wraps and r.expand_turns,
        "expand_turns=True with packing_strategy='wrapped'.",
        why="it cuts documents wherever a row is full, and a part of a turn has lost its history",
        do="Use packing_strategy='step', 'minibatch' or 'bfd'."),
    Requirement(lambda r: r.plan.fills_rows and r.max_length is None,
        "packing_strategy='{r.packing_strategy}' fills rows of max_length tokens, max_length is None.",
        do="Set max_length, or packing_strategy='step' or 'minibatch', which need none."),
    Requirement(lambda r: r.plan.fills_rows and r.dataloader_drop_last,
        "dataloader_drop_last=True has nothing to drop under packing_strategy='{r.packing_strategy}'.",
        why="rows are dealt so that every rank takes part in every step, the last one too", do="Drop it."),
    Requirement(lambda r: r.plan.fills_rows and r.train_sampling_strategy in ("group_by_length", "batch_rebalance"),
        "train_sampling_strategy='{r.train_sampling_strategy}' has nothing to order under "
        "packing_strategy='{r.packing_strategy}'.",
        why="the packer decides which documents share a batch", do="Drop train_sampling_strategy."),
    Requirement(lambda r: r.packing and not r.plan.recuts_steps and r.max_tokens_per_microbatch,
        "max_tokens_per_microbatch={found} has no effect under packing_strategy='{r.packing_strategy}'.",
        do="Use packing_strategy='step', or drop it."),
    Requirement(lambda r: r.plan.recuts_steps and r.train_sampling_strategy == "batch_rebalance",
        "train_sampling_strategy='batch_rebalance' with packing_strategy='step'.",
        why="both decide how a step is cut into micro-batches", do="Use packing_strategy='minibatch'."),
    Requirement(lambda r: r.loss_weighting == "example" and r.loss_type != "nll",
        "loss_type='{r.loss_type}' with loss_weighting='example'.",
        why="an example's own mean loss is defined for 'nll' only", do="Use loss_weighting='token'."),
    Requirement(lambda r: r.loss_weighting == "example" and r.label_smoothing_factor,
        "label_smoothing_factor={found} with loss_weighting='example'.",
        why="an example's own mean loss is defined for 'nll' only", do="Use loss_weighting='token'."),
    Requirement(lambda r: r.expand_turns and r.assistant_only_loss,
        "assistant_only_loss=True with expand_turns=True.",
        why="each example trains exactly its own assistant turn", do="Drop assistant_only_loss."),
    Requirement(lambda r: r.neftune_noise_alpha is not None and _shares(r),
        "{found}=True with neftune_noise_alpha={r.neftune_noise_alpha}.",
        why="each document draws its own noise, so no prefix could be computed once", do="Drop one of them.",
        shown="share_prefixes=True or expand_turns=True with neftune_noise_alpha"),
)  # fmt: skip
