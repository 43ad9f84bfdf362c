"""TRL's trainers on images, without padding: the losses and gradient norms of the padded run."""

import pytest
import tiny
import torch
import trl
import vision
from datasets import Dataset
from peft import LoraConfig
from selection import in_full
from tolerance import TRAJECTORY
from training import arguments
from trl_trainers import ROUNDED, differences, train

import trl_packfa
from trl_packfa.errors import InvalidDataset
from trl_packfa.patching.apply import find_state

STEPS = 4


def pairs():
    """Return preference pairs about an image, of uneven lengths."""
    rows = vision.prompts()
    return Dataset.from_dict({
        "image": rows["image"],
        "prompt": rows["prompt"],
        "chosen": rows["completion"],
        "rejected": [[{"role": "assistant", "content": tiny.words(2 + i % 5, seed=90 + i)}] for i in range(len(rows))],
    })  # fmt: skip


def build(kind, out, *, lora=False, **options):
    """Build TRL's own trainer of this kind on images."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM") if lora else None
    common = {"processing_class": vision.processor(), "peft_config": adapter}
    batch = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "max_steps": STEPS,
        "remove_unused_columns": False,
    }
    if kind in ("messages", "prompts"):
        args = arguments(trl.SFTConfig, out, max_length=None, **batch, **options)
        return trl.SFTTrainer(vision.model(), args=args, train_dataset=getattr(vision, kind)(), **common)
    if kind == "dpo":
        args = arguments(trl.DPOConfig, out, max_length=None, **batch, **options)
        reference = {} if lora else {"ref_model": vision.model()}
        return trl.DPOTrainer(vision.model(), args=args, train_dataset=pairs(), **reference, **common)
    args = arguments(trl.GRPOConfig, out, num_generations=2, max_completion_length=8, beta=0.0, **batch, **options)
    prompts = vision.prompts().remove_columns("completion")
    reward = lambda completions, **columns: [float(len(str(text)) % 5) for text in completions]  # noqa: E731
    return trl.GRPOTrainer(vision.model(), reward, args=args, train_dataset=prompts, **common)


@pytest.mark.parametrize("lora", [True, *in_full(False)], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["messages", "dpo", "grpo", *in_full("prompts")])
def test_it_trains_as_padded(kind, lora, tmp_path):
    torch.manual_seed(0)
    expected = train(build(kind, tmp_path, lora=lora))
    torch.manual_seed(0)
    trainer = trl_packfa.padding_free(build(kind, tmp_path, lora=lora))
    logs = train(trainer)
    worst = {name: found for name, found in differences(expected, logs).items() if found > TRAJECTORY}
    assert worst.keys() <= set(ROUNDED), worst
    assert max(entry["padding_saved"] for entry in logs) > 0.05 and find_state(trainer.model).takes_images
    run = trainer.trl_packfa_padding_free
    assert run.first_calls.keys() == run.models.keys()


def test_packed_trainers_say_how_images_train_without_padding(tmp_path):
    args = arguments(trl_packfa.PackedSFTConfig, tmp_path, max_length=64)
    with pytest.raises(InvalidDataset, match=r"vision dataset cannot be packed(?s:.*)padding_free\(trainer\)"):
        trl_packfa.PackedSFTTrainer(
            vision.model(), args=args, train_dataset=vision.messages(), processing_class=vision.processor()
        )
