"""Which attention a side runs: TRL's own trainers are compared with FlashAttention, as a user of a GPU would run them,
wherever it can be had."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from ..errors import InvalidConfig
from ..patching.apply import find_state
from ..runtime.autocast import HALF
from ..training.config import PackedSFTConfig
from ..training.flops import compute_dtype
from ..training.model_loading import init_kwargs

FLASH = "flash_attention_2"
# transformers' names, as `--attn_implementation` takes them; kernels of the Hub are named by their repository.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", FLASH, "flash_attention_3", "flash_attention_4")


class Attention(NamedTuple):
    """What a trainer attends with.

    Attributes:
        name (`str`, *optional*): transformers' name, `None` for the model's default.
        remark (`str`): on a GPU, why it is not FlashAttention; empty if it is, or if the user chose it.
    """

    name: str | None
    remark: str = ""


def require_implementation(name: str, *, text: str) -> None:
    """Refuse an attention that transformers does not have.

    Raises:
        [`InvalidConfig`]: for our own backends too, with the strategy `text` that named it.
    """
    if name not in IMPLEMENTATIONS and "/" not in name:
        raise InvalidConfig(
            f"'{text}': TRL's own trainer has no attention '{name}'.",
            do=f"Name one of transformers': {', '.join(IMPLEMENTATIONS)}.",
        )


def upstream_attention(model: str, args: PackedSFTConfig, *, named: str = "auto") -> Attention:
    """What TRL's own trainer attends with: what the side or `attn_implementation` names, else FlashAttention where the
    machine, the dtype and the model have it.

    Args:
        model (`str`): name or path of the model.
        args ([`PackedSFTConfig`]): of the run.
        named (`str`): what the side names; `"auto"` for nothing.
    """
    chosen = init_kwargs(args).get("attn_implementation") if named == "auto" else named
    if chosen or args.device.type != "cuda":
        return Attention(chosen)
    why = _why_not_flash(model, args)
    return Attention(None, why) if why else Attention(FLASH)


def _why_not_flash(model: str, args: PackedSFTConfig) -> str:
    """Why FlashAttention cannot be had; empty if it can."""
    dtype = compute_dtype(args)
    if dtype not in HALF:
        return f"FlashAttention takes half precision, this runs in {str(dtype).removeprefix('torch.')}"
    # Asked first: where it is missing, transformers would download a kernel from the Hub in its place.
    if not is_flash_attn_2_available():
        return "flash-attn is not installed"
    trusted = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(model, revision=args.model_revision, **trusted)
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=FLASH, dtype=dtype, **trusted)
    except (ImportError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def attention_of(trainer: Any) -> str:
    """What a trainer that has run attends with, as a table names it: our backends, else transformers' attention."""
    state = find_state(trainer.model)
    if state is not None and state.backends.resolved:
        return ", ".join(sorted(set(state.backends.resolved.values())))
    return trainer.model.config.get_text_config()._attn_implementation
