"""A plain transformers.Trainer on packed rows: one line patches the model. python recipes/plain_trainer.py

The collator concatenates the examples of a micro-batch. It marks their boundaries with position_ids that restart and
with cu_seq_lens_*, and the patched model uses both. Unpatched, many architectures ignore them (see README, "Supported
models"), and without cu_seq_lens_* transformers guesses boundaries from the positions.
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import trl_packfa

MODEL = "Qwen/Qwen3-0.6B"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = trl_packfa.patch(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"))
report = trl_packfa.check(model)
report.require_exact()
print(report)


def tokenize(example: dict) -> dict:
    """Return token ids and labels of a prompt and its completion; only the completion counts in the loss."""
    prompt = tokenizer(example["prompt"])["input_ids"]
    completion = [*tokenizer(example["completion"])["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


dataset = load_dataset("trl-lib/tldr", split="train")
dataset = dataset.map(tokenize, remove_columns=dataset.column_names)
trainer = Trainer(
    model,
    args=TrainingArguments("qwen3-plain-packed", per_device_train_batch_size=8, learning_rate=1e-5),
    train_dataset=dataset,
    data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
)
trainer.train()
trl_packfa.unpatch(model)
trainer.save_model()
