"""Arguments of `trl-packfa bench` in addition to TRL's own, and the function that reads them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from trl import DatasetMixtureConfig, ScriptArguments

from ..config.sft import PackedSFTConfig
from ..errors import InvalidConfig
from ..packing import STEP
from ..scripts.parsing import parse
from .presets import PRESETS
from .sides import KINDS, TRAINERS, Side, parse_sides

# Defaults of a benchmark that differ from a training. The YAML file and the flags override them.
_DEFAULTS = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 10}
_ON_CPU = {"use_cpu": True, "bf16": False}


@dataclass
class BenchArguments:
    """Arguments of a benchmark: the strategies, the data, and the output files.

    All of TRL's arguments are accepted too: `max_length`, `per_device_train_batch_size`, `load_in_4bit`, ...
    """

    model: str | None = field(
        default=None,
        metadata={"help": "Name or path of a model, or a preset with random weights (see `presets.py`)."},
    )
    dataset: str | None = field(default=None, metadata={"help": "File or name of a dataset in any of TRL's formats."})
    documents: int | None = field(
        default=None, metadata={"help": "Train on this many documents from the start of the dataset (default: all)."}
    )
    lengths: str | None = field(
        default=None,
        metadata={
            "help": "JSON list of document lengths in tokens, or the name of a mix (see `data.py`): the data are "
            "documents of random tokens with these lengths."
        },
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Name or path of a tokenizer, for a model with random weights."}
    )
    trainer: str = field(
        default="sft",
        metadata={
            "help": "TRL's trainer: `sft`, `dpo`, `reward` or `kto`. The last three have the strategies `padding` "
            "(TRL's own trainer), `padding_free` (the same without pad tokens), `padding_free-shared` (shared "
            "prefixes are also computed once) and `step` (our packed trainer).",
            "choices": list(TRAINERS),
        },
    )
    strategies: str | None = field(
        default=None,
        metadata={
            "help": f"Strategies to compare, separated by commas: {', '.join(KINDS)}. Default: `padding,step`, for "
            "other trainers `padding,padding_free,step`. `bfd@4096` fills rows of 4,096 tokens, `bfd@4096x1` one such "
            "row per micro-batch; `padding/sdpa` names transformers' attention, `step/varlen` our backend (default: "
            "FlashAttention where it is available)."
        },
    )
    base: str | None = field(
        default=None, metadata={"help": "Strategy that is the base of all ratios (default: the first)."}
    )
    contaminated: str = field(
        default="",
        metadata={"help": "Strategies to compare even if documents see each other, separated by commas."},
    )
    untimed_steps: int = field(default=2, metadata={"help": "Optimizer steps of each side before timing starts."})
    interleave: bool = field(
        default=True,
        metadata={"help": "Step all sides in turn. `False`: one after the other, if memory is short."},
    )
    eval_documents: int = field(default=64, metadata={"help": "Documents held out for the validation loss."})
    trace: bool = field(
        default=True, metadata={"help": "Also trace one step of each side, for host waits, calls and operations."}
    )
    profile: bool = field(default=False, metadata={"help": "Also list each side's operations by their own time."})
    output: str | None = field(
        default=None,
        metadata={"help": "JSON file for all measured figures. Every step goes at once to the same name with .jsonl."},
    )
    presets: str | None = field(
        default=None, metadata={"help": "Folder in which presets are kept for later runs (default: a temporary one)."}
    )


class Setup(NamedTuple):
    """Parsed arguments of a benchmark and its sides."""

    argv: list[str]
    bench: BenchArguments
    script: ScriptArguments
    args: PackedSFTConfig
    mixture: DatasetMixtureConfig
    sides: list[Side]


def read_arguments(argv: list[str]) -> Setup:
    """Read flags and `--config FILE.yaml` with TRL's parser; refuse unknown names and contradictions."""
    classes: Any = (BenchArguments, ScriptArguments, PackedSFTConfig, DatasetMixtureConfig)
    defaults = {**_DEFAULTS, **({} if torch.cuda.is_available() else _ON_CPU)}
    bench, script, args, mixture = parse(classes, argv, prog="trl-packfa bench", defaults=defaults)
    _require_sense(bench, args)
    default = "padding,step" if bench.trainer == "sft" else "padding,padding_free,step"
    sides = parse_sides(bench.strategies or default, contaminated=bench.contaminated, trainer=bench.trainer)
    if bench.base is not None and bench.base not in [side.name for side in sides]:
        raise InvalidConfig(
            f"base='{bench.base}' is no side.", do=f"Choose from {', '.join(side.name for side in sides)}."
        )
    return Setup(argv, bench, script, args, mixture, sides)


def _require_sense(bench: BenchArguments, args: PackedSFTConfig) -> None:
    if bench.model is None and args.model_name_or_path is None:
        raise InvalidConfig("no model.", do=f"Pass --model: a name, a path, or one of {sorted(PRESETS)}.")
    if args.strategy != STEP:
        raise InvalidConfig(
            f"packing={args.packing}, packing_strategy='{args.packing_strategy}': a benchmark has many.",
            do="Name the strategies in --strategies.",
        )
    if bench.untimed_steps < 1:
        raise InvalidConfig(
            f"untimed_steps={bench.untimed_steps}: a side's first step is never typical.", do="Set it to 1 or more."
        )
    if args.max_steps == 0:
        raise InvalidConfig("max_steps=0: nothing to time.", do="Set it to 10 or more, or -1 for whole epochs.")
