"""Measure the cost of the check: CPU seconds of one core and peak memory, by vocabulary size or for a real model.

    python benchmarks/check_cost.py
    python benchmarks/check_cost.py --model FOLDER --dtypes float32 bfloat16

Each row runs in its own process with one thread.
"""

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trl_packfa import check, patch
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target

WORDS = (1_600, 151_936, 262_144)


def small(words):
    config = LlamaConfig(
        vocab_size=words, num_hidden_layers=2, hidden_size=8, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def seconds(function, *args, **options):
    started = time.process_time()
    function(*args, **options)
    return time.process_time() - started


def row(name, dtype):
    """Measure one row and return it as a line of the table."""
    torch.set_num_threads(1)
    if name.isdigit():
        patch(small(1_600), unpad=True)  # warm up: some work runs once in a process
        model, fresh = small(int(name)), small(int(name))
    else:
        model, fresh = (AutoModelForCausalLM.from_pretrained(name, dtype=dtype) for _ in range(2))
    apply_patch(Target.of(model), get_patch(model.config))
    checked, unpadded = seconds(check, model), seconds(patch, fresh, unpad=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return f"| {name} | {dtype} | {checked:.1f} | {unpadded:.2f} | {peak:.2f} GB |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder of a model, instead of small models with several vocabularies")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    args = parser.parse_args()
    print("| vocabulary or model | dtype | `check` | `patch(unpad=True)` | peak |\n|---|---|---|---|---|", flush=True)
    for name in [args.model] if args.model else map(str, WORDS):
        for dtype in args.dtypes:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                print(pool.submit(row, name, dtype).result(), flush=True)


if __name__ == "__main__":
    main()
