"""`PackedSFTConfig`: TRL's `SFTConfig` and `ModelConfig` in one class, with a few fields of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from ...errors import InvalidConfig
from ...packing import BFD, OVERFLOW_POLICIES, PADDED, STEP, STRATEGIES, WRAPPED, Strategy, require_policy
from ..common.config import CommonConfig, require_recutting

LOSS_WEIGHTINGS = ("token", "example")


@dataclass
class PackedSFTConfig(CommonConfig, SFTConfig):
    """Arguments of [`PackedSFTTrainer`]: all fields of TRL's `SFTConfig` and `ModelConfig`, and thirteen of our own.

    Ours are `max_tokens_per_microbatch`, `overflow`, `expand_turns`, `share_prefixes`, `loss_weighting`, `loss_by`,
    `sequence_parallel`, `check_packing`, `recheck`, `attention_backend`, `fused_lora`, `fused_kernels` and
    `peak_tflops`.

    > [!NOTE]
    > These fields have other defaults than TRL's: `packing=True`, `use_peft=True`,
    > `lora_target_modules=["all-linear"]`, `packing_strategy="step"`, `learning_rate` and `dtype`. The default
    > `learning_rate` is `2e-4` with LoRA, and TRL's `2e-5` without. The default `dtype` is `"bfloat16"`
    > for a quantized model trained in bf16, and TRL's `"float32"` otherwise. On a machine without a GPU, `bf16` is off
    > by default, where TRL raises an error.
    """

    packing: bool = field(
        default=True,
        metadata={
            "help": "Pack several documents into one row; no document sees another. `False` trains padded, as "
            "`SFTTrainer` does."
        },
    )
    packing_strategy: str | None = field(
        default=None,
        metadata={
            "help": "`'step'` (the default): each optimizer step has the examples of the padded run, re-cut into as "
            "few and as equal micro-batches as the token budget allows. "
            "`'minibatch'`: each micro-batch has the examples of the padded run's micro-batch, as one row. "
            "`'bfd'`: fill rows of `max_length` tokens by best-fit decreasing over the whole dataset, anew every "
            "epoch. "
            "`'bfd_split'`: `'bfd'` with `overflow='split'`. "
            "`'wrapped'`: put documents one after the other and cut wherever a row of `max_length` tokens is full; "
            "each part is then a document of its own.",
            "choices": list(STRATEGIES),
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a micro-batch under `packing_strategy='step'`. Default: the size of the padded "
            "run's largest micro-batch, `per_device_train_batch_size` times the longest document. With images: the "
            "size of the step's largest padded micro-batch; image patches count as parts of tokens."
        },
    )
    overflow: str = field(
        default="truncate",
        metadata={
            "help": "What happens to documents longer than `max_length`: `'truncate'`, `'split'` into several "
            "documents, `'drop'`, or `'error'`. The report counts them.",
            "choices": list(OVERFLOW_POLICIES),
        },
    )
    expand_turns: bool = field(
        default=False,
        metadata={
            "help": "Train each assistant turn of a conversation as an example of its own, with the history as the "
            "chat template renders it there. The examples of a conversation stay in one micro-batch, where their "
            "common history is computed once (`share_prefixes` is on). A step counts conversations."
        },
    )
    loss_weighting: str = field(
        default="token",
        metadata={
            "help": "How the training loss is weighted: `'token'` gives every trained token of a step the same weight "
            "(TRL's default); `'example'` gives every example the same weight, like padded training with one example "
            "per micro-batch.",
            "choices": list(LOSS_WEIGHTINGS),
        },
    )
    loss_by: str | None = field(
        default=None, metadata={"help": "Column with the source of each example. The loss of each source is logged."}
    )
    sequence_parallel: int = field(
        default=1,
        metadata={
            "help": "Number of processes that share each row, so that each holds a part of its tokens. Such a group "
            "has the batches that one process has otherwise. It must divide the number of processes and the model's "
            "attention heads."
        },
    )
    recheck: bool = field(
        default=False,
        metadata={
            "help": "Run the exactness check although an earlier run on this machine has proven the same: model, "
            "weights, adapter, settings, versions, device."
        },
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={
            "help": "Peak speed of one device in TFLOP/s; the logged `mfu` is a share of it. Default: the GPU's data "
            "sheet, found by its name, else the fastest matrix product of the model's shape, measured once."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_policy(self.overflow)
        self._require_weighting()
        self._settle_turns()
        self._settle_packing()
        if self.sequence_parallel < 1 or (self.sequence_parallel > 1 and not self.packing):
            raise InvalidConfig(
                f"sequence_parallel={self.sequence_parallel} with packing={self.packing}: only packed rows can be "
                "shared, by at least one process.",
                do="Drop sequence_parallel, or set packing=True.",
            )

    def _settle_packing(self) -> None:
        """Require one valid strategy if packing is on, and none if it is off."""
        if self.max_length is not None and self.max_length < 2:
            raise InvalidConfig(
                f"max_length={self.max_length}: a document needs two tokens to train on one.", do="Pass 2 or more."
            )
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
                f"packing_strategy='{self.packing_strategy}' does not exist.", do=f"Choose one of {list(STRATEGIES)}."
            )
        # `bfd_split` is `bfd` with a policy in its name.
        if self.strategy.overflow in OVERFLOW_POLICIES:
            self.overflow = self.strategy.overflow
        if self.truncation_mode != "keep_start" and self.max_length is not None:
            raise InvalidConfig(
                f"truncation_mode='{self.truncation_mode}' with packing: documents are cut at their end only.",
                why=["TRL has deprecated truncation_mode"],
                do="Drop it, cut the data yourself, or use overflow='split', which trains every token.",
            )
        if self.strategy.wraps and self.overflow != "truncate":
            raise InvalidConfig(
                f"overflow='{self.overflow}' has no effect under packing_strategy='{self.packing_strategy}'.",
                why=["this strategy cuts every document where a row is full"],
                do=f"Drop overflow, or use packing_strategy='{BFD}'.",
            )
        if self.strategy.fills_rows:
            self._require_rows()
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 2:
            raise InvalidConfig(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch}: a document needs two tokens to train on "
                "one.",
                do="Pass max_length or more, or None.",
            )
        require_recutting(self)
        # Packing has no padding anyway. TRL's `padding_free` is a switch for TRL's own collator.
        self.padding_free = False

    def _settle_turns(self) -> None:
        """Switch shared prefixes on for expanded turns, and refuse what contradicts either."""
        name = "expand_turns" if self.expand_turns else "share_prefixes"
        if not self.expand_turns and not self.share_prefixes:
            return
        self.share_prefixes = True
        if not self.packing:
            raise InvalidConfig(
                f"{name}=True with packing=False.",
                why=["a prefix is computed once for the documents of a packed row"],
                do=f"Drop packing=False, or {name}.",
            )
        if self.expand_turns and self.packing_strategy == WRAPPED.name:
            raise InvalidConfig(
                f"expand_turns=True with packing_strategy='{WRAPPED}'.",
                why=["it cuts documents wherever a row is full, and a part of a turn has lost its history"],
                do="Use packing_strategy='step', 'minibatch' or 'bfd'.",
            )
        if self.expand_turns and self.assistant_only_loss:
            raise InvalidConfig(
                "assistant_only_loss=True with expand_turns=True.",
                why=["each example trains exactly its own assistant turn"],
                do="Drop assistant_only_loss.",
            )
        if self.neftune_noise_alpha is not None:
            raise InvalidConfig(
                f"{name}=True with neftune_noise_alpha={self.neftune_noise_alpha}.",
                why=["each document draws its own noise, so no prefix could be computed once"],
                do="Drop one of them.",
            )

    def _require_rows(self) -> None:
        """Require what rows of a fixed capacity need, and refuse arguments that contradict them."""
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
        """Refuse an unknown `loss_weighting`, and losses that `"example"` weighting does not support."""
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
        """The strategy that `packing_strategy` names; `PADDED` with `packing=False`."""
        return STRATEGIES[self.packing_strategy] if self.packing and self.packing_strategy else PADDED

    @classmethod
    def from_args(cls, args: TrainingArguments, **changes: Any) -> PackedSFTConfig:
        """Convert TRL's or transformers' arguments to a `PackedSFTConfig`; return a `PackedSFTConfig` unchanged.

        A plain `SFTConfig` has `packing=False` by default, so `False` does not show that the user wants padding.
        Therefore packing, patching and LoRA are on, as in a `PackedSFTConfig`. Its `packing_strategy` is kept only if
        it has `packing=True`. `changes` are fields that replace those of `args` and the defaults.
        """
        if isinstance(args, cls):
            return args
        kept = cls.fields_of(args)
        packing = kept.pop("packing", False)
        strategy = kept.pop("packing_strategy", None)
        return cls(**{**kept, "packing_strategy": strategy if packing else None, **changes})
