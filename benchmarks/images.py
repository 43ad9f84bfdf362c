"""Train a small Qwen3-VL on images of uneven sizes and texts of uneven lengths: TRL's padded run beside ours.

    python benchmarks/images.py

Each side is a process of its own, and the sides run in turn. The texts have log-normal lengths (median 122 tokens,
sigma 1.0), an image has 4 to 100 tokens. Figures: true tokens per second of the whole run, CPU seconds (for a machine
with other work on it), and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.bench.environment import large_heap
from trl_packfa.memory import resident_peak

_VOCABULARY, _WIDTH, _PATCH = 8192, 512, 16
_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PADDED = "TRL, padded"
SIDES = (PADDED, "minibatch", "step")


class WithoutVideos(Qwen3VLProcessor):
    """Qwen3-VL's processor without a video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)


def build(documents, seed):
    torch.manual_seed(seed)
    marks = ["<pad>", "<s>", "</s>", "<unk>", *_MARKS]
    vocabulary = {word: i for i, word in enumerate([*marks, *(f"w{i}" for i in range(_VOCABULARY - len(marks)))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    template = (
        "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part['text'] }}{% endif %}{% endfor %} </s> "
        "{% endfor %}"
    )
    size = {"shortest_edge": 64 * 64, "longest_edge": 320 * 320}
    images = Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=2, temporal_patch_size=2, size=size)
    processor = WithoutVideos(images, tokenizer, chat_template=template)
    text = {
        "vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True, "rope_theta": 1e6,
        },
    }  # fmt: skip
    seen = {
        "depth": 4, "hidden_size": 192, "intermediate_size": 768, "num_heads": 4, "patch_size": _PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": _WIDTH,
        "num_position_embeddings": 400, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids: Any = {name: vocabulary[mark] for name, mark in zip(names, _MARKS, strict=True)}
    config = Qwen3VLConfig(text_config=text, vision_config=seen, **ids)
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(122), 1.0, documents).astype(int), 8, 2000)
    rows = [" ".join(f"w{i}" for i in generator.integers(0, _VOCABULARY - 64, n)) for n in lengths]
    edges = 64 + 32 * generator.integers(0, 9, (documents, 2))
    pictures = [Image.new("RGB", (int(w), int(h)), (int(w) % 256, 80, 90)) for w, h in edges]
    data = Dataset.from_dict({
        "images": [[picture] for picture in pictures],
        "messages": [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": row}] for row in rows],
    })  # fmt: skip
    return Qwen3VLForConditionalGeneration(config), processor, data


def run_side(side, documents, seed):
    """Train one epoch on one side and return its figures."""
    torch.set_num_threads(os.cpu_count() or 1)
    model, processor, data = build(documents, seed)
    layers = r".*language_model.*(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj|gate_proj)"
    adapter = LoraConfig(r=16, target_modules=layers, task_type="CAUSAL_LM")
    common = {
        "output_dir": tempfile.mkdtemp(), "num_train_epochs": 1, "per_device_train_batch_size": 4, "max_length": None,
        "gradient_accumulation_steps": 4,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    ours = side != PADDED
    args = PackedSFTConfig(check_packing=False, packing_strategy=side, **common) if ours else SFTConfig(**common)
    trainer = (PackedSFTTrainer if ours else SFTTrainer)(
        model, args=args, train_dataset=data, processing_class=processor, peft_config=adapter
    )
    started, worked = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens = logs[-1]["num_tokens"]
    return {
        "side": side, "seconds": round(seconds, 1), "CPU seconds": round(worked, 1),
        "tokens/s": round(tokens / seconds), "peak MB": round(resident_peak() / 2**20),
        "micro-batches": [entry.get("micro_batches") for entry in logs], "losses": [entry["loss"] for entry in logs],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    for _ in range(args.repeats):
        for side in SIDES:
            # Large tensors stay in the heap, where they are reused. glibc reads this when a process starts.
            with large_heap(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                print(json.dumps(pool.submit(run_side, side, args.documents, args.seed).result()), flush=True)


if __name__ == "__main__":
    main()
