"""Run tests under several instruction sets of an x86 CPU, and print how near each bound is to its limit.

`python tools/margins.py FOLDER --ignore=tests/whole -m "not slow"` gives pytest what follows the folder, which keeps
the shares; with nothing after it, the table of an earlier run is printed again.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETS = {
    "native": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def run(folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest with the arguments under each set; return how many of these runs failed."""
    failed = 0
    for name, env in SETS.items():
        # Inductor's cache does not know of the limit.
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-{name}")}
        env = {**os.environ, **env, **caches, "MARGINS": str(folder / f"{name}.jsonl")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        failed += subprocess.run(command, cwd=ROOT, env=env).returncode != 0
    return failed


def table(folder: Path) -> list[str]:
    """Return a markdown table: for each bound, of a control the least that was found, of others the most."""
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for name in SETS:
        path = folder / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            bound, share, test = json.loads(line)
            found.setdefault(bound, {}).setdefault(name, []).append((share if share == share else math.inf, test))
    lines = [f"| found / allowed | comparisons | {' | '.join(SETS)} | nearest |", "|---" * (len(SETS) + 3) + "|"]
    for bound, by_set in sorted(found.items()):
        pick = min if "control" in bound else max
        picked = {name: pick(by_set[name]) for name in by_set}
        cells = [f"{picked[name][0]:.2g}" if name in picked else "" for name in SETS]
        count, nearest = max(map(len, by_set.values())), pick(picked.values())[1].split("::")[-1]
        lines.append(f"| {bound} | {count:,} | {' | '.join(cells)} | `{nearest}` |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run pytest under each set if there are arguments for it, and print the table."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(exist_ok=True)
    failed = run(folder, arguments[1:]) if arguments[1:] else 0
    print(*table(folder), sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
