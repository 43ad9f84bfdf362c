"""TRL's trainers on images, without padding: the losses and gradient norms of the padded run."""

import os

import pytest
import tiny
import trl
import vision
from datasets import Dataset
from peft import LoraConfig, PeftModel
from selection import exhaustive, in_full
from tolerance import assert_rounding
from training import arguments
from trl_trainers import beyond, run, train

import trl_packfa
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.patching.state import find_state
from trl_packfa.trainers.sft.images import ImageCutter

# `IMAGE_STEPS=50` runs as many as the documentation tells of.
STEPS = int(os.environ.get("IMAGE_STEPS", "4"))
# Adam divides by a gradient's size: of key biases, whose gradients are rounding alone, it makes whole steps.
IN_FULL = {"optim": "sgd", "learning_rate": 1e-2}


def pairs():
    """Return preference pairs about an image, of uneven lengths."""
    rows = vision.prompts()
    return Dataset.from_dict({
        "image": rows["image"],
        "prompt": rows["prompt"],
        "chosen": rows["completion"],
        "rejected": [[{"role": "assistant", "content": tiny.words(2 + i % 5, seed=90 + i)}] for i in range(len(rows))],
    })  # fmt: skip


def build(kind, out, *, lora=False, family="llava", **options):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM") if lora else None
    model, processor = vision.family(family)
    common = {"processing_class": processor, "peft_config": adapter}
    batch = {"learning_rate": 1e-4, "max_steps": STEPS, "remove_unused_columns": False, **({} if lora else IN_FULL)}
    if kind in ("messages", "prompts"):
        args = arguments(trl.SFTConfig, out, max_length=None, **batch, **options)
        return trl.SFTTrainer(model, args=args, train_dataset=getattr(vision, kind)(), **common)
    if kind == "dpo":
        args = arguments(trl.DPOConfig, out, max_length=None, **batch, **options)
        reference = {} if lora else {"ref_model": vision.family(family)[0]}
        return trl.DPOTrainer(model, args=args, train_dataset=pairs(), **reference, **common)
    args = arguments(trl.GRPOConfig, out, num_generations=2, max_completion_length=8, beta=0.0, **batch, **options)
    prompts = vision.prompts().remove_columns("completion")
    reward = lambda completions, **columns: [float(len(str(text)) % 5) for text in completions]  # noqa: E731
    return trl.GRPOTrainer(model, reward, args=args, train_dataset=prompts, **common)


@pytest.mark.parametrize("case", [
    "llava-lora",
    "gemma3-lora",
    *in_full("llava-full", "gemma3-full", "llava_next-lora", "idefics3-lora"),
    *exhaustive("llava_next-full", "idefics3-full", "deepseek_vl-lora", "deepseek_vl-full"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["messages", "dpo", "grpo", *exhaustive("prompts")])
def test_packed_images_train_as_padded(case, kind, tmp_path):
    family, lora = case.split("-")[0], case.endswith("lora")
    if (family, kind) == ("deepseek_vl", "grpo"):
        pytest.skip("TRL's own padded run raises: this processor pads no prompts")
    expected, _ = run(build, kind, tmp_path, lora=lora, family=family)
    logs, trainer = run(lambda: trl_packfa.padding_free(build(kind, tmp_path, lora=lora, family=family)))
    assert not beyond(expected, logs)
    # Prompts of GRPO and images of many tokens leave few pads.
    least = 0.0 if kind == "grpo" else 0.05
    assert max(entry["padding_saved"] for entry in logs) > least and find_state(trainer.model).parts.takes_images
    attached = trainer.trl_packfa_padding_free
    assert attached.first_calls.keys() == attached.models.keys()


def packed(out, args=trl_packfa.PackedSFTConfig, *, data=None, model=None, **options):
    options = {"max_length": None, "learning_rate": 1e-4, "max_steps": STEPS, **options}
    return trl_packfa.PackedSFTTrainer(
        model or vision.model(), args=arguments(args, out, **options), train_dataset=data or vision.messages(),
        processing_class=vision.processor(),
    )  # fmt: skip


@pytest.mark.parametrize("config", [trl_packfa.PackedSFTConfig, trl.SFTConfig])
def test_the_packed_trainer_trains_as_padded(config, tmp_path, caplog):
    """TRL's micro-batches, without their pads."""
    ours = {"use_peft": False, "packing_strategy": "minibatch", **IN_FULL}
    own = ours if config is trl_packfa.PackedSFTConfig else {}
    expected = train(build("messages", tmp_path))
    trainer = packed(tmp_path, config, **own)
    if config is trl.SFTConfig:  # a swap of the class trains an adapter by default, and says so
        assert isinstance(trainer.model, PeftModel) and isinstance(trainer._cutter, ImageCutter)
        assert [r.message for r in caplog.records if "adds a LoRA adapter" in r.message]
        free = packed(tmp_path, config, padding_free=True)  # TRL's own refuses images
        assert max(entry["padding_saved"] for entry in train(free)) > 0.05
        return
    logs = train(trainer)
    assert not beyond(expected, logs)
    assert max(entry["padding_saved"] for entry in logs) > 0.05
    assert_rounding(trainer.trl_packfa_padding_free.first_calls["model"].difference)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_default_adapter_is_on_the_text_decoder(by_name, tmp_path):
    model = vision.model()
    if by_name:
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    trainer = packed(tmp_path / "out", model=model)
    adapted = [name for name, _ in trainer.model.named_modules() if name.endswith("lora_A")]
    assert len(adapted) == 2 * 7 and all("language_model" in name for name in adapted)
    assert max(entry["padding_saved"] for entry in train(trainer)) > 0.05
    towers = packed(tmp_path / "towers", lora_target_modules=["q_proj", "v_proj"])
    assert any("vision" in name for name, _ in towers.model.named_modules() if name.endswith("lora_A"))


def test_rows_are_not_filled_with_images(tmp_path):
    for strategy in ("bfd", "wrapped"):
        with pytest.raises(InvalidConfig, match="rows cannot be filled before training: the dataset has images"):
            packed(tmp_path, packing_strategy=strategy, max_length=64)
    with pytest.raises(InvalidConfig, match="packing_strategy='step'"):
        packed(tmp_path, trl.SFTConfig, packing=True, max_length=64)


def test_a_model_that_runs_text_only_is_refused_by_name_or_trained_padded(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packfa.patching.inspect.text_decoder", lambda model: None)
    with pytest.raises(UnsupportedModel, match=r"cannot run without its pads(?s:.*)runs only text without its pads"):
        packed(tmp_path)
    trainer = packed(tmp_path, trl.SFTConfig)
    assert find_state(trainer.model) is None and not isinstance(trainer.model, PeftModel)
    assert "padding_saved" not in train(trainer)[0]
