"""`trl-packfa plan`: figures against brute force and against the trainers that really run."""

import io
import re

import numpy as np
import pytest
import tiny
from datasets import Dataset
from plans import UNEVEN, made
from rich.console import Console
from tolerance import assert_estimate
from training import FORMATS, arguments, packed_trainer
from training import dataset as small_dataset

from trl_packfa import packing
from trl_packfa.data import epoch_plan
from trl_packfa.data.batching import Batching
from trl_packfa.data.epoch_plan import plan_epoch
from trl_packfa.packing import BFD, MINIBATCH, PADDED, STEP, STRATEGIES, WRAPPED, TrainedTokens, plan_overflow
from trl_packfa.plan.gather import Source, read_documents
from trl_packfa.plan.memory import estimate
from trl_packfa.plan.run import _ranks, make_plan, read_shape
from trl_packfa.plan.terminal import _memory, print_tables, tables

pytest.importorskip("matplotlib")


def brute_force(lengths, size, accumulation, world, strategy, budget):
    """Steps, micro-batches of a rank, pads: an epoch counted one document at a time, documents in their order."""
    batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    if world > 1:  # accelerate begins again at the front until every rank has a whole batch
        again = lengths * 2
        while len(batches[-1]) < size or len(batches) % world:
            dealt = sum(map(len, batches))
            if len(batches[-1]) < size:
                batches[-1] = batches[-1] + again[dealt - len(lengths) :][: size - len(batches[-1])]
            else:
                batches.append(again[dealt - len(lengths) :][:size])
    rounds = [batches[i : i + world] for i in range(0, len(batches), world)]
    steps = [rounds[i : i + accumulation] for i in range(0, len(rounds), accumulation)]
    if strategy == STEP:
        flat = [[n for round_ in step for batch in round_ for n in batch] for step in steps]
        needed = [-(-packing.fewest_micro_batches(np.array(step), budget) // world) for step in flat]
        return len(steps), sum(needed), 0
    pads = sum(max(batch) * len(batch) - sum(batch) for batch in batches) if strategy == PADDED else 0
    return len(steps), len(rounds), pads


@pytest.mark.parametrize("strategy", [PADDED, MINIBATCH, STEP])
@pytest.mark.parametrize(("count", "size", "accumulation", "world"), [(53, 4, 1, 1), (53, 4, 3, 1), (61, 3, 2, 4)])
def test_figures_are_those_of_a_count_by_hand(strategy, count, size, accumulation, world):
    lengths = UNEVEN[:count]
    batching = Batching(strategy, size, accumulation, world, sampling="sequential")
    epoch = plan_epoch(np.array(lengths), batching)
    budget = size * max(lengths)
    steps, micro_batches, pads = brute_force(lengths, size, accumulation, world, strategy, budget)
    assert (epoch.steps, epoch.micro_batches) == (steps, micro_batches)
    assert epoch.tokens == sum(lengths) and epoch.examples_per_step == count / steps
    tokens = batching.draw(np.array(lengths)).sum()
    assert epoch.padding == pytest.approx(pads / (tokens + pads))
    if strategy == PADDED:
        assert epoch.padding > 0.2 and epoch.fill == pytest.approx(tokens / (tokens + pads)) and epoch.rows == count
        assert brute_force(lengths[::-1], size, accumulation, world, strategy, budget)[2] != pads, "it is no accident"
    if strategy == STEP:
        assert epoch.fill == pytest.approx(tokens / (budget * micro_batches * world))


def test_rows_are_counted_as_they_are_packed():
    lengths = np.array(UNEVEN).clip(max=200)
    for strategy, wrapped in ((BFD, False), (WRAPPED, True)):
        batching = Batching(strategy, 2, 3, 4, max_length=200, sampling="sequential")
        cut = lengths
        if wrapped:
            spans, _ = plan_overflow(lengths, TrainedTokens.every(lengths.sum()), max_length=200, policy="cut at rows")
            cut = spans.stop - spans.start
        epoch, rows = plan_epoch(cut, batching), batching.row_sampler(cut).num_rows
        assert epoch.rows == rows >= -(-lengths.sum() // 200) and epoch.padding == 0
        assert epoch.steps == -(-rows // (2 * 4 * 3)) and epoch.fill == pytest.approx(lengths.sum() / (rows * 200))
        assert epoch.micro_batches == -(-rows // 8)


def test_cost_waits_for_the_slowest_and_counts_pads_and_attention():
    lengths = np.array([10, 2, 4, 8])
    batching = Batching(PADDED, 2, quadratic=0.1, sampling="sequential")
    padded = plan_epoch(lengths, batching)
    assert padded.cost == pytest.approx(2 * (10 + 10) + 2 * (8 + 6.4)) and padded.imbalance == 1.0
    ours = plan_epoch(lengths, Batching(MINIBATCH, 2, quadratic=0.1, sampling="sequential"))
    assert ours.cost == pytest.approx(24 + 0.1 * (100 + 4 + 16 + 64))
    two = plan_epoch(lengths, Batching(MINIBATCH, 2, world_size=2, sampling="sequential"))
    assert (two.cost, two.imbalance) == (12, pytest.approx(1.0))
    uneven = plan_epoch(np.array([10, 10, 1, 1]), Batching(MINIBATCH, 2, world_size=2, sampling="sequential"))
    assert (uneven.cost, uneven.imbalance) == (20, pytest.approx(20 / 11))
    rounded = plan_epoch(lengths, Batching(MINIBATCH, 2, pad_to=16, sampling="sequential"))
    assert rounded.padding == pytest.approx(1 - 24 / 32) and rounded.largest_micro_batch == 32


def test_order_and_dropping_follow_the_arguments():
    lengths = np.array(UNEVEN)
    random, grouped = (plan_epoch(lengths, Batching(PADDED, 8, sampling=s)) for s in ("random", "group_by_length"))
    assert grouped.padding < random.padding / 2, "batches of similar lengths have fewer pads"
    dropped = plan_epoch(lengths[:53], Batching(STEP, 4, world_size=2, drop_last=True))
    assert (dropped.documents, dropped.steps) == (48, 6)


@pytest.mark.parametrize("strategy", [PADDED, MINIBATCH, STEP])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_part_of_a_large_dataset_and_of_a_long_epoch_is_near_the_whole(monkeypatch, strategy, drop_last):
    lengths = np.array(UNEVEN * 20 + [3])
    batching = Batching(strategy, 2, 4, world_size=2, drop_last=drop_last, quadratic=1e-3)
    sampled = plan_epoch(lengths, batching)
    with monkeypatch.context() as patched:
        patched.setattr(epoch_plan, "_SAMPLED", 10_000)
        whole = plan_epoch(lengths, batching)
    monkeypatch.setattr(epoch_plan, "_DRAWN", len(lengths) // 4)
    for part in (sampled, plan_epoch(lengths, batching)):
        assert (part.steps, part.documents) == (whole.steps, whole.documents)
        for name in ("tokens", "rows", "micro_batches", "cost"):
            assert_estimate(getattr(part, name), getattr(whole, name))


def test_equal_lengths_gain_nothing(tmp_path):
    plan = made(tmp_path, [100] * 64)
    assert all(plan.speed_up(outcome) == pytest.approx(1) for outcome in plan.outcomes.values())
    assert plan.padded.epoch().padding == 0 and plan.advice[0].startswith("Packing gains little here: 0%")


@pytest.mark.parametrize("strategy", [PADDED, *STRATEGIES.values()])
def test_steps_are_those_that_the_trainer_takes(tmp_path, strategy):
    asked = {"packing": False} if strategy == PADDED else {"packing_strategy": strategy.name}
    args = arguments(
        out=tmp_path, **asked, max_length=48, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        max_steps=-1, num_train_epochs=1, check_packing=False,
    )  # fmt: skip
    trainer = packed_trainer(args, train_dataset=small_dataset(41))
    tokens = read_documents("d", small_dataset(41), tokenizer_folder(tmp_path), args).tokens
    plan = make_plan(Source("d", tokens), args, [1])
    trainer.train()
    epoch = plan.chosen.epoch()
    assert plan.chosen.strategy == strategy and epoch.steps == trainer.state.global_step
    assert plan.to_dict()["strategies"][strategy.name]["ranks"]["1"]["total_steps"] == trainer.state.max_steps
    if strategy != PADDED:
        assert plan.chosen.report == trainer.packing_reports["train"]
        assert trainer.packing_plan["steps_per_epoch"] == epoch.steps
        assert trainer.packing_plan["examples_per_step"] == epoch.examples_per_step
        rows = {"fill": epoch.fill, "documents_per_row": len(trainer.train_dataset) / epoch.rows}
        assert not strategy.fills_rows or rows.items() <= trainer.packing_plan.items()
    else:
        assert epoch.documents == len(trainer.train_dataset)


def tokenizer_folder(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize("name", [*FORMATS, "assistant only", "whole text"])
def test_documents_are_tokenized_and_labelled_as_the_trainer_does(tmp_path, name):
    rows = FORMATS["messages" if name == "assistant only" else name if name in FORMATS else "prompt-completion"]
    only = {"assistant only": {"assistant_only_loss": True}, "whole text": {"completion_only_loss": False}}
    args = arguments(out=tmp_path, max_length=24, **only.get(name, {}))
    trainer = packed_trainer(args, train_dataset=Dataset.from_list(rows))
    tokens = read_documents(name, Dataset.from_list(rows), tokenizer_folder(tmp_path), args).tokens
    _, report = plan_overflow(*tokens, max_length=24, policy="truncate")
    assert report == trainer.packing_reports["train"]
    trains_all = name in ("text", "messages", "whole text", "pre-tokenized")
    assert (report.trained_tokens < report.packed_tokens - report.packed_documents) != trains_all


def test_memory_is_that_of_the_model_and_near_what_autograd_keeps(tmp_path, saved):
    args = arguments(out=tmp_path, model_name_or_path=saved["MODEL"], lora_r=8)
    shape = read_shape(args)
    model = tiny.model(layers=2)
    assert shape.parameters == model.num_parameters() and shape.layers == 2
    assert estimate(shape, args, 100).weights == sum(p.numel() * 4 for p in model.parameters())
    adapted = packed_trainer(args, model=model, peft_config=None)
    assert shape.trainable == adapted.model.num_parameters(only_trainable=True)
    assert shape.quadratic == adapted._cutter.quadratic
    full = arguments(out=tmp_path, model_name_or_path=saved["MODEL"], use_peft=False)
    memory = estimate(read_shape(full), full, 100)
    assert memory.optimizer == 2 * memory.gradients == 2 * memory.weights and memory.adapter == 0
    quantized = arguments(out=tmp_path, model_name_or_path=saved["MODEL"], load_in_4bit=True)
    assert estimate(read_shape(quantized), quantized, 100).weights < estimate(shape, args, 100).weights


def test_advice_warns_of_fewer_steps_with_the_figures(tmp_path):
    plan = made(tmp_path, packing_strategy="bfd", per_device_train_batch_size=4)
    steps, padded = plan.chosen.epoch().steps, plan.padded.epoch().steps
    text = "\n".join(plan.advice)
    assert padded >= 3 * steps
    assert f"Warning: your packing_strategy='bfd' takes {steps} optimizer steps an epoch where the padded run" in text
    assert f"takes {padded}, {padded / steps:.1f} times fewer" in text and "1.284" in text and "1.129" in text
    assert text.startswith("Use packing_strategy='step': ")
    ours = "\n".join(made(tmp_path, packing_strategy="step").advice)
    assert ours.startswith("Use packing_strategy='step' (your choice)") and "Warning" not in ours
    even = "\n".join(made(tmp_path, [190] * 400, per_device_train_batch_size=1, packing_strategy="bfd").advice)
    assert "Warning" not in even, "where rows hold one document each, nothing changes"


def test_a_row_and_a_sentence_say_what_runs_without_gradient_checkpointing(tmp_path, saved):
    text, unchecked = {}, {}
    shape = read_shape(arguments(out=tmp_path, model_name_or_path=saved["MODEL"]))
    for checkpointed in (True, False):
        plan = made(tmp_path, shape=shape, gradient_checkpointing=checkpointed)
        text[checkpointed] = "\n".join([*plan.advice, *_memory(plan)])
        unchecked[checkpointed] = plan.without_checkpointing
        assert (plan.to_dict()["memory_without_checkpointing"] is None) != checkpointed
    assert unchecked[True].activations > plan.memory[plan.chosen.strategy.name].activations / 2
    needed = unchecked[True].needed / 1e9
    assert f"Gradient checkpointing can be off: est. {needed:.1f} GB of a GPU of 4 GB." in text[True]
    assert "step *, no gradient checkpointing" in text[True]
    assert "checkpointing" not in text[False]


def test_advice_names_what_is_lost_and_what_waits(tmp_path):
    lengths = [*UNEVEN, 3000]
    text = "\n".join(made(tmp_path, lengths, max_length=100).advice)
    assert re.search(r"tokens \(\d+\.\d%\) are lost: \d+ of 301 documents are longer than max_length=100", text)
    kept = [np.minimum(lengths, n).sum() / sum(lengths) for n in (800, 1600, 3200)]
    for length, share in zip((800, 1600, 3200), kept, strict=True):
        assert f"max_length={length} {share:.0%}" in text
    assert kept[-1] == 1 and "max_length=6400" not in text
    text = "\n".join(made(tmp_path, lengths, max_length=None).advice)
    assert "The longest document (3,000 tokens)" in text and "max_tokens_per_microbatch=" in text
    text = "\n".join(made(tmp_path, packing_strategy="minibatch", ranks=(8,)).advice)
    assert "On 8 ranks" in text and "spreads the examples of each step" in text
    assert "The whole run is max_steps=3 optimizer steps" in "\n".join(made(tmp_path, max_steps=3).advice)
    assert "documents are cut into several" in "\n".join(made(tmp_path, packing_strategy="wrapped").advice)


def test_memory_that_no_gpu_has_is_said_with_what_is_left_to_do(tmp_path, saved):
    args = {"model_name_or_path": saved["MODEL"], "gradient_checkpointing": False, "max_length": None}
    shape = read_shape(arguments(out=tmp_path, **args))
    text = "\n".join(made(tmp_path, [40_000_000, 5], shape=shape, **args).advice)
    assert "No single GPU has that: lower per_device_train_batch_size or max_length, gradient_checkpointing," in text
    assert "a GPU of 4 GB will do" in "\n".join(made(tmp_path, shape=shape, **args).advice)


def test_sharded_rows_are_advised_where_no_gpu_holds_one(tmp_path, saved):
    args = {"model_name_or_path": saved["MODEL"], "max_length": None, "gradient_checkpointing": False}
    shape = read_shape(arguments(out=tmp_path, **args))
    text = "\n".join(made(tmp_path, [80_000_000, 5], shape=shape, **args).advice)
    size = int(re.search(r"With sequence_parallel=(\d+) \(it must divide the model's attention heads\)", text)[1])
    plan = made(tmp_path, [80_000_000, 5], ranks=(size,), shape=shape, sequence_parallel=size, **args)
    sentence = next(s for s in plan.advice if s.startswith(f"sequence_parallel={size}: {size} GPUs share each row"))
    assert "GB will do" in "\n".join(plan.advice) and "not needed" not in sentence
    # Two layers of 4 heads of 16 features, 2 key/value heads: (2 * 64 + 2 * 32) * 4 bytes a token.
    tokens = plan.chosen.epoch().largest_micro_batch / size
    assert f"Each sends {tokens * 192 * 4 * (size - 1) / size / 1e6:,.1f} MB in the forward of a layer" in sentence
    assert "It is not needed: est." in "\n".join(made(tmp_path, ranks=(2,), shape=shape, sequence_parallel=2).advice)


def test_gpus_that_share_rows_count_as_one(tmp_path):
    shared, alone = made(tmp_path, ranks=(2, 8), sequence_parallel=2), made(tmp_path, ranks=(1, 4))
    assert list(shared.chosen.epochs) == [2, 8] and shared.world_size == 2
    assert list(shared.chosen.epochs.values()) == list(alone.chosen.epochs.values())
    assert "2 GPUs, 2 of which share each row" in next(tables(shared))[0]
    assert _ranks("1,2,8", 4) == [8] and _ranks("1,2", 4) == [4]


def test_the_suggested_budget_does_what_is_said(tmp_path):
    plan = made(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=16)
    sentence = next(s for s in plan.advice if "max_tokens_per_microbatch=" in s)
    budget, said = re.search(r"max_tokens_per_microbatch=(\d+) needs (as many|[\d.]+) micro", sentence).groups()
    before = plan.chosen.epoch()
    again = made(tmp_path, per_device_train_batch_size=16, max_tokens_per_microbatch=int(budget))
    epoch = again.chosen.epoch()
    said = f"{before.micro_batches / before.steps:.1f}" if said == "as many" else said
    assert f"{epoch.micro_batches / epoch.steps:.1f}" == said and epoch.fill > plan.chosen.epoch().fill
    assert epoch.steps == plan.chosen.epoch().steps


@pytest.mark.parametrize("width", [80, 100, 150])
def test_a_table_shows_every_figure_at_each_width(tmp_path, saved, width):
    shape = read_shape(arguments(out=tmp_path, model_name_or_path=saved["MODEL"]))
    plan = made(tmp_path, shape=shape)
    console, narrow = (Console(file=io.StringIO(), width=size) for size in (width, 40))
    for each in (console, narrow):
        print_tables(plan, each)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    values = {value for _, columns in tables(plan) for cells in columns.values() for value in cells.values()}
    assert values <= set(text.split())
    assert not values <= set(narrow.file.getvalue().split()), "the control"


def test_construction_deals_a_bounded_number_of_documents(monkeypatch):
    """At 1,024 ranks a hundred steps took minutes. The sampled steps tell the same to a few per cent."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.3, 1, 400_000), 2048).astype(np.int64) + 1
    dealt, deal = [], epoch_plan.Batching.recut
    monkeypatch.setattr(
        epoch_plan.Batching, "recut", lambda self, step, **given: dealt.append(step.size) or deal(self, step, **given)
    )
    found = {}
    for ranks, accumulation in ((1, 4), (1024, 4)):
        dealt.clear()
        found[ranks] = plan_epoch(lengths, Batching(STEP, 4, accumulation, ranks, 2048))
        assert sum(dealt) <= max(epoch_plan._DOCUMENTS, 4 * ranks * accumulation * epoch_plan._FEWEST)
        assert 1 < len(dealt) <= 100
    assert len(dealt) == epoch_plan._DOCUMENTS // (1024 * 16) and found[1024].tokens == found[1].tokens
