"""What `trl-packfa bench` takes beside TRL's own arguments, and how all are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from trl import DatasetMixtureConfig, ScriptArguments

from ..errors import InvalidConfig
from ..packing import STEP
from ..training.config import PackedSFTConfig
from ..training.parsing import parse
from .presets import PRESETS
from .sides import KINDS, TRAINERS, Side, parse_sides

# What a benchmark wants otherwise than a training; YAML file and flags win.
_DEFAULTS = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 10}
_ON_CPU = {"use_cpu": True, "bf16": False}


@dataclass
class BenchArguments:
    """What is compared, on what, and where the result goes.

    All of TRL's arguments are taken beside them: `max_length`, `per_device_train_batch_size`, `load_in_4bit`, ...
    """

    model: str | None = field(
        default=None,
        metadata={"help": "Name or path of a model, or a size with random weights (see `presets.py`)."},
    )
    dataset: str | None = field(default=None, metadata={"help": "File or name of a dataset in any of TRL's formats."})
    documents: int | None = field(
        default=None, metadata={"help": "Train on the first so many documents of the dataset, instead of all."}
    )
    lengths: str | None = field(
        default=None,
        metadata={
            "help": "JSON list of document lengths in tokens, or the name of a mix (see `mixes.py`): random tokens of "
            "these lengths are the data."
        },
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Name or path of a tokenizer, for a model with random weights."}
    )
    trainer: str = field(
        default="sft",
        metadata={
            "help": "TRL's trainer: `sft`, or `dpo`, `reward` and `kto`, whose strategies are `padding`, TRL's own, "
            "`padding_free`, the same without its pads, `padding_free-shared`, with shared prefixes once, and `step`, "
            "our packed trainer.",
            "choices": list(TRAINERS),
        },
    )
    strategies: str | None = field(
        default=None,
        metadata={
            "help": "What is compared, separated by commas, the first is what ratios refer to: "
            f"{', '.join(KINDS)}. Default: `padding,step`, for other trainers `padding,padding_free,step`. "
            "`bfd@4096` fills rows of 4,096 tokens, `bfd@4096x1` one such row a micro-batch; `padding/sdpa` names "
            "transformers' attention, `step/varlen` our backend (default: FlashAttention where it can be had)."
        },
    )
    backends: str = field(
        default="auto", metadata={"help": "Attention backends of our strategies, separated by commas; each is a side."}
    )
    contaminated: str = field(
        default="",
        metadata={"help": "Strategies that are compared although documents see each other, separated by commas."},
    )
    untimed_steps: int = field(default=2, metadata={"help": "Optimizer steps of each side before the clock runs."})
    interleave: bool = field(
        default=True,
        metadata={"help": "Step all sides in turn. `False`: one after the other, where they do not fit together."},
    )
    eval_documents: int = field(default=64, metadata={"help": "Documents held out for the validation loss."})
    profile: bool = field(default=False, metadata={"help": "Also list each side's operations by their own time."})
    output: str | None = field(default=None, metadata={"help": "JSON file of all that was measured."})
    plot: str | None = field(default=None, metadata={"help": "PNG file; needs the `plots` extra."})


class Setup(NamedTuple):
    """A benchmark as asked for."""

    bench: BenchArguments
    script: ScriptArguments
    args: PackedSFTConfig
    mixture: DatasetMixtureConfig
    sides: list[Side]


def read_arguments(argv: list[str]) -> Setup:
    """Flags and `--config FILE.yaml`, by TRL's own parser.

    Raises:
        [`InvalidConfig`]: for unknown arguments, strategies and contradictions.
    """
    classes: Any = (BenchArguments, ScriptArguments, PackedSFTConfig, DatasetMixtureConfig)
    defaults = {**_DEFAULTS, **({} if torch.cuda.is_available() else _ON_CPU)}
    bench, script, args, mixture = parse(classes, argv, prog="trl-packfa bench", defaults=defaults)
    _require_sense(bench, args)
    default = "padding,step" if bench.trainer == "sft" else "padding,padding_free,step"
    sides = parse_sides(
        bench.strategies or default, backends=bench.backends, contaminated=bench.contaminated, trainer=bench.trainer
    )
    return Setup(bench, script, args, mixture, sides)


def _require_sense(bench: BenchArguments, args: PackedSFTConfig) -> None:
    if bench.model is None and args.model_name_or_path is None:
        raise InvalidConfig("no model.", do=f"Pass --model: a name, a path, or one of {sorted(PRESETS)}.")
    if args.strategy != STEP:
        raise InvalidConfig(
            f"packing={args.packing}, packing_strategy='{args.packing_strategy}': a benchmark has many.",
            do="Name them in --strategies.",
        )
    if bench.untimed_steps < 1:
        raise InvalidConfig(
            f"untimed_steps={bench.untimed_steps}: a side's first step is never typical.", do="1 or more."
        )
    if args.max_steps == 0:
        raise InvalidConfig("max_steps=0: nothing to time.", do="Set it to 10 or more, or -1 for whole epochs.")
