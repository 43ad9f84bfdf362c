"""Re-cut steps of pairs and answers about images: losses, gradient norms and means over pairs of TRL's padded run."""

import pytest
import torch
import vision
from datasets import Dataset
from image_runs import build_preference, mix_images_up
from selection import exhaustive
from tolerance import CONTROL
from trl_trainers import OF_MICRO_BATCHES, beyond, train

from trl_packfa.data.image_examples import Merging
from trl_packfa.errors import InvalidConfig, InvalidDataset

APO = {"loss_type": "apo_zero_unpaired"}
LORA = ["q_proj", "v_proj"]


def both(kind, out, family="llava", **options):
    """Return the logs of TRL's padded run, ours, and our trainer."""
    own = ("max_tokens_per_microbatch",)
    shared = {name: value for name, value in options.items() if name not in own}
    expected = train(build_preference(kind, out / "padded", family, padded=True, **shared))
    trainer = build_preference(kind, out / "run", family, **options)
    return expected, train(trainer), trainer


@pytest.mark.parametrize(("kind", "family", "lora"), [
    ("DPO", "llava", None),
    ("DPO", "qwen3_vl", LORA),
    ("KTO", "llava", None),
    *exhaustive(
        ("DPO", "gemma3", None), ("DPO", "llava_next", LORA), ("DPO", "idefics3", None), ("KTO", "qwen3_vl", LORA)
    ),
])  # fmt: skip
def test_recut_steps_train_as_padded(kind, family, lora, tmp_path):
    options = {"gradient_accumulation_steps": 6, **(APO if kind == "KTO" else {})}
    expected, logs, trainer = both(kind, tmp_path, family, lora=lora, **options)
    assert not beyond(expected, logs, besides=OF_MICRO_BATCHES[kind.lower()])
    assert trainer.cut_reason == "" and min(entry["micro_batches"] for entry in logs) < 6
    assert max(entry["padding_saved"] for entry in logs) > 0.05
    assert kind == "KTO" or [*trainer._cutter._collator.collator.is_equal.values()] == [True], "joined as TRL joins"
    compared = trainer.trl_packfa_padding_free.first_calls
    assert compared.keys() == ({"model"} if lora else {"model", "ref_model"})
    report = trainer.packing_reports["train"]
    assert report.documents == 12 * len(logs)
    assert 0 < report.image_tokens < report.tokens and 0 < report.trained_tokens < report.tokens


def test_the_last_padded_micro_batch_may_be_smaller(tmp_path):
    """Its pairs weigh more, so they share no micro-batch with the others."""
    data = vision.uneven_pairs(11)
    expected, logs, trainer = both(
        "DPO", tmp_path, data=data, max_steps=-1, num_train_epochs=2, per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    assert len(logs) == 4 and not beyond(expected, logs, besides=OF_MICRO_BATCHES["dpo"])
    assert trainer.packing_reports["train"].documents == 22


def test_rows_without_images_and_a_budget(tmp_path):
    """The budget is smaller than some pairs: these run alone."""
    data = vision.uneven_pairs(24, without=(1, 3, 4, 8))
    expected, logs, _ = both("DPO", tmp_path, data=data, max_tokens_per_microbatch=60)
    assert not beyond(expected, logs, besides=OF_MICRO_BATCHES["dpo"])
    assert min(entry["micro_batches"] for entry in logs) > 3


def test_resuming_and_workers(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": 2, "lora": LORA, "max_steps": 3}
    expected, logs, _ = both("DPO", tmp_path, **saving)
    assert not beyond(expected, logs, besides=OF_MICRO_BATCHES["dpo"])
    again = build_preference("DPO", tmp_path / "run", **saving)
    assert not beyond(logs, train(again, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2")))


def test_control_images_of_another_pair_train_something_else(tmp_path, monkeypatch):
    mix_images_up(monkeypatch)
    expected, logs, _ = both("DPO", tmp_path)
    assert {"loss", "grad_norm"} <= beyond(expected, logs, times=CONTROL).keys()


def test_losses_of_a_whole_micro_batch_are_not_cut(tmp_path):
    """KTO's KL, too; NEFTune's noise is no obstacle without images."""
    options = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    expected, logs, trainer = both("KTO", tmp_path, **options)
    assert not beyond(expected, logs) and "estimates the KL over the rows" in trainer.cut_reason
    assert max(entry["padding_saved"] for entry in logs) > 0.05
    noise = {"neftune_noise_alpha": 5.0}
    assert "NEFTune's noise depends on the padded row" in build_preference("DPO", tmp_path, **noise).cut_reason
    with pytest.raises(InvalidConfig, match="has no effect"):
        build_preference("DPO", tmp_path, max_tokens_per_microbatch=99, **noise)


def test_what_images_do_not_have_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="overflow='drop' with images"):
        build_preference("DPO", tmp_path, overflow="drop")
    broken = [{**row, "images": None if i == 3 else row["images"]} for i, row in enumerate(vision.uneven_pairs(6))]
    with pytest.raises(InvalidDataset, match="row 3 of the train dataset has no image"):
        build_preference("DPO", tmp_path, data=Dataset.from_list(broken))


def test_batches_without_a_part_for_each_row_are_not_joined():
    odd = {"input_ids": torch.ones(2, 3, dtype=torch.long), "sizes": torch.ones(3, 2)}
    assert Merging(dict, 0, rows=2)._merged([odd, odd]) is None
