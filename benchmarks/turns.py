"""Compare training each assistant turn of conversations: TRL padded, packed, and packed with histories run once.

    python benchmarks/turns.py --tokenizer FOLDER CONVERSATIONS.jsonl ... [--count 24] [--repeats 3]

Every side trains the same turns with their histories: `padded` is TRL's `SFTTrainer` on one prompt and completion for
each turn, `packed` is `PackedSFTTrainer` on the same, `turns` is `expand_turns=True` on the conversations. A Llama of
eight layers and width 256 with random weights, LoRA, float32; conversations are drawn with a seed, cut to
`--max_length`. Sides run in turn, and the table shows the median of the ratios to `padded` with their range. Times are
CPU times of `train()` without the check, which other work on the machine disturbs little. The template drops the
thoughts of earlier turns; `--thoughts` puts thoughts of so many tokens into every turn.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer

_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['role'] == 'assistant' and loop.last and m.get('thoughts') %}{{ m['thoughts'] + '\n' }}{% endif %}"
    "{{ m['content'] or '' }}{% if m.get('tool_calls') %}{{ m['tool_calls'] | tojson }}{% endif %}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SIDES = ("padded", "packed", "turns")


def conversations(path, count, thoughts, seed):
    """Draw conversations that have an assistant turn; give every assistant turn thoughts of random words."""
    generator, words, found = random.Random(seed), "so we see that it is one of two".split(), []
    rows: Any = load_dataset("json", data_files=path, split="train").shuffle(seed=seed).select(range(4 * count))
    for row in rows:
        messages = [{name: value for name, value in m.items() if value is not None} for m in row["messages"]]
        if any(message["role"] == "assistant" for message in messages):
            for message in messages:
                if thoughts and message["role"] == "assistant":
                    message["thoughts"] = " ".join(generator.choices(words, k=thoughts))
            found.append({"messages": messages, "tools": json.loads(row.get("tools") or "[]") or None})
    return found[:count]


def model(words):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=words, hidden_size=256, intermediate_size=704, num_hidden_layers=8,
                    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192)
    )  # fmt: skip


def tokenized(rows, tokenizer, longest):
    """Return each turn as tokens and labels, as TRL tokenizes a prompt and its completion."""
    samples = []
    for row in rows:
        for i, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            options = {"tools": row["tools"], "return_dict": True}
            prompt = tokenizer.apply_chat_template(row["messages"][:i], add_generation_prompt=True, **options)
            whole = tokenizer.apply_chat_template(row["messages"][: i + 1], **options)["input_ids"][:longest]
            start = len(prompt["input_ids"])
            if start < len(whole):
                samples.append({"input_ids": whole, "labels": [-100] * start + whole[start:]})
    return Dataset.from_list(samples)


def run(side, data, tokenizer, batch, longest) -> tuple[float, Any]:
    """Train one side for an epoch; return its seconds and its trainer."""
    common = {
        "num_train_epochs": 1, "per_device_train_batch_size": batch, "max_length": longest, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "output_dir": tempfile.mkdtemp(),
    }  # fmt: skip
    lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    made, cls = (SFTConfig(**common), SFTTrainer) if side == "padded" else (
        PackedSFTConfig(**common, check_packing=False, expand_turns=side == "turns", max_tokens_per_microbatch=4096),
        PackedSFTTrainer,
    )  # fmt: skip
    trainer = cls(model(len(tokenizer)), args=made, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    began = time.process_time()
    trainer.train()
    return time.process_time() - began, trainer


def measure(path, tokenizer, args):
    """Measure all sides on a dataset; print its row of the table."""
    rows = conversations(path, args.count, args.thoughts, args.seed)
    samples = tokenized(rows, tokenizer, args.max_length)
    # Tools are a JSON string, as in TRL, because Arrow would fill the fields of one tool into all others.
    whole = Dataset.from_list([{**row, "tools": json.dumps(row["tools"])} for row in rows])
    seconds, saved = {side: [] for side in SIDES}, 0.0
    for _ in range(args.repeats):
        for side in SIDES:
            data = whole if side == "turns" else samples
            took, trainer = run(side, data, tokenizer, args.batch, args.max_length)
            seconds[side].append(took)
            if side == "turns":
                report = trainer.packing_reports["train"]
                saved = report.packed_tokens / (report.packed_tokens - report.shared_tokens)
    tokens = sum(map(len, samples["input_ids"]))
    ratios = {side: [a / b for a, b in zip(seconds["padded"], seconds[side], strict=True)] for side in SIDES[1:]}
    told = [f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" for found in ratios.values()]
    over_packed = statistics.median(a / b for a, b in zip(seconds["packed"], seconds["turns"], strict=True))
    name = path.rsplit("/", 1)[-1].split(".")[0]
    counts = f"{len(rows)} | {len(samples)} | {tokens:,} | {saved:.2f}"
    print(f"| {name} | {counts} | {' | '.join(told)} | {over_packed:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    numbers = {"count": 24, "repeats": 3, "batch": 4, "max_length": 2048, "thoughts": 0, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.chat_template, tokenizer.pad_token = _TEMPLATE, tokenizer.pad_token or tokenizer.eos_token
    print("| data | conversations | turns | tokens | fewer tokens | packed | turns | turns over packed |")
    print("|---|---|---|---|---|---|---|---|")
    for path in args.datasets:
        measure(path, tokenizer, args)


if __name__ == "__main__":
    main()
