"""`trl-packfa backends`: the attention backends, and what this machine lacks for each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .output import add_json, print_rows

if TYPE_CHECKING:
    from ..attention import AttentionRequest


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "list the attention backends and what this machine lacks for each"
    backends = commands.add_parser("backends", help=text)
    add_json(backends)
    backends.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask every backend about a usual request of this machine."""
    from ..attention import BACKENDS

    request = usual_request()
    if not args.json:
        print(f"for {request.describe()}")
    rows = [{"backend": b.name, "here": "; ".join(b.refusals(request)) or "yes", "what": b.summary} for b in BACKENDS]
    return print_rows(rows, as_json=args.json)


def usual_request() -> AttentionRequest:
    """What a model of 8 B parameters would ask this machine's backends."""
    import torch

    from ..attention import AttentionRequest

    device, dtype = ("cuda:0", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return AttentionRequest(torch.device(device), dtype, head_dim=128, num_heads=32, num_key_value_heads=8)
