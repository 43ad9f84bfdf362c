"""Advice from the figures of a plan: sentences, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..data.batching import FREE, Batching
from ..data.epoch_plan import EpochPlan, plan_epoch
from ..packing import BFD, BFD_SPLIT, MINIBATCH, PADDED, STEP
from .memory import RESERVED, SLACK, Memory, estimate, operations, shared_by
from .report import Plan, total_steps

# Memory sizes of GPUs for rent, in GB of 10^9 bytes.
_CARDS = (4, 6, 8, 12, 16, 24, 40, 48, 80, 96, 141, 180)
# Numbers of GPUs that may share a row.
_SHARED_BY = (2, 4, 8, 16, 32)
# Warn if a strategy takes fewer optimizer steps than this share of the padded run's, or if the whole run is short.
_FEWER, _FEW_STEPS = 0.67, 200
# Packing gains little below this share of pads. Warn about lost tokens above this share.
_LITTLE_PADDING, _MUCH_LOST = 0.10, 0.01
_UNEVEN, _WAITING = 4.0, 1.1
# The share of tokens up to which larger values of `max_length` are listed, and how many values.
_NEARLY_ALL, _VALUES = 0.99, 4
# A token budget with a fill below the first number can be smaller; the second is its room above the mean micro-batch.
_HALF_EMPTY, _ROOM = 0.5, 1.3
PAPER = (
    "The paper (arXiv 2407.09105, Table 2: Mistral-7B, 20k FLAN examples, one epoch) measured a validation loss of "
    "1.284 with rows packed over the whole dataset, 1.129 padded, 1.127 with the padded run's number of steps"
)


def advise(plan: Plan) -> tuple[str, ...]:
    """Return the advice as sentences, the recommendation first."""
    parts = (_recommend, _steps, _few, _lost, _outlier, _budget, _waiting, _untrained, _fits, _checkpointing,
             _sharded_rows)  # fmt: skip
    return tuple(sentence for part in parts for sentence in part(plan))


def _recommend(plan: Plan) -> Iterator[str]:
    padding, chosen = plan.padded.epoch().padding, plan.chosen
    best = STEP if STEP.name in plan.outcomes else MINIBATCH
    gain = plan.speed_up(plan.outcomes[best.name])
    if padding < _LITTLE_PADDING:
        yield (
            f"Packing gains little here: {padding:.0%} of a padded run's tokens are pads at "
            f"per_device_train_batch_size={plan.args.per_device_train_batch_size} (predicted {gain:.2f}x). It gains "
            "with larger batches and more uneven lengths."
        )
        return
    ours, theirs = plan.outcomes[best.name].epoch(), plan.padded.epoch()
    yours = " (your choice)" if chosen.strategy == best else ""
    if chosen.strategy == MINIBATCH and plan.world_size == 1 and plan.args.gradient_accumulation_steps == 1:
        yours = " (your 'minibatch' does the same on one GPU without accumulation)"
    runs = _micro_batches(ours)
    padded = ", as padded" if _micro_batches(theirs) == runs else f"; padded, {_micro_batches(theirs)}"
    same = "on the same examples, so the loss is the padded run's" if ours.tokens == theirs.tokens else (
        f"on other documents: overflow='{plan.args.overflow}' where the padded run truncates"
    )  # fmt: skip
    yield (
        f"Use packing_strategy='{best}'{yours}: {padding:.0%} of a padded run's tokens are pads, it computes none of "
        f"them (predicted {gain:.2f}x). It takes {ours.steps:,} optimizer steps an epoch (padded {theirs.steps:,}), "
        f"{same}. A step runs {runs}{padded}."
    )


def _micro_batches(epoch: EpochPlan) -> str:
    count = epoch.micro_batches / epoch.steps
    each = f"{epoch.tokens_per_micro_batch:,.0f} true tokens"
    return f"one micro-batch of {each}" if count == 1 else f"{count:.1f} micro-batches of {each}"


def _steps(plan: Plan) -> Iterator[str]:
    """Warn if rows that are packed over the whole dataset take far fewer, larger steps."""
    padded = plan.padded.epoch()
    strategy = plan.chosen.strategy if plan.chosen.strategy.fills_rows else BFD
    if strategy.name not in plan.outcomes:
        return
    rows = plan.outcomes[strategy.name].epoch()
    if rows.steps >= _FEWER * padded.steps:
        return
    yours = plan.chosen.strategy == strategy
    yield (
        f"{'Warning: your' if yours else 'Not'} packing_strategy='{strategy}'{' takes' if yours else ': it takes'} "
        f"{rows.steps:,} optimizer steps an epoch where the padded run takes {padded.steps:,}, "
        f"{padded.steps / rows.steps:.1f} times fewer, of {rows.examples_per_step:,.0f} examples instead of "
        f"{padded.examples_per_step:,.0f}. {PAPER}. "
        f"{'Smaller' if yours else 'If you want it all the same, smaller'} per_device_train_batch_size and "
        "gradient_accumulation_steps give steps back; a learning rate tuned padded does not carry over."
    )


def _few(plan: Plan) -> Iterator[str]:
    steps = total_steps(plan.chosen.epoch(), plan.args)
    if steps < _FEW_STEPS:
        yield (
            f"The whole run is {steps:,} optimizer steps ({plan.args.num_train_epochs:g} epochs of "
            f"{plan.chosen.epoch().steps:,}): few, with warm-up. A smaller batch or more epochs give more."
            if plan.args.max_steps <= 0
            else f"The whole run is max_steps={steps:,} optimizer steps, "
            f"{steps / plan.chosen.epoch().steps:.2f} epochs: few, with warm-up."
        )


def _lost(plan: Plan) -> Iterator[str]:
    report, lengths = plan.chosen.report, plan.source.tokens.lengths
    share = report.tokens_lost / report.tokens
    limit = plan.args.max_length
    if share > _MUCH_LOST and limit is not None and BFD_SPLIT.name in plan.outcomes:
        split = plan.outcomes[BFD_SPLIT.name].report.tokens_lost
        yield (
            f"{report.tokens_lost:,} tokens ({share:.1%}) are lost: {report.too_long:,} of {report.documents:,} "
            f"documents are longer than max_length={limit}. {_kept(lengths, limit)} "
            f"overflow='split', which makes documents of the pieces, loses {split:,} tokens."
        )
    if plan.chosen.strategy.fills_rows and report.split:
        yield (
            f"{report.split:,} documents are cut into several: what comes after a cut does not see what came before."
        )


def _kept(lengths: np.ndarray, max_length: int) -> str:
    """Say which share of the tokens some larger values of `max_length` keep, up to one that keeps nearly all."""
    larger, kept = max_length, []
    while (not kept or kept[-1][1] < _NEARLY_ALL) and larger < lengths.max():
        larger *= 2
        kept.append((larger, np.minimum(lengths, larger).sum() / lengths.sum()))
    shown = kept[-_VALUES:]
    return f"Tokens kept: {', '.join(f'max_length={value} {part:.0%}' for value, part in shown)}."


def _outlier(plan: Plan) -> Iterator[str]:
    """Warn if one long document sets the memory of every micro-batch."""
    lengths = plan.chosen.lengths
    longest, usual = int(lengths.max()), float(np.percentile(lengths, 99))
    is_budget_default = plan.chosen.strategy.recuts_steps and plan.args.max_tokens_per_microbatch is None
    if is_budget_default and longest > _UNEVEN * usual:
        size = plan.args.per_device_train_batch_size
        yield (
            f"The longest document ({longest:,} tokens) is {longest / usual:.0f} times as long as the 99th percentile "
            f"({usual:.0f}). A micro-batch must have room for {size} of that length: a lower max_length saves memory."
        )


def _budget(plan: Plan) -> Iterator[str]:
    """Suggest a smaller token budget if the default, made for the longest documents, is mostly empty."""
    epoch, args = plan.chosen.epoch(), plan.args
    if not plan.chosen.strategy.recuts_steps or args.max_tokens_per_microbatch is not None:
        return
    if (epoch.fill or 1) > _HALF_EMPTY:
        return
    if plan.shape is not None and plan.shape.cut != FREE:  # the budget must hold whole padded micro-batches
        return
    # The budget has room for an average micro-batch of the step and for the longest document.
    budget = max(int(epoch.tokens_per_micro_batch * _ROOM), int(plan.chosen.lengths.max()))
    if budget >= epoch.largest_micro_batch:
        return
    batching = Batching.of(args, strategy=STEP, world_size=epoch.world_size)
    smaller = plan_epoch(plan.chosen.lengths, replace(batching, budget=budget))
    was, now = (f"{each.micro_batches / each.steps:.1f}" for each in (epoch, smaller))
    needs = "as many micro-batches a step" if was == now else f"{now} micro-batches a step instead of {was}"
    yield (
        f"Micro-batches are {epoch.fill:.0%} full: the default budget of {epoch.largest_micro_batch:,} tokens is the "
        f"padded run's worst micro-batch. max_tokens_per_microbatch={budget} needs {needs} and less memory; the "
        "training is the same."
    )


def _waiting(plan: Plan) -> Iterator[str]:
    for ranks, epoch in plan.chosen.epochs.items():
        if epoch.imbalance > _WAITING:
            yield (
                f"On {ranks} ranks a step takes {epoch.imbalance:.2f} times as long as if no rank had to wait: "
                + (
                    "the longest document of a step alone takes that long. More examples per step reduce this."
                    if plan.chosen.strategy.recuts_steps
                    else "packing_strategy='step' spreads the examples of each step evenly over all ranks."
                )
            )
            return


def _untrained(plan: Plan) -> Iterator[str]:
    dropped = plan.chosen.report.dropped_untrained
    if dropped:
        yield (
            f"{dropped:,} {'documents have' if dropped > 1 else 'document has'} no token to train on within "
            "max_length and will be dropped: the prompt fills it, or no token has a label."
        )


def _smaller(plan: Plan) -> str:
    """Return the ways to save memory that the arguments do not use yet, as text."""
    args = plan.args
    ways = ["lower per_device_train_batch_size or max_length"]
    ways += [] if args.gradient_checkpointing else ["gradient_checkpointing"]
    ways += [] if args.use_peft else ["use_peft"]
    ways += [] if args.load_in_4bit or not args.use_peft else ["load_in_4bit"]
    return ", ".join([*ways, "or shard the model with FSDP"])


def _is_frozen_in_float32(plan: Plan) -> bool:
    shape, args = plan.shape, plan.args
    float32 = shape is not None and bool(shape.lora_rank) and shape.dtype_bytes == 4
    return float32 and bool(args.bf16) and not (args.load_in_4bit or args.load_in_8bit)


def _fits(plan: Plan) -> Iterator[str]:
    memory = plan.memory.get(plan.chosen.strategy.name)
    if memory is None:
        return
    card = _card(memory)
    saved = plan.memory[PADDED.name].total
    yield (
        f"Memory: about {memory.total / 1e9:.1f} GB at the largest micro-batch of "
        f"{plan.chosen.epoch().largest_micro_batch:,} tokens (padded {saved / 1e9:.1f} GB), an estimate. "
        + (
            f"With {SLACK - 1:.0%} slack and 1 GB for CUDA that is {memory.needed / 1e9:.1f} GB: a GPU of {card} GB "
            "will do."
            if card
            else f"No single GPU has that: {_smaller(plan)}."
        )
    )
    if memory.weights > RESERVED and _is_frozen_in_float32(plan):
        yield (
            f"The frozen weights are float32, TRL's default: dtype='bfloat16' halves their "
            f"{memory.weights / 1e9:.1f} GB, load_in_4bit does more."
        )


def _card(memory: Memory) -> int | None:
    """Return the memory in GB of the smallest GPU that holds it; `None` if no GPU does."""
    return next((size for size in _CARDS if size * 1e9 >= memory.needed), None)


def _checkpointing(plan: Plan) -> Iterator[str]:
    """Say that gradient checkpointing can be off, which is faster, if the memory then fits on a GPU."""
    memory = plan.without_checkpointing
    card = None if memory is None else _card(memory)
    if memory is None or card is None or plan.shape is None:
        return
    yield (
        f"Gradient checkpointing can be off: est. {memory.needed / 1e9:.1f} GB of a GPU of {card} GB. "
        f"gradient_checkpointing=False computes {operations(bool(plan.shape.lora_rank))}."
    )


def _sharded_rows(plan: Plan) -> Iterator[str]:
    """Say when GPUs have to share rows, and what it costs."""
    memory, shape, args = plan.memory.get(plan.chosen.strategy.name), plan.shape, plan.args
    if memory is None or shape is None:
        return
    tokens, size = plan.chosen.epoch().largest_micro_batch, args.sequence_parallel
    if size == 1:
        estimates = {n: estimate(shape, shared_by(args, n), tokens) for n in _SHARED_BY}
        least = None if _card(memory) else next((n for n in _SHARED_BY if _card(estimates[n])), None)
        if least is not None:
            yield (
                f"With sequence_parallel={least} (it must divide the model's attention heads) {least} GPUs share each "
                f"row: est. {estimates[least].needed / 1e9:.1f} GB on each. {_exchange(plan, least)}"
            )
        return
    alone = estimate(shape, shared_by(args, 1), tokens)
    card = _card(alone)
    unneeded = f" It is not needed: est. {alone.needed / 1e9:.1f} GB without it, which a GPU of {card} GB has."
    yield (
        f"sequence_parallel={size}: {size} GPUs share each row, {-(-tokens // size):,} tokens of the largest "
        f"micro-batch on each. {_exchange(plan, size)}{unneeded if card else ''}"
    )


def _exchange(plan: Plan, size: int) -> str:
    shape, tokens = plan.shape, plan.chosen.epoch().largest_micro_batch
    assert shape is not None
    # Query, key, value and the attention's output are exchanged; each GPU keeps one part of N.
    width = (2 * shape.query + 2 * shape.key_value) * (2 if plan.args.bf16 or plan.args.fp16 else shape.dtype_bytes)
    sent = tokens / size * width * (size - 1) / size
    return (
        f"Each sends {sent / 1e6:,.1f} MB in the forward of a layer and as much in its backward: keep the GPUs of a "
        "group on one node."
    )
