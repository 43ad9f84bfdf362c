"""`trl-packfa check`: prove that packing is exact on a given model."""

from __future__ import annotations

import argparse
import json

from ..errors import ContaminationError
from ..versions import require_versions
from .output import add_json, print_rows

# Not 1: that code means that the command could not run.
NOT_EXACT = 3


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    check = commands.add_parser("check", help="prove that packing is exact on a model")
    check.add_argument("model", help="name or path of a causal LM")
    check.add_argument("--adapter", help="name or path of a PEFT adapter to load onto the model")
    check.add_argument("--backend", default="auto", help="attention backend (default: auto)")
    check.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    check.add_argument("--unpad", action="store_true", help="also check padded batches that run without pad tokens")
    check.add_argument(
        "--share-prefixes",
        action="store_true",
        help="with --unpad: also check rows with a common prefix, which is computed once",
    )
    check.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    add_json(check)
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the model and print the report; return 0 if packing is exact, else 3."""
    require_versions(training=False)
    from ..api import patch
    from ..exactness import check
    from ..terminal.progress import a_line_per_thing, proving
    from ..trainers.common.hub import load_causal_lm, load_tokenizer

    with a_line_per_thing():
        model = load_causal_lm(args.model, dtype=args.dtype, adapter=args.adapter)
    patch(model, backend=args.backend, unpad=args.unpad, share_prefixes=args.share_prefixes)
    with proving("checking that no document sees another") as progress:
        report = check(model, processing_class=load_tokenizer(args.model), seed=args.seed, progress=progress)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_rows(report.rows(), as_json=False)
        print(f"{report}\n{report.seconds:.1f} s")
        try:
            report.require_exact()
        except ContaminationError as error:  # the same message as in the trainer: it names the module and what to do
            print(error)
    return 0 if report.is_exact else NOT_EXACT
