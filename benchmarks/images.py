"""Train a small Idefics3 on images and texts of uneven length: TRL's padded run beside ours.

    python benchmarks/images.py

Each side is a process of its own, and the sides run in turn. The texts have log-normal lengths (median 122 tokens,
sigma 1.0), an image has 64 tokens. Figures: true tokens per second of the whole run, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

# CPU timing: keep large tensors in the heap, where they are reused. glibc reads these when a process starts.
_HEAP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736", "HF_HUB_OFFLINE": "1"}
_VOCABULARY, _WIDTH, _IMAGE = 8192, 512, "<image>"
SIDES = ("TRL, padded", "PackedSFTTrainer")


def build(documents, seed):
    """Build the model, the processor and the dataset."""
    import numpy as np
    import torch
    from datasets import Dataset
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(seed)
    marks = ["<pad>", "<s>", "</s>", "<unk>", _IMAGE, "<fake_token_around_image>", "<global-img>"]
    vocabulary = {word: i for i, word in enumerate([*marks, *(f"w{i}" for i in range(_VOCABULARY - len(marks) - 1))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks[4:]})
    template = (
        "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image> {% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %} </s> {% endfor %}"
    )
    edge = {"longest_edge": 128}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=64, chat_template=template)
    text = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=_WIDTH, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    seen = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Idefics3Config(
        text_config=text, vision_config={**seen, "image_size": 128, "patch_size": 8}, scale_factor=2,
        image_token_id=vocabulary[_IMAGE],
    )  # fmt: skip
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(122), 1.0, documents).astype(int), 8, 2000)
    rows = [" ".join(f"w{i}" for i in generator.integers(0, _VOCABULARY - 64, n)) for n in lengths]
    pictures = [
        Image.new("RGB", (64 + 8 * int(i), 128), (int(i), 80, 90)) for i in generator.integers(0, 9, documents)
    ]
    data = Dataset.from_dict({
        "images": [[picture] for picture in pictures],
        "messages": [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": row}] for row in rows],
    })  # fmt: skip
    return Idefics3ForConditionalGeneration(config), processor, data


def run_side(side, documents, seed):
    """Train one epoch on one side, and print its figures as JSON."""
    import torch
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from trl_packfa import PackedSFTConfig, PackedSFTTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    model, processor, data = build(documents, seed)
    layers = r".*text_model.*(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj|gate_proj)"
    adapter = LoraConfig(r=16, target_modules=layers, task_type="CAUSAL_LM")
    common = {
        "output_dir": tempfile.mkdtemp(), "num_train_epochs": 1, "per_device_train_batch_size": 8, "max_length": None,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    ours = side == SIDES[1]
    args = PackedSFTConfig(check_packing=False, **common) if ours else SFTConfig(**common)
    trainer = (PackedSFTTrainer if ours else SFTTrainer)(
        model, args=args, train_dataset=data, processing_class=processor, peft_config=adapter
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens = logs[-1]["num_tokens"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {
        "side": side, "seconds": round(seconds, 1), "tokens/s": round(tokens / seconds), "peak MB": round(peak),
        "losses": [entry["loss"] for entry in logs],
    }  # fmt: skip
    print("RESULT " + json.dumps(figures), flush=True)


def main():
    """Run both sides in turn and print a row for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help="run this side only, in this process")
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args.documents, args.seed)
        return
    for _ in range(args.repeats):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--documents", str(args.documents)]
            done = subprocess.run(
                [*command, "--seed", str(args.seed)], env={**os.environ, **_HEAP}, capture_output=True, text=True
            )
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            print(found[-1][7:] if found else done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
