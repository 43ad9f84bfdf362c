"""TRL's own SFTTrainer and its own packing, on a patched model. python recipes/trl_sft.py

TRL packs as it does (best-fit decreasing, once, before training; far fewer optimizer steps) and warns that packing
needs FlashAttention; on a patched model no document sees another, with or without it. PackedSFTTrainer keeps the steps
of the padded run too.
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
