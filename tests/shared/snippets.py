"""Run the code that readers see, unchanged except for small local models instead of Hub names, and two steps."""

import json
import runpy

import tiny
import vision
from tiny_models import small_model
from tiny_models.encoders import EMBEDDINGS, small_encoder
from training import FORMATS, rows
from transformers import TrainingArguments

# What stands behind every Hub name in README, recipes and scripts.
MODELS = {
    "meta-llama/Llama-3.2-1B": "llama", "meta-llama/Llama-3.2-3B": "llama", "Qwen/Qwen3-0.6B": "qwen3",
    "ibm-granite/granite-3.3-2b-base": "granite",
}  # fmt: skip
EMBEDDER = "nomic-ai/modernbert-embed-base"
LLAVA, IMAGES = "llava-hf/llava-1.5-7b-hf", "trl-lib/llava-instruct-mix"
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "1 2 3"} for row in rows(24)]
DATASETS = {
    "trl-lib/tldr": rows(24),
    "trl-lib/Capybara": FORMATS["messages"],
    "trl-lib/ultrafeedback_binarized": PAIRS,
    "sentence-transformers/gooaq": [{"question": row["prompt"], "answer": row["completion"]} for row in rows(24)],
}


def localize(text, folder):
    """Replace every Hub name in the text by a folder with a small stand-in."""

    def place_of(name):
        return folder / "hub" / name.replace("/", "--")

    for name, model_type in MODELS.items():
        if name in text:
            model = small_model(model_type, num_hidden_layers=2, intermediate_size=128)
            text = text.replace(f'"{name}"', repr(tiny.save(place_of(name), model)))
    if EMBEDDER in text:
        path = place_of(EMBEDDER)
        small_encoder("modernbert", EMBEDDINGS).save_pretrained(path)
        tiny.save_tokenizer(path)
        text = text.replace(f'"{EMBEDDER}"', repr(str(path)))
    if LLAVA in text:
        path, data = place_of(LLAVA), place_of(IMAGES)
        vision.model().save_pretrained(path)
        vision.processor().save_pretrained(path)
        data.mkdir(parents=True)
        vision.messages().to_parquet(data / "train.parquet")
        text = text.replace(f'"{LLAVA}"', repr(str(path))).replace(f'"{IMAGES}"', repr(str(data)))
    for name, data in DATASETS.items():
        if name in text:
            path = place_of(name)
            path.mkdir(parents=True)
            (path / "train.jsonl").write_text("\n".join(map(json.dumps, data)))
            text = text.replace(f'"{name}"', repr(str(path)))
    return text


def shorten_training(monkeypatch):
    """Limit every later training to two steps on the CPU."""
    settle = TrainingArguments.__post_init__

    def shortened(args):
        args.max_steps, args.use_cpu, args.bf16, args.report_to, args.disable_tqdm = 2, True, False, "none", True
        settle(args)

    monkeypatch.setattr(TrainingArguments, "__post_init__", shortened)


def run_shortened(text, folder, monkeypatch):
    """Run a Python script with short training in its own folder and return its globals."""
    monkeypatch.chdir(folder)
    shorten_training(monkeypatch)
    script = folder / "script.py"
    script.write_text(localize(text, folder))
    return runpy.run_path(str(script))
