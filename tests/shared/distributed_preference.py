"""Preference trainers under torchrun, as `launches.py` starts them."""

import os
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from launches import run_scenarios
from trl_trainers import build, build_packed, train


def run(folder, *, kind, packed, **options):
    """Train, with TRL's own trainer or packed, and return the logs. Each step holds the same examples under any number
    of processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // world}
    batch |= {"ddp_backend": "gloo" if world > 1 else None, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    torch.manual_seed(0)
    trainer = (build_packed if packed else build)(kind, Path(folder), **{**batch, **options})
    return train(trainer)


if __name__ == "__main__":
    run_scenarios(run)
