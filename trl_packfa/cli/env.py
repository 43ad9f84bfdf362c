"""`trl-packfa env`: the facts about this machine that a bug report needs."""

from __future__ import annotations

import argparse

from .backends import usual_request
from .output import Commands, add_json, described, print_rows

_PACKAGES = ("bitsandbytes", "flash-attn", "liger-kernel", "kernels", "triton", "mamba-ssm", "causal-conv1d",
             "flash-linear-attention", "deepspeed", "tokenizers", "numpy")  # fmt: skip


def add(commands: Commands) -> None:
    """Declare the command."""
    env = commands.add_parser("env", help="print the facts about this machine that a bug report needs")
    add_json(env)
    env.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print machine, package versions and attention backends, one row for each fact."""
    import os
    import platform

    import torch

    from ..adapters import table
    from ..attention import BACKENDS
    from ..patches.measured import measured_with
    from ..versions import MINIMUM_VERSIONS, TESTED, installed_version

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = ["trl-packfa", *MINIMUM_VERSIONS, *_PACKAGES]
    ranges = [f"{package} {tested.oldest} to {tested.newest}" for package, tested in TESTED.items()]
    request = usual_request()
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch threads": str(torch.get_num_threads()),
        "gpu": ", ".join(gpus) or "none",
        "cuda": torch.version.cuda or "not in this torch",
        **{package: installed_version(package) or "not installed" for package in packages},
        "tested versions": ", ".join(ranges),
        "attention backends": ", ".join(b.name for b in BACKENDS if not b.refusals(request)),
        "model types measured with": described(measured_with()),
        "adapters measured with": described(table.measured_with()),
    }
    return print_rows([{"what": name, "version": value} for name, value in facts.items()], as_json=args.json)
