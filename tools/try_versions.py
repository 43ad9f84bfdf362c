"""Run the tests of `-m versions` with other versions of the dependencies, each set in its own virtual environment.

`python tools/try_versions.py oldest newest` is `make test-versions`; `released` takes the newest releases that pip
finds, `upstream` the main branches of transformers, TRL and PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the project may not be installed in the Python that runs this script

_PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
_TESTS = ("pytest>=8", "pytest-xdist>=3", "hypothesis>=6")
_UPSTREAM = [f"git+https://github.com/huggingface/{name}" for name in ("transformers", "trl", "peft")]
_BATTERY = ("-m", "versions and not slow", "--ignore=tests/whole", "--continue-on-collection-errors", "-q")
_READ_VERSIONS = """
import json, platform
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in %r}}))
"""


class Result(NamedTuple):
    """Result of a set: the installed versions, the counts of tests, and the minutes of installing and testing."""

    name: str
    versions: dict[str, str]
    passed: int
    failed: int
    installing: float
    testing: float


def requirements(name: str) -> tuple[list[str], list[str]]:
    """Return the requirements of a set: torch, which is installed first, and the rest."""
    if name == "upstream":
        return ["torch"], _UPSTREAM
    if name == "released":
        return ["torch"], list(_PACKAGES[1:])
    from trl_packfa.versions import TESTED

    first, *rest = [f"{package}=={getattr(TESTED[package], name)}" for package in _PACKAGES]
    return [first], rest


def install(name: str, folder: Path) -> Path:
    """Make the environment of a set, unless it exists with these requirements, and return its Python."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    torch, rest = requirements(name)
    wanted = json.dumps([torch, rest, (ROOT / "pyproject.toml").read_text(encoding="utf-8")])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and name not in ("upstream", "released"):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    # Do not compile at install: most modules are never imported.
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    # A constraint of this machine's pip must not change the set.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    subprocess.run([*pip, *torch], check=True, env=environment)
    # One command with the project, so that pip checks these versions against the project's own requirements.
    subprocess.run([*pip, "-e", str(ROOT), *torch, *rest, *_TESTS], check=True, cwd=ROOT, env=environment)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def run_battery(python: Path, folder: Path) -> tuple[int, int]:
    """Run the tests and return how many passed and how many failed. Their output goes to `battery.log`."""
    report, log = folder / "report.xml", folder / "battery.log"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", *_BATTERY, "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    if not report.exists():
        return 0, 1
    suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    return int(suite["tests"]) - failed - int(suite["skipped"]), failed


def try_set(name: str, folder: Path) -> Result:
    """Install a set of versions and run the tests with it."""
    start = time.monotonic()
    python = install(name, folder)
    between = time.monotonic()
    read = subprocess.run([python, "-c", _READ_VERSIONS % (_PACKAGES,)], check=True, capture_output=True, text=True)
    passed, failed = run_battery(python, folder)
    minutes = [(between - start) / 60, (time.monotonic() - between) / 60]
    return Result(name, json.loads(read.stdout), passed, failed, *minutes)


def table(results: list[Result]) -> str:
    """Return the results as a table, one row each: versions, tests and minutes."""
    header = ["set", "python", *_PACKAGES, "passed", "failed", "install", "tests"]
    rows = []
    for r in results:
        versions, minutes = [r.versions[name] for name in header[1:-4]], (r.installing, r.testing)
        rows.append([r.name, *versions, str(r.passed), str(r.failed), *(f"{m:.1f} min" for m in minutes)])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows])


def main() -> int:
    """Try the sets in parallel; return 0 if every test of every set passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", choices=("oldest", "newest", "released", "upstream"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions", help="folder for the environments")
    parser.add_argument("--install-only", action="store_true", help="make the environments, and run no test")
    args = parser.parse_args()
    folders = {name: args.folder / name for name in args.sets}
    with ThreadPoolExecutor(len(folders)) as pool:
        if args.install_only:
            list(pool.map(install, folders, folders.values()))
            return 0
        results = list(pool.map(try_set, folders, folders.values()))
    for result in results:
        if result.failed or not result.passed:
            print((folders[result.name] / "battery.log").read_text(encoding="utf-8"))
    print(table(results))
    return int(any(result.failed or not result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
