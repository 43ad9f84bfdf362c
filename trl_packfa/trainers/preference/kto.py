"""`PackedKTOTrainer`: TRL's `KTOTrainer` without padding. Its steps are re-cut if the loss estimates no KL."""

from __future__ import annotations

from dataclasses import dataclass

from trl import KTOConfig, KTOTrainer

from .trainer import PackedPreference, PreferenceConfig


@dataclass
class PackedKTOConfig(PreferenceConfig, KTOConfig):
    """Arguments of [`PackedKTOTrainer`]: all fields of TRL's `KTOConfig` and `ModelConfig`, and eight of our own.

    Ours, and the fields with another default than TRL's, are those of [`PackedDPOConfig`].
    """


class PackedKTOTrainer(PackedPreference, KTOTrainer):
    """TRL's `KTOTrainer` without padding. It takes the same arguments and has the same losses.

    ```python
    from datasets import load_dataset
    from trl_packfa import PackedKTOConfig, PackedKTOTrainer

    trainer = PackedKTOTrainer(
        "Qwen/Qwen3-0.6B",
        args=PackedKTOConfig("out", train_sampling_strategy="sequential"),
        train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train"),
    )
    trainer.train()
    ```

    All arguments are TRL's; attributes and errors are those of [`PackedDPOTrainer`]. With `loss_type="kto"` the padded
    run's micro-batches are kept: each has one KL estimate, made from its own mismatched rows, and the loss of its
    examples depends on it. `"apo_zero_unpaired"` estimates no KL, so its steps are re-cut.
    """

    _tag_names = ["trl", "kto", "trl-packfa"]
    _config = PackedKTOConfig
    _takes_images = True
    _columns = (("prompt", "completion", "label"), ("chosen", "rejected"))
    _rows = (("prompt_ids", "completion_ids"),)
    _label = "label"

    def _why_not_cut(self) -> str:
        """Name the KL estimate (one number for each padded micro-batch of all ranks), or an unknown loss type."""
        if self.calculate_KL:
            return f"loss_type '{self.loss_type}' estimates the KL over the rows of each padded micro-batch"
        known = self.loss_type == "apo_zero_unpaired"
        return "" if known else f"loss_type '{self.loss_type}' is not known to be a mean over examples"
