"""`PackedDPOTrainer`: TRL's `DPOTrainer` without padding, with re-cut steps."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer

from .trainer import PackedPreference, PreferenceConfig

# TRL 1.16's loss types in which each pair has a loss of its own ...
_BY_PAIR = {
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
}  # fmt: skip
# ... and those that read the whole micro-batch.
_BY_BATCH = {
    "aot": "sorts the log-ratios of a micro-batch",
    "aot_unpaired": "sorts the log-ratios of a micro-batch",
    "sft": "is a mean over the tokens of a micro-batch",
}


@dataclass
class PackedDPOConfig(PreferenceConfig, DPOConfig):
    """Arguments of [`PackedDPOTrainer`]: all fields of TRL's `DPOConfig` and `ModelConfig`, and seven of our own.

    Ours are `packing_strategy` (`"step"` or `"minibatch"`), `max_tokens_per_microbatch`, `overflow`, `check_packing`,
    `attention_backend`, `fused_kernels` and `share_prefixes`. `padding_free=True` trains without padding, while TRL
    1.16 warns and pads.

    > [!NOTE]
    > These fields have other defaults than TRL's: `use_peft=True`, `lora_target_modules=["all-linear"]` and `dtype`.
    > The default `dtype` is `"bfloat16"` for a quantized model trained in bf16, and `"float32"` otherwise.
    """


class PackedDPOTrainer(PackedPreference, DPOTrainer):
    """TRL's `DPOTrainer` without padding. It takes the same arguments and has the same losses.

    ```python
    from datasets import load_dataset
    from trl_packfa import PackedDPOConfig, PackedDPOTrainer

    trainer = PackedDPOTrainer(
        "Qwen/Qwen3-0.6B",
        args=PackedDPOConfig("out"),
        train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
    )
    trainer.train()
    ```

    All arguments are TRL's. A plain `DPOConfig` or `TrainingArguments` is read as a [`PackedDPOConfig`]. A model given
    by name is loaded with the config's `dtype`, `attn_implementation` and quantization. The trainer adds a LoRA
    adapter, except if the model already has one, if `peft_config` is given, with `use_peft=False`, or if an optimizer
    is passed that holds parameters of the model.

    Attributes:
        packing_reports (`dict[str, PackingReport]`): by dataset name, rows and tokens in, out and lost.
        cut_reason (`str`): the reason why steps are not re-cut; empty if they are.

    Raises:
        [`PackingError`]: at construction, if arguments, models or data cannot be trained without padding.
    """

    _tag_names = ["trl", "dpo", "trl-packfa"]
    _config = PackedDPOConfig
    _takes_images = True
    _rows = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))

    def _why_not_cut(self) -> str:
        """Name the loss types that are not known to be a mean over single pairs; `""` if all are."""
        why = [
            f"loss_type '{name}' {_BY_BATCH.get(name, 'is not known to be a mean over pairs')}"
            for name in self.loss_types
            if name not in _BY_PAIR
        ]
        return "; ".join(why)
