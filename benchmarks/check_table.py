"""Measure false alarms of the check: every exact model type, small, in every precision, with several seeds and scales.

    PYTHONPATH=tools python benchmarks/check_table.py --out check.jsonl --seeds 0 1 2 3 4
    PYTHONPATH=tools python benchmarks/check_table.py --out check.jsonl --summary
    PYTHONPATH=tools python benchmarks/check_table.py --out real.jsonl --model FOLDER --seeds 0 1 2 3

Each row is one check: `exact`, a false alarm, or `cannot run` if the model itself cannot run in this setting. All rows
take hours; rows that are in the file do not run again. `tests/whole/test_check_power.py` tests a few of them.
"""

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import product
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from trl_packfa import check
from trl_packfa.patches.measured import results
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.bitsandbytes import unconverted
from trl_packfa.patching.inspect import Target
from trl_packfa.trainers.loading import READ_DIRECTLY

MODES = ("float32", "bfloat16", "float16", "autocast", "nf4")


def build(name, mode, seed, scale):
    """Build a small model or load a saved one; `scale` is the standard deviation of its matrices, 0 keeps them."""
    model = AutoModelForCausalLM.from_pretrained(name) if os.path.isdir(name) else small_model(name, seed=seed)
    if scale:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if mode in ("bfloat16", "float16"):
        return model.to(getattr(torch, mode))
    return with_adapter(model) if mode == "nf4" else model


def with_adapter(model):
    """Return the model in NF4 with nonzero LoRA factors, except on layers with weights that kernels read directly."""
    read = READ_DIRECTLY.get(model.config.get_text_config().model_type, ())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype="bfloat16",
            llm_int8_skip_modules=[*read, "lm_head"] if read else None,
        )
        model = type(model).from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    lora.exclude_modules = list(read) or None
    return get_peft_model(model, lora)


def measure(job):
    """Run one check and return its row of the table."""
    name, mode, seed, scale = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    row = {"type": name, "precision": mode, "seed": seed, "scale": scale}
    context = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
    ids = torch.arange(3, 14)[None]
    try:
        model = build(name, mode, seed, scale)
        with context, unconverted(model):
            assert bool(model(input_ids=ids, use_cache=False).logits.isfinite().all()), "logits are not finite"
            model.train()(input_ids=ids, use_cache=False).logits.float().sum().backward()
        model = build(name, mode, seed, scale)
    except Exception as error:  # the model's own code can raise anything in this precision
        return {**row, "verdict": "cannot run", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    try:
        apply_patch(Target.of(model), get_patch(model.config))
        tokenizer = AutoTokenizer.from_pretrained(name) if os.path.isdir(name) and seed % 2 else None
        with context:
            report = check(model, seed=seed, processing_class=tokenizer)
    except Exception as error:
        return {**row, "verdict": "raises", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    if report.verdict == "not finite":  # even for single documents
        return {**row, "verdict": "cannot run", "why": "logits of documents alone are not finite"}
    return {**row, "verdict": report.verdict, "mode": report.mode, "seconds": report.seconds,
            **{row.kind: row._asdict() for row in report.rows}}  # fmt: skip


_COMPARED = ("parity", "gradients")


def _excess(row, kind):
    """Return a difference as a share of its limit, `None` if it was not measured."""
    return round(row[kind]["difference"] / row[kind]["allowed"], 4) if kind in row else None


def summary(rows):
    """Return the verdicts by precision and scale, and how close the exact checks came to an alarm."""
    lines = ["| precision | scale | seeds | exact | false alarms | cannot run | nearest: layers | gradients |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for mode, scale in sorted({(row["precision"], row["scale"]) for row in rows}):
        some = [row for row in rows if (row["precision"], row["scale"]) == (mode, scale)]
        verdicts = Counter(row["verdict"] for row in some)
        exact = [row for row in some if row["verdict"] == "exact"]
        layers, gradients = (max((_excess(row, kind) or 0 for row in exact), default=0) for kind in _COMPARED)
        alarms = len(some) - verdicts["exact"] - verdicts["cannot run"]
        seeds = len({row["seed"] for row in some})
        lines.append(
            f"| {mode} | {scale or 'as built'} | {seeds} | {verdicts['exact']} | {alarms} | {verdicts['cannot run']} "
            f"| {layers:.2f} | {gradients:.2f} |"
        )
    return "\n".join(lines)


def write_results(path, rows):
    """Write the rows for the commit: type, precision, seed, scale, verdict, and each error as a share of its limit."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["precision"], row["scale"], row["seed"], row["type"])):
        found = [row["type"], row["precision"], row["seed"], row["scale"], row["verdict"]]
        if row["verdict"] == "cannot run":
            found += [row["why"]]
        elif "parity" in row:
            found += [_excess(row, kind) for kind in _COMPARED]
        lines.append(json.dumps(found))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.0])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--types", nargs="+")
    parser.add_argument("--model", help="folder of a real model, instead of small models")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--results", type=Path, help="write the rows in the form to commit")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if not (args.summary or args.results):
        exact = [name for name, result in results().items() if result["verdict"] == "exact"]
        names = [args.model] if args.model else args.types or exact
        done = {(row["type"], row["precision"], row["seed"], row["scale"]) for row in rows}
        jobs = [(n, m, s, c) for c, s, m, n in product(args.scales, args.seeds, args.modes, names)]
        jobs = [job for job in jobs if job not in done]
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool, args.out.open("a") as file:
            for row in pool.map(measure, jobs):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    if args.results:
        write_results(args.results, rows)
    print(summary(rows))
    for row in rows:
        if row["verdict"] not in ("exact", "cannot run"):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
