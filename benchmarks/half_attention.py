"""Measure attention in float32 in a half-precision step on a CPU: whole LoRA steps, with it and in half precision.

    OMP_NUM_THREADS=1 python benchmarks/half_attention.py [--documents 128 512] [--tokens 1024] [--repeats 8]

Both sides run in turn, in one process. Times are of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_packfa import PackedLayout, patch
from trl_packfa.attention import sdpa
from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.override import set_inside

_WORDS = 8192


def build(*, width: int, layers: int) -> Any:
    """Build a Llama of random weights with heads of 64 features and an adapter, patched."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        vocab_size=_WORDS,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return patch(get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))).train()


def step(model: Any, *, tokens: int, document: int) -> float:
    """Run a forward and a backward under bfloat16 autocast, and return the processor's seconds."""
    layout = PackedLayout.from_lengths([document] * (tokens // document))
    ids = torch.arange(layout.num_tokens)[None] % _WORDS
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=ids, labels=ids, position_ids=layout.position_ids(), packed_layout=layout)
    output.loss.backward()
    return time.process_time() - start


def measure(model: Any, *, tokens: int, document: int, repeats: int) -> dict[str, Any]:
    """Return how many times as fast a step is with attention in float32: median and inner half of the pairs."""
    ratios = []
    for number in range(repeats + 1):
        seconds = {}
        for side in (True, False) if number % 2 else (False, True):
            with set_inside(sdpa, **({} if side else {"_runs_in_float32": lambda *_: False})):
                seconds[side] = step(model, tokens=tokens, document=document)
        ratios.append(seconds[False] / seconds[True])
    low, middle, high = statistics.quantiles(ratios[1:], n=4)  # the first pair warms up
    return {"documents": document, "times": f"{middle:.2f} ({low:.2f} to {high:.2f})"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--documents", type=int, nargs="+", default=[128, 256, 512, 1024], help="lengths in tokens")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=8, help="pairs of steps, at least 2")
    given = parser.parse_args(argv)
    model = build(width=given.width, layers=given.layers)
    options = {"tokens": given.tokens, "repeats": given.repeats}
    return print_rows([measure(model, document=n, **options) for n in given.documents], as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
