"""Download the wheels that a GPU machine without network lacks into `.gpu/`, which git ignores: `make gpu-kit`.

    python benchmarks/gpu/prepare.py [--python 3.12] [--cuda 130] [--also NAME==VERSION ...]

Wheels and working tree together stay under 64 MiB. The script needs pip and a package index. On the GPU machine,
`benchmarks/gpu/run.py` unpacks the wheels.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
LIMIT = 64 * 2**20
# The GPU machine already has a torch for its GPU.
_THERE = {"torch"}
# Requirements of the tested versions that torch's images lack, and Liger for the comparison.
_NEEDED = ("liger-kernel==0.8.5", "dill==0.4.1", "multiprocess==0.70.19")
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def carried(also: Sequence[str] = ()) -> list[str]:
    """Return the packages to carry: those that CI tests, pinned, and their requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested = [name for name in project["optional-dependencies"]["tested"] if name.split("==")[0] not in _THERE]
    return [*tested, *_NEEDED, *also]


def download(names: Sequence[str], folder: Path, *, python: str) -> None:
    """Download wheels for Python `python` on Linux, without their requirements."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [part for platform in _PLATFORMS for part in ("--platform", platform)]
    for name in names:
        subprocess.run([*command, name], check=True)


def keep_files(wheel: Path, keep: Callable[[str], bool]) -> None:
    """Remove the files that `keep` refuses from a wheel and from its RECORD."""
    trimmed = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name in filter(keep, old.namelist()):
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines()
                data = "".join(f"{line}\n" for line in lines if keep(line.split(",")[0])).encode()
            new.writestr(name, data)
    trimmed.replace(wheel)


def of_cuda(version: str) -> Callable[[str], bool]:
    """Return a filter for the files of bitsandbytes with this CUDA, which keeps two of its sixteen libraries."""
    libraries = {f"libbitsandbytes_cuda{version}.so", "libbitsandbytes_cpu.so"}
    return lambda name: not name.endswith(".so") or Path(name).name in libraries


def working_tree() -> int:
    """Count the bytes that are carried anyway: tracked files, and new files that git does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file())


def commit() -> str:
    """Return the commit, marked if files differ from it: the copy on the GPU machine has no git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make(folder: Path, *, python: str, cuda: str, also: Sequence[str] = ()) -> list[Path]:
    """Make the folder of the kit again and return its wheels.

    Raises:
        `SystemExit`: if the kit is too large to carry, with the sizes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download(carried(also), folder, python=python)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        keep_files(wheel, of_cuda(cuda))
    (folder / "commit.txt").write_text(commit(), encoding="utf-8")
    wheels = sorted(folder.glob("*.whl"))
    sizes = {wheel.name: wheel.stat().st_size for wheel in wheels}
    total = sum(sizes.values()) + working_tree()
    listed = "\n".join(f"{size / 2**20:8.2f} MiB  {name}" for name, size in sizes.items())
    told = f"{listed}\n{total / 2**20:8.2f} MiB  with the working tree, of {LIMIT // 2**20}"
    if total > LIMIT:
        raise SystemExit(f"the kit is too large to carry:\n{told}")
    print(told)
    return wheels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine")
    parser.add_argument("--cuda", default="130", help="CUDA version of its torch: 130 is 13.0")
    parser.add_argument("--also", nargs="*", default=[], help="more packages, in pip's form")
    given = parser.parse_args()
    make(ROOT / ".gpu", python=given.python, cuda=given.cuda, also=given.also)
    print("there, each in ten minutes: python benchmarks/gpu/run.py first | second | third")
