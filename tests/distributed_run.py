"""Run by `test_distributed.py`, alone or under torchrun: a few packed steps, the losses as JSON on the last line."""

import json
import os
import sys

from training import arguments, losses, packed_trainer

strategy, out, *resume = sys.argv[1:]
world = int(os.environ.get("WORLD_SIZE", "1"))
args = arguments(
    out=out,
    packing_strategy=strategy,
    per_device_train_batch_size=8 // world,
    gradient_accumulation_steps=3,
    max_steps=6,
    max_length=96,
    learning_rate=2e-3,
    ddp_backend="gloo" if world > 1 else None,
    save_strategy="steps",
    save_steps=3,
)
trainer = packed_trainer(args)
trainer.train(resume_from_checkpoint=f"{out}/checkpoint-3" if resume else None)
if trainer.is_world_process_zero():
    print(json.dumps({"losses": losses(trainer), "verdict": trainer.exactness.verdict}), flush=True)
trainer.accelerator.end_training()  # the process group's threads must not outlive the interpreter
