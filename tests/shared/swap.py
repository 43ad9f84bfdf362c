"""TRL's trainer and ours, built with the same code."""

import tiny
import torch
from training import arguments, dataset
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer

SWAP = {SFTTrainer: SFTConfig, PackedSFTTrainer: PackedSFTConfig}


def tokenizer():
    """Build a tokenizer with a template that uses tools and its own argument."""
    made = tiny.tokenizer(["USER", "ASSISTANT", "tools"])
    tools = "{% if tools %}{{ 'tools ' }}{% endif %}"
    made.chat_template = tools + made.chat_template.replace(
        "m['role'] + ' '", "(m['role'] | upper if loud else m['role']) + ' '"
    )
    return made


def build(cls, out, data=None, *, model=None, args=None, **options):
    """Build the trainer as a script would, with either class; both do full fine-tuning."""
    ours = {"use_peft": "peft_config" in options} if cls is PackedSFTTrainer else {}
    config = arguments(SWAP[cls], out, **ours, **{"learning_rate": 1e-3, **(args or {})})
    data = dataset(24) if data is None else data
    options = {"train_dataset": data, "processing_class": tokenizer(), **options}
    return cls(tiny.model(layers=2) if model is None else model, config, **options)


def both(out, data=None, **options):
    return [build(cls, out, data, **options) for cls in SWAP]


def train_both(out, data=None, **options):
    trainers = both(out, data, **options)
    for trainer in trainers:
        trainer.train()
    return trainers


def snapshot(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def moved(trainer, before):
    return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
