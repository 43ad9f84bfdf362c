"""Choice of the attention of a side with TRL's own trainer.

On a GPU it is FlashAttention wherever that is available, because GPU users train with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from ..patching.apply import find_state
from ..runtime.autocast import HALF
from ..trainers.common.flops import compute_dtype
from ..trainers.common.model_loading import init_kwargs
from ..trainers.sft.config import PackedSFTConfig

FLASH = "flash_attention_2"
# transformers' names for `--attn_implementation`. Kernels of the Hub have the name of their repository.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", FLASH, "flash_attention_3", "flash_attention_4")


class Attention(NamedTuple):
    """Attention implementation of a trainer."""

    name: str | None  # transformers' name; `None` for the model's default
    remark: str = ""  # on a GPU, the reason why it is not FlashAttention; empty if it is, or if the user chose it


def upstream_attention(model: str, args: PackedSFTConfig, *, named: str = "auto") -> Attention:
    """Return the attention of TRL's own trainer on a model, by name or path.

    It is the one that the side (`named`) or `attn_implementation` names, else FlashAttention if the machine, the dtype
    and the model support it.
    """
    chosen = init_kwargs(args).get("attn_implementation") if named == "auto" else named
    if chosen or args.device.type != "cuda":
        return Attention(chosen)
    why = _why_not_flash(model, args)
    return Attention(None, why) if why else Attention(FLASH)


def _why_not_flash(model: str, args: PackedSFTConfig) -> str:
    """Return the reason why FlashAttention is not available; an empty string if it is."""
    dtype = compute_dtype(args)
    if dtype not in HALF:
        return f"FlashAttention takes half precision, this runs in {str(dtype).removeprefix('torch.')}"
    # This check comes first: without flash-attn, transformers would download a kernel from the Hub instead.
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
    """Return the attention of a trainer that has run, for the table: our backends, else transformers' attention."""
    state = find_state(trainer.model)
    if state is not None and state.backends.resolved:
        return ", ".join(sorted(set(state.backends.resolved.values())))
    return trainer.model.config.get_text_config()._attn_implementation
