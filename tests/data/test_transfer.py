"""Batches go to the device from page-locked memory, without a wait. The meta device stands in for a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory
from training import arguments, packed_trainer

from trl_packfa import DataCollatorForPacking, PackedLayout, PackedSFTConfig
from trl_packfa.data.collating import CountedBatch
from trl_packfa.data.dataloading import copies_without_waiting, send
from trl_packfa.data.steps import StepPart


@pytest.fixture
def copies(monkeypatch):
    """What is locked and what is copied: a copy to the device that waits, or that is of pageable memory, fails."""
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
