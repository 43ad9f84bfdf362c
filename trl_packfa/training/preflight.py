"""What a run needs besides model and data, asked before either is loaded: a folder, a checkpoint, reporting packages,
a chat template that says which tokens are the assistant's."""

from __future__ import annotations

import copy
import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import AutoProcessor
from transformers.integrations import integration_utils
from transformers.trainer import TRAINER_STATE_NAME
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from ..errors import InvalidConfig, MissingPackage
from .checkpointing import require_undamaged, require_whole_checkpoint
from .config import PackedSFTConfig

# What `resume_from_checkpoint` may be besides a folder, in any case of letters.
_LAST, _NONE = ("true", "last"), ("", "false", "none")
# Where transformers' function that looks for an integration has another name.
_LOOKED_FOR_AS = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}


def require_output_dir(folder: str | Path | None) -> None:
    """Make the folder that a run writes into, and write there.

    Raises:
        [`InvalidConfig`]: if it cannot be made, is a file or cannot be written to.
    """
    try:
        Path(folder or ".").mkdir(parents=True, exist_ok=True)
        # By writing: permissions say little on network file systems, and nothing to root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        is_file = next((part for part in (Path(folder or "."), *Path(folder or ".").parents) if part.is_file()), None)
        raise InvalidConfig(
            f"output_dir {folder} cannot be written to: {error.strerror or error}.",
            why=[f"{is_file} is a file"] if is_file else [],
            do="Name a folder that can be made and written to.",
        ) from error


def checkpoint_to_resume(asked: str | bool | None, folder: str | Path | None) -> str | None:
    """The folder of the checkpoint that `resume_from_checkpoint` asks for: `True`, `"true"` and `"last"` are the last
    one in `folder` that was written whole.

    Raises:
        [`InvalidConfig`]: if there is none there, or its files are not those that were written.
    """
    word = str(asked or "").lower()
    if word in _NONE:
        return None
    if word in _LAST:
        return require_whole_checkpoint(folder)
    if not (Path(str(asked)) / TRAINER_STATE_NAME).is_file():
        there = "no such folder" if not Path(str(asked)).is_dir() else f"the folder has no {TRAINER_STATE_NAME}"
        raise InvalidConfig(
            f"resume_from_checkpoint={asked}: that is no checkpoint.",
            why=[there],
            do=f"Name the folder of one, or pass 'last' for the last whole one in {folder}.",
        )
    require_undamaged(str(asked))
    return str(asked)


def resuming_message(checkpoint: str | Path) -> str:
    """From which checkpoint a run goes on, and at which optimizer step.

    Raises:
        [`InvalidConfig`]: if the checkpoint's state cannot be read.
    """
    path = Path(checkpoint) / TRAINER_STATE_NAME
    try:
        step = int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error!r}.", do="Resume from another checkpoint.") from error
    return f"resuming from {Path(checkpoint).name} at step {step}"


def require_reporters(args: PackedSFTConfig) -> None:
    """The packages that `report_to` names.

    Raises:
        [`InvalidConfig`]: if transformers knows no such integration.
        [`MissingPackage`]: if one is not installed, or not set up.
    """
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or []:
        if name not in known:
            raise InvalidConfig(
                f"report_to='{name}' does not exist.", do=f"Choose of {', '.join(known)}, or pass report_to='none'."
            )
        look = getattr(integration_utils, f"is_{_LOOKED_FOR_AS.get(name, name)}_available", None)
        if look is not None and not look():
            raise MissingPackage(
                f"report_to='{name}': its package is not installed, or not set up.",
                do=f"pip install {name.replace('_', '-')}, or pass report_to='none'.",
            )


def load_tokenizer(name: str, args: PackedSFTConfig, *, otherwise: str = "") -> Any:
    """The tokenizer or processor of that name, as TRL loads it beside the model; `otherwise` ends the advice.

    Raises:
        [`InvalidConfig`]: if there is none.
    """
    try:
        return AutoProcessor.from_pretrained(
            name, revision=args.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"cannot load a tokenizer from '{name}'.",
            why=[str(error)],
            do="Check the name, or the path of a folder that holds one" + (f", {otherwise}." if otherwise else "."),
        ) from error


def require_markable(tokenizer: Any, args: PackedSFTConfig) -> None:
    """A chat template that tells the assistant's tokens, as it is or as TRL marks it, if only these are trained.

    Raises:
        [`InvalidConfig`]: naming the templates that TRL can mark.
    """
    if not args.assistant_only_loss:
        return
    tokenizer = _with_template(tokenizer, args)
    template = getattr(tokenizer, "chat_template", None)
    if template is not None:
        if has_generation_markers(template):
            return
        try:
            get_training_chat_template(tokenizer)
            return
        except ValueError:
            pass
    folder = resources.files("trl") / "chat_templates"
    suffix = "_training.jinja"
    marked = sorted(file.name.removesuffix(suffix) for file in folder.iterdir() if file.name.endswith(suffix))
    raise InvalidConfig(
        "assistant_only_loss=True: nothing tells the assistant's tokens.",
        why=[
            "the tokenizer has no chat template"
            if template is None
            else "its chat template has no {% generation %} markers, and TRL cannot add them",
            f"TRL can mark the templates of {', '.join(marked)}, where they are unchanged",
        ],
        do="Leave assistant_only_loss off, put {% generation %} and {% endgeneration %} around what the assistant "
        "says, or name a template that has them: chat_template_path.",
    )


def _with_template(tokenizer: Any, args: PackedSFTConfig) -> Any:
    """A tokenizer with the chat template that `chat_template_path` names, as TRL reads it."""
    if args.chat_template_path is None:
        return tokenizer
    path = Path(args.chat_template_path)
    if not (path.is_file() and path.suffix in (".jinja", ".j2")):
        return load_tokenizer(args.chat_template_path, args)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer
