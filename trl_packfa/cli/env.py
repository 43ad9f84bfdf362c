"""`trl-packfa env`: the facts about this machine that a bug report needs, and what each attention backend lacks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .output import Commands, add_json, described, print_rows

if TYPE_CHECKING:
    from ..attention import AttentionBackend, AttentionRequest

_ASKED = ("head_dim", "value_dim", "sliding_window", "softcap", "sinks")


def add(commands: Commands) -> None:
    """Declare the command."""
    text = "print the facts about this machine that a bug report needs, and what each attention backend lacks here"
    env = commands.add_parser("env", help=text)
    add_json(env)
    env.add_argument("--head_dim", type=int, help="size of an attention head (default: 128)")
    env.add_argument("--value_dim", type=int, help="size of a value head, if it differs from --head_dim")
    env.add_argument("--sliding_window", type=int, help="number of keys that a query may attend to")
    env.add_argument("--softcap", type=float, help="soft cap of the attention scores, as in Gemma-2")
    env.add_argument("--sinks", action="store_true", default=None, help="attention sinks, as in gpt-oss")
    dtypes = ("bfloat16", "float16", "float32", "float64")
    env.add_argument("--dtype", choices=dtypes, help="model dtype (default: bfloat16 on a GPU, else float32)")
    env.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print machine, package versions and attention backends, one row for each fact."""
    from ..adapters import table
    from ..attention import BACKENDS
    from ..bench.environment import environment
    from ..patches.measured import measured_with
    from ..versions import TESTED

    ranges = [f"{package} {tested.oldest} to {tested.newest}" for package, tested in TESTED.items()]
    machine, request = environment(), _request(args)
    facts = {
        **{name: _as_text(value) for name, value in machine.items() if not isinstance(value, dict)},
        **{name: version or "not installed" for name, version in machine["versions"].items()},
        "tested versions": ", ".join(ranges),
        "model types measured with": described(measured_with()),
        "adapters measured with": described(table.measured_with()),
        "attention asked for": request.describe(),
        **{f"backend {backend.name}": _here(backend, request) for backend in BACKENDS},
    }
    return print_rows([{"what": name, "value": value} for name, value in facts.items()], as_json=args.json)


def _as_text(value: object) -> str:
    return (", ".join(value) if isinstance(value, list) else "" if value is None else str(value)) or "none"


def _request(args: argparse.Namespace) -> AttentionRequest:
    """Return the attention request of an 8 B parameter model on this machine, with the user's changes."""
    import torch

    from ..attention import AttentionRequest

    device, dtype = ("cuda:0", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    usual = AttentionRequest(torch.device(device), dtype, head_dim=128, num_heads=32, num_key_value_heads=8)
    wanted = {name: getattr(args, name) for name in _ASKED if getattr(args, name) is not None}
    return usual._replace(**wanted, dtype=getattr(torch, args.dtype) if args.dtype else dtype)


def _here(backend: AttentionBackend, request: AttentionRequest) -> str:
    """Say what a backend lacks for the request, or that it serves it and with which kernels, and what it is."""
    why = "; ".join(backend.refusals(request)) or ", ".join(filter(None, ("yes", backend.kernels(request))))
    return f"{why} ({backend.summary})"
