"""What the configs of all trainers here have in common: how a model is loaded and adapted, what runs its attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import ModelConfig

from ..attention import get_backend
from ..errors import InvalidConfig


@dataclass
class CommonConfig(ModelConfig):
    """TRL's `ModelConfig` with LoRA on, and the fields of ours that mean the same in every trainer.

    Stands before TRL's own config among the bases of a trainer's.
    """

    # What the code that loads models asks; a field where a config can switch packing off.
    packing = True

    check_packing: bool = field(
        default=True,
        metadata={"help": "Prove on this model, before the first step, that no document can see another."},
    )
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "Attention backend: `'auto'`, or a name from `trl-packfa backends`, which then runs or raises."
        },
    )
    fused_lora: bool = field(
        default=True,
        metadata={
            "help": "Compute LoRA layers with their base layers in one product, where they allow it, to PEFT's "
            "result within rounding; `False` leaves them to PEFT."
        },
    )
    fused_kernels: bool = field(
        default=True,
        metadata={
            "help": "Compute norms, rotations and SwiGLU in fewer passes over memory: by liger-kernel on CUDA where "
            "it is installed, in pieces on a CPU; `False` runs the model's own code."
        },
    )
    use_peft: bool = field(
        default=True,
        metadata={"help": "Train a LoRA adapter. `False` trains all parameters."},
    )
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "LoRA target modules; all linear layers but the LM head by default."},
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Data type to load the model in. Default: `'bfloat16'` for a quantized model trained in bf16, "
            "else `'float32'`.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )

    @property
    def patch_options(self) -> dict[str, Any]:
        """What [`patch`] is called with."""
        names = ("fused_lora", "fused_kernels")
        return {"backend": self.attention_backend, **{name: getattr(self, name) for name in names}}


def settle_precision(args: Any) -> None:
    """TRL trains in bf16 unless told otherwise and stops where there is none: without a GPU, float32 is meant.

    Called before TRL's own config settles, as transformers raises where a machine has no bf16.

    Raises:
        [`InvalidConfig`]: on an accelerator without bfloat16.
    """
    if args.bf16 is not None or args.fp16 or args.use_cpu:
        return
    if is_torch_bf16_gpu_available() or is_torch_xla_available():
        return
    if torch.accelerator.is_available():
        raise InvalidConfig(
            f"this {torch.accelerator.current_accelerator()} has no bfloat16, in which TRL trains by default.",
            do="Pass fp16=True, or bf16=False to train in float32.",
        )
    args.bf16 = False


def settle_loading(args: Any) -> None:
    """How batches travel, the dtype to load in, and that a named backend exists; called after TRL's config settled."""
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False  # there is nothing to pin for, of which torch warns in every epoch
    elif args.device.type == "cuda" and args.dataloader_pin_memory:
        # TRL's config has made an AcceleratorConfig of it; copies from page-locked memory need not wait.
        args.accelerator_config.non_blocking = True
    if args.dtype is None:
        # Quantized weights have their own type: `dtype` is that of norms, embeddings and head.
        quantized = args.load_in_4bit or args.load_in_8bit
        args.dtype = "bfloat16" if quantized and args.bf16 else "float32"
    if args.attention_backend != "auto":
        get_backend(args.attention_backend)


# The smallest value of numbers that neither TRL nor transformers looks at before a loop divides by them.
_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
    "lora_r": 1,
}


def require_trainable(args: Any) -> None:
    """Refuse numbers that are too small, and contradictions between adapters and quantization.

    Raises:
        [`InvalidConfig`]: naming them.
    """
    for name, least in _LEAST.items():
        if getattr(args, name) < least:
            raise InvalidConfig(f"{name}={getattr(args, name)}: it must be {least} or more.", do="Raise it.")
    if not args.use_peft and (args.load_in_4bit or args.load_in_8bit):
        raise InvalidConfig(
            "use_peft=False with a quantized model: quantized weights cannot be trained.",
            do="Drop use_peft=False to train a LoRA adapter, or drop load_in_4bit / load_in_8bit.",
        )
    targets = args.lora_target_modules
    if args.use_peft and "lm_head" in ([targets] if isinstance(targets, str) else targets or []):
        raise InvalidConfig(
            "lora_target_modules names 'lm_head'.",
            why=["TRL multiplies hidden states with lm_head.weight directly, so its adapter would never be trained"],
            do="Remove 'lm_head'; to train it in full, name it in lora_modules_to_save.",
        )
