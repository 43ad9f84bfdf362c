"""`trl-packfa env`: the facts about this machine that a bug report needs."""

from __future__ import annotations

import argparse

from .backends import usual_request
from .output import add_json, described, print_rows

_PACKAGES = (
    "bitsandbytes",
    "flash-attn",
    "liger-kernel",
    "kernels",
    "triton",
    "mamba-ssm",
    "causal-conv1d",
    "flash-linear-attention",
    "deepspeed",
    "tokenizers",
    "numpy",
)


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    env = commands.add_parser("env", help="print the facts about this machine that a bug report needs")
    add_json(env)
    env.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print machine, package versions and attention backends, one row for each fact."""
    facts = {**_machine(), **_versions(), **_backends(), **_tables()}
    return print_rows([{"what": name, "version": value} for name, value in facts.items()], as_json=args.json)


def _machine() -> dict[str, str]:
    import os
    import platform

    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch threads": str(torch.get_num_threads()),
        "gpu": ", ".join(gpus) or "none",
        "cuda": torch.version.cuda or "not in this torch",
    }


def _versions() -> dict[str, str]:
    from ..versions import MINIMUM_VERSIONS, TESTED, installed_version

    packages = ["trl-packfa", *MINIMUM_VERSIONS, *_PACKAGES]
    found = {package: installed_version(package) or "not installed" for package in packages}
    ranges = [f"{package} {tested.oldest} to {tested.newest}" for package, tested in TESTED.items()]
    return {**found, "tested versions": ", ".join(ranges)}


def _tables() -> dict[str, str]:
    """Return the versions that the tables of model types and of adapters were measured with."""
    from ..adapters import table
    from ..patches.measured import measured_with

    return {
        "model types measured with": described(measured_with()),
        "adapters measured with": described(table.measured_with()),
    }


def _backends() -> dict[str, str]:
    """Return the backends that can serve a usual request here, best first."""
    from ..attention import BACKENDS

    request = usual_request()
    return {"attention backends": ", ".join(b.name for b in BACKENDS if not b.refusals(request))}
