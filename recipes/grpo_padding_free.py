"""TRL's own GRPOTrainer with models that run without pad tokens. python recipes/grpo_padding_free.py

Prompts are padded on the left and completions on the right; the model computes neither padding. Generation, rewards,
losses and metrics stay TRL's. The same line works for RLOO, DPO, KTO, reward models and distillation.
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

import trl_packfa


def brevity(completions: list, **columns: list) -> list[float]:
    """Return a reward that prefers short answers; replace it with your own."""
    return [-len(str(completion)) / 100 for completion in completions]


trainer = GRPOTrainer(
    "Qwen/Qwen3-0.6B",
    reward_funcs=brevity,
    args=GRPOConfig(
        "qwen3-grpo-packed",
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=256,
        model_init_kwargs={"dtype": "float32"},
    ),
    train_dataset=load_dataset("trl-lib/tldr", split="train").remove_columns("completion"),
)
trl_packfa.padding_free(trainer)
trainer.train()
print(trl_packfa.describe(trainer.model))
trainer.save_model()
