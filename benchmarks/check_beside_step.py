"""Measure the cost of the check, compared with one optimizer step of the same training.

    python benchmarks/check_beside_step.py --model NAME_OR_PATH --dataset FILE_OR_NAME [--json]

The other arguments are those of `trl-packfa bench`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_packfa.bench.arguments import read_arguments
from trl_packfa.bench.data import read_documents, save_documents
from trl_packfa.bench.run import model_path
from trl_packfa.bench.sides import Side, build_trainer
from trl_packfa.cli.output import print_rows

_STEPS, _RUN = 4, 500


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


def bench_check(argv: list[str]) -> list[dict[str, Any]]:
    """Measure the seconds of the check and of a step, and their share of a run.

    The arguments are those of `trl-packfa bench`.

    Raises:
        [`ContaminationError`]: if packing is not exact on the model.
    """
    setup = read_arguments(argv)
    documents = read_documents(setup)
    with tempfile.TemporaryDirectory(prefix="trl-packfa-bench-") as name:
        folder = Path(name)
        model = model_path(setup, folder)
        save_documents(setup, documents, model, folder)
        tokenizer = AutoTokenizer.from_pretrained(setup.bench.tokenizer or model)
        data = {"train_dataset": load_from_disk(str(folder / "train")), "processing_class": tokenizer}
        run = {"output_dir": str(folder / "output"), "max_steps": _STEPS}
        trainer: Any = build_trainer(Side("step"), setup.args, model, data, **run)
        seconds = trainer.check().seconds
        clock = _Clock()
        trainer.remove_callback(PrinterCallback)  # only the table is printed
        trainer.add_callback(clock)
        trainer.train()
    step = statistics.median(b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False))
    return [
        {
            "part": "check",
            "seconds": round(seconds, 3),
            f"share of {_RUN} steps": f"{seconds / _RUN / step:.3%}",
        },
        {"part": "one optimizer step", "seconds": round(step, 3), f"share of {_RUN} steps": f"{1 / _RUN:.3%}"},
    ]


def main(argv: list[str]) -> int:
    return print_rows(bench_check([argument for argument in argv if argument != "--json"]), as_json="--json" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
