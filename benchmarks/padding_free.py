"""Each of TRL's trainers beside itself without padding: what `docs/padding_free.md` shows as a table.

    PYTHONPATH=tests/shared:tools python benchmarks/padding_free.py [--steps 50] [--only dpo,kto]

Small random models in float32 on a CPU: what is compared is the training, not the speed. Writes
`benchmarks/results/padding_free.json`; `--markdown` prints the table of what is there.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from trl_trainers import EXPERIMENTAL, ROUNDED, STABLE, build, differences, train

import trl_packfa

RESULTS = Path(__file__).parent / "results" / "padding_free.json"


def compare(kind: str, *, lora: bool, steps: int) -> dict:
    """One trainer, padded and without."""
    logs, weights = [], []
    for free in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            trainer: Any = build(kind, Path(folder), lora=lora, max_steps=steps)
            if free:
                trl_packfa.padding_free(trainer)
            logs.append(train(trainer))
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    worst = differences(*logs)
    moved = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    run = trainer.trl_packfa_padding_free
    return {
        "trainer": type(trainer).__name__,
        "stable": kind in STABLE,
        "lora": lora,
        "steps": steps,
        "models": sorted(run.models),
        "loss": worst.pop("loss"),
        "metrics": {name: value for name, value in sorted(worst.items()) if name not in ROUNDED},
        "weights": moved,
        "padding_saved": sum(entry["padding_saved"] for entry in logs[1]) / len(logs[1]),
    }


def markdown(rows: list[dict]) -> str:
    """The table of a page."""
    lines = [
        "| trainer | models without pads | LoRA | places saved | loss | worst other metric | beyond 1e-5 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        within = {name: value for name, value in row["metrics"].items() if value <= 1e-5}
        beyond = ", ".join(f"`{name}`" for name, value in row["metrics"].items() if value > 1e-5)
        lines.append(
            f"| {row['trainer']}{'' if row['stable'] else ' (experimental)'} | {', '.join(row['models'])} | "
            f"{'yes' if row['lora'] else 'no'} | {row['padding_saved']:.0%} | {row['loss']:.0e} | "
            f"{max(within.values(), default=0.0):.0e} | {beyond or 'none'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if not arguments.markdown:
        kinds = arguments.only.split(",") if arguments.only else [*STABLE, *EXPERIMENTAL]
        rows = []
        for kind in kinds:
            for lora in (False, True)[: 1 if kind == "bema_dpo" else 2]:
                rows.append(compare(kind, lora=lora, steps=arguments.steps))
                print(json.dumps(rows[-1]), flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(json.loads(RESULTS.read_text())))
