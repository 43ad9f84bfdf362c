"""Description of the machine behind the figures: hardware, versions, threads, allocator."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from shutil import which
from typing import Any

import torch
from accelerate.utils import patch_environment

from ..versions import MINIMUM_VERSIONS, installed_version

# Every side allocates large tensors on the heap, which reuses memory. Otherwise page faults dominate CPU time.
HEAP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
# Environment variables that change memory allocation and so speed.
ALLOCATOR = (*HEAP, "MALLOC_ARENA_MAX", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PACKAGES = ("trl-packfa", *MINIMUM_VERSIONS, "bitsandbytes", "flash-attn", "liger-kernel", "kernels", "triton",
             "mamba-ssm", "causal-conv1d", "flash-linear-attention", "deepspeed", "tokenizers", "numpy")  # fmt: skip


def large_heap() -> AbstractContextManager[None]:
    """Set [`HEAP`] for processes that start inside a `with` block, except what the user has set."""
    return patch_environment(**{name: value for name, value in HEAP.items() if name not in os.environ})


def environment() -> dict[str, Any]:
    """Return the facts that someone needs to reproduce a figure or a fault; a package that is missing is `None`."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "commit": _commit(),
        "allocator": {name: {**HEAP, **os.environ}.get(name, "") for name in ALLOCATOR},
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Return the commit of a checkout, or of its copy that `make gpu-kit` has noted in `.gpu`.

    Return `None` for an installed wheel, which has a version instead.
    """
    folder = Path(__file__).parents[2]
    noted = folder / ".gpu" / "commit.txt"
    if (folder / ".git").exists() and which("git"):
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stdout.strip() or None
    return noted.read_text(encoding="utf-8").strip() if noted.exists() else None
