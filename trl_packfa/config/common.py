"""Fields that the configs of all our trainers share: loading and adapting a model, and its attention backend."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import ModelConfig

from ..attention import get_backend
from ..errors import InvalidConfig
from .arguments import ARGUMENTS, WITHOUT_PADS
from .options import option
from .requirements import Run, require

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..packing import Strategy

    class _Base(ModelConfig, TrainingArguments):
        """The base class for type checkers only: every trainer's config also is TRL's, with these fields.

        At run time `TrainingArguments` as a base would bring defaults that win over those of TRL's config.
        """

        max_length: int | None
        packing_strategy: str
        max_tokens_per_microbatch: int | None
        overflow: str
        pad_to_multiple_of: int | None
        model_init_kwargs: dict[str, Any] | None
        dataset_kwargs: dict[str, Any] | None
        gradient_checkpointing_kwargs: dict[str, Any] | None
        strategy: Strategy
        trust_remote_code: bool
        # The learning rate, if the user has named none.
        chosen_learning_rate: float | None
else:
    _Base = ModelConfig


@dataclass
class CommonConfig(_Base):
    """TRL's `ModelConfig` with LoRA on, and our fields. It comes before TRL's config in a config's base classes."""

    # `PackedSFTConfig` makes these fields: it can switch packing off, share rows, and expand turns.
    packing = True
    sequence_parallel = 1
    expand_turns = False

    # How much larger LoRA's learning rate is than TRL's default, as TRL's own scripts have it ("LoRA Without Regret").
    lora_rate_factor = 10.0

    check_packing: bool = field(
        default=True,
        metadata={"help": "Check on this model, before the first step, that no document can see another."},
    )
    attention_backend: str = option("backend")
    fused_kernels: bool = option("fused_kernels")
    share_prefixes: bool = option("share_prefixes")
    # Without a default, so that one by the user is known. `__post_init__` sets it.
    learning_rate: float = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "The initial learning rate for the optimizer. Default: TRL's with `use_peft=False`. For LoRA "
            "ten times as much if TRL's is one for all parameters: `2e-4` for SFT, `1e-5` for DPO, KTO, GRPO and "
            "RLOO, and TRL's `1e-4` for rewards."
        },
    )
    use_peft: bool = field(default=True, metadata={"help": "Train a LoRA adapter. `False` trains all parameters."})
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "LoRA target modules. Default: all linear layers except the LM head."},
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Data type of the loaded model. Default: `'bfloat16'` for a quantized model trained in bf16, "
            "else `'float32'`.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )

    def __post_init__(self) -> None:
        # First, because TRL's config fills DeepSpeed's with it.
        self.chosen_learning_rate = None
        if self.learning_rate is None:
            self.chosen_learning_rate = self.learning_rate = self._default_learning_rate(adapts=self.use_peft)
        # Call both by name, because neither calls the other. Settle precision first: TRL's config sets `bf16=True` by
        # default, and transformers raises on a machine without bf16.
        ModelConfig.__post_init__(self)
        _settle_precision(self)
        if getattr(self, "activation_checkpointing", False) is None:
            # TRL's config sets the old name by default, and transformers warns of it since 5.23.
            self.activation_checkpointing = self.gradient_checkpointing
        self._trl_config().__post_init__(self)
        _settle_loading(self)
        self._settle()
        run = Run(self, type(self).__name__)
        require(ARGUMENTS if run.is_sft else (*WITHOUT_PADS, *ARGUMENTS), run)

    def _settle(self) -> None:
        """Settle the config's own fields."""

    @classmethod
    def _trl_config(cls) -> Any:
        """Return TRL's config class for this trainer."""
        bases = (base for base in cls.__mro__ if base.__module__.startswith("trl."))
        return next(base for base in bases if base is not ModelConfig)

    @classmethod
    def _default_learning_rate(cls, *, adapts: bool) -> float:
        full: Any = next(f.default for f in fields(cls._trl_config()) if f.name == "learning_rate")
        return float(f"{full * cls.lora_rate_factor:g}") if adapts else full  # 1e-05, not 9.999999999999999e-06

    def settle_learning_rate(self, *, adapts: bool) -> str:
        """Set the default learning rate of a model with or without an adapter, unless the user has named a rate.

        Return a sentence on a rate that may surprise; `""` if none does.
        """
        full, usual = (self._default_learning_rate(adapts=adapter) for adapter in (False, True))
        if self.learning_rate == self.chosen_learning_rate:
            self.chosen_learning_rate = self.learning_rate = usual if adapts else full
            if adapts and usual != full:
                return f"learning_rate={usual:g} for the adapter; TRL's default, {full:g}, is for all parameters"
        elif adapts and usual != full and self.learning_rate == full:
            return f"learning_rate={full:g} is TRL's default for all parameters; an adapter usually needs {usual:g}"
        return ""

    @classmethod
    def fields_of(cls, args: TrainingArguments) -> dict[str, Any]:
        """Return the fields of TRL's or transformers' arguments that a config of this class can be made with."""
        # `TrainingArguments` computes some of its fields: those cannot be passed.
        names = {f.name for f in fields(cls) if f.init}
        return {f.name: getattr(args, f.name) for f in fields(args) if f.name in names}

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process: one. transformers counts all visible ones, for `nn.DataParallel`.

        TRL refuses `nn.DataParallel`, and splits a model that it loads by name over all of them instead.
        """
        return min(super().n_gpu, 1)

    @property
    def data_parallel_size(self) -> int:
        """Number of processes with different batches; processes that share rows count once."""
        return max(self.world_size // self.sequence_parallel, 1)

    @property
    def data_parallel_rank(self) -> int:
        """Number of this process's batches among them."""
        return self.process_index // self.sequence_parallel

    @property
    def patch_options(self) -> dict[str, Any]:
        """Keyword arguments for [`patch`], without `unpad`."""
        same = {name: getattr(self, name) for name in ("fused_kernels", "share_prefixes")}
        return {"backend": self.attention_backend, **same}

    @property
    def card_settings(self) -> dict[str, Any]:
        """The fields that a model card shows."""
        names = ("packing_strategy", "max_length", "overflow", "loss_weighting")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def _settle_precision(args: Any) -> None:
    """Switch `bf16` off on a machine without an accelerator, if the user has not chosen a precision."""
    if args.bf16 is not None or args.fp16 or args.use_cpu:
        return
    if _has_bfloat16():
        return
    if torch.accelerator.is_available():
        raise InvalidConfig(
            f"this {torch.accelerator.current_accelerator()} has no bfloat16, and TRL trains in bfloat16 by default.",
            do="Pass fp16=True, or bf16=False to train in float32.",
        )
    args.bf16 = False


def _has_bfloat16() -> bool:
    """Tell whether the device computes in bfloat16. Turing GPUs (T4) emulate it, many times slower than float16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available() or is_torch_xla_available()


def _settle_loading(args: Any) -> None:
    """Set how batches are copied and the dtype to load in, and require that a named attention backend exists."""
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False  # pinning has no use on a CPU, and torch would warn in every epoch
    elif args.device.type == "cuda" and args.dataloader_pin_memory:
        # TRL's config has made it an AcceleratorConfig. Copies from page-locked memory need not wait.
        args.accelerator_config.non_blocking = True
    if args.dtype is None:
        # Quantized weights have their own type. `dtype` is the type of norms, embeddings and LM head.
        quantized = args.load_in_4bit or args.load_in_8bit
        args.dtype = "bfloat16" if quantized and args.bf16 else "float32"
    if args.attention_backend != "auto":
        get_backend(args.attention_backend)
