"""`PackedSFTConfig`: TRL's `SFTConfig` and `ModelConfig` in one class, with a few fields of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from ..packing import OVERFLOW_POLICIES, PADDED, STEP, STRATEGIES, Strategy
from .common import CommonConfig

LOSS_WEIGHTINGS = ("token", "example")


@dataclass
class PackedSFTConfig(CommonConfig, SFTConfig):
    """Arguments of [`PackedSFTTrainer`]: all fields of TRL's `SFTConfig` and `ModelConfig`, and twelve of our own.

    Ours are `max_tokens_per_microbatch`, `overflow`, `expand_turns`, `share_prefixes`, `loss_weighting`, `loss_by`,
    `sequence_parallel`, `check_packing`, `recheck`, `attention_backend`, `fused_kernels` and `peak_tflops`.

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
            "help": "Run the check although an earlier run on this machine has checked the same: model, "
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

    def _settle(self) -> None:
        self.share_prefixes = self.share_prefixes or self.expand_turns  # the turns of a conversation share its history
        if not self.packing:
            # The default of a config that `dataclasses.replace` has changed.
            self.packing_strategy = None if self.packing_strategy == STEP.name else self.packing_strategy
            return
        self.packing_strategy = self.packing_strategy or STEP.name
        # `bfd_split` is `bfd` with a policy in its name.
        chosen = STRATEGIES.get(self.packing_strategy, STEP).overflow
        self.overflow = chosen if chosen in OVERFLOW_POLICIES else self.overflow
        # Packing has no padding anyway. TRL's `padding_free` is a switch for TRL's own collator.
        self.padding_free = False

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
