"""Compare each of TRL's trainers with itself without padding, for the table in `benchmarks/README.md`.

    PYTHONPATH=tests/shared:tools python benchmarks/padding_free.py [--steps 50] [--only dpo,packed_kto]

The models are small, random and in float32 on a CPU: the benchmark compares training, not speed. Packed trainers
re-cut steps of four padded micro-batches of two pairs. The script writes `benchmarks/results/padding_free.json`; with
`--only` it replaces only the named rows. `--markdown` prints the table of the present results.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from trl_trainers import EXPERIMENTAL, PACKED, ROUNDED, STABLE, build, build_packed, train

import trl_packfa

# By name: the kind of trainer, and arguments in addition to the common ones.
_ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
_PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"packed_{kind}": (kind, _ACCUMULATED) for kind in PACKED},
    "packed_kto_apo": ("kto", {**_ACCUMULATED, "loss_type": "apo_zero_unpaired"}),
}
RESULTS = Path(__file__).parent / "results" / "padding_free.json"


def compare(kind: str, *, lora: bool, steps: int) -> dict:
    logs, weights = [], []
    packed = kind in _PACKED
    named, options = _PACKED.get(kind, (kind, {}))
    for free in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            made = build_packed if free and packed else build
            trainer: Any = made(named, Path(folder), lora=lora, max_steps=steps, **options)
            if free and not packed:
                trl_packfa.padding_free(trainer)
            logs.append(train(trainer))
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    worst = differences(*logs)
    moved = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    run = trainer.trl_packfa_padding_free
    return {
        "trainer": type(trainer).__name__,
        "loss_type": options.get("loss_type", ""),
        "stable": named in STABLE,
        "lora": lora,
        "steps": steps,
        "models": sorted(run.models),
        "loss": worst.pop("loss"),
        "metrics": {name: value for name, value in sorted(worst.items()) if name not in ROUNDED},
        "weights": moved,
        "micro_batches": sum(entry.get("micro_batches", 0) for entry in logs[1]) / len(logs[1]),
        "padding_saved": sum(entry["padding_saved"] for entry in logs[1]) / len(logs[1]),
    }


def differences(logs: list[dict], others: list[dict]) -> dict[str, float]:
    """Return the worst difference of each metric over all steps, relative where the metric is larger than 1."""
    worst: dict[str, float] = {}
    for entry, other in zip(logs, others, strict=True):
        for name, value in entry.items():
            if isinstance(value, (int, float)) and not any(word in name for word in ("time", "second", "epoch")):
                worst[name] = max(worst.get(name, 0.0), abs(value - other[name]) / max(1.0, abs(value)))
    return worst


def markdown(rows: list[dict]) -> str:
    lines = [
        "| trainer | models without pads | LoRA | places saved | micro-batches | loss | worst other metric | "
        "beyond 1e-5 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        within = {name: value for name, value in row["metrics"].items() if value <= 1e-5}
        beyond = ", ".join(f"`{name}`" for name, value in row["metrics"].items() if value > 1e-5)
        lines.append(
            f"| {row['trainer']}{_which(row)} | {', '.join(row['models'])} | "
            f"{'yes' if row['lora'] else 'no'} | {row['padding_saved']:.0%} | {_recut(row)} | {row['loss']:.0e} | "
            f"{max(within.values(), default=0.0):.0e} | {beyond or 'none'} |"
        )
    return "\n".join(lines)


def _which(row: dict) -> str:
    loss = f", `{row['loss_type']}`" if row.get("loss_type") else ""
    return loss + ("" if row["stable"] else " (experimental)")


def _recut(row: dict) -> str:
    """Return the micro-batches of a step if it is re-cut."""
    made = row.get("micro_batches", 0)
    return f"{made:.1f} for 4" if made else "as padded"


def _with(rows: list[dict], measured: list[dict]) -> list[dict]:
    """Return the earlier rows, with the newly measured rows in their places."""

    def name(row: dict) -> tuple:
        return row["trainer"], row.get("loss_type", ""), row["lora"], row["stable"]

    again = {name(row): row for row in measured}
    return [again.pop(name(row), row) for row in rows] + list(again.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if not arguments.markdown:
        kinds = arguments.only.split(",") if arguments.only else [*STABLE, *_PACKED, *EXPERIMENTAL]
        rows = []
        for kind in kinds:
            for lora in (False, True)[: 1 if kind == "bema_dpo" else 2]:
                rows.append(compare(kind, lora=lora, steps=arguments.steps))
                print(json.dumps(rows[-1]), flush=True)
        before = json.loads(RESULTS.read_text()) if arguments.only else []
        RESULTS.write_text(json.dumps(_with(before, rows), indent=1) + "\n")
    print(markdown(json.loads(RESULTS.read_text())))
