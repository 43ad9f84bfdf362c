"""`trl-packfa check`: check that packing, or running padded batches without pads, is exact on a given model."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..config.options import PatchOptions
from ..errors import ContaminationError
from ..versions import require_versions
from .output import Commands, add_json, print_rows

if TYPE_CHECKING:  # the command's help must not import torch
    from torch import nn

    from ..checking import CheckReport

# Not 1: that code means that the command could not run.
NOT_EXACT = 3


def add(commands: Commands) -> None:
    """Declare the command."""
    check = commands.add_parser("check", help="check that packing is exact on a model")
    check.add_argument("model", help="name or path of a causal LM, a classifier or an encoder")
    check.add_argument("--adapter", help="name or path of a PEFT adapter to load onto the model")
    check.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    for option in fields(PatchOptions):
        flag: dict[str, Any] = {"type": str} if option.type == "str" else {"action": argparse.BooleanOptionalAction}
        check.add_argument(f"--{option.name}", default=option.default, help=option.metadata["help"], **flag)
    check.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    add_json(check)
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the model and print the report; return 0 if packing is exact, else 3."""
    require_versions(training=False)
    from ..scripts.merging import load_for_check

    model = load_for_check(args.model, dtype=args.dtype, adapter=args.adapter)
    report = _checked(model, args)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_rows(report.table(), as_json=False)
        print(f"{report}\n{report.seconds:.1f} s")
        try:
            report.require_exact()
        except ContaminationError as error:  # the same message as in the trainer: it names the module and what to do
            print(error)
    return 0 if report.is_exact else NOT_EXACT


def _checked(model: nn.Module, args: argparse.Namespace) -> CheckReport:
    """Patch the model and check packed rows. Encoders and classifiers get padded batches only: `patch` checks them."""
    from ..api import patch
    from ..checking import check
    from ..patching.inspect import inner_model
    from ..patching.state import find_state
    from ..scripts.merging import is_encoder, load_tokenizer
    from ..terminal.progress import checking

    inner = inner_model(model)
    padded = is_encoder(inner.config) or inner.get_output_embeddings() is None
    options = {option.name: getattr(args, option.name) for option in fields(PatchOptions)}
    patch(model, **{**options, "unpad": args.unpad or padded})
    state = find_state(model)
    if state is not None and state.unpadding_report is not None and state.parts.padded_only:
        return state.unpadding_report
    with checking("checking that no document sees another") as progress:
        return check(model, processing_class=load_tokenizer(args.model), seed=args.seed, progress=progress)
