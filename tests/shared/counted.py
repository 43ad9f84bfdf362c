"""Count the operations of small steps, and of a micro-batch on a GPU that is not there (`benchmarks/gpu/model.py`).
`PYTHONPATH=tools:benchmarks python tests/shared/counted.py` writes counts.json."""

import json
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import tiny
import torch
import training
from attention_speed import Heads, attend_with
from gpu import model
from operations import OperationCounter
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedLayout, PackedSFTConfig, PackedSFTTrainer

BOUNDS = Path(__file__).parent / "counts.json"
LENGTHS = (60, 1, 200, 33, 90, 128)
STRATEGIES = ("step", "minibatch", "bfd")
BACKENDS = ("sdpa", "reference")
# Micro-batches of 8,192 tokens on a GPU.
DEVICE = {
    "lora": model.LORA,
    "qlora, checkpointed": replace(model.LORA, four_bits=True, adapters="bfloat16", checkpointed=True),
}
LAYERS = "layers of a step"
# Counts hold exactly with these versions.
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


class _OneStep(TrainerCallback):
    """Callback that counts the second optimizer step, from the log of the first step to its own log."""

    def __init__(self, trainer):
        self.counter, self.parameter_walks = OperationCounter(), 0
        own = trainer.model.num_parameters  # walks all parameters
        trainer.model.num_parameters = lambda **options: self._note() or own(**options)

    def _note(self):
        self.parameter_walks += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step == 1:
            self.counter.__enter__()
            self.parameter_walks = 0
        if state.global_step == 2 and "loss" in logs:
            self.counter.__exit__(None, None, None)


def count_step(layers=2, **options):
    """Count one optimizer step of a tiny LoRA Llama; without `packing_strategy` it is TRL's own, with a dense mask."""
    return counted_step(layers, **options).counter.to_dict()


def counted_step(layers, **options):
    with tempfile.TemporaryDirectory() as out:
        common = {"out": out, "max_steps": 2, "gradient_accumulation_steps": 2, **options}
        packs = "packing_strategy" in options
        args = training.arguments(PackedSFTConfig if packs else SFTConfig, **common)
        cls = PackedSFTTrainer if packs else SFTTrainer
        trainer = training.packed_trainer(args, model=tiny.model(layers=layers), cls=cls)
        step = _OneStep(trainer)
        trainer.add_callback(step)
        trainer.train()
    return step


def count_layers():
    """Count what each layer adds to an optimizer step of four padded micro-batches, and what is outside of layers."""
    small, large = (counted_step(layers, packing_strategy="step", gradient_accumulation_steps=4) for layers in (2, 3))
    by_layer = large.counter.calls - small.counter.calls
    return {
        "calls_per_layer": by_layer, "calls_outside": small.counter.calls - 2 * by_layer,
        "host_syncs": small.counter.syncs, "parameter_walks": small.parameter_walks,
    }  # fmt: skip


def count_device(name):
    """Count what each layer adds to a micro-batch on a GPU, and what is outside of layers."""
    outside, each = model.by_layer(DEVICE[name])
    return {
        "operators_per_layer": each["operators"], "operators_outside": outside["operators"],
        "host_syncs": outside["host_waits"], "host_syncs_per_layer": each["host_waits"],
        "peak_bytes_per_layer": each["peak_bytes"], "peak_bytes_outside": outside["peak_bytes"],
    }  # fmt: skip


def count_attention(side):
    layout = PackedLayout.from_lengths(LENGTHS)
    torch.manual_seed(0)
    tensors = [torch.randn(layout.num_tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    attend = attend_with(side, layout, Heads(4, 2, 16))
    upstream = torch.randn_like(tensors[0])
    with OperationCounter() as counter:
        attend(*tensors).backward(upstream)
    return counter.to_dict()


def measure():
    steps = {f"step/{name}": count_step(**options(name)) for name in STRATEGIES}
    attention = {f"attention/{name}": count_attention(name) for name in BACKENDS}
    return {**steps, **attention, LAYERS: count_layers(), **{f"device/{name}": count_device(name) for name in DEVICE}}


def versions():
    return {name: version(name).split("+")[0] for name in PACKAGES}


def options(strategy):
    rows = {"max_length": 128, "per_device_train_batch_size": 1} if strategy == "bfd" else {}
    return {"packing_strategy": strategy, **rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    BOUNDS.write_text(json.dumps({"versions": versions(), "cases": measure()}, indent=2) + "\n")
    print(f"wrote {BOUNDS}")
