"""Count the operations of small steps. `PYTHONPATH=tools:benchmarks python tests/shared/counted.py` writes
counts.json."""

import json
import tempfile
from pathlib import Path

import torch
import training
from attention_speed import Heads, attend_with
from operations import OperationCounter
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedLayout, PackedSFTConfig, PackedSFTTrainer

BOUNDS = Path(__file__).parent / "counts.json"
LENGTHS = (60, 1, 200, 33, 90, 128)
STRATEGIES = ("step", "minibatch", "bfd")
BACKENDS = ("sdpa", "reference")


class _OneStep(TrainerCallback):
    """Callback that counts the second optimizer step, from the log of the first step to its own log."""

    def __init__(self):
        self.counter = OperationCounter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step == 1:
            self.counter.__enter__()
        if state.global_step == 2 and "loss" in logs:
            self.counter.__exit__(None, None, None)


def count_step(**options):
    """Count one optimizer step of a tiny LoRA Llama; without `packing_strategy` it is TRL's own, with a dense mask."""
    with tempfile.TemporaryDirectory() as out:
        common = {"out": out, "max_steps": 2, "gradient_accumulation_steps": 2, **options}
        packs = "packing_strategy" in options
        args = training.arguments(PackedSFTConfig if packs else SFTConfig, **common)
        trainer = training.packed_trainer(args, cls=PackedSFTTrainer if packs else SFTTrainer)
        step = _OneStep()
        trainer.add_callback(step)
        trainer.train()
    return step.counter.to_dict()


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
    return {**steps, **{f"attention/{name}": count_attention(name) for name in BACKENDS}}


def options(strategy):
    rows = {"max_length": 128, "per_device_train_batch_size": 1} if strategy == "bfd" else {}
    return {"packing_strategy": strategy, **rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    BOUNDS.write_text(json.dumps({"torch": torch.__version__.split("+")[0], "cases": measure()}, indent=2) + "\n")
    print(f"wrote {BOUNDS}")
