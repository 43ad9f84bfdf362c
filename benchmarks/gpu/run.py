"""Measure the wanted figures of `benchmarks/gpu/README.md` on a machine with a GPU, ten minutes a command at most.

    python benchmarks/gpu/run.py STAGE [--out FOLDER] [--limit SECONDS] [--trace] [--small]
    python benchmarks/gpu/run.py STEP              one of a stage's steps alone: llama3_8b, paper_x16, ...
    python benchmarks/gpu/run.py collect FOLDER    take results of another machine into `results`, print the tables

The stages are first, second and third, the most valuable figures first, and fourth, whose steps are commands for
another half hour.

Packages that the machine lacks come from `.gpu/`, the folder of `make gpu-kit`. Raw JSON and logs go to `--out`, by
default `$OUT` if it is set, else `benchmarks/gpu/results`. A benchmark that runs out of time is killed; its steps are
in its `.jsonl`. `--trace` also traces a step of each side, for the host's waits. `--small` runs the same commands on a
small model, also on a CPU, to test them before GPU time is used.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu import wanted

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "recipes" / "bench"
RESULTS = HERE / "results"
_LAST_LINES = 40
# Seconds of a command on the device machine, which ends it after ten minutes.
LIMIT = 585
# Data of `--small`: document lengths, and tokens of a row.
_SMALL_LENGTHS, _SMALL_ROW = [5, 31, 12, 7, 24, 3, 18, 9] * 24, 64
# Expected seconds of each step's parts on one H100. Measured on an H200: 50 for the weights of 8 B, 60 to build a
# side. The time of the optimizer steps is `model.py`'s. `start`: imports, data, and weights if the stage makes them.
SECONDS = {
    "kernels": {"all": 60},
    "llama3_8b": {"start": 70, "step": 80, "trl-bfd@8192x1": 100, "bfd@8192x1": 90, "trl-bfd-liger@8192x1": 95},
    "automodel": {"start": 15, "step": 125},
    "qlora_8b": {"start": 65, "step": 92, "padding": 92, "bfd@4096x1": 92, "trl-bfd@4096x1": 92},
    "compiled_1b": {"start": 25, "bfd@8192x1": 30, "bfd-compiled@8192x1": 95},
    "paper_x2": {"start": 60, "step": 70, "padding": 75},
    "paper_x16": {"start": 10, "step": 95, "padding": 125},
    "tests": {"all": 400},
    "types": {"all": 500},
    "trainers": {"all": 250},
    "parts": {"all": 100},
    "attention": {"all": 120},
    "dpo_1b": {"start": 25, "step": 40, "padding": 50, "padding_free": 40},
    "full_1b": {"start": 15, "step": 45, "trl-bfd@8192x1": 50, "bfd@8192x1": 45},
}


# The step that runs our Triton kernels alone. If one fails or hangs, the steps after it run torch's operators.
KERNELS, _SHARE_OF_KERNELS = "kernels", 0.25  # of the command's time, at most
TRITON = "TRL_PACKFA_TRITON"  # read by `kernels/devices.py`, which needs packages that are not unpacked yet
# Tests whose trainers run on the GPU, each beside TRL's own trainer.
_TRAINERS = [
    f"tests/{name}.py"
    for name in ("trainers/test_packed_preference", "trainers/test_shared_prefixes", "data/test_turns",
                 "trainers/test_image_steps", "trainers/test_padding_free", "whole/test_swap_training")
]  # fmt: skip


class Step(NamedTuple):
    """One command of a stage: arguments of Python, and more environment. Its output goes to `NAME.log` or
    `NAME.json`."""

    name: str
    command: list[str]
    prints_json: bool = False
    variables: dict[str, str] = {}


class Options(NamedTuple):
    """Options of the command line that change the steps."""

    out: Path
    small: bool = False
    trace: bool = False


def bench(name: str, recipe: str, on: Options, **more: str) -> Step:
    """Return the step of `trl-packfa bench` with a recipe and more arguments; `small` uses a few short documents."""
    command = ["-m", "trl_packfa", "bench", "--config", str(RECIPES / f"{recipe}.yaml")]
    # Every step of the machine takes the weights that the first one has made.
    more |= {"presets": str(Path(tempfile.gettempdir()) / "trl-packfa-gpu-presets"), "trace": str(on.trace).lower()}
    more |= {"output": str(on.out / f"{name}.json"), "output_dir": tempfile.gettempdir()}
    more |= _small(recipe, more, on.out) if on.small else {}
    return Step(name, command + [part for option, value in more.items() for part in (f"--{option}", value)])


def _small(recipe: str, more: dict[str, str], out: Path) -> dict[str, str]:
    """Return arguments with which a recipe runs on a CPU in seconds, with all of its sides."""
    written = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")) | more
    lengths = out / "small_lengths.json"
    lengths.write_text(str(_SMALL_LENGTHS))
    sizes = {"model": "tiny", "lengths": str(lengths), "max_length": _SMALL_ROW, "eval_documents": 4, "max_steps": 2}
    sizes |= {"untimed_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    named = [name for name in ("strategies", "base") if name in written]
    sizes |= {name: re.sub(r"@\d+", f"@{_SMALL_ROW}", written[name]) for name in named}
    if "max_tokens_per_microbatch" in written:
        sizes["max_tokens_per_microbatch"] = _SMALL_ROW
    return {name: str(value) for name, value in sizes.items()}


def stages(on: Options) -> dict[str, list[Step]]:
    """Return every stage with its steps, the most valuable stage first."""
    small, out = on.small, on.out
    workers = [] if small else ["-n", "12"]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--durations=5", *workers]
    kernels = [*pytest, f"tests/kernels/{'test_lora_launches' if small else 'test_triton_kernels'}.py"]
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
    paper = {"strategies": "step,padding", "base": "padding"}
    one = {"model": "llama-3.2-1b", "interleave": "true"}
    compiled = one | {"strategies": "bfd@8192x1,bfd-compiled@8192x1", "base": "bfd@8192x1"}
    full = one | {"strategies": "step,trl-bfd@8192x1,bfd@8192x1", "use_peft": "false"}
    dpo = one | {"trainer": "dpo", "strategies": "step,padding,padding_free", "base": "padding"}
    return {
        "first": [Step(KERNELS, kernels), bench("llama3_8b", "llama3_8b", on)],
        "second": [bench("qlora_8b", "qlora_8b", on), bench("compiled_1b", "llama3_8b", on, **compiled)],
        "third": [
            bench("paper_x2", "paper", on, **paper, max_steps="8"),
            # These steps take eight times as long, so there are fewer.
            bench("paper_x16", "paper", on, **paper, gradient_accumulation_steps="16", max_steps="5"),
            bench("automodel", "automodel", on),
        ],
        "fourth": [
            Step("tests", battery),
            Step("types", every_type),
            Step("trainers", trainers, variables={"TRAIN_ON": "cpu" if small else "cuda"}),
            Step("parts", parts),
            Step("attention", attention, prints_json=True),
            bench("dpo_1b", "llama3_8b", on, **dpo),
            bench("full_1b", "llama3_8b", on, **full),
        ],
    }


def collect(folder: Path, results: Path = RESULTS, page: Path = HERE / "README.md") -> str:
    """Copy reports and logs into `results`, write the table of wanted figures anew, and return its measured rows."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".jsonl", ".log") and path.name != "small_lengths.json":
            shutil.copyfile(path, results / path.name)
    table = wanted.markdown(results)
    before, rest = page.read_text(encoding="utf-8").split(f"{wanted.BEGIN}\n")
    after = rest.split("<!-- end -->", 1)[1]
    page.write_text(f"{before}{wanted.BEGIN}\n{table}\n<!-- end -->{after}", encoding="utf-8")
    return "\n".join(row for row in table.splitlines() if wanted.NOT_YET not in row)


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
    for suffix in ("json", "jsonl"):  # of an earlier run
        (out / f"{step.name}.{suffix}").unlink(missing_ok=True)
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
    parser.add_argument("stage", help="a stage, one step of a stage, or collect")
    parser.add_argument("folder", type=Path, nargs="?", help="of collect: the results")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    parser.add_argument("--limit", type=float, default=LIMIT, help="time limit of the command in seconds")
    parser.add_argument("--trace", action="store_true", help="also trace a step of each side")
    parser.add_argument("--small", action="store_true", help="use a small model, also on a CPU")
    given = parser.parse_args(argv)
    if (given.stage == "collect") != (given.folder is not None):
        parser.error("collect takes a folder, and nothing else does")
    if given.folder is not None:
        print(collect(given.folder))
        return 0
    began, out = time.monotonic(), given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    asked = chosen(given.stage, stages(Options(out, small=given.small, trace=given.trace)))
    if not asked:
        parser.error(f"there is no stage or step '{given.stage}'")
    site = Path(tempfile.gettempdir()) / "trl-packfa-gpu-site"
    unpack(ROOT / ".gpu", site)
    link_mapped_folders()
    variables, codes = environment(site), []
    for step in asked:
        left = given.limit - (time.monotonic() - began)
        left = min(left, _SHARE_OF_KERNELS * given.limit) if step.name == KERNELS else left
        codes.append(run_step(step, out, variables, left) if left > 0 else 124)
        if step.name == KERNELS and codes[-1]:
            print(f"== the next steps run without our Triton kernels ({TRITON}=0)")
            variables[TRITON] = "0"
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
