"""`PackedSFTConfig`: `SFTConfig` and `ModelConfig` in one, and the little they lack.

TRL's own fields keep their names and meaning; what has another default here says so in its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from ..errors import InvalidConfig, VersionTooOld
from ..packing import BFD, OVERFLOW_POLICIES, PADDED, STEP, STRATEGIES, Strategy, require_policy
from ..versions import installed_version
from .common_config import CommonConfig, require_trainable, settle_loading, settle_precision
from .sampler import TAKES_BATCHES

LOSS_WEIGHTINGS = ("token", "example")


@dataclass
class PackedSFTConfig(CommonConfig, SFTConfig):
    """Arguments of [`PackedSFTTrainer`]: all fields of TRL's `SFTConfig` and `ModelConfig`, and nine of our own.

    Ours are `max_tokens_per_microbatch`, `overflow`, `loss_weighting`, `loss_by`, `check_packing`,
    `attention_backend`, `fused_lora`, `fused_kernels` and `peak_tflops`.

    > [!NOTE]
    > These fields have other defaults than TRL's: `packing=True`, `use_peft=True`,
    > `lora_target_modules=["all-linear"]`, `packing_strategy="step"`, and `dtype`, which is `"bfloat16"` for a
    > quantized model trained in bf16 and TRL's `"float32"` otherwise. On a machine without a GPU `bf16` is off unless
    > asked for, where TRL raises.
    """

    packing: bool = field(
        default=True,
        metadata={"help": "Pack documents, with boundaries honoured. `False` trains padded, as `SFTTrainer` does."},
    )
    packing_strategy: str | None = field(
        default=None,
        metadata={
            "help": "`'step'`, also if none is named: an optimizer step sees the examples of the padded run, re-cut "
            "into as few and as equal micro-batches as the token budget allows. "
            "`'minibatch'`: each micro-batch holds the examples it would hold padded, as one row. "
            "`'bfd'`: rows of `max_length` tokens, best-fit decreasing over the whole dataset, repacked every epoch. "
            "`'bfd_split'`: the same with `overflow='split'`. "
            "`'wrapped'`: documents one after the other, cut wherever a row of `max_length` tokens is full; the parts "
            "are documents of their own.",
            "choices": list(STRATEGIES),
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a micro-batch under `packing_strategy='step'`. Default: what the padded run "
            "would hold at its worst, `per_device_train_batch_size` times the longest document."
        },
    )
    overflow: str = field(
        default="truncate",
        metadata={
            "help": "What happens to documents longer than `max_length`: `'truncate'`, `'split'` into documents of "
            "their own, `'drop'`, or `'error'`. All is counted and reported.",
            "choices": list(OVERFLOW_POLICIES),
        },
    )
    loss_weighting: str = field(
        default="token",
        metadata={
            "help": "What counts in the training loss: `'token'`, every trained token of a step the same (TRL's), or "
            "`'example'`, every example the same, as unpacked training with one example a micro-batch does.",
            "choices": list(LOSS_WEIGHTINGS),
        },
    )
    loss_by: str | None = field(
        default=None,
        metadata={"help": "Column that says where an example comes from; the loss of each source is logged."},
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={
            "help": "What the logged `mfu` is a share of, in TFLOP/s of a device; default: a GPU's data sheet, by "
            "its name, else the best matrix product of the model's shape, measured once."
        },
    )

    def __post_init__(self) -> None:
        # Both by name: neither calls the other's. Precision is settled between them, as SFTConfig sets `bf16=True`
        # where nothing is said and transformers raises where a machine has none.
        ModelConfig.__post_init__(self)
        settle_precision(self)
        SFTConfig.__post_init__(self)
        settle_loading(self)
        require_policy(self.overflow)
        self._require_weighting()
        self._settle_packing()
        require_trainable(self)

    def _settle_packing(self) -> None:
        """One strategy if packing is on, none if it is off."""
        if self.max_length is not None and self.max_length < 2:
            raise InvalidConfig(f"max_length={self.max_length}: a document needs two tokens to train on one.")
        if not self.packing:
            if self.packing_strategy is not None:
                raise InvalidConfig(
                    f"packing=False, but packing_strategy='{self.packing_strategy}'.",
                    do="Drop packing_strategy to train padded, or packing=False to pack.",
                )
            return
        if self.packing_strategy is None:
            self.packing_strategy = STEP.name
        if self.packing_strategy not in STRATEGIES:
            raise InvalidConfig(
                f"packing_strategy='{self.packing_strategy}' does not exist.",
                do=f"Choose one of {list(STRATEGIES)}.",
            )
        # `bfd_split` is `bfd` with a policy in its name.
        if self.strategy.overflow in OVERFLOW_POLICIES:
            self.overflow = self.strategy.overflow
        if self.truncation_mode != "keep_start" and self.max_length is not None:
            raise InvalidConfig(
                f"truncation_mode='{self.truncation_mode}' with packing: documents are cut at their end only.",
                why=["TRL has deprecated it"],
                do="Drop it, cut the data yourself, or use overflow='split', which trains every token.",
            )
        if self.strategy.wraps and self.overflow != "truncate":
            raise InvalidConfig(
                f"overflow='{self.overflow}' has no effect under packing_strategy='{self.packing_strategy}'.",
                why=["it cuts every document where a row is full"],
                do=f"Drop overflow, or use packing_strategy='{BFD}'.",
            )
        if self.strategy.fills_rows:
            self._require_rows()
        self._require_budget()
        # Packing always is padding-free; TRL's switch of that name is for its own collator.
        self.padding_free = False

    def _require_budget(self) -> None:
        """What a token budget may be, and where it means something."""
        budget = self.max_tokens_per_microbatch
        if budget is not None and budget < 2:
            raise InvalidConfig(f"max_tokens_per_microbatch={budget}: a document needs two tokens to train on one.")
        if budget is not None and not self.strategy.recuts_steps:
            raise InvalidConfig(
                f"max_tokens_per_microbatch={budget} has no effect under packing_strategy='{self.packing_strategy}'.",
                do="Use packing_strategy='step', or drop it.",
            )
        if self.strategy.recuts_steps and self.train_sampling_strategy == "batch_rebalance":
            raise InvalidConfig(
                f"train_sampling_strategy='batch_rebalance' with packing_strategy='{self.packing_strategy}'.",
                why=["both decide how a step is cut into micro-batches"],
                do="Use packing_strategy='minibatch'.",
            )

    def _require_rows(self) -> None:
        """What rows of a fixed capacity need, and what contradicts them."""
        if not TAKES_BATCHES:
            raise VersionTooOld(
                f"packing_strategy='{self.packing_strategy}' needs transformers >= 5.17, found "
                f"{installed_version('transformers')}.",
                why=["its Trainer takes no batches from a sampler"],
                do="Use packing_strategy='step' or 'minibatch', or upgrade transformers.",
            )
        if self.max_length is None:
            raise InvalidConfig(
                f"packing_strategy='{self.packing_strategy}' fills rows of max_length tokens, max_length is None.",
                do="Set max_length, or packing_strategy='step' or 'minibatch', which need none.",
            )
        if self.dataloader_drop_last:
            raise InvalidConfig(
                f"dataloader_drop_last=True has nothing to drop under packing_strategy='{self.packing_strategy}'.",
                why=["rows are dealt so that every rank takes part in every step, the last one too"],
                do="Drop it.",
            )
        if self.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
            raise InvalidConfig(
                f"train_sampling_strategy='{self.train_sampling_strategy}' has nothing to order under "
                f"packing_strategy='{self.packing_strategy}'.",
                why=["the packer decides which documents share a batch"],
                do="Drop train_sampling_strategy.",
            )

    def _require_weighting(self) -> None:
        """What a weighting of examples contradicts."""
        if self.loss_weighting not in LOSS_WEIGHTINGS:
            raise InvalidConfig(
                f"loss_weighting='{self.loss_weighting}' does not exist.", do=f"Choose one of {list(LOSS_WEIGHTINGS)}."
            )
        by_example = self.loss_weighting == "example"
        if by_example and (self.loss_type != "nll" or self.label_smoothing_factor):
            what = f"loss_type='{self.loss_type}'" if self.loss_type != "nll" else "label_smoothing_factor"
            raise InvalidConfig(
                f"{what} with loss_weighting='example': an example's own mean loss is defined for 'nll' only.",
                do="Use loss_weighting='token'.",
            )

    @property
    def strategy(self) -> Strategy:
        """What `packing_strategy` stands for; padded with `packing=False`."""
        return STRATEGIES[self.packing_strategy] if self.packing and self.packing_strategy else PADDED

    @classmethod
    def from_args(cls, args: TrainingArguments, **changes: Any) -> PackedSFTConfig:
        """Any of TRL's or transformers' arguments as a `PackedSFTConfig`; one that is already comes back as it is.

        A plain `SFTConfig` has `packing=False` by default, which cannot be told from a wish: packing, patching and
        LoRA are on, as in a `PackedSFTConfig`. Its strategy counts if it has `packing=True`. `changes` are fields that
        are to be others than the arguments' or the defaults.
        """
        if isinstance(args, cls):
            return args
        # `TrainingArguments` computes some of its fields: those cannot be passed.
        names = {f.name for f in fields(cls) if f.init}
        kept = {f.name: getattr(args, f.name) for f in fields(args) if f.name in names}
        packing = kept.pop("packing", False)
        strategy = kept.pop("packing_strategy", None)
        return cls(**{**kept, "packing_strategy": strategy if packing else None, **changes})
