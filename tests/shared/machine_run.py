"""A packed run on one of two machines, as `test_two_machines.py` starts it: FOLDER and whether it resumes (0 or 1)."""

import sys

import tiny
import torch
from training import arguments, losses, packed_trainer

if __name__ == "__main__":
    torch.manual_seed(0)
    options = {"max_steps": 4, "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2,
               "ddp_backend": "gloo", "ddp_find_unused_parameters": False}  # fmt: skip
    trainer = packed_trainer(arguments(out=sys.argv[1], **options), model=tiny.model(layers=1))
    trainer.train(resume_from_checkpoint=sys.argv[2] == "1" or None)
    print("losses", losses(trainer), flush=True)
    torch.distributed.destroy_process_group()
