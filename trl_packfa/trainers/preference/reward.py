"""`PackedRewardTrainer`: TRL's `RewardTrainer` without padding, with re-cut steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import RewardConfig, RewardTrainer

from .trainer import PackedPreference, PreferenceConfig


@dataclass
class PackedRewardConfig(PreferenceConfig, RewardConfig):
    """Arguments of [`PackedRewardTrainer`]: all fields of TRL's `RewardConfig` and `ModelConfig`, and eight of ours.

    Ours, and the fields with another default than TRL's, are those of [`PackedDPOConfig`]. `overflow` is `"drop"`, as
    in TRL, or `"error"`.
    """

    lora_rate_factor = 1.0  # TRL's default is one for LoRA

    overflow: str = field(
        default="drop",
        metadata={
            "help": "What happens to pairs with a row longer than `max_length`: `'drop'`, as in TRL, or `'error'`. "
            "The report counts them.",
            "choices": ["drop", "error"],
        },
    )


class PackedRewardTrainer(PackedPreference, RewardTrainer):
    """TRL's `RewardTrainer` without padding. It takes the same arguments and has the same losses.

    ```python
    from datasets import load_dataset
    from trl_packfa import PackedRewardConfig, PackedRewardTrainer

    trainer = PackedRewardTrainer(
        "Qwen/Qwen3-0.6B",
        args=PackedRewardConfig("out"),
        train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
    )
    trainer.train()
    ```

    All arguments are TRL's; attributes and errors are those of [`PackedDPOTrainer`]. The config's adapter has the task
    type of a classifier: the new head is trained in full.
    """

    _tag_names = ["trl", "reward-trainer", "trl-packfa"]
    _config = PackedRewardConfig
    _rows = (("chosen_ids",), ("rejected_ids",))
    _task = "SEQ_CLS"
