"""A counting collator: its batches hold what the own collator's hold, and their masks are not read again."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from padded import masks_read
from selection import in_full
from torch.utils.data import DataLoader
from trl_trainers import beyond, build, train

import trl_packfa
from trl_packfa.data.collating import CountedBatch, CountingCollator
from trl_packfa.layout.padded_rows import rows_of


@dataclass
class Collator:
    pad: int = 0

    def __call__(self, lengths):
        mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in zip(mask, lengths, strict=True):
            row[:length] = 1
        return {"input_ids": mask + 4, "attention_mask": mask}


@pytest.fixture
def read(monkeypatch):
    return masks_read(monkeypatch)


def test_batches_hold_tensors_and_know_their_rows_wherever_they_go(read):
    batch = CountingCollator(Collator())([3, 1])
    assert batch.keys() == Collator()([3, 1]).keys()
    assert all(isinstance(value, torch.Tensor) for value in batch.values())
    assert {name: value.to("cpu") for name, value in batch.items()}.keys() == batch.keys()
    assert len(read) == 1
    moved = pickle.loads(pickle.dumps(batch)).to(torch.device("cpu"), non_blocking=True)
    assert isinstance(moved, CountedBatch) and rows_of(moved["attention_mask"]).lengths == (3, 1) and len(read) == 1
    assert rows_of(copy.copy(batch)["attention_mask"]).lengths == (3, 1) and len(read) == 1
    # Made of its values otherwise, it is read again.
    other = type(batch)({name: value.clone() for name, value in batch.items()})
    assert rows_of(other["attention_mask"]).lengths == (3, 1) and len(read) == 2


@pytest.mark.parametrize("workers", [0, *in_full(1)])
def test_rows_come_through_loader_workers(workers, read):
    loader = DataLoader([3, 1, 2, 5], batch_size=2, collate_fn=CountingCollator(Collator()), num_workers=workers)
    found = [rows_of(batch.to("cpu")["attention_mask"]).lengths for batch in loader]
    assert found == [(3, 1), (2, 5)] and len(read) == (0 if workers else 2)  # by the collator, in its process


def test_a_counting_collator_passes_for_the_one_that_it_wraps():
    own = Collator()
    counting = pickle.loads(pickle.dumps(CountingCollator(own, share_prefixes=True)))
    assert isinstance(counting, Collator) and isinstance(counting, CountingCollator)
    assert counting.share_prefixes and counting.pad == 0 and isinstance(copy.deepcopy(counting), CountingCollator)
    counting.pad = 7
    assert counting.collator.pad == 7
    assert pickle.loads(pickle.dumps(CountingCollator(max)))([1, 2]) == 2  # no batch with a mask


@pytest.mark.parametrize("options", [{}, *in_full({"dataloader_num_workers": 1})])
def test_a_trainers_batches_hold_nothing_but_tensors(options, tmp_path):
    trainer = trl_packfa.padding_free(build("dpo", tmp_path, max_steps=1, **options))
    batch = next(iter(trainer.get_train_dataloader()))
    assert {name: value.to("cpu") for name, value in batch.items()}.keys() == batch.keys()
    assert 0.1 < train(trainer)[0]["padding_saved"]


def test_accelerate_may_dispatch_batches(tmp_path):
    """It concatenates and cuts what is in them."""
    settings = {"accelerator_config": {"dispatch_batches": True}, "max_steps": 2}
    expected = train(build("reward", tmp_path, **settings))
    logs = train(trl_packfa.padding_free(build("reward", tmp_path, **settings)))
    assert not beyond(expected, logs, only=("loss",)) and all(entry["padding_saved"] > 0.1 for entry in logs)
