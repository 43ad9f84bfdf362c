"""Measure the wanted figures of `benchmarks/gpu/README.md` on a machine with a GPU, in stages of ten minutes at most.

    python benchmarks/gpu/run.py STAGE [--out FOLDER] [--limit SECONDS] [--small]
    python benchmarks/gpu/run.py STEP      one of a stage's steps alone: llama3_8b, paper_x16, ...

The stages are tests, types, trainers, kernels, train, paper and rest.

Packages that the machine lacks come from `.gpu/`, the folder of `make gpu-kit`. Raw JSON and logs go to `--out`, by
default `benchmarks/gpu/results`. Commands that run out of time are killed. `--small` runs the same commands on a small
model, also on a CPU, to test them before GPU time is used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "recipes" / "bench"
_LAST_LINES = 40
# Data of `--small`: document lengths, and tokens of a row.
_SMALL_LENGTHS, _SMALL_ROW = [5, 31, 12, 7, 24, 3, 18, 9] * 24, 64


# Tests whose trainers run on the GPU, each beside TRL's own trainer.
_TRAINERS = [
    f"tests/{name}.py"
    for name in ("trainers/test_packed_preference", "trainers/test_shared_prefixes", "trainers/test_turns",
                 "trainers/test_image_steps", "trainers/test_padding_free", "whole/test_swap_training")
]  # fmt: skip


class Step(NamedTuple):
    """One command of a stage: arguments of Python, and more environment. Its output goes to `NAME.log` or
    `NAME.json`."""

    name: str
    command: list[str]
    prints_json: bool = False
    variables: dict[str, str] = {}


def bench(name: str, recipe: str, out: Path, *more: str, small: bool) -> Step:
    """Return the step of `trl-packfa bench` with a recipe; `small` uses a few short documents."""
    command = ["-m", "trl_packfa", "bench", "--config", str(RECIPES / f"{recipe}.yaml"), *more]
    command += ["--output", str(out / f"{name}.json"), "--output_dir", tempfile.gettempdir()]
    return Step(name, command + (_small(recipe, more, out) if small else []))


def _small(recipe: str, more: tuple[str, ...], out: Path) -> list[str]:
    """Return arguments with which a recipe runs on a CPU in seconds, with the first and the last of its sides."""
    written = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))
    sides = more[more.index("--strategies") + 1] if "--strategies" in more else written["strategies"]
    lengths = out / "small_lengths.json"
    lengths.write_text(str(_SMALL_LENGTHS))
    sizes = {"model": "tiny", "lengths": str(lengths), "max_length": _SMALL_ROW, "eval_documents": 4, "max_steps": 2}
    sizes |= {"untimed_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    first, *_, last = re.sub(r"@\d+", f"@{_SMALL_ROW}", sides).split(",")
    sizes |= {"strategies": f"{first},{last}"}
    if "max_tokens_per_microbatch" in written:
        sizes["max_tokens_per_microbatch"] = _SMALL_ROW
    return [part for name, value in sizes.items() for part in (f"--{name}", str(value))]


def stages(out: Path, *, small: bool) -> dict[str, list[Step]]:
    """Return every stage with its steps, the most valuable stage first."""
    workers = [] if small else ["-n", "12"]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--durations=5", *workers]
    battery = [*pytest, "tests/test_gpu.py", *(["-k", "formula"] if small else [])]
    trainers = [*pytest, *(_TRAINERS[:1] if small else _TRAINERS), *(["-k", "token_budget"] if small else [])]
    every_type = [str(HERE / "every_type.py"), "--output", str(out / "types.jsonl")]
    every_type += ["--jobs", "1", "--only", "llama"] if small else []
    heads = ["--heads", "4", "--key_value_heads", "2", "--head_dim", "16"] if small else [
        "--heads", "32", "--key_value_heads", "8", "--head_dim", "128"]  # fmt: skip
    tokens = ["--tokens", "64"] if small else ["--tokens", "8192", "32768"]
    mixes = ["--mixes", "uneven", "--repeats", "1", "--json"]
    attention = [str(HERE.parent / "attention_speed.py"), *heads, *tokens, *mixes]
    parts = [str(HERE / "parts.py"), "--json", str(out / "parts.json"), *(["--small"] if small else [])]
    compiled = ["--model", "llama-3.2-1b", "--strategies", "bfd@8192x1,bfd-compiled@8192x1,step,step-compiled"]
    # These steps take eight times as long, so there are fewer steps and sides.
    sixteen = ["--gradient_accumulation_steps", "16", "--max_steps", "6"]
    sixteen += ["--strategies", "padding,trl-bfd@4096x1,step"]
    return {
        "tests": [Step("tests", battery)],
        "types": [Step("types", every_type)],
        "trainers": [Step("trainers", trainers, variables={"TRAIN_ON": "cpu" if small else "cuda"})],
        "kernels": [Step("parts", parts), Step("attention", attention, prints_json=True)],
        "train": [
            bench("llama3_8b", "llama3_8b", out, small=small),
            bench("automodel", "automodel", out, small=small),
        ],
        "paper": [
            bench("paper_x2", "paper", out, small=small),
            bench("paper_x16", "paper", out, *sixteen, small=small),
        ],
        "rest": [
            bench("qlora_8b", "qlora_8b", out, small=small),
            bench("compiled_1b", "llama3_8b", out, *compiled, small=small),
        ],
    }


def chosen(name: str, known: dict[str, list[Step]]) -> list[Step]:
    """Return the steps of a stage, or the one step of that name; empty if there is neither."""
    return known.get(name) or [step for steps in known.values() for step in steps if step.name == name]


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a step: paths of the carried packages, this checkout and the flash-attn stand-in.

    The stand-in is used only if flash-attn is not installed.
    """
    stand_in = [] if importlib.util.find_spec("flash_attn") else [str(HERE / "stand_in")]
    path = [str(site), str(ROOT), *stand_in, os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Row lengths change with every step. Without expandable segments, memory fragments into unusable gaps.
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false", **os.environ, **ours}


def link_mapped_folders() -> None:
    """Link `patches` and `recipes` into the package: this machine runs the checkout without installing it."""
    for name in ("patches", "recipes"):
        link = ROOT / "trl_packfa" / name
        if not link.exists():
            link.symlink_to(ROOT / name)


def unpack(wheels: Path, site: Path) -> None:
    """Unpack the carried wheels into `site`, once for every kit."""
    carried, done = sorted(wheels.glob("*.whl")), site / "unpacked.txt"
    names = "\n".join(wheel.name for wheel in carried)
    if not carried or (done.exists() and done.read_text() == names):
        return
    shutil.rmtree(site, ignore_errors=True)
    for wheel in carried:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    done.write_text(names)


def run_step(step: Step, out: Path, variables: dict[str, str], seconds: float) -> int:
    """Run a step for `seconds` at most and return its exit code; 124 if it was killed."""
    out_file = out / f"{step.name}.{'json' if step.prints_json else 'log'}"
    print(f"== {step.name}, at most {seconds:.0f} s", flush=True)
    with out_file.open("w") as told:
        errors = None if step.prints_json else subprocess.STDOUT
        # A separate process group, so that the sides of a benchmark are killed with it.
        process = subprocess.Popen([sys.executable, *step.command], cwd=ROOT, env={**variables, **step.variables},
                                   stdout=told, stderr=errors, start_new_session=True)  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = 124
    print("\n".join(out_file.read_text().splitlines()[-_LAST_LINES:]))
    print(f"== {step.name}: exit code {code}", flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    """Run a stage; return 1 if one of its steps failed or did not end in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", help="a stage, or one step of a stage")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--limit", type=float, default=585.0, help="time limit of the stage in seconds")
    parser.add_argument("--small", action="store_true", help="use a small model, also on a CPU")
    given = parser.parse_args(argv)
    began, out = time.monotonic(), given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = chosen(given.stage, stages(out, small=given.small))
    if not wanted:
        parser.error(f"there is no stage or step '{given.stage}'")
    site = Path(tempfile.gettempdir()) / "trl-packfa-gpu-site"
    unpack(ROOT / ".gpu", site)
    link_mapped_folders()
    codes = []
    for step in wanted:
        left = given.limit - (time.monotonic() - began)
        codes.append(run_step(step, out, environment(site), left) if left > 0 else 124)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
