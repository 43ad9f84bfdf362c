"""TRL's own SFTTrainer with its own packing, on a patched model. python recipes/trl_sft.py

TRL packs once, before training (best-fit decreasing), which gives far fewer optimizer steps. It warns that packing
needs FlashAttention, but on a patched model no document sees another, with or without it. PackedSFTTrainer also keeps
the optimizer steps of the padded run.
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import trl_packfa

model = trl_packfa.patch(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="float32"))
report = trl_packfa.check(model)
report.require_exact()
print(report)

trainer = SFTTrainer(
    model,
    args=SFTConfig("qwen3-trl-packed", packing=True, max_length=2048, per_device_train_batch_size=1),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
trainer.save_model()
