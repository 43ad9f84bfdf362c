"""Compare a training step and `encode` of encoders with and without padding: tokens a second and memory.

    PYTHONPATH=tools:tests/shared python benchmarks/encoders.py [--types bert modernbert] [--repeats 3]
    ... --lengths LENGTHS.json --texts TEXTS.jsonl --tokenizer FOLDER --count 1000 --encode minilm
    ... --types --encode pretrained --pretrained FOLDER --texts TEXTS.jsonl --count 1000

BERT-base, ModernBERT-base and MiniLM shapes with random weights, in float32. A training step has 16 texts (`--rows`);
lengths are log-normal (median 60 tokens), or drawn from a JSON list, and cut to 512 (`--longest`). `encode` gets
random words in such lengths, or the prompts of a dataset. Sides run in turn in one process; the table shows the median
and the range of the ratio. Each side's peak memory is that of a process of its own. `encode` needs
sentence-transformers, which sorts texts by length.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import tiny
import torch
from datasets import load_dataset
from padded import padded
from tiny_models.encoders import EMBEDDINGS, small_encoder
from transformers import AutoTokenizer, logging

import trl_packfa
from trl_packfa.memory import resident_peak

_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 512,
}  # fmt: skip
_SHAPES = {
    "bert": _BASE,
    "modernbert": {**_BASE, "intermediate_size": 1152, "num_hidden_layers": 22, "local_attention": 128,
                   "global_attn_every_n_layers": 3},
    "minilm": {**_BASE, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
}  # fmt: skip


def encoder(shape, head, **sizes):
    return small_encoder("bert" if shape == "minilm" else shape, head, **{**_SHAPES[shape], **sizes})


def lengths(count, args):
    """Draw lengths of texts in tokens, from a JSON list if there is one."""
    if args.lengths:
        found = json.load(open(args.lengths))
        return [min(n, args.longest) for n in random.Random(args.seed).sample(found, count)]
    drawn = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(args.seed)) * 0.9 + 4.1)
    return drawn.clamp(4, args.longest - 12).int().tolist()


def training_step(args, shape):
    """Return a function that makes a side's training step, and the step's true tokens."""
    rows = lengths(args.rows, args)
    batch = padded([torch.randint(3, 97, (length,)) for length in rows], extra=0)

    def side(free):
        model = encoder(shape, "SequenceClassification", max_position_embeddings=max(512, args.longest)).train()
        if free:
            trl_packfa.patch(model, unpad=True)

        def step():
            model.zero_grad()
            model(**batch, labels=torch.arange(args.rows) % 2).loss.backward()

        return step

    return side, sum(rows), len(rows) * max(rows) / sum(rows)


def random_sentence_transformer(shape, tokenizer):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with tempfile.TemporaryDirectory() as folder:
        encoder(shape, EMBEDDINGS, vocab_size=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        modules = [Transformer(folder), Pooling(_SHAPES[shape]["hidden_size"])]
        return SentenceTransformer(modules=modules, device="cpu")


def random_tokenizer(args):
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else tiny.tokenizer()
    tokenizer.model_max_length = args.longest
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def texts_to_encode(args):
    """Return the prompts of a dataset, or random words."""
    if args.texts:
        data = load_dataset("json", data_files=args.texts, split="train").shuffle(seed=args.seed)
        return list(data.select(range(args.count))["prompt"])
    drawn = lengths(args.count, args)
    return [tiny.words(max(1, count - 2), seed=i) for i, count in enumerate(drawn)]


def encoding(args, shape):
    """Return a function that makes a side's `encode`, the true tokens, and what batches of 32 in order compute."""
    from sentence_transformers import SentenceTransformer

    texts, tokenizer = texts_to_encode(args), random_tokenizer(args)
    if shape == "pretrained":
        model = SentenceTransformer(args.pretrained, device="cpu")
        tokenizer, tokenizer.model_max_length = model.tokenizer, model.max_seq_length
    counts = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    longest_first = sorted(counts, reverse=True)
    computed = sum(len(longest_first[i : i + 32]) * longest_first[i] for i in range(0, len(counts), 32))

    def side(free):
        if shape == "pretrained":
            model = SentenceTransformer(args.pretrained, device="cpu")
        else:
            model = random_sentence_transformer(shape, tokenizer)
        if free:
            trl_packfa.patch(model, unpad=True)
        return lambda: model.encode(texts, batch_size=32)

    return side, sum(counts), computed / sum(counts)


RUNS = {"step": training_step, "encode": encoding}


def timed(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def peak(kind, shape, free, args):
    """Run one side once in this process, and return the peak memory of the process in MB."""
    logging.set_verbosity_error()
    RUNS[kind](args, shape)[0](free)()
    return resident_peak() // 2**20


def compare(kind, shape, args):
    """Run both sides in turn after one run of each, and print a row."""
    # First, while this process holds no model: a padded ModernBERT-base on FLAN-like lengths takes 13 GB.
    peaks = []
    for free in (False, True):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks.append(pool.submit(peak, kind, shape, free, args).result())
    memory = " | ".join(f"{found:,} MB" for found in peaks)
    side, tokens, computed = RUNS[kind](args, shape)
    with_pads, free = side(False), side(True)
    if kind == "step":
        for warm_up in (with_pads, free):
            warm_up()
    times = [(timed(with_pads), timed(free)) for _ in range(args.repeats)]
    speeds = " | ".join(f"{tokens / statistics.median(each):,.0f}" for each in zip(*times, strict=True))
    ratios = [a / b for a, b in times]
    middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {shape}, {kind} | {computed:.2f} | {speeds} | {middle} | {memory} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="compare encoders with and without padding")
    parser.add_argument("--types", nargs="*", default=["bert", "modernbert"], choices=list(_SHAPES))
    parser.add_argument("--encode", nargs="*", default=["bert"], choices=[*_SHAPES, "pretrained"])
    parser.add_argument("--pretrained", help="folder of a SentenceTransformer, for `--encode pretrained`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", help="JSON list of lengths in tokens")
    parser.add_argument("--texts", help="dataset file with a column `prompt`")
    parser.add_argument("--tokenizer", help="folder of a tokenizer for these texts")
    parser.add_argument("--count", type=int, default=128, help="texts to encode")
    parser.add_argument("--rows", type=int, default=16, help="texts of a training step")
    parser.add_argument("--longest", type=int, default=512, help="longest text in tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.set_verbosity_error()
    print(f"{torch.get_num_threads()} threads")
    print("| run | computed by true tokens | padded, tokens/s | without pads | times as fast | peak memory, padded "
          "| without pads |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for kind, shapes in (("step", args.types), ("encode", args.encode)):
        for shape in shapes:
            compare(kind, shape, args)


if __name__ == "__main__":
    main()
