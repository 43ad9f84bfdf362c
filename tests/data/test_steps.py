"""Steps that every rank plans from lengths: the same rows as in the padded run, dealt, cut and loaded here."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from tolerance import assert_another_run, assert_trajectory
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler
from training import arguments, dataset, losses, packed_trainer, padded_trainer, trained
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.data import steps
from trl_packfa.data.batching import KEPT, deal
from trl_packfa.data.origins import origins_of_steps
from trl_packfa.data.steps import StepPart, StepSampler, micro_batches_of
from trl_packfa.errors import InvalidConfig


def sampler(inner, *, rank=0, world_size=1, size=2, accumulation=2, drop_last=False, even=True, plans=False):
    args = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=world_size, dataloader_drop_last=drop_last,
                           gradient_accumulation_steps=accumulation)  # fmt: skip
    return StepSampler(inner, args, SimpleNamespace(even_batches=even), size=size, plans=plans)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("count", [3, 16, 17, 23])
def test_rows_are_dealt_as_accelerate_deals_them(count, world_size, drop_last, split):
    size = 4 if split else 2
    for rank in range(world_size):
        inner = BatchSampler(SequentialSampler(range(count)), size, drop_last)
        expected = inner if world_size == 1 else BatchSamplerShard(inner, world_size, rank, split_batches=split)
        own = size // world_size if split else size
        inner = SequentialSampler(range(count))
        ours = sampler(inner, rank=rank, world_size=world_size, size=own, drop_last=drop_last)
        assert list(ours) == [list(batch) for batch in expected] and len(ours) == len(expected)


def test_every_rank_sees_the_whole_step():
    """Two ranks, two batches of two rows a step: the places of a step name the same eight rows on both."""
    places = [list(sampler(SequentialSampler(range(10)), rank=rank, world_size=2, plans=True)) for rank in (0, 1)]
    for one, other in zip(*places, strict=True):
        assert np.array_equal(one[0].rows, other[0].rows) and one[0][1:] == other[0][1:]
    assert [(place.rows.tolist(), place.number, place.batches) for (place,) in places[0]] == [
        (list(range(8)), 0, 2), (list(range(8)), 1, 2), ([8, 9, 0, 1], 0, 1)
    ]  # fmt: skip


def test_a_plan_repeats_no_row_if_the_user_wants_none_repeated():
    places = sampler(SequentialSampler(range(9)), world_size=2, even=False, plans=True)
    assert np.concatenate([place.rows for (place,) in places if not place.number]).tolist() == list(range(9))


def test_a_batch_that_is_split_over_ranks_is_cut_like_one(tmp_path, monkeypatch):
    monkeypatch.setattr(PackedSFTConfig, "data_parallel_size", 2)
    args = arguments(out=tmp_path, accelerator_config={"split_batches": True}, gradient_accumulation_steps=2)
    trainer = packed_trainer(args)
    loader = trainer.get_train_dataloader()
    assert trainer._cutter.batch_size == 2 == loader.batch_sampler.size and len(loader) == 12


def test_an_order_that_differs_by_rank_is_the_main_ranks(monkeypatch):
    monkeypatch.setattr(steps, "gather_object", lambda mine: [*mine, 7])
    monkeypatch.setattr(steps, "broadcast_object_list", lambda mine: [np.array([3, 1, 0, 2])])
    drawn = WeightedRandomSampler([1.0] * 4, 4)
    assert list(sampler(drawn, world_size=2)) == [[3, 1]]
    asked = []
    monkeypatch.setattr(steps, "gather_object", asked.append)
    seeded = SeedableRandomSampler(range(4), data_seed=1)
    assert len(list(sampler(seeded, world_size=2))) == 1 and not asked, "all ranks draw the same"


@pytest.mark.parametrize("batches", range(1, 6))
@pytest.mark.parametrize("count", range(1, 12))
def test_a_steps_micro_batches_are_held_once_and_the_last_batch_holds_one(count, batches):
    held = [StepPart(number, batches, count).held for number in range(batches)]
    assert [i for part in held for i in part] == list(range(count)) and held[-1]
    assert count < batches or all(held)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_yields_ordinary_batches(workers, tmp_path):
    """Every document of a step once, in batches with the collator's keys; the first step has an empty one."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "dataloader_num_workers": workers}
    trainer = packed_trainer(arguments(out=tmp_path, **options))
    loader = trainer.get_train_dataloader()
    batches = list(loader)
    assert len(loader) == len(batches) == 24
    assert all(batch["input_ids"].shape == batch["labels"].shape for batch in batches)
    assert not any(name.startswith("trl_packfa") for batch in batches for name in batch)
    padded = list(padded_trainer(arguments(SFTConfig, tmp_path, **options)).get_train_dataloader())
    for start in range(0, 24, 3):
        found = [ids for batch in batches[start : start + 3] for part in micro_batches_of(batch)
                 for ids in part["packed_layout"].split(part["input_ids"])]  # fmt: skip
        wanted = [ids[mask.bool()] for batch in padded[start : start + 3]
                  for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
        assert sorted(ids.tolist() for ids in found) == sorted(ids.tolist() for ids in wanted)
    assert min(batch["input_ids"].numel() for batch in batches) == 0, "fewer micro-batches than padded"


def test_workers_change_nothing(tmp_path):
    options = {"gradient_accumulation_steps": 3, "seed": 3}
    one, two = (trained(packed_trainer(arguments(out=tmp_path, dataloader_num_workers=n, **options))) for n in (0, 2))
    assert losses(one) == losses(two)


def test_transformers_sampler_of_batches_keeps_its_batches(tmp_path):
    options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "batch_rebalance"}
    expected = trained(padded_trainer(arguments(SFTConfig, tmp_path, **options)))
    ours = trained(packed_trainer(arguments(out=tmp_path, packing_strategy="minibatch", **options)))
    assert_trajectory(losses(ours), losses(expected))
    assert_another_run(losses(trained(packed_trainer(arguments(out=tmp_path)))), losses(expected))


class Own:
    """A user's class with a sampler of its own."""

    def _get_train_sampler(self, train_dataset=None):
        weights = [1.0 + i % 5 for i in range(len(self.train_dataset))]
        return WeightedRandomSampler(weights, len(weights), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_an_own_sampler_is_honoured(strategy, tmp_path):
    options = {"gradient_accumulation_steps": 2}
    with_own = {cls: type("Mine", (Own, cls), {}) for cls in (PackedSFTTrainer, SFTTrainer)}
    args = arguments(out=tmp_path, packing_strategy=strategy, **options)
    ours = trained(packed_trainer(args, cls=with_own[PackedSFTTrainer]))
    padded = arguments(SFTConfig, tmp_path, **options)
    expected = trained(packed_trainer(padded, cls=with_own[SFTTrainer]))
    assert_trajectory(losses(ours), losses(expected))
    assert_another_run(losses(trained(packed_trainer(args))), losses(expected))


def test_without_a_sampler_rows_come_in_their_order(tmp_path):
    none = type("None_", (PackedSFTTrainer,), {"_get_train_sampler": lambda self, *_: None})
    args = arguments(out=tmp_path, train_sampling_strategy="sequential")
    expected = losses(trained(packed_trainer(args)))
    assert losses(trained(packed_trainer(arguments(out=tmp_path), cls=none))) == expected


def test_a_sampler_that_cannot_be_honoured_is_refused(tmp_path):
    mine = type("Mine", (Own, PackedSFTTrainer), {})
    args = arguments(out=tmp_path, packing_strategy="bfd", max_length=64)
    with pytest.raises(InvalidConfig, match="'bfd' has no use for a sampler: _get_train_sampler of Mine"):
        packed_trainer(args, cls=mine)
    trainer = packed_trainer(args)
    trainer._get_train_sampler = lambda *_: None
    with pytest.raises(InvalidConfig, match="'bfd' has no use for a sampler: _get_train_sampler of PackedSFT"):
        trainer.train()
    endless = type("Endless", (PackedSFTTrainer,), {"_get_train_sampler": lambda self, *_: iter(range(8))})
    with pytest.raises(InvalidConfig, match=r"has no length(.|\n)*Give it a __len__"):
        packed_trainer(arguments(out=tmp_path), cls=endless).get_train_dataloader()


def test_a_plan_reaches_loader_workers_without_the_dataset():
    trainer = packed_trainer(arguments(), train_dataset=dataset(1000))
    sent = pickle.loads(pickle.dumps(trainer._cutter))
    assert sent._rows is None and np.array_equal(sent.lengths, trainer._cutter.lengths)
    step = np.arange(4)
    assert sent.cut(step) == trainer._cutter.cut(step)


def test_padded_micro_batches_that_stay_are_dealt_in_whole_rounds():
    """Without `even_batches` a rank has one less, and runs an idle one; it was an IndexError."""
    groups = np.repeat(np.arange(5), 2)
    dealt = deal(np.full(10, 5), groups, cut=KEPT, budget=10, world_size=2, quadratic=0.0)
    assert dealt == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], []]]
    assert [len(of.sizes) for of in origins_of_steps(dealt, np.full(10, 5), groups, rank=1)] == [2, 2, 0]
