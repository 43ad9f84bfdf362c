"""`trl-packfa merge`: merge a trained adapter into the weights of its base model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..versions import require_versions
from .output import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    merge = commands.add_parser("merge", help="merge a trained adapter into its base model and save the result")
    merge.add_argument("adapter", help="folder or Hub name of the adapter")
    merge.add_argument("output", type=Path, help="folder for the merged model; must be empty or new")
    merge.add_argument("--base", help="base model to use instead of the one named in the adapter")
    merge.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="dtype of the merged weights; auto: the dtype that the base was saved in",
    )
    merge.add_argument("--push_to_hub", metavar="REPO", help="also push the merged model to this Hub repository")
    merge.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge the adapter, save the model and print its folder."""
    require_versions(training=False)
    from ..scripts.merging import merge_adapter

    model, tokenizer = merge_adapter(args.adapter, args.output, base=args.base, dtype=args.dtype)
    print(f"merged into {args.output} ({model.num_parameters():,} parameters, {model.dtype})")
    if args.push_to_hub:
        model.push_to_hub(args.push_to_hub)
        if tokenizer is not None:
            tokenizer.push_to_hub(args.push_to_hub)
        print(f"pushed to {args.push_to_hub}")
    return 0
