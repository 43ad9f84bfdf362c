"""Check every causal-LM type of transformers on the GPU, small and with random weights: `run.py types`.

    python benchmarks/gpu/every_type.py --output types.jsonl [--jobs 12] [--dtype bfloat16] [--only TYPE ...]

Each result is written at once, as a line of JSON: the verdict and the numbers of `trl_packfa.check`. An error of the
device makes it unusable for the process, so the process then starts again with the next type.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny_models import NOT_BUILDABLE, all_types, small_model

from trl_packfa import check, describe, patch
from trl_packfa.errors import PackingError

_LAST = 2000  # characters of an error that are kept


def measure(name: str, device: str, dtype: str) -> dict[str, Any]:
    """Build, patch and check one type, and return the result, also if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            model = small_model(name)
            torch.nn.Module.to(model, device, getattr(torch, dtype))
            patch(model)
            report = check(model)
            return {"type": name, "dtype": dtype, **report.to_dict(), "describe": str(describe(model))}
        except PackingError as error:
            return {"type": name, "dtype": dtype, "verdict": "refused", "why": str(error)}
        except Exception:  # record it as a result, so that the other types go on
            return {"type": name, "dtype": dtype, "verdict": "raises", "why": traceback.format_exc()[-_LAST:]}


def work(names: list[str], given: argparse.Namespace) -> None:
    """Check these types one after the other; start again in a new process after an error of the device."""
    torch.set_num_threads(1)
    while names:
        found = measure(names.pop(0), given.device, given.dtype)
        with given.output.open("a") as out:
            out.write(json.dumps(found) + "\n")
        if "CUDA error" in found.get("why", "") and names:
            os.execv(sys.executable, [sys.executable, *_command(names, given)])


def _command(names: list[str], given: argparse.Namespace) -> list[str]:
    options = ["--output", str(given.output), "--device", given.device, "--dtype", given.dtype, "--jobs", "0"]
    return [__file__, *options, "--only", *names]


def main() -> int:
    """Check the types in several processes; return 1 if one is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of the results")
    parser.add_argument("--jobs", type=int, default=12, help="processes; 0: this one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", default=(), metavar="TYPE", help="types to check (default: all)")
    given = parser.parse_args()
    names = list(given.only or (name for name in sorted(all_types()) if name not in NOT_BUILDABLE))
    if given.jobs == 0:
        work(names, given)
        return 0
    given.output.unlink(missing_ok=True)
    shares = [names[i :: given.jobs] for i in range(min(given.jobs, len(names)))]
    for process in [subprocess.Popen([sys.executable, *_command(share, given)]) for share in shares]:
        process.wait()
    results = [json.loads(line) for line in given.output.read_text().splitlines()]
    print(*(f"{name}: {number}" for name, number in Counter(found["verdict"] for found in results).items()), sep="\n")
    wrong = [found for found in results if found["verdict"] not in ("exact", "refused")]
    for found in wrong:
        print(found["type"], found["verdict"], found.get("why", found.get("parity")))
    return int(bool(wrong) or len(results) != len(names))


if __name__ == "__main__":
    sys.exit(main())
