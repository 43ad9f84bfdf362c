"""Collators: what their batches hold, whose masks are not read again, and how they go to the device."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from padded import masks_read
from selection import in_full
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from training import arguments, packed_trainer
from trl_trainers import beyond, build, train

import trl_packfa
from trl_packfa import DataCollatorForPacking, PackedLayout, PackedSFTConfig
from trl_packfa.data.collating import CountedBatch, CountingCollator
from trl_packfa.data.collator import FIRST_LABELS, LOSSES
from trl_packfa.data.dataloading import copies_without_waiting, send
from trl_packfa.data.steps import StepPart
from trl_packfa.errors import InvalidLayout
from trl_packfa.layout.padded_rows import rows_of


@pytest.mark.parametrize("examples", [
    [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}],
    [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [9, 4], "seq_lengths": [2]}],
], ids=["documents", "rows packed before"])  # fmt: skip
def test_matches_trls_padding_free_collator(examples):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    ours = DataCollatorForPacking(pad_token_id=0)(examples)
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(examples)
    assert set(ours) - set(theirs) == {"packed_layout"}
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


def test_labels_of_first_tokens_are_counted_if_asked():
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3], "labels": [-100]}, {"input_ids": [4], "labels": [4]}]
    packed = {"input_ids": [5, 6], "seq_lengths": [1, 1]}
    batch = DataCollatorForPacking(count_first_labels=True)([*rows, packed])
    assert batch[FIRST_LABELS] == 2 and FIRST_LABELS not in DataCollatorForPacking()(rows)


def test_padding_is_one_trailing_document():
    collator = DataCollatorForPacking(pad_token_id=9, pad_to_multiple_of=8)
    batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, -100, -100, -100]]
    assert batch["packed_layout"].lengths == (3, 1, 4)


def test_rows_packed_before_keep_their_boundaries():
    batch = DataCollatorForPacking()([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, {"input_ids": [4, 5]}])
    assert batch["packed_layout"].lengths == (2, 1, 2)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1]]


def test_losses_of_a_stream_are_summed():
    """Also beside a later part of a cut example, which has none."""
    rows = [{"input_ids": [1, 2], LOSSES: [1, 0, 2, 30]}, {"input_ids": [3], LOSSES: [0, 0, 0, 4]}]
    assert DataCollatorForPacking()([{"input_ids": [6, 7]}, *rows])[LOSSES] == (1, 0, 2, 34)


@pytest.mark.parametrize(("examples", "message"), [
    ([{"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1], "labels": [1, 2]}], "2 input_ids and 1 labels"),
    ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], r"3 input_ids, but its seq_lengths \[2, 2\] sum up to 4"),
    ([{"input_ids": [1, 2]}, {"input_ids": []}], "lengths must all be positive"),
])  # fmt: skip
def test_examples_that_do_not_add_up_are_refused(examples, message):
    with pytest.raises(InvalidLayout, match=message):
        DataCollatorForPacking()(examples)


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


def test_accelerate_may_dispatch_batches(tmp_path):
    """It concatenates and cuts what is in them."""
    settings = {"accelerator_config": {"dispatch_batches": True}, "max_steps": 2}
    expected = train(build("reward", tmp_path, **settings))
    logs = train(trl_packfa.padding_free(build("reward", tmp_path, **settings)))
    assert not beyond(expected, logs, only=("loss",)) and all(entry["padding_saved"] > 0.1 for entry in logs)


@pytest.fixture
def copies(monkeypatch):
    """Fail a copy to the device that waits, or that is of pageable memory."""
    locked, copied, to = set(), [], torch.Tensor.to

    def lock(self, device=None):
        tensor = self.clone()
        locked.add(id(tensor))
        copied.append(tensor)  # keeps its id
        return tensor

    def copy(self, *args, **options):
        if args and str(args[0]) == "meta" and self.device.type == "cpu":
            assert options.get("non_blocking"), "the host waits"
            assert id(self) in locked, "pageable memory"
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: id(self) in locked)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    return copied


EXAMPLES = [{"input_ids": list(range(1, n))} for n in (5, 31, 9)]


def test_a_batch_is_locked_and_sent_whole(copies):
    batch = {**DataCollatorForPacking()(EXAMPLES), "sources": ("a", "b"), "packing_losses": (3, 0)}
    sent = send(batch, torch.device("meta"))
    layout = sent["packed_layout"]
    assert layout.cu_seqlens.device.type == "meta" and layout.lengths == (4, 30, 8)
    assert {name for name, value in sent.items() if isinstance(value, torch.Tensor) and value.is_meta} == {
        "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"
    }  # fmt: skip
    assert sent["sources"] == ("a", "b") and sent["packing_losses"] == (3, 0)
    again = send(sent, torch.device("meta"))
    assert all(again[name] is sent[name] for name in ("input_ids", "labels"))
    with pytest.raises(AssertionError, match="the host waits"):
        batch["input_ids"].to("meta")


def test_what_a_data_loader_has_locked_is_not_locked_again(copies):
    """torch's loaders lock the tensors of a dictionary, and what says how it is locked."""
    batch = DataCollatorForPacking(return_flash_attn_kwargs=False)(EXAMPLES)
    locked = pin_memory(batch)
    assert locked["packed_layout"].cu_seqlens.is_pinned() and locked["packed_layout"].lengths == (4, 30, 8)
    before = len(copies)
    send(locked, torch.device("meta"))
    assert len(copies) == before
    batch = CountedBatch(batch, step=StepPart(1, 2, 2), origins="which")
    assert (pin_memory(batch).step, pin_memory(batch).origins) == (batch.step, "which")
    layout = PackedLayout.from_lengths([2, 3, 5], rows=2, padding=5).pin_memory()
    assert (layout.lengths, layout.rows, layout.padding) == ((2, 3, 5), 2, 5)


@pytest.mark.parametrize(
    ("changes", "sends"),
    [({}, True), ({"packing": False}, False), ({"device": torch.device("cpu")}, False),
     ({"dataloader_pin_memory": False}, False), ({"deepspeed": {"stage": 2}}, False)],
)  # fmt: skip
def test_who_copies_without_waiting(changes, sends):
    given = {"packing": True, "device": torch.device("cuda", 0), "dataloader_pin_memory": True, "deepspeed": None}
    assert copies_without_waiting(SimpleNamespace(**{**given, **changes})) is sends


def test_the_data_loader_of_a_gpu_does_not_wait_either(monkeypatch):
    assert not PackedSFTConfig("out", use_cpu=True).accelerator_config.non_blocking
    monkeypatch.setattr(PackedSFTConfig, "device", torch.device("cuda", 0))
    assert PackedSFTConfig("out").accelerator_config.non_blocking
    assert not PackedSFTConfig("out", dataloader_pin_memory=False).accelerator_config.non_blocking


def test_the_trainer_sends_what_its_model_reads(monkeypatch):
    """Every micro-batch of a step, and nothing beside its layout that says where documents begin."""
    trainer, seen = packed_trainer(arguments(max_steps=1)), []
    monkeypatch.setattr("trl_packfa.trainers.sft.trainer.copies_without_waiting", lambda args: True)
    monkeypatch.setattr("trl_packfa.trainers.sft.trainer.send", lambda batch, device: seen.append(set(batch)) or batch)
    trainer.train()
    keys = {"input_ids", "labels", "position_ids", "packed_layout"}
    assert seen and all(names >= keys and not any("seq" in name for name in names) for names in seen)
