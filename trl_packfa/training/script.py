"""`trl-packfa train`: TRL's parser, one of our configs, its trainer."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from peft import PeftModel
from rich.console import Console
from trl import DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset

from ..errors import InvalidConfig, InvalidDataset, PackingError
from ..exactness import ExactnessReport
from ..terminal.progress import RichProgressCallback, a_line_per_thing, packing_table, plan_table
from ..terminal.tables import print_table
from .config import PackedSFTConfig
from .dataloading import COUNTS
from .hub import load_dataset_dict
from .preflight import (
    checkpoint_to_resume,
    load_tokenizer,
    require_markable,
    require_output_dir,
    require_reporters,
    resuming_message,
)
from .trainer import PackedSFTTrainer

_FLAG, SFT_NAME = "--trainer", "sft"


class Kind(NamedTuple):
    """A trainer that `train` may run, and its config, which says which flags there are."""

    trainer: Any
    config: Any


SFT = Kind(PackedSFTTrainer, PackedSFTConfig)


@dataclass
class TrainerChoice:
    """Which trainer runs."""

    trainer: str = field(
        default=SFT_NAME,
        metadata={
            "help": "What is trained: `sft`, or on pairs `dpo`, a model against a reference, `reward`, a reward "
            "model, or `kto`, on single answers that are good or bad. The other arguments are its config's.",
            "choices": ["sft", "dpo", "reward", "kto"],
        },
    )


def asked_trainer(argv: list[str]) -> str:
    """The trainer that flags or the YAML file name, before their parser is built; a wrong name is the parser's to
    refuse."""
    names = TrainerChoice.__dataclass_fields__["trainer"].metadata["choices"]
    asked = _value_of(_FLAG, argv)
    config = _value_of("--config", argv)
    if asked is None and config is not None and Path(config).is_file():
        with open(config, encoding="utf-8") as file:
            content = yaml.safe_load(file)
        asked = content.get("trainer") if isinstance(content, dict) else None
    return str(asked) if asked in names else SFT_NAME


def _value_of(flag: str, argv: list[str]) -> str | None:
    """`--flag value` or `--flag=value`, the last one."""
    found = [after for word, after in pairwise(argv) if word == flag]
    found += [word.split("=", 1)[1] for word in argv if word.startswith(f"{flag}=")]
    return found[-1] if found else None


def _classes(config: Any) -> Any:
    """What `train` takes."""
    return (TrainerChoice, ScriptArguments, config, DatasetMixtureConfig)


def train_parser(config: Any = PackedSFTConfig, **options: Any) -> TrlParser:
    """The parser of `trl-packfa train`: TRL's, with a trainer's config; `options` are argparse's."""
    return _parser(_classes(config), prog="trl-packfa train", **options)


def _parser(classes: Any, *, prog: str, **options: Any) -> TrlParser:
    """TRL's parser. argparse shows its usage above each error: of 250 arguments it would bury what is wrong."""
    usage = f"{prog} [--config FILE.yaml] [--ARGUMENT VALUE ...]      {prog} --help lists all arguments"
    return TrlParser(classes, prog=prog, usage=usage, **options)


def parse(
    classes: tuple[type, ...], argv: list[str], *, prog: str, defaults: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """Flags and `--config FILE.yaml` on TRL's own parser, one instance of each class; `defaults` are weaker than both.

    Raises:
        [`InvalidConfig`]: for what TRL or transformers refuse; our own errors pass.
    """
    parser = _parser(classes, prog=prog)
    parser.set_defaults(**(defaults or {}))
    # TRL's own default of it, which nobody has to answer for.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        return parser.parse_args_and_config(args=argv, fail_with_unknown_args=True)
    except PackingError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise InvalidConfig(str(error), do=_meant(str(error), classes)) from error


def _meant(message: str, classes: tuple[type, ...]) -> str:
    """Arguments that exist, for those that a message quotes and that are nearly one."""
    known = [f.name for cls in classes for f in fields(cls)]
    named = re.findall(r"'(?:--)?(\w+)'", message)
    close = [match for name in named if name not in known for match in get_close_matches(name, known, n=1)]
    return f"Did you mean {', '.join(close)}?" if close else ""


@a_line_per_thing()
def train(argv: list[str], kind: Kind = SFT) -> int:
    """Parse flags and `--config FILE.yaml`, train, save model and reports into `output_dir`."""
    _, script_args, args, mixture = parse(_classes(kind.config), argv, prog="trl-packfa train")
    args.resume_from_checkpoint = _ask_first(args)
    told = args.process_index == 0 and not args.disable_tqdm
    if told:
        data = script_args.dataset_name or "the datasets"
        print(f"loading {args.model_name_or_path}, tokenizing {data} ...", flush=True)
    with _without_counts() if told else nullcontext():
        trainer = build_trainer(script_args, args, mixture, kind.trainer)
    shown = trainer.is_world_process_zero() and not args.disable_tqdm
    if shown:
        RichProgressCallback.attach(trainer, "training")
        _show(trainer)
    # A trainer of pairs has proven its models when they were patched.
    if kind is SFT and args.packing and args.check_packing and not trainer.is_proven_wrapped:
        proof = trainer.prove(args.resume_from_checkpoint)  # on every rank: they wait for each other
        if shown:
            _show_proof(proof)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:  # of a sharded state dict the Trainer would save nothing, without a word
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        trainer.save_reports(Path(args.output_dir))
    if shown:
        _tell_where(trainer, Path(args.output_dir))
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    # The process group's threads must not outlive the interpreter: an abort at exit would look like a failed run.
    trainer.accelerator.end_training()
    return 0


@contextmanager
def _without_counts() -> Iterator[None]:
    """What packing does to the data is not logged: a table will show it."""
    counts = logging.getLogger(COUNTS)
    level = counts.level
    counts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        counts.setLevel(level)


def _ask_first(args: PackedSFTConfig) -> str | None:
    """What would stop the run after minutes, before data and weights are loaded; the checkpoint to go on from."""
    model = _require_model(args)
    require_output_dir(args.output_dir)
    require_reporters(args)
    checkpoint = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir)
    if getattr(args, "assistant_only_loss", False):
        require_markable(load_tokenizer(model, args), args)
    if checkpoint is not None and args.process_index == 0:
        print(resuming_message(checkpoint))
    return checkpoint


def _require_model(args: PackedSFTConfig) -> str:
    if args.model_name_or_path is None:
        raise InvalidConfig(
            "no model is named.", do="Pass --model_name_or_path, on the command line or in the YAML file."
        )
    return args.model_name_or_path


def _tell_where(trainer: PackedSFTTrainer, folder: Path) -> None:
    """What lies where, and what to do with it."""
    adapter = isinstance(trainer.model, PeftModel)
    reports = ", ".join(sorted(path.name for path in folder.glob("*_report.json")))
    print(f"{'adapter' if adapter else 'model'}, tokenizer, {reports}: {folder}")
    if adapter:
        print(f"one model of base and adapter: trl-packfa merge {folder} FOLDER")


def _show(trainer: PackedSFTTrainer) -> None:
    """What packing does to the data."""
    console = Console()
    if trainer.packing_reports:
        console.print(packing_table(trainer.packing_reports))
    plan = getattr(trainer, "packing_plan", None)  # trainers of pairs plan no epoch
    if plan:
        console.print(plan_table(plan))


def _show_proof(proof: ExactnessReport) -> None:
    """The verdict, and what it rests on."""
    if proof.taken_from:
        print(
            f"exactness check: {proof.verdict}, proven before {proof.taken_from}; nothing has changed since",
            flush=True,
        )
        return
    print(f"exactness check: {proof.verdict}, in {proof.seconds:.0f} s", flush=True)
    print_table(proof.rows())


def build_trainer(
    script_args: ScriptArguments,
    args: PackedSFTConfig,
    mixture: DatasetMixtureConfig,
    trainer: Any = PackedSFTTrainer,
) -> Any:
    """The trainer that the arguments describe."""
    train_split, *test_split = _splits(script_args, args, mixture)
    return trainer(
        _require_model(args),
        args=args,
        train_dataset=train_split,
        eval_dataset=test_split[0] if test_split else None,
    )


def train_dataset(script_args: ScriptArguments, args: PackedSFTConfig, mixture: DatasetMixtureConfig) -> Any:
    """The training split that the arguments name."""
    return _splits(script_args, args, mixture)[0]


def _splits(script_args: ScriptArguments, args: PackedSFTConfig, mixture: DatasetMixtureConfig) -> list[Any]:
    """The training split, and the test split if the arguments evaluate."""
    if mixture.datasets:
        dataset: Any = get_dataset(mixture)
    elif script_args.dataset_name:
        dataset = load_dataset_dict(
            script_args.dataset_name, config=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    else:
        raise InvalidConfig("no dataset is named.", do="Pass --dataset_name, or 'datasets' in the YAML file.")
    splits = [script_args.dataset_train_split]
    if args.eval_strategy != "no":
        splits.append(script_args.dataset_test_split)
    missing = [split for split in splits if split not in dataset]
    if missing:
        raise InvalidDataset(
            f"the dataset has no split {missing}, only {sorted(dataset)}.",
            do="Set dataset_train_split / dataset_test_split, or eval_strategy='no'.",
        )
    return [dataset[split] for split in splits]
