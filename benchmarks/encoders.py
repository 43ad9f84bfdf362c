"""Compare a training step and `encode` of encoders with and without padding: tokens a second, side by side.

    PYTHONPATH=tools:tests/shared python benchmarks/encoders.py [--types bert modernbert] [--repeats 3]

BERT-base and ModernBERT-base shapes with random weights and a small vocabulary, in float32 on a CPU; 16 texts a batch
with log-normal lengths (median 60 tokens, at most 512), as instruction data has. Sides run in turn; the table shows
the median and the range of the ratio. `encode` needs sentence-transformers and sorts texts by length in both sides.
"""

import argparse
import statistics
import tempfile
import time

import tiny
import torch
from tiny_models.encoders import small_encoder
from transformers import logging

import trl_packfa

_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 512,
}  # fmt: skip
_SHAPES = {
    "bert": _BASE,
    "modernbert": {**_BASE, "intermediate_size": 1152, "num_hidden_layers": 22, "local_attention": 128,
                   "global_attn_every_n_layers": 3},
}  # fmt: skip
_ROWS, _TEXTS, _LONGEST = 16, 128, 500


def lengths(count, seed=0):
    """Draw lengths of texts in tokens."""
    drawn = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.9 + 4.1)
    return drawn.clamp(4, _LONGEST).int().tolist()


def padded_batch(rows):
    """Pad random token ids of these lengths on the right."""
    ids, mask = (
        torch.zeros(len(rows), max(rows), dtype=torch.long),
        torch.zeros(len(rows), max(rows), dtype=torch.long),
    )
    for i, length in enumerate(rows):
        ids[i, :length], mask[i, :length] = torch.randint(3, 97, (length,)), 1
    return {"input_ids": ids, "attention_mask": mask}


def timed(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(padded, free, repeats):
    """Run both sides in turn, after one run of each; return both times and the ratios."""
    padded()
    free()
    times = [(timed(padded), timed(free)) for _ in range(repeats)]
    return [statistics.median(side) for side in zip(*times, strict=True)], [a / b for a, b in times]


def train_step(model, batch):
    def run():
        model.zero_grad()
        labels = torch.arange(len(batch["input_ids"])) % 2
        model(**batch, labels=labels).loss.backward()

    return run


def embed(folder, texts):
    """Return a run of `encode` by a model of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = SentenceTransformer(modules=[Transformer(folder), Pooling(768)], device="cpu")
    return model, lambda: model.encode(texts, batch_size=32)


def show(name, tokens, times, ratios):
    speeds = " | ".join(f"{tokens / seconds:,.0f}" for seconds in times)
    middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {name} | {speeds} | {middle} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="compare encoders with and without padding")
    parser.add_argument("--types", nargs="+", default=list(_SHAPES), choices=list(_SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    rows = lengths(_ROWS)
    share = len(rows) * max(rows) / sum(rows)
    print(f"a batch computes {share:.2f} times its true tokens; {torch.get_num_threads()} threads")
    print("| run | padded, tokens/s | without pads, tokens/s | times as fast |\n|---|---|---|---|")
    for name in args.types:
        stock = small_encoder(name, "SequenceClassification", **_SHAPES[name]).train()
        free = trl_packfa.patch(small_encoder(name, "SequenceClassification", **_SHAPES[name]).train(), unpad=True)
        batch = padded_batch(rows)
        show(
            f"{name}, training step",
            sum(rows),
            *compare(train_step(stock, batch), train_step(free, batch), args.repeats),
        )
        del stock, free
        counts = lengths(_TEXTS, seed=1)
        texts = [tiny.words(count - 2, seed=i) for i, count in enumerate(counts)]
        with tempfile.TemporaryDirectory() as folder:
            small_encoder(name, "MaskedLM", **_SHAPES[name]).save_pretrained(folder)
            tokenizer = tiny.tokenizer()
            tokenizer.model_max_length = 512
            tokenizer.save_pretrained(folder)
            (_, padded), (model, own) = embed(folder, texts), embed(folder, texts)
            trl_packfa.patch(model, unpad=True)
            show(f"{name}, encode", sum(counts), *compare(padded, own, args.repeats))


if __name__ == "__main__":
    main()
