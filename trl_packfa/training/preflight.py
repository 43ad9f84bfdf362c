"""What a run needs besides model and data, asked before either is loaded: a folder, a checkpoint, reporting packages,
a chat template that says which tokens are the assistant's."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import AutoProcessor
from transformers.integrations import integration_utils
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_flash_attn_2_available
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from ..errors import InvalidConfig, MissingPackage
from .chat_templates import holds_conversations
from .checkpointing import require_undamaged, require_whole_checkpoint
from .config import PackedSFTConfig
from .hub import missing_path

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


def checkpoint_to_resume(asked: str | bool | None, folder: str | Path | None, *, whole: bool = True) -> str | None:
    """The folder of the checkpoint that `resume_from_checkpoint` asks for: `True`, `"true"` and `"last"` are the last
    one in `folder` that was written whole, or, of a trainer whose checkpoints do not say so (`whole=False`), the last.

    Raises:
        [`InvalidConfig`]: if there is none there, or its files are not those that were written.
    """
    word = str(asked or "").lower()
    if word in _NONE:
        return None
    if word in _LAST:
        last = None if whole else get_last_checkpoint(str(folder))
        return last or require_whole_checkpoint(folder)
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


def from_zero_message(folder: str | Path | None) -> str:
    """Say that a run begins anew though its folder has checkpoints; empty if it has none."""
    found = get_last_checkpoint(str(folder)) if Path(folder or ".").is_dir() else None
    if found is None:
        return ""
    return (
        f"{folder} has checkpoints of an earlier run, the last {Path(found).name}: this run starts from zero and "
        "writes over them. To go on from there, pass --resume_from_checkpoint last."
    )


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
            f"cannot load a tokenizer or processor from '{name}'.",
            why=missing_path(name) or [str(error)],
            do="Check the name, or copy the files of one into the folder: for text those of a tokenizer, for a vision "
            "model those of its processor" + (f", {otherwise}." if otherwise else "."),
        ) from error


def require_tokenizer(
    model: Any, args: Any, *, processing_class: Any, datasets: Iterable[tuple[str, Any]], makes_text: bool = True
) -> None:
    """Load the tokenizer of a model that is given by name, and require of it what the datasets need.

    Args:
        model (`str` or `torch.nn.Module`):
            As a trainer takes it.
        args (`TrainingArguments`):
            As they are settled.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`, *optional*):
            The user's own.
        datasets (`Iterable`):
            Names and datasets.
        makes_text (`bool`, *optional*, defaults to `True`):
            Whether the chat template makes text of conversations, rather than a function of the user's.

    Raises:
        [`InvalidConfig`]: if there is none, or no chat template for conversations, or one that does not mark what
            `assistant_only_loss` trains.
    """
    if processing_class is None:
        if not isinstance(model, str):
            return  # TRL reads the name out of the model
        processing_class = load_tokenizer(model, args)
    tokenizer = _with_template(processing_class, args)
    if getattr(args, "assistant_only_loss", False):
        require_markable(tokenizer)
    if getattr(tokenizer, "chat_template", None) is not None or not makes_text:
        return
    for name, dataset in datasets:
        if holds_conversations(dataset):
            raise InvalidConfig(
                f"the {name} dataset holds conversations, and the tokenizer has no chat template.",
                why=["the template makes text of messages; base models often come without one"],
                do="Pass chat_template_path: a .jinja file, or the name or folder of a model that has one."
                if hasattr(args, "chat_template_path")
                else "Set tokenizer.chat_template and pass the tokenizer as processing_class, or save it so.",
            )


def require_attention(args: Any) -> None:
    """Require the package of the attention that transformers is to run.

    Raises:
        [`MissingPackage`]: if flash-attn is not installed, or finds no GPU.
    """
    asked = getattr(args, "attn_implementation", None)
    if asked != "flash_attention_2" or is_flash_attn_2_available():
        return
    raise MissingPackage(
        "attn_implementation='flash_attention_2' cannot run here.",
        why=["flash-attn is not installed" if find_spec("flash_attn") is None else "flash-attn finds no GPU"],
        do="Drop it: attention_backend chooses what runs packed attention. Or pip install 'trl-packfa[flash]'.",
    )


def require_hub(args: Any) -> None:
    """Ask the Hub who is logged in, if something is to be pushed there.

    Raises:
        [`InvalidConfig`]: if the Hub cannot be reached, or knows nobody by the token.
    """
    if not args.push_to_hub:
        return
    try:
        HfApi().whoami(token=args.hub_token)
    except Exception as error:  # whatever the network raises: nothing could be pushed
        raise InvalidConfig(
            "push_to_hub=True, and the Hub takes nothing from here.",
            why=[str(error).split("\n", 1)[0]],
            do="Log in with `hf auth login`, or drop push_to_hub: `hf upload REPO FOLDER` pushes after training.",
        ) from error


def require_markable(tokenizer: Any) -> None:
    """Require a chat template that tells the assistant's tokens, as it is or as TRL marks it.

    Raises:
        [`InvalidConfig`]: naming the templates that TRL can mark.
    """
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


def _with_template(tokenizer: Any, args: Any) -> Any:
    """Give a tokenizer the chat template that `chat_template_path` names, as TRL reads it."""
    named = getattr(args, "chat_template_path", None)
    if named is None:
        return tokenizer
    path = Path(named)
    if path.suffix in (".jinja", ".j2") and not path.is_file():
        raise InvalidConfig(f"chat_template_path={named}: there is no such file.", do="Check the path.")
    if not path.is_file():
        return load_tokenizer(named, args)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer
