"""The command `trl-packfa plan`: it parses arguments, makes a plan, and shows it as tables or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from trl import DatasetMixtureConfig, ScriptArguments

from ..config.requirements import require
from ..config.sft import PackedSFTConfig
from ..data.batching import FREE
from ..errors import InvalidConfig, PackingError
from ..scripts.parsing import ColumnChoice, parse
from ..scripts.train import load_splits
from ..trainers.loading import init_kwargs
from ..trainers.requirements.runs import MODEL
from ..trainers.requirements.training import Training
from .advise import advise
from .gather import Source, lengths_from_file, read_documents
from .memory import ModelShape, estimate, shape_of, without_checkpointing
from .report import Plan, compare
from .terminal import WIDTH, show


@dataclass
class PlanArguments(ColumnChoice):
    """Arguments of `trl-packfa plan`, in addition to those of `trl-packfa train`."""

    tokenizer: str | None = field(
        default=None, metadata={"help": "Name or path of a tokenizer (default: the model's). Enough without a model."}
    )
    lengths: str | None = field(
        default=None, metadata={"help": "JSON list of document lengths in tokens, instead of a dataset."}
    )
    ranks: str = field(
        default="1,2,8",
        metadata={"help": "Numbers of GPUs, multiples of sequence_parallel; the main tables show the first."},
    )
    json: bool = field(default=False, metadata={"help": "Print everything as JSON instead of tables."})


def plan(argv: list[str]) -> int:
    """Parse flags and `--config FILE.yaml`, read lengths, and show the plan. Return 0: the planned run can train."""
    # Users plan on machines without a GPU, so arguments that require one are turned off here.
    classes = (ScriptArguments, PackedSFTConfig, DatasetMixtureConfig, PlanArguments)
    given = ["--use_cpu", "true", *argv, "--tf32", "false"]
    script, args, mixture, wanted = parse(classes, given, prog="trl-packfa plan")
    ranks = _ranks(wanted.ranks, args.sequence_parallel)
    shape = read_shape(args) if args.model_name_or_path else None
    source = _source(script, args, mixture, wanted)
    made = make_plan(source, args, ranks, shape)
    if wanted.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        show(made, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0


def make_plan(source: Source, args: PackedSFTConfig, ranks: list[int], shape: Any = None) -> Plan:
    """Return the plan with all figures and the advice; refuse what `trl-packfa train` would refuse."""
    quadratic, cut = (shape.quadratic, shape.cut) if shape else (0.0, FREE)
    outcomes = compare(source.tokens, args, ranks, quadratic, cut, on_images=source.on_images)
    memory, unchecked = {}, None
    if shape:
        memory = {name: estimate(shape, args, o.epoch().largest_micro_batch) for name, o in outcomes.items()}
    if shape and args.gradient_checkpointing:
        tokens = outcomes[args.strategy.name].epoch().largest_micro_batch
        unchecked = estimate(shape, without_checkpointing(args), tokens)
    figures = Plan(source, args, outcomes, shape, memory, unchecked)
    return replace(figures, advice=(*advise(figures), *source.remarks))


def read_shape(args: PackedSFTConfig) -> ModelShape | None:
    """Return the shape of `args.model_name_or_path` with the adapter of the arguments, from the model's config alone.

    It is built on the meta device, without weights; `None` if its config does not say its sizes. Raise
    [`InvalidConfig`] if there is no such model, or the adapter does not fit it, [`UnsupportedModel`] if its type
    cannot be packed.
    """
    name = args.model_name_or_path
    assert name is not None, "asked for a model"
    try:
        config = AutoConfig.from_pretrained(
            name, revision=init_kwargs(args).get("revision"), trust_remote_code=args.trust_remote_code
        )
        require(MODEL, Training(args, "PackedSFTTrainer", model=name))
        with torch.device("meta"):
            kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
            model = kind.from_config(config, trust_remote_code=args.trust_remote_code)
        return shape_of(model, args)
    except PackingError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfig(
            f"cannot make the model '{name}' from its config.",
            why=[str(error)],
            do="Check the name, or pass --tokenizer without a model, for a plan without memory and attention cost.",
        ) from error


def _source(script: Any, args: PackedSFTConfig, mixture: Any, wanted: PlanArguments) -> Source:
    if wanted.lengths:
        return lengths_from_file(wanted.lengths)
    dataset, *_ = load_splits(script, args, mixture, wanted.columns)
    tokenizer = wanted.tokenizer or args.model_name_or_path
    if tokenizer is None:
        raise InvalidConfig(
            "no tokenizer.",
            do="Pass --tokenizer or --model_name_or_path, or document lengths with --lengths FILE.json.",
        )
    return read_documents(Path(script.dataset_name or "the mixture").name, dataset, tokenizer, args)


def _ranks(text: str, shared_by: int) -> list[int]:
    """Return the numbers of GPUs that can share rows in groups of this size, at least one group."""
    try:
        ranks = list(dict.fromkeys(int(part) for part in text.split(",")))
        if min(ranks) < 1:
            raise ValueError
    except ValueError as error:
        raise InvalidConfig(
            f"--ranks {text} is not a list of GPU counts.", do="Write for example --ranks 1,2,8."
        ) from error
    return [n for n in ranks if n % shared_by == 0] or [shared_by]
