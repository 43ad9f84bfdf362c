"""The steps of the demo: base model, 4-bit QLoRA fine-tune, check, saved adapter, comparison with padded training."""

from __future__ import annotations

import time
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from ..config.sft import PackedSFTConfig
from ..data.files import load_dataset_dict
from ..terminal.progress import RichProgressCallback, packing_table, quiet
from ..trainers.sft.trainer import PackedSFTTrainer
from . import DemoOptions
from .corpus import docstring_dataset

# Padded and packed training are compared on the same few steps. The first step is not timed.
_COMPARED_STEPS = 4
# The loss of these held-out documents is measured three times. More documents would take longer than the training.
_HELD_OUT = 64
_VOCAB_SIZE, _EOS, _PAD = 8192, "<|eos|>", "<|pad|>"


@quiet()
def run_demo(options: DemoOptions) -> dict[str, float]:
    """Run the demo and return its figures: held-out losses, and true tokens per second packed and padded."""
    console = Console()
    dataset = _dataset(options, console)
    base, tokenizer = _base(options, dataset, console)
    # The demo runs the check itself, in its own part, not inside train().
    args = PackedSFTConfig(**_arguments(options, max_steps=options.steps), load_in_4bit=True, check_packing=False)
    data: Any = {"train_dataset": dataset["train"], "eval_dataset": dataset["test"], "processing_class": tokenizer}
    trainer = PackedSFTTrainer(base, args, **data)
    _part(console, 3, "exactness check of the 4-bit model with its LoRA adapter: no document may see another")
    console.print(packing_table(trainer.packing_reports))
    # Tokenization runs once: the later trainers take the datasets that this trainer has prepared.
    data |= {"train_dataset": trainer.train_dataset, "eval_dataset": trainer.eval_dataset}
    console.print(f"exactness check: {trainer.check()}", highlight=False, markup=False)
    _part(console, 4, f"QLoRA fine-tune: {options.steps} optimizer steps of packed rows, a minute or less")
    RichProgressCallback.attach(trainer, "QLoRA", console)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    console.print(f"held-out loss: {before:.3f} before, {after:.3f} after {options.steps} steps")
    _part(console, 5, "save the adapter and load it onto a fresh 4-bit base")
    loaded = _save_and_load_back(trainer, data, options, console)
    _part(console, 6, f"speed: the same {_COMPARED_STEPS} steps, packed and with TRL's padded trainer")
    packed, padded = _compare(base, data, options)
    console.print(
        f"padded (TRL's SFTTrainer) {padded:,.0f} true tokens/s, packed {packed:,.0f} true tokens/s: "
        f"{packed / padded:.2f}x, without the first step of each"
    )
    losses = {"loss_before": before, "loss_after": after, "loss_loaded": loaded}
    return {**losses, "packed_tokens_per_second": packed, "padded_tokens_per_second": padded}


def _part(console: Console, number: int, what: str) -> None:
    console.print(f"[bold]{number}/6[/bold] {what}", highlight=False)


def _dataset(options: DemoOptions, console: Console) -> DatasetDict:
    dataset: Any
    source = options.dataset or "questions and answers from the docstrings of Python's standard library"
    _part(console, 1, f"data: {source}")
    if options.dataset is None:
        dataset = docstring_dataset()
    else:
        dataset = load_dataset_dict(options.dataset)
        if "test" not in dataset:
            dataset = dataset["train"].train_test_split(test_size=0.05, seed=0)
    dataset["test"] = dataset["test"].select(range(min(len(dataset["test"]), _HELD_OUT)))
    console.print(f"{len(dataset['train']):,} documents to train on, {len(dataset['test']):,} held out")
    return DatasetDict({"train": dataset["train"], "test": dataset["test"]})


def _arguments(options: DemoOptions, **others: Any) -> dict[str, Any]:
    """Return the arguments that every trainer of the demo has, packed or padded."""
    return {
        "output_dir": str(options.output_dir),
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "max_length": options.max_length,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        **others,
    }


def _base(options: DemoOptions, dataset: DatasetDict, console: Console) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the name or path of the base model, and its tokenizer; train the built-in model first, also packed."""
    _part(console, 2, f"base model: {options.model or 'a small one, built here'}")
    if options.model is not None:
        return options.model, AutoTokenizer.from_pretrained(options.model)
    tokenizer = train_tokenizer(dataset["train"])
    model = build_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    console.print(
        f"a Llama of {parameters:.1f} M random weights and a tokenizer of {len(tokenizer):,} tokens. LoRA on random "
        f"weights learns little, so all weights are trained first, packed: {options.base_steps} steps, about a minute"
    )
    shape = {"per_device_train_batch_size": 1, "max_steps": options.base_steps, "learning_rate": 1e-3}
    args = PackedSFTConfig(**_arguments(options, **shape), use_peft=False, packing_strategy="bfd")
    trainer = PackedSFTTrainer(model, args, train_dataset=dataset["train"], processing_class=tokenizer)
    RichProgressCallback.attach(trainer, "base model", console)
    trainer.train()
    path = str(options.output_dir / "base")
    trainer.save_model(path)
    return path, tokenizer


def _save_and_load_back(
    trainer: PackedSFTTrainer, data: dict[str, Any], options: DemoOptions, console: Console
) -> float:
    """Save adapter and reports, load the adapter onto a fresh 4-bit base, and return its held-out loss."""
    path = options.output_dir / "adapter"
    trainer.save_model(str(path))
    trainer.save_reports(path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        path, quantization_config=get_quantization_config(trainer.args), dtype=trainer.args.dtype, is_trainable=True
    )
    fresh = PackedSFTTrainer(loaded, PackedSFTConfig(**_arguments(options)), **data)
    RichProgressCallback.attach(fresh, "", console)
    loss = fresh.evaluate()["eval_loss"]
    console.print(f"adapter and reports saved in {path}; loaded back: held-out loss {loss:.3f}")
    return loss


def _compare(base: str, data: dict[str, Any], options: DemoOptions) -> tuple[float, float]:
    """Return the true tokens per second of the same few steps: packed, and with TRL's own padded trainer."""
    common = _arguments(options, max_steps=_COMPARED_STEPS, logging_steps=1)
    args = PackedSFTConfig(**common, load_in_4bit=True, check_packing=False)
    data = {**data, "eval_dataset": None}
    packed = PackedSFTTrainer(base, args, **data)
    padded = SFTTrainer(
        base,
        SFTConfig(**common, model_init_kwargs={"dtype": args.dtype}),
        quantization_config=get_quantization_config(args),
        peft_config=get_peft_config(args),
        **data,
    )
    return _tokens_per_second(packed), _tokens_per_second(padded)


def train_tokenizer(dataset: Dataset) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on prompts and completions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_PAD, _EOS],  # ids 0 and 1
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [a + b for a, b in zip(dataset["prompt"], dataset["completion"], strict=True)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_PAD)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama of about 19 M parameters: 8 layers, hidden size 384, grouped-query attention, untied LM head."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


class _Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.marks.append((time.perf_counter(), logs["num_tokens"]))


def _tokens_per_second(trainer: SFTTrainer) -> float:
    RichProgressCallback.attach(trainer, "", Console(quiet=True))
    stopwatch = _Stopwatch()
    trainer.add_callback(stopwatch)
    trainer.train()
    (start, tokens_before), (stop, tokens_after) = stopwatch.marks[0], stopwatch.marks[-1]
    return (tokens_after - tokens_before) / (stop - start)
