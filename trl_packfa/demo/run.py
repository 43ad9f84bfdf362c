"""The steps of the demo: data, base model, 4-bit QLoRA fine-tune, comparison with padded training.

Each is a command, which is printed before it runs.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from rich.console import Console
from transformers import GPT2Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed

from ..bench.run import bench
from ..data.files import load_dataset_dict
from ..scripts.train import train
from ..terminal.progress import errors_only
from .corpus import docstring_dataset

# Padded and packed training are compared on the same few steps.
_COMPARED_STEPS = 5
# The loss of these held-out documents is measured twice. More documents would take longer than the training.
_HELD_OUT = 64
_VOCAB_SIZE = 8192


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo with the options of the command, and return the exit code of its last part."""
    data = options.output_dir / "data"
    _part(1, f"data: {options.dataset or 'questions and answers from the docstrings of the standard library'}")
    dataset = _dataset(options.dataset)
    print(f"{len(dataset['train']):,} documents to train on, {len(dataset['test']):,} held out")
    with errors_only():
        dataset.save_to_disk(data)
    common = {
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "max_length": options.max_length,
        "gradient_checkpointing": "false",
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "report_to": "none",
    }
    training = {"dataset_name": data, **common, "logging_steps": 5, "save_strategy": "no"}
    base = options.model
    _part(2, f"base model: {base or 'a small one, built here'}")
    if base is None:
        untrained, base = options.output_dir / "untrained", options.output_dir / "base"
        _save_untrained(dataset["train"], untrained)
        # One row of documents is a micro-batch.
        rows = {"packing_strategy": "bfd", "per_device_train_batch_size": 1}
        whole = {"use_peft": "false", "check_packing": "false", "learning_rate": 1e-3, "max_steps": options.base_steps}
        _run(train, {"model_name_or_path": untrained, **training, **rows, **whole, "output_dir": base})
    _part(3, f"QLoRA fine-tune: {options.steps} optimizer steps after a check of the 4-bit model")
    evaluating = {"eval_strategy": "steps", "eval_steps": options.steps, "eval_on_start": "true"}
    quantized = {"load_in_4bit": "true", "max_steps": options.steps, "output_dir": options.output_dir / "adapter"}
    _run(train, {"model_name_or_path": base, **training, **quantized, **evaluating})
    _part(4, f"speed: the same {_COMPARED_STEPS} steps, with TRL's padded trainer and packed")
    compared = {"strategies": "padding,step", "untimed_steps": 1, "max_steps": _COMPARED_STEPS, "trace": "false"}
    compared |= {"eval_documents": 0, "load_in_4bit": "true", "output_dir": options.output_dir / "bench"}
    return _run(bench, {"model": base, "dataset": data, **common, **compared})


def _part(number: int, what: str) -> None:
    Console().print(f"[bold]{number}/4[/bold] {what}", highlight=False, soft_wrap=True)


def _run(command: Any, flags: dict[str, Any]) -> int:
    """Print a command as one would type it, and run it."""
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    print(f"$ trl-packfa {command.__name__} {shlex.join(argv)}", flush=True)
    return command(argv)


def _dataset(name: str | None) -> DatasetDict:
    """Return documents to train on and held-out ones, as `train` and `test`."""
    dataset: Any = docstring_dataset() if name is None else load_dataset_dict(name)
    if "test" not in dataset:
        dataset = dataset["train"].train_test_split(test_size=0.05, seed=0)
    held_out = dataset["test"].select(range(min(len(dataset["test"]), _HELD_OUT)))
    return DatasetDict({"train": dataset["train"], "test": held_out})


def _save_untrained(dataset: Dataset, folder: Path) -> None:
    """Save a Llama of random weights (8 layers, grouped-query attention) and a tokenizer that the dataset trains."""
    texts = [prompt + completion for prompt, completion in zip(dataset["prompt"], dataset["completion"], strict=True)]
    empty = GPT2Tokenizer(pad_token="<|pad|>")
    tokenizer = empty.train_new_from_iterator(texts, _VOCAB_SIZE, show_progress=False)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model = LlamaForCausalLM(config)
    print(
        f"a Llama of {model.num_parameters() / 1e6:.1f} M random weights, a tokenizer of {len(tokenizer):,} tokens. "
        "LoRA on random weights learns little, so all weights are trained first, packed, in about a minute"
    )
    with errors_only():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
