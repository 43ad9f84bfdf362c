"""Trainers on images, beside TRL's own; as a script on two ranks under torchrun, as `launches.py` starts it."""

import os

import torch
import trl
import vision
from distributed_run import deepspeed_options, forget_the_last_engine, take_deepspeed_on_a_cpu, take_fsdp_on_a_cpu
from launches import run_scenarios
from peft import LoraConfig
from training import arguments
from trl_trainers import beyond, train

import trl_packfa
from trl_packfa.data.image_examples import Merging

# `IMAGE_STEPS=20` runs as many as the documentation tells of.
STEPS = int(os.environ.get("IMAGE_STEPS", "4"))
# As in the padded run. TRL's other metrics are means over micro-batches.
SAME = ("loss", "grad_norm", "num_tokens", "learning_rate")
# Adam divides by a gradient's size: of key biases, whose gradients are rounding alone, it makes whole steps.
IN_FULL = {"optim": "sgd", "learning_rate": 1e-2, "use_peft": False}

# By default accelerate looks for a class that the tower does not have.
WRAPPED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "CLIPEncoderLayer"]}


def _settings(kind, padded, lora, options):
    """Return TRL's trainer, config and options of this kind, or ours; what only ours have is left out for TRL's."""
    module, prefix = (trl, "") if padded else (trl_packfa, "Packed")
    common = {"max_length": None, "max_steps": STEPS, "gradient_accumulation_steps": 3, "learning_rate": 1e-4}
    options = {**common, **({} if lora else IN_FULL), **options}
    ours = ("use_peft", "packing_strategy", "max_tokens_per_microbatch") if padded else ()
    options = {name: value for name, value in options.items() if name not in ours}
    return getattr(module, f"{prefix}{kind}Trainer"), getattr(module, f"{prefix}{kind}Config"), options


def build(out, family="llava", *, padded=False, data=None, lora=None, built=None, **options):
    model, processor = built or vision.family(family)
    adapter = LoraConfig(r=4, target_modules=lora, task_type="CAUSAL_LM") if lora else None
    cls, config, options = _settings("SFT", padded, lora, options)
    args = arguments(config, out, **options)
    data = vision.uneven() if data is None else data
    return cls(model, args=args, train_dataset=data, processing_class=processor, peft_config=adapter)


def build_preference(kind, out, family="llava", *, padded=False, data=None, lora=None, **options):
    """Build a trainer of pairs (`DPO`) or answers (`KTO`) about images of uneven sizes: ours, or TRL's own."""
    options = {"remove_unused_columns": False, "per_device_train_batch_size": 2, **options}
    trainer, config, options = _settings(kind, padded, lora, options)
    model, processor = vision.family(family)
    data = (vision.uneven_pairs() if kind == "DPO" else vision.uneven_answers()) if data is None else data
    adapter = LoraConfig(r=4, target_modules=lora, task_type="CAUSAL_LM") if lora else None
    reference = {} if lora else {"ref_model": vision.family(family)[0]}
    return trainer(
        model, args=arguments(config, out, **options), train_dataset=data, processing_class=processor,
        peft_config=adapter, **reference,
    )  # fmt: skip


def mix_images_up(monkeypatch):
    """Let merged batches hold the images of other examples, unnoticed: for negative controls."""
    merged = Merging._merged

    def mixed_up(self, batches):
        found = merged(self, batches)
        return {**found, "pixel_values": found["pixel_values"].flip(0)}

    monkeypatch.setattr(Merging, "_merged", mixed_up)
    monkeypatch.setattr("trl_packfa.data.image_examples._differing", lambda merged, own: [])


def differing(expected, logs, **options):
    """Return what a re-cut run has in common with the padded one, and differs there."""
    return beyond(expected, logs, only=SAME, **options)


def run(folder, *, kind=None, without=(), fsdp=False, zero=None, **options):
    """Train on two ranks, and return the logs, or the error."""
    forget_the_last_engine()
    if fsdp:
        options |= {"fsdp": True, "fsdp_config": {"version": 2, **WRAPPED}}
    if zero is not None:
        options |= deepspeed_options(zero)
    batch = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "max_steps": 3}
    torch.manual_seed(0)
    try:
        if kind is not None:
            return train(build_preference(kind, folder, **{**batch, **options}))
        return train(build(folder, data=vision.uneven(24, without=without), **{**batch, **options}))
    except trl_packfa.errors.PackingError as error:
        return str(error)


if __name__ == "__main__":
    take_fsdp_on_a_cpu()
    take_deepspeed_on_a_cpu()
    run_scenarios(run)
