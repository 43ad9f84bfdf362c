"""`packing_strategy="step"` on images: the padded run's losses, from fewer and fuller micro-batches."""

import pytest
import torch
import vision
from image_runs import build, differing, mix_images_up
from selection import in_full
from tolerance import CONTROL, assert_rounding
from torch import nn
from trl_trainers import train

from trl_packfa.data.image_examples import ImageWeights
from trl_packfa.data.steps import micro_batches_of
from trl_packfa.errors import ContaminationError, InvalidConfig
from trl_packfa.trainers.sft.images import ImageCutter


@pytest.mark.parametrize("lora", [None, *in_full(("q_proj", "v_proj"), ("q_proj", "qkv", "fc1"))])
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", *in_full("gemma3", "llava_next", "idefics3")])
def test_image_steps_train_as_padded_in_fewer_micro_batches(family, lora, tmp_path):
    lora = lora and list(lora)
    expected = train(build(tmp_path, family, padded=True, lora=lora))
    # The small towers of the others are as large as their decoders: by default few examples fit.
    budget = {} if family in ("llava", "qwen3_vl") else {"max_tokens_per_microbatch": 1000}
    trainer = build(tmp_path, family, lora=lora, **budget)
    logs = train(trainer)
    assert not differing(expected, logs)
    assert min(entry["micro_batches"] for entry in logs) < 3
    # The processor's own batches equal the merged ones. Of Idefics3, rows of one and two images are not merged.
    merged = list(trainer._cutter._collator.collator.is_equal.values())
    assert merged == [True] or family == "idefics3"
    assert_rounding(trainer.trl_packfa_padding_free.first_calls["model"].difference)
    report = trainer.packing_reports["train"]
    assert report.documents == 4 * 3 * len(logs) and report.tokens == logs[-1]["num_tokens"]
    assert 0 < report.image_tokens < report.tokens and 0 < report.trained_tokens < report.tokens


@pytest.mark.parametrize("family", ["idefics3", *in_full("qwen3_vl", "gemma3")])
def test_rows_without_images_train_as_padded(family, tmp_path):
    data = vision.uneven(without=(3, 10, 11))
    expected = train(build(tmp_path, family, padded=True, data=data))
    trainer = build(tmp_path, family, data=data)
    assert not differing(expected, train(trainer))
    # Idefics3 has pixels by row, and zeros in a row without an image: the processor makes such batches again.
    assert (False in trainer._cutter._collator.collator.is_equal.values()) == (family == "idefics3")


def test_prompts_and_streams_train_as_padded(tmp_path):
    for data, budget in ((vision.prompts(24), 200), (vision.uneven().to_iterable_dataset(), None)):
        expected = train(build(tmp_path, padded=True, data=data))
        logs = train(build(tmp_path, data=data, max_tokens_per_microbatch=budget))
        assert not differing(expected, logs) and min(entry["micro_batches"] for entry in logs) < 3


def test_workers_and_a_resumed_run_train_the_same(tmp_path):
    """Workers process the images; a run that resumes in the middle of an epoch skips what was trained."""
    saving = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": 2}
    common = {"data": vision.uneven(36), "lora": ["q_proj", "v_proj"], "max_steps": 3}
    expected = train(build(tmp_path / "padded", padded=True, **common))
    assert not differing(expected, train(build(tmp_path / "run", **common, **saving)))
    resumed = train(build(tmp_path / "run", **common), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert not differing(expected, resumed)


def test_negative_control_mixed_images_and_rows_without_weights_train_another_loss(tmp_path, monkeypatch):
    """Images of other examples, and rows without their weights, train another loss."""
    weights = "trl_packfa.trainers.sft.images._row_weights"
    expected = train(build(tmp_path, padded=True))
    with monkeypatch.context() as patched:
        mix_images_up(patched)
        assert differing(expected, train(build(tmp_path)), times=CONTROL)
    expected = train(build(tmp_path, "qwen3_vl", padded=True))
    monkeypatch.setattr(weights, lambda trained, padded, parts: [torch.ones(len(part)) for part in parts])
    assert differing(expected, train(build(tmp_path, "qwen3_vl")), times=CONTROL)


def test_a_processor_whose_batches_depend_on_their_examples_makes_them_again(tmp_path, caplog):
    model, processor = vision.family("llava")
    make = processor.image_processor.preprocess

    def by_batch(images, **options):
        made = make(images, **options)
        made["pixel_values"] = made["pixel_values"] * (1 + 0.01 * len(made["pixel_values"]))
        return made

    processor.image_processor.preprocess = by_batch
    trainer = build(tmp_path, built=(model, processor))
    with caplog.at_level("INFO", logger="trl_packfa"):
        train(trainer)
    assert list(trainer._cutter._collator.collator.is_equal.values()) == [False]
    assert [r.message for r in caplog.records if "pixel_values, so they are processed twice" in r.message]


def test_a_tower_that_mixes_images_is_found_before_the_first_update(tmp_path, caplog):
    """The control of the check of the first re-cut micro-batch, which passes on the model itself."""
    model, processor = vision.family("llava")
    with caplog.at_level("INFO", logger="trl_packfa"):
        train(build(tmp_path, built=(model, processor), max_steps=1))
    assert [r.message for r in caplog.records if "in the first re-cut micro-batch of" in r.message]
    look = model.model.vision_tower.forward

    def mixing(pixel_values, **options):
        return look(pixel_values + pixel_values.mean(0, keepdim=True), **options)

    model.model.vision_tower.forward = mixing
    before = model.lm_head.weight.clone()
    trainer = build(tmp_path, built=(model, processor), max_steps=1)
    with pytest.raises(ContaminationError, match="images of a micro-batch have an effect on each other"):
        train(trainer)
    assert torch.equal(model.lm_head.weight, before)
    train(build(tmp_path, built=(model, processor), max_steps=1, check_packing=False))


@pytest.mark.parametrize("budget", [90, 30])
def test_a_budget_counts_tokens_and_patches(budget, tmp_path):
    """The last example alone is larger than the smaller budget, so it is a micro-batch of its own."""
    data, cut, sizes = vision.uneven(12), ImageCutter.batches, []

    def record(self, batches, collate):
        made = cut(self, batches, collate)
        for micro_batch in (part for batch in made for part in micro_batches_of(batch)):
            patches = self.weights.count(micro_batch)
            tokens = int(micro_batch["attention_mask"].sum())
            sizes.append((tokens + self.weights.size * patches, len(micro_batch["labels"])))
        return made

    expected = train(build(tmp_path, padded=True, data=data, max_steps=1))
    trainer = build(tmp_path, data=data, max_steps=1, max_tokens_per_microbatch=budget)
    trainer._cutter.batches = record.__get__(trainer._cutter)
    assert not differing(expected, train(trainer))
    assert all(size <= budget or rows == 1 for size, rows in sizes)
    assert max(sizes)[0] > budget if budget == 30 else len(sizes) > 3


def test_out_of_memory_says_which_budget_to_lower(tmp_path):
    model, processor = vision.family("llava")
    trainer = build(tmp_path, built=(model, processor), check_packing=False, max_tokens_per_microbatch=150)

    def fails(*args, **kwargs):
        raise MemoryError("no memory")

    model.forward = fails
    with pytest.raises(MemoryError) as raised:
        train(trainer)
    assert "Lower max_tokens_per_microbatch from 150 to 75" in str([raised.value.args, raised.value.__notes__])


def test_weights_follow_the_shapes_and_what_trains():
    model, _ = vision.family("llava")
    trained = ImageWeights.of(model)
    assert trained.values == 3 * 8 * 8
    # LLaVA's tower has 2 layers of width 16 and products of 4 * 16^2 + 2 * 16 * 32; Llama's 2 of width 32.
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(False)
    frozen = ImageWeights.of(model)
    assert frozen.cost == pytest.approx(trained.cost / 3) and frozen.size < trained.size
    assert trained.count({"pixel_values": torch.zeros(5, 3, 16, 16), "input_ids": torch.zeros(1, 7)}) == 20
    assert ImageWeights.of(model.model.language_model.__class__(model.config.text_config)) == ImageWeights(1, 0.0, 0.0)


def test_where_a_cut_would_change_the_loss_micro_batches_stay(tmp_path, caplog):
    with caplog.at_level("INFO", logger="trl_packfa"):
        trainer = build(tmp_path, neftune_noise_alpha=5.0)
    reason = "NEFTune's noise depends on the padded row"
    assert trainer._cutter is None and [r.message for r in caplog.records if reason in r.message]
    with pytest.raises(InvalidConfig, match=rf"max_tokens_per_microbatch=99 has no effect(?s:.*){reason}"):
        build(tmp_path, neftune_noise_alpha=5.0, max_tokens_per_microbatch=99)
    trainer.neftune_noise_alpha = None
    assert trainer._why_images_stay() == ""
    trainer._own_collator = True
    assert "data_collator" in trainer._why_images_stay()
    trainer._own_collator = False
    trainer.model.model.multi_modal_projector.norm = nn.BatchNorm1d(4)
    assert "projector.norm' is a batch norm" in trainer._why_images_stay()
    trainer.model_accepts_loss_kwargs, trainer.args.loss_type = False, "dft"
    assert "takes no num_items_in_batch" in trainer._why_images_stay()
    trainer.aux_loss_enabled = True
    assert "auxiliary loss" in trainer._why_images_stay()


def test_what_has_no_effect_on_images_is_refused(tmp_path):
    for name, value in (("overflow", "drop"), ("loss_by", "source")):
        with pytest.raises(InvalidConfig, match=f"{name}='{value}' has no effect on images"):
            build(tmp_path, **{name: value})
