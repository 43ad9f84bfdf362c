"""PackedSFTTrainer in place of SFTTrainer: packed QLoRA, checked before it trains. python recipes/ten_line_swap.py"""

from datasets import load_dataset

from trl_packfa import PackedSFTConfig, PackedSFTTrainer

trainer = PackedSFTTrainer(
    "Qwen/Qwen3-0.6B",
    args=PackedSFTConfig("qwen3-packed", load_in_4bit=True, per_device_train_batch_size=8),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
print(trainer.check_report)
trainer.save_model()
