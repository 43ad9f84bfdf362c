"""`torch_compile=True` with packing: every batch has other lengths, and yet nothing is compiled anew."""

import pytest
import tiny
import torch
from tolerance import assert_trajectory
from torch._dynamo.utils import counters
from training import arguments, dataset, losses, packed_trainer
from transformers import TrainerCallback

WARM, STEPS = 8, 14


def graphs(out, strategy, *, compiled=True):
    """Graphs that were compiled by the end of each step, and the losses."""
    torch._dynamo.reset()
    counters.clear()
    seen = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(counters["stats"]["unique_graphs"])

    options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    args = arguments(out=out, packing_strategy=strategy, max_length=96, max_steps=STEPS, check_packing=False,
                     use_peft=False, **options)  # fmt: skip
    model = tiny.model(layers=1)
    trainer = packed_trainer(args, model=model, peft_config=None, train_dataset=dataset(100), callbacks=[Count()])
    trainer.train()
    return seen, losses(trainer)


@pytest.mark.parametrize("strategy", ["step", "bfd"])
def test_nothing_is_compiled_after_warm_up(tmp_path, strategy):
    seen, compiled = graphs(tmp_path / "compiled", strategy)
    assert 0 < seen[WARM - 1] == seen[-1]
    assert_trajectory(compiled, graphs(tmp_path / "eager", strategy, compiled=False)[1])


def test_fixed_shapes_would_be(tmp_path):
    """The control."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        seen, _ = graphs(tmp_path, "step")
    assert seen[-1] > seen[WARM - 1]
