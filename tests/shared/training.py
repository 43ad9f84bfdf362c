"""Small trainers on small data, shared by the tests of the trainer."""

import os

import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.scripts import train as script

# `TRAIN_ON=cuda` runs the tests' trainers on a GPU: stage `trainers` of benchmarks/gpu/run.py.
ON_CPU = os.environ.get("TRAIN_ON", "cpu") == "cpu"
# Of documents, as uneven as instructions are.
LENGTHS = [n for i in range(40) for n in (5 + i % 7, 31, 2 + i % 3)]
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "check_packing": False}


def lora_config():
    """Return a new LoRA config for each trainer, because PEFT writes the found modules into its config."""
    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def rows(count=48, *, seed=0, longest=40):
    """Return prompt-completion pairs of very uneven lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (count, 2), generator=generator).tolist()
    return [
        {"prompt": tiny.words(a, seed=i) + " ", "completion": tiny.words(b, seed=i + 10_000), "source": str(i % 3)}
        for i, (a, b) in enumerate(sizes)
    ]


def dataset(count=48, **options):
    return Dataset.from_list(rows(count, **options))


def arguments(cls=PackedSFTConfig, out="out", **options):
    defaults = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
        "max_steps": 3, "save_strategy": "no", "gradient_checkpointing": False, "use_cpu": ON_CPU, "bf16": False,
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return cls(str(out), **{**defaults, **options})


def packed_trainer(args=None, *, model=None, cls=PackedSFTTrainer, **options):
    given = {"train_dataset": dataset(), "processing_class": tiny.tokenizer(), "peft_config": lora_config()}
    options = {name: value for name, value in {**given, **options}.items() if (name, value) != ("peft_config", None)}
    return cls(tiny.model(layers=2) if model is None else model, args or arguments(), **options)


def padded_trainer(args, **options):
    """Build TRL's own trainer with the arguments of `packed_trainer`."""
    return packed_trainer(args, cls=SFTTrainer, **options)


def trained(trainer, **options):
    trainer.train(**options)
    return trainer


def logs_of(trainer):
    """Return the training logs, without those of evaluations."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def losses(trainer):
    return [entry["loss"] for entry in logs_of(trainer)]


def built_trainers(monkeypatch):
    """Return a list that will hold every trainer that `trl-packfa train` builds."""
    built, build = [], script.build_trainer
    monkeypatch.setattr(script, "build_trainer", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
    return built


def slow_down(monkeypatch, cls, clock, **seconds):
    """Let methods of a class move a clock, a list of one number, by so many seconds each."""

    def slowed(own, duration):
        def run(*args, **kwargs):
            clock[0] += duration
            return own(*args, **kwargs)

        return run

    for name, duration in seconds.items():
        monkeypatch.setattr(cls, name, slowed(getattr(cls, name), duration))


class AfterEachStep(TrainerCallback):
    """Callback that does something at the end of each step."""

    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        self.act()


def batches_of(trainer):
    """Return a list that will hold every batch that the trainer trains."""
    # Not `compute_loss`: a trainer whose `compute_loss` is replaced trains padded rows.
    seen, run = [], trainer._run_micro_batch

    def watch(model, inputs, *args):
        seen.append(dict(inputs))
        return run(model, inputs, *args)

    trainer._run_micro_batch = watch
    return seen


FORMATS = {
    "text": [{"text": tiny.words(n, seed=n)} for n in range(2, 26)],
    "prompt-completion": rows(24),
    "messages": [
        {"messages": [{"role": "user", "content": tiny.words(n, seed=n)}, {"role": "assistant", "content": "7 8"}]}
        for n in range(2, 26)
    ],
    "conversational prompt-completion": [
        {"prompt": [{"role": "user", "content": tiny.words(n, seed=n)}],
         "completion": [{"role": "assistant", "content": "7 8 9"}]}
        for n in range(2, 26)
    ],
    "pre-tokenized": [{"input_ids": list(range(5, 5 + n)), "labels": [-100, *range(6, 5 + n)]} for n in range(2, 26)],
}  # fmt: skip
