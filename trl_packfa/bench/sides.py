"""Sides of a comparison: their names, their trainers, and the attention of TRL's own trainers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available
from trl import SFTConfig, SFTTrainer, get_peft_config

from ..attention import get_backend
from ..autocast import HALF
from ..config.sft import PackedSFTConfig
from ..data.dataset import read_lengths
from ..data.flops import compute_dtype
from ..errors import InvalidConfig
from ..packing import BFD, MINIBATCH, PADDED, STEP, WRAPPED, Strategy
from ..patching.state import find_state
from ..trainers.loading import config_of, init_kwargs, quantization_of
from ..trainers.sft.trainer import PackedSFTTrainer

FLASH = "flash_attention_2"
# transformers' names for `--attn_implementation`. Kernels of the Hub have the name of their repository.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", FLASH, "flash_attention_3", "flash_attention_4")


class Kind(NamedTuple):
    """A kind of trainer to compare."""

    strategy: Strategy  # makes the batches
    ours: bool = True  # `PackedSFTTrainer` runs it; `False`: TRL's own unmodified `SFTTrainer`
    options: dict[str, Any] = {}  # config arguments of this kind
    reorders: bool = False  # it takes the examples in another order than the padded run
    contaminated: bool = False  # documents see each other by design, so no permission is needed to measure it
    # Makes of the trainer the function that runs in place of training a micro-batch.
    micro_batch: Callable[[Any], Any] | None = None

    @property
    def trains(self) -> bool:
        """`True` if its steps train the model."""
        return self.micro_batch is None

    @property
    def in_order(self) -> bool:
        """`True` if each step holds the same examples as in the padded run; rows that are filled hold others."""
        return not (self.reorders or self.strategy.fills_rows)


_COMPILED = {"torch_compile": True}
KINDS = {
    "padding": Kind(PADDED, ours=False),
    "group_by_length": Kind(PADDED, ours=False, options={"train_sampling_strategy": "group_by_length"}, reorders=True),
    "padding_free": Kind(MINIBATCH, ours=False, options={"padding_free": True}),
    "fixed": Kind(WRAPPED, ours=False, options={"packing": True, "packing_strategy": "wrapped"}, contaminated=True),
    "trl-bfd": Kind(BFD, ours=False, options={"packing": True, "packing_strategy": "bfd"}),
    # Our sides use Liger's kernels where it is installed, so TRL's packing is measured with them, too.
    "trl-bfd-liger": Kind(
        BFD, ours=False, options={"packing": True, "packing_strategy": "bfd", "use_liger_kernel": True}
    ),
    "fixed+posid": Kind(WRAPPED),
    "bfd": Kind(BFD),
    "minibatch": Kind(MINIBATCH),
    "step": Kind(STEP),
    "bfd-compiled": Kind(BFD, options=_COMPILED),
    "step-compiled": Kind(STEP, options=_COMPILED),
}
# One trainer four times: padded, without pad tokens, also with shared prefixes computed once, and with re-cut steps.
# All of them train what TRL's trainer trains.
_OF_OTHERS = {
    "padding": Kind(PADDED, ours=False),
    "padding_free": Kind(PADDED),
    "padding_free-shared": Kind(PADDED, options={"share_prefixes": True}),
    "step": Kind(STEP),
}
TRAINERS = {"sft": KINDS, "dpo": _OF_OTHERS, "reward": _OF_OTHERS, "kto": _OF_OTHERS}
# What a benchmark never does, whatever the arguments say.
UNUSED = {"eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False}
_NAME = re.compile(r"(?P<strategy>[^@/]+)(@(?P<row>\d+)(x(?P<rows>\d+))?)?(/(?P<backend>.+))?")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a kind of trainer with the options of the user."""

    strategy: str  # a kind of its trainer
    row: int | None = None  # tokens of a row, instead of `max_length`
    rows: int | None = None  # rows of a micro-batch, instead of `per_device_train_batch_size`
    backend: str = "auto"  # our attention backend or, for TRL's trainers, transformers' attention; "auto": the best
    allowed: bool = False  # it may run even if documents see each other
    trainer: str = "sft"  # name in `TRAINERS`

    @property
    def kind(self) -> Kind:
        """Kind of trainer that the strategy names."""
        return TRAINERS[self.trainer][self.strategy]

    @property
    def name(self) -> str:
        """Name of the side, as a user writes it."""
        row = f"@{self.row}" if self.row else ""
        rows = f"x{self.rows}" if self.rows else ""
        return self.strategy + row + rows + (f"/{self.backend}" if self.backend != "auto" else "")


def parse_sides(strategies: str, *, contaminated: str = "", trainer: str = "sft") -> list[Side]:
    """Parse sides such as `padding/sdpa,trl-bfd@2048x1,step/varlen`: strategies with optional rows and attention.

    Raise [`InvalidConfig`] for unknown names, rows of a strategy without rows, and sides that are named twice.
    """
    if trainer not in TRAINERS:
        raise InvalidConfig(f"there is no trainer '{trainer}'.", do=f"Choose from {', '.join(TRAINERS)}.")
    kinds, allowed = TRAINERS[trainer], _split(contaminated)
    for name in [*allowed, *(text.split("@")[0].split("/")[0] for text in _split(strategies))]:
        if name not in kinds:
            of = "" if trainer == "sft" else f" of --trainer {trainer}"
            raise InvalidConfig(f"there is no strategy '{name}'{of}.", do=f"Choose from {', '.join(kinds)}.")
    sides = [_side(text, allowed, trainer) for text in _split(strategies)]
    twice = sorted({side.name for side in sides if sides.count(side) > 1})
    if twice or not sides:
        raise InvalidConfig(f"strategies='{strategies}': " + (f"{twice} more than once." if twice else "none."))
    return sides


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _side(text: str, allowed: list[str], trainer: str) -> Side:
    match = _NAME.fullmatch(text)
    if match is None:
        raise InvalidConfig(f"cannot read the strategy '{text}'.", do="Write it as bfd, bfd@4096, bfd@4096x1/sdpa.")
    strategy, backend = match["strategy"], match["backend"] or "auto"
    row, rows = (int(match[name]) if match[name] else None for name in ("row", "rows"))
    side = Side(strategy, row, rows, backend, strategy in allowed, trainer)
    if row and not side.kind.strategy.fills_rows:
        raise InvalidConfig(f"'{text}': {strategy} has no rows of a fixed length.", do="Drop the @.")
    if backend != "auto" and side.kind.ours:
        get_backend(backend)
    elif backend != "auto" and backend not in IMPLEMENTATIONS and "/" not in backend:
        raise InvalidConfig(
            f"'{text}': TRL's own trainer has no attention '{backend}'.",
            do=f"Name one of transformers': {', '.join(IMPLEMENTATIONS)}.",
        )
    return side


def build_trainer(side: Side, args: PackedSFTConfig, model: str, data: dict[str, Any], **overrides: Any) -> SFTTrainer:
    """Build the trainer of a side.

    `data` holds its arguments `train_dataset`, `eval_dataset` (documents that are already tokenized and cut) and
    `processing_class`. Raise [`InvalidConfig`] if its rows are too short for the longest document.
    """
    strategy, config = side.kind.strategy, PackedSFTConfig if side.kind.ours else SFTConfig
    # The documents have labels and are cut already, so options that would do this again are off.
    options = {**side.kind.options, **overrides, **_row_options(side, args, data["train_dataset"]), **UNUSED}
    options |= {"assistant_only_loss": False, "completion_only_loss": None}
    if side.kind.ours:
        budget = args.max_tokens_per_microbatch if strategy.recuts_steps else None
        given = {"packing_strategy": strategy.name, "max_tokens_per_microbatch": budget, "overflow": "truncate"}
        options |= {"attention_backend": side.backend}
    else:
        given = {"packing": False, "packing_strategy": "bfd", "padding_free": False, "eval_packing": False}
        options |= {"model_init_kwargs": upstream_kwargs(side, model, args)}
    own_args: Any = config(**{**shared_fields(args, config), **given, **options})
    if not side.kind.ours:
        return SFTTrainer(model, own_args, peft_config=get_peft_config(args), **quantization(model, args), **data)
    trainer = PackedSFTTrainer(model, own_args, **data)
    if side.kind.micro_batch is not None:
        trainer._run_micro_batch = side.kind.micro_batch(trainer)
    return trainer


def quantization(model: str, args: PackedSFTConfig) -> dict[str, Any]:
    """Return the argument of TRL's own trainers that quantizes a model as the arguments say."""
    return {"quantization_config": quantization_of(config_of(model, args).model_type, args)}


def upstream_kwargs(side: Side, model: str, args: PackedSFTConfig) -> dict[str, Any]:
    """Return the `from_pretrained` arguments of a side with TRL's own trainer, including its attention."""
    return {**init_kwargs(args), "attn_implementation": upstream_attention(model, args, named=side.backend).name}


def shared_fields(args: PackedSFTConfig, cls: type) -> dict[str, Any]:
    """Return the config fields that `cls` has, too, without the strategy, because each side has its own."""
    names = {f.name for f in fields(cls) if f.init} & {f.name for f in fields(args) if f.init}
    return {name: getattr(args, name) for name in names - {"packing_strategy"}}


def _row_options(side: Side, args: PackedSFTConfig, train: Dataset) -> dict[str, Any]:
    """Return length and number of rows; no limit for a side without rows, because documents are cut already."""
    if not side.kind.strategy.fills_rows:
        return {"max_length": None}
    row, longest = side.row or args.max_length or 0, int(read_lengths(train).max())
    if row < longest and not side.kind.strategy.wraps:
        raise InvalidConfig(
            f"rows of {row} tokens cut documents of up to {longest}, which the other sides train whole.",
            do=f"Write {side.strategy}@{longest} or more, or pass --max_length {row}.",
        )
    return {"max_length": row, **({"per_device_train_batch_size": side.rows} if side.rows else {})}


class Attention(NamedTuple):
    """Attention implementation of a trainer."""

    name: str | None  # transformers' name; `None` for the model's default
    remark: str = ""  # on a GPU, the reason why it is not FlashAttention; empty if it is, or if the user chose it


def upstream_attention(model: str, args: PackedSFTConfig, *, named: str = "auto") -> Attention:
    """Return the attention of TRL's own trainer on a model, by name or path.

    It is the one that the side (`named`) or `attn_implementation` names. Else it is on a GPU FlashAttention wherever
    the machine, the dtype and the model support it, because GPU users train with it.
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
