"""Train a real model packed and with TRL's own padded trainer, and compare the losses step by step.

    python benchmarks/same_training.py --model FOLDER --data data.jsonl --out same_training.json

It trains with LoRA, QLoRA (NF4) and in full, in bfloat16 autocast as TRL does by default; with LoRA once in float32,
once with bfloat16 weights, and once with products in torchao's float8, scaled by token, as a CPU emulates them.
`noise` compares the padded run with itself with halved micro-batches: only the grouping of sums changes. `--sides
packed` trains no padded run; every way that ran is compared with LoRA in float32.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.patching.bitsandbytes import conversion_edits

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
WAYS = {
    "LoRA, float32": {"adapter": True, "bf16": False},
    "LoRA, bf16 autocast": {"adapter": True},
    "QLoRA (NF4), bf16 autocast": {"adapter": True, "nf4": True},
    "full, bf16 autocast": {"adapter": False},
    "LoRA, bfloat16 weights": {"adapter": True, "dtype": torch.bfloat16},
    "LoRA, bfloat16 weights, PEFT's forward": {"adapter": True, "dtype": torch.bfloat16, "fused": False},
    "LoRA, float8 products (emulated)": {"adapter": True, "dtype": torch.bfloat16, "float8": True},
}

EXACT = "LoRA, float32"
SIDES = ("padded", "packed")


def load(path, nf4=False, dtype=torch.float32, float8=False):
    quantization = None
    if nf4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
        )
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, dtype=dtype)
    if float8:
        from torchao.float8 import (  # type: ignore[import-not-found]  # optional, for this way only
            Float8LinearConfig,
            convert_to_float8_training,
        )

        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "layers" in name)
    # Else, on some CPUs, bitsandbytes makes weights that cannot train.
    for module, switch, off in conversion_edits(model):
        setattr(module, switch, off)
    return model


def run(path, data, steps, *, packed, adapter, halved=False, bf16=True, fused=True, **options):
    """Train one run and return its losses and seconds."""
    torch.manual_seed(0)
    config, trainer = (PackedSFTConfig, PackedSFTTrainer) if packed else (SFTConfig, SFTTrainer)
    options.setdefault("dtype", torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            folder,
            max_steps=steps,
            logging_steps=1,
            per_device_train_batch_size=1 if halved else 2,
            gradient_accumulation_steps=4 if halved else 2,
            max_length=256,
            learning_rate=2e-4 if adapter else 2e-5,
            bf16=bf16,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            shuffle_dataset=False,
            **({"use_peft": adapter, "fused_kernels": fused} if packed else {}),
        )
        made: Any = trainer(
            load(path, **options),
            args=args,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(path),
            peft_config=LoraConfig(**LORA) if adapter else None,
        )
        if packed:
            made.check()
        started = time.perf_counter()
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    seconds = round(time.perf_counter() - started, 1)
    report = {"verdict": str(made.check_report), "seconds": made.check_report.seconds} if packed else None
    return {"losses": losses, "seconds": seconds, "check": report}


def differences(one, other):
    return [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]


def line(way, found):
    """Describe a way's runs in words: losses, and differences to LoRA in float32 if that ran."""
    words = []
    for side in SIDES:
        if side in found[way]:
            losses, exact = found[way][side]["losses"], found.get(EXACT, {}).get(side)
            words.append(f"{side}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {found[way][side]['seconds']} s")
            if exact and way != EXACT:
                off = differences(found[way][side], exact)
                words[-1] += f", off float32 by {max(off):.1e} at most, {sum(off) / len(off):.1e} in the mean"
    words += [f"{name} {found[way][name]:.1e}" for name in ("difference", "noise") if name in found[way]]
    return f"{way}: {'; '.join(words)}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--noise", action="store_true", help="also run padded with halved micro-batches")
    args = parser.parse_args()
    data = load_dataset("json", data_files=args.data, split="train").select(range(4 * args.steps))
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for way in args.ways:
        runs = {side: run(args.model, data, args.steps, packed=side == "packed", **WAYS[way]) for side in args.sides}
        found[way] = dict(runs)
        if len(runs) == len(SIDES):
            found[way]["difference"] = max(differences(*runs.values()))
        if args.noise and "padded" in runs:
            halved = run(args.model, data, args.steps, packed=False, halved=True, **WAYS[way])
            found[way]["noise"] = max(differences(runs["padded"], halved))
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(line(way, found), flush=True)


if __name__ == "__main__":
    main()
