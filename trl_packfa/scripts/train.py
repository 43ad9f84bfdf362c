"""The script of `trl-packfa train`: parse flags with TRL's parser, build a trainer, train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from peft import PeftModel
from rich.console import Console
from transformers.trainer_utils import get_last_checkpoint
from trl import DatasetMixtureConfig, ScriptArguments, get_dataset

from ..checking import CheckReport
from ..config.requirements import require
from ..config.sft import PackedSFTConfig
from ..data.dataset import COUNTS, hold_out
from ..data.files import load_dataset_dict
from ..data.raw_dataset import make_columns
from ..errors import InvalidConfig, InvalidDataset
from ..plotting import LOSS_CURVE, save_loss_curve
from ..terminal import print_table
from ..terminal.progress import RichProgressCallback, packing_table, plan_table
from ..trainers.requirements.runs import LAUNCH, SETUP
from ..trainers.requirements.training import Training
from ..trainers.saving.checkpoint_files import checkpoint_to_resume, finished_message, resuming_message
from ..trainers.sft.trainer import PackedSFTTrainer
from .parsing import TrainerChoice, parse, trainer_name


class Kind(NamedTuple):
    """A trainer that `train` can run, and the dataclasses that define its flags."""

    trainer: Any  # the class, or a function that is called like one
    config: Any
    script: Any = ScriptArguments  # those of TRL's own script for this trainer
    # Returns more keyword arguments for the trainer, made from the script arguments.
    options: Callable[[Any], dict[str, Any]] = lambda _: {}
    writes_whole: bool = True  # whether its checkpoints record that they are complete


SFT = Kind(PackedSFTTrainer, PackedSFTConfig)
# The packed trainers that `--trainer` may name besides SFT, and TRL's own trainers, run padding-free.
_PACKED = {"dpo": "DPO", "reward": "Reward", "kto": "KTO"}
_ONLINE = {"grpo": "GRPO", "rloo": "RLOO"}


def kind_of(argv: list[str]) -> Kind:
    """Return the trainer that the flags or the YAML file select, with its config class."""
    # TRL's other trainers take seconds to import, so only the selected one is imported.
    asked = trainer_name(argv)
    if name := _PACKED.get(asked):
        found = import_module(f"..trainers.preference.{asked}", __package__)
        return Kind(getattr(found, f"Packed{name}Trainer"), getattr(found, f"Packed{name}Config"))
    if name := _ONLINE.get(asked):
        from . import online

        script = import_module(f"trl.scripts.{asked}")
        return Kind(
            getattr(online, asked),
            getattr(online, f"PaddingFree{name}Config"),
            script=getattr(script, f"{name}ScriptArguments"),
            options=online.reward_options,
            writes_whole=False,
        )
    return SFT


def classes_of(kind: Kind = SFT) -> Any:
    """Return the dataclasses whose fields are the flags of `train`."""
    return (TrainerChoice, kind.script, kind.config, DatasetMixtureConfig)


def train(argv: list[str]) -> int:
    """Parse flags and `--config FILE.yaml`, train, and save model and reports to `output_dir`. Return exit code 0."""
    kind = kind_of(argv)
    choice, script_args, args, mixture = parse(classes_of(kind), argv, prog="trl-packfa train")
    if choice.preview and not hasattr(kind.trainer, "preview_batch"):
        raise InvalidConfig("--preview shows packed documents, which only --trainer sft has.", do="Drop --preview.")
    args.resume_from_checkpoint = _ask_first(args, kind)
    if args.resume_from_checkpoint and (finished := finished_message(args.resume_from_checkpoint, args)):
        if args.process_index == 0:
            print(finished)
        return 0
    told = args.process_index == 0 and not args.disable_tqdm
    if told:
        data = script_args.dataset_name or "the datasets"
        print(f"loading {args.model_name_or_path}, tokenizing {data} ...", flush=True)
    counts = logging.getLogger(COUNTS)
    counts.disabled = told  # a table will show them
    try:
        trainer = build_trainer(script_args, args, mixture, kind, columns=choice.columns)
    finally:
        counts.disabled = False
    shown = trainer.is_world_process_zero() and not args.disable_tqdm
    if shown:
        progress = RichProgressCallback.attach(trainer, "training")
        _show(trainer)
    if choice.preview and trainer.is_world_process_zero():
        print(trainer.preview_batch())
    # A preference trainer has already checked its models when it patched them.
    if kind is SFT and trainer.args.packing and args.check_packing and not trainer.is_checked_wrapped:
        report = trainer.check(args.resume_from_checkpoint)  # on every rank, because ranks wait for each other
        if shown:
            _show_check(report)
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_go_on(args)) from None
    finally:
        if shown:
            progress.close()  # otherwise the terminal keeps the bar's settings after an error
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:  # with a sharded state dict the Trainer would silently save nothing
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        save_loss_curve(trainer.state.log_history, Path(args.output_dir) / LOSS_CURVE)
    if shown:
        _tell_where(trainer, Path(args.output_dir))
    if args.push_to_hub:
        _push(trainer, script_args.dataset_name)
    # The process group's threads must not outlive the interpreter: an abort at exit would look like a failed run.
    trainer.accelerator.end_training()
    return 0


def _ask_first(args: Any, kind: Kind) -> str | None:
    """Refuse problems that would stop the run only after minutes; return the checkpoint to resume from, or `None`."""
    run = Training(args, kind.config.__name__, model=_require_model(args), knows_data=False)
    checkpoint = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir, whole=kind.writes_whole)
    require((*SETUP, *LAUNCH), run)  # the trainer repeats it with the data
    said = resuming_message(checkpoint) if checkpoint else _from_zero_message(args.output_dir)
    if said and args.process_index == 0:
        print(said)
    return checkpoint


def _from_zero_message(folder: str | Path | None) -> str:
    """Say that a run starts from zero though its folder has checkpoints; return `""` if it has none."""
    found = get_last_checkpoint(str(folder)) if Path(folder or ".").is_dir() else None
    if found is None:
        return ""
    return (
        f"{folder} has checkpoints of an earlier run, the last is {Path(found).name}. This run starts from zero and "
        "overwrites them. To continue the earlier run, pass --resume_from_checkpoint last."
    )


def _how_to_go_on(args: Any) -> str:
    """Tell the user how to resume an interrupted run from its last checkpoint."""
    found = get_last_checkpoint(args.output_dir)
    if found is None:
        return f"No checkpoint was saved in {args.output_dir} yet. A smaller --save_steps saves more often."
    return (
        f"{Path(found).name} is saved in {args.output_dir}. To continue from there, run the same command with "
        "--resume_from_checkpoint last."
    )


def _push(trainer: Any, dataset_name: str | None) -> None:
    """Push the trained model to the Hub."""
    try:
        trainer.push_to_hub(dataset_name=dataset_name)
    except Exception as error:  # any network error: the training is done, and must not look lost
        folder = trainer.args.output_dir
        raise InvalidConfig(
            f"the model is trained and saved in {folder}, but could not be pushed to the Hub.",
            why=[str(error).split("\n", 1)[0]],
            do=f"Push it with `hf upload {trainer.hub_model_id} {folder}`.",
        ) from error


def _require_model(args: PackedSFTConfig) -> str:
    if args.model_name_or_path is None:
        raise InvalidConfig(
            "no model is named.", do="Pass --model_name_or_path, on the command line or in the YAML file."
        )
    return args.model_name_or_path


def _tell_where(trainer: PackedSFTTrainer, folder: Path) -> None:
    """Print which files were saved where, and how to merge an adapter."""
    adapter = isinstance(trainer.model, PeftModel)
    reports = sorted(path.name for path in folder.glob("*_report.json"))
    curve = [LOSS_CURVE] if (folder / LOSS_CURVE).exists() else []
    saved = ["adapter" if adapter else "model", "tokenizer", *curve, *reports]
    print(f"{', '.join(saved)}: {folder}")
    if adapter:
        print(f"to merge the adapter into the base model: trl-packfa merge {folder} FOLDER")
    where = "FOLDER" if adapter else folder
    print(f"to talk to it: transformers serve {where}, and in another terminal transformers chat {where}")


def _show(trainer: PackedSFTTrainer) -> None:
    """Print tables of what packing does to the data, and of the epoch's plan."""
    console = Console()
    reports = getattr(trainer, "packing_reports", None)  # TRL's own trainers have none
    if reports:
        console.print(packing_table(reports))
    plan = getattr(trainer, "packing_plan", None)  # preference trainers plan no epoch
    if plan:
        console.print(plan_table(plan))


def _show_check(report: CheckReport) -> None:
    """Print the verdict of the check and its measurements."""
    print(report.headline, flush=True)
    if not report.taken_from:
        print_table(report.table())


def build_trainer(
    script_args: ScriptArguments,
    args: PackedSFTConfig,
    mixture: DatasetMixtureConfig,
    kind: Kind = SFT,
    *,
    columns: Sequence[str] | None = None,
) -> Any:
    """Load the data and build the trainer that the arguments describe."""
    options = kind.options(script_args)
    train_split, *test_split = load_splits(script_args, args, mixture, columns)
    return kind.trainer(
        _require_model(args),
        args=args,
        train_dataset=train_split,
        eval_dataset=test_split[0] if test_split else None,
        **options,
    )


def load_splits(
    script_args: ScriptArguments, args: PackedSFTConfig, mixture: DatasetMixtureConfig, columns: Sequence[str] | None
) -> list[Any]:
    """Load the training split, and the test split if the arguments ask for evaluation."""
    if mixture.test_split_size is not None and args.eval_strategy == "no":
        raise InvalidConfig(
            f"test_split_size={mixture.test_split_size} holds documents out, but eval_strategy='no' never evaluates "
            "them.",
            do="Pass --eval_strategy epoch, or --eval_strategy steps with --eval_steps.",
        )
    train_name, test_name = script_args.dataset_train_split, script_args.dataset_test_split
    if mixture.datasets:
        dataset: Any = get_dataset(mixture)
    elif script_args.dataset_name:
        dataset = load_dataset_dict(
            script_args.dataset_name, config=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
        if mixture.test_split_size is not None:
            held_out = hold_out(dataset.get(train_name), mixture.test_split_size, seed=args.seed)
            dataset = {**dataset, **dict(zip((train_name, test_name), held_out, strict=True))}
    else:
        raise InvalidConfig("no dataset is named.", do="Pass --dataset_name, or 'datasets' in the YAML file.")
    splits = [train_name, *([test_name] if args.eval_strategy != "no" else [])]
    missing = [split for split in splits if split not in dataset]
    if missing:
        raise InvalidDataset(
            f"the dataset has no split {missing}, only {sorted(dataset)}.",
            do="Set dataset_train_split / dataset_test_split, hold a share out with --test_split_size 0.1, or pass "
            "eval_strategy='no'.",
        )
    return [make_columns(dataset[split], columns) for split in splits]
