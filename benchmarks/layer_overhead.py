"""Measure the overhead of a decoder layer: CPU microseconds and Python calls of one layer in one call.

    python benchmarks/layer_overhead.py

The model is so narrow that its matrix products take almost no time. Models of 2 and of 10 layers are timed in turn.
Their difference excludes the LM head and all work that runs once in a call. Call counts are equal on every machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import trl_packfa
from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.errors import InvalidConfig
from trl_packfa.layout import PackedLayout

_FEW, _MANY = 2, 10
_DOCUMENTS = (16,) * 4
SIDES = ("transformers and PEFT, padded", "patched, packed")
PASSES = ("forward", "forward and backward", "checkpointed, both")


def bench_overhead(*, repeats: int) -> list[dict[str, Any]]:
    """Measure the overhead per layer of each pass of each side, in pairs of calls of few and of many layers.

    Raises:
        [`InvalidConfig`]: if `repeats` is less than 1.
    """
    if repeats < 1:
        raise InvalidConfig(f"repeats={repeats}.", do="Pass 1 or more.")
    return [{"side": side, "pass": which, **_per_layer(side, which, repeats)} for which in PASSES for side in SIDES]


def _per_layer(side: str, which: str, repeats: int) -> dict[str, Any]:
    calls = [_call(side, which, layers) for layers in (_FEW, _MANY)]
    for call in calls:
        call()
    seconds = [[_seconds(call) for call in calls] for _ in range(repeats)]
    counts = [_count(call) for call in calls]
    layers = _MANY - _FEW
    microseconds = [(many - few) / layers * 1e6 for few, many in seconds]
    return {
        "CPU microseconds": round(statistics.median(microseconds)),
        "least": round(min(microseconds)),
        "Python calls": (counts[1] - counts[0]) // layers,
    }


def _call(side: str, which: str, layers: int) -> Callable[[], None]:
    """Return a function that runs one pass of a model with `layers` layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    model: Any = get_peft_model(LlamaForCausalLM(config), lora).train()
    if which == PASSES[2]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    ids, batch = torch.arange(sum(_DOCUMENTS)) % 16, {}
    if side == SIDES[1]:
        trl_packfa.patch(model)
        layout = PackedLayout.from_lengths(_DOCUMENTS)
        batch = {"input_ids": ids[None], "position_ids": layout.position_ids(), "packed_layout": layout}
    else:
        batch = {"input_ids": ids.view(len(_DOCUMENTS), -1)}

    def call() -> None:
        with torch.set_grad_enabled(which != PASSES[0]):
            loss = model(**batch, use_cache=False).logits.sum()
        if which != PASSES[0]:
            loss.backward()

    return call


def _seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _count(call: Callable[[], None]) -> int:
    """Count the Python functions that a call runs."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()  # else models of earlier calls may end inside of this one, and call back
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--repeats", type=int, default=101, help="pairs of calls")
    args = parser.parse_args(argv)
    return print_rows(bench_overhead(repeats=args.repeats), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
