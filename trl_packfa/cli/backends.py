"""`trl-packfa backends`: the attention backends, and what is missing for each on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .output import Commands, add_json, print_rows

if TYPE_CHECKING:
    from ..attention import AttentionBackend, AttentionRequest


def add(commands: Commands) -> None:
    """Declare the command."""
    text = "list the attention backends and what is missing for each on this machine"
    backends = commands.add_parser("backends", help=text)
    add_json(backends)
    backends.add_argument("--head_dim", type=int, help="size of an attention head (default: 128)")
    backends.add_argument("--value_dim", type=int, help="size of a value head, if it differs from --head_dim")
    backends.add_argument("--sliding_window", type=int, help="number of keys that a query may attend to")
    backends.add_argument("--softcap", type=float, help="soft cap of the attention scores, as in Gemma-2")
    backends.add_argument("--sinks", action="store_true", default=None, help="attention sinks, as in gpt-oss")
    dtypes = ("bfloat16", "float16", "float32", "float64")
    backends.add_argument("--dtype", choices=dtypes, help="model dtype (default: bfloat16 on a GPU, else float32)")
    backends.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print for each backend whether it can serve a request on this machine.

    The arguments change the usual request of an 8 B model.
    """
    import torch

    from ..attention import BACKENDS

    fields = ("head_dim", "value_dim", "sliding_window", "softcap", "sinks")
    asked = {name: getattr(args, name) for name in fields if getattr(args, name) is not None}
    if args.dtype is not None:
        asked["dtype"] = getattr(torch, args.dtype)
    request = usual_request()._replace(**asked)
    if not args.json:
        print(f"for {request.describe()}")
    rows = [{"backend": b.name, "here": _here(b, request), "what": b.summary} for b in BACKENDS]
    return print_rows(rows, as_json=args.json)


def _here(backend: AttentionBackend, request: AttentionRequest) -> str:
    """Say what a backend lacks for the request, or that it serves it, and with which kernels."""
    why = "; ".join(backend.refusals(request))
    return why or ", ".join(filter(None, ("yes", backend.kernels(request))))


def usual_request() -> AttentionRequest:
    """Return the attention request of an 8 B parameter model on this machine."""
    import torch

    from ..attention import AttentionRequest

    device, dtype = ("cuda:0", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return AttentionRequest(torch.device(device), dtype, head_dim=128, num_heads=32, num_key_value_heads=8)
