"""Measure time and memory of one packed attention, forward and backward, for several row lengths and mixes.

    python benchmarks/attention_speed.py --tokens 2048 8192 --lengths LENGTHS.json

The results are compared with transformers' own paths, and with the least time that arithmetic and memory traffic take.
Each measurement runs in its own process, so that its peak memory is its own. Sides take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from transformers import AttentionInterface, LlamaConfig
from transformers.masking_utils import create_causal_mask

from trl_packfa import PackedLayout
from trl_packfa.attention import BACKENDS, AttentionArguments, AttentionRequest, get_backend
from trl_packfa.bench.data import MIXES
from trl_packfa.bench.environment import large_heap
from trl_packfa.bench.measuring import peak_bytes, reset_peak
from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.data.flops import best_seconds, matmul_flops
from trl_packfa.errors import InvalidConfig
from trl_packfa.plan.gather import read_length_list
from trl_packfa.trainers.sft.datasheet import datasheet_flops

# Sides with transformers' own mask and attention, and their name in transformers.
TRANSFORMERS = "transformers-sdpa"
_OWN = {TRANSFORMERS: "sdpa", "transformers-flex": "flex_attention"}
_DEVICE, _DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
_WARM_UP, _SECONDS = 2, 1.0
_COPIED_BYTES = 2**28
# The most documents that are drawn for a row.
_DRAWN = 20_000
# Bytes of the dense path per pair of query and key: the mask as bool and as float, and temporary results.
_DENSE_BYTES = 12
Row = dict[str, Any]


class Heads(NamedTuple):
    """Numbers of query heads and key/value heads, and the size of a head."""

    query: int = 8
    key_value: int = 2
    dim: int = 64


class Floors(NamedTuple):
    flops: float
    bytes: float


def bench_attention(
    *,
    tokens: list[int],
    mixes: list[str],
    sides: list[str] | None = None,
    heads: Heads = Heads(),  # noqa: B008  # immutable
    repeats: int = 3,
    slowest: float = 60.0,
) -> list[Row]:
    """Measure one row per mix, row length in `tokens` and side: medians over `repeats` draws, or the reason for none.

    The heads are few and small by default, so that a CPU is fast enough. A side is skipped if the arithmetic of one
    forward and backward takes more than `slowest` seconds.

    Raises:
        [`InvalidConfig`] or [`InvalidDataset`]: if there is no such mix, before anything is measured.
    """
    for mix in mixes:
        draw_lengths(mix, 1, seed=0)
    device = torch.device(_DEVICE)
    known = attention_sides(AttentionRequest(device, _DTYPE, heads.dim, heads.query, heads.key_value))
    # Known GPUs: take the peak of the data sheet, because a product of this size does not fill a GPU.
    peak = datasheet_flops(device, _DTYPE) or matmul_flops(2048, 2048, 2048, dtype=_DTYPE, device=device)
    floors = Floors(peak, _bandwidth(device))
    rows = []
    for mix in mixes:
        for count in tokens:
            skipped = {side: _reason(side, known, mix, count, heads, floors, slowest) for side in sides or known}
            running = [side for side, reason in skipped.items() if not reason]
            runs: dict[str, list[dict[str, Any]]] = {side: [] for side in running}
            for seed in range(repeats):
                for side in running:
                    runs[side].append(_in_process(side, count, mix, seed, heads))
            drawn = [document_lengths(mix, count, seed=seed) for seed in range(repeats)]
            floor = statistics.median(_floor(lengths, heads, floors) for lengths in drawn)
            rows += [_row(mix, count, side, runs.get(side, []), skipped[side], floor) for side in skipped]
    return rows


def _bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that memory reads and writes in a large copy."""
    source = torch.randn(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / best_seconds(lambda: target.copy_(source), 0.5)


def draw_lengths(mix: str, count: int, *, seed: int) -> np.ndarray:
    """Draw `count` document lengths from a mix or, if `mix` is a path, from a JSON list.

    Raises:
        [`InvalidConfig`]: if `mix` is neither.
    """
    rng = np.random.default_rng(seed)
    if mix in MIXES:
        return MIXES[mix](rng, count)
    if not mix.endswith(".json"):
        raise InvalidConfig(f"there is no mix of lengths '{mix}'.", do=f"Pass {', '.join(MIXES)}, or a .json file.")
    return rng.choice(read_length_list(mix), count)


def document_lengths(mix: str, tokens: int, *, seed: int) -> list[int]:
    """Return lengths from a mix that add up to `tokens`; the last length is cut."""
    lengths = draw_lengths(mix, min(tokens, _DRAWN), seed=seed)
    before = np.cumsum(lengths) - lengths
    kept = lengths[before < tokens]
    kept[-1] = min(int(kept[-1]), tokens - int(before[len(kept) - 1]))
    return [*kept.tolist(), *([tokens - int(kept.sum())] if kept.sum() < tokens else [])]


def _row(mix: str, tokens: int, side: str, runs: list[dict[str, Any]], reason: str, floor: float) -> Row:
    remark = reason or next((run["failed"] for run in runs if "failed" in run), "")
    figures: dict[str, float | None] = dict.fromkeys(("us/token", "times the floor", "KB/token"))
    if not remark:
        seconds, memory = (statistics.median(run[name] for run in runs) for name in ("seconds", "bytes"))
        found = (seconds / tokens * 1e6, seconds / floor, memory / tokens / 1e3)
        figures = {name: round(value, 1) for name, value in zip(figures, found, strict=True)}
    return {"mix": mix.rsplit("/", 1)[-1], "tokens": tokens, "side": side, **figures, "remark": remark}


def _reason(
    side: str, known: dict[str, str], mix: str, tokens: int, heads: Heads, floors: Floors, slowest: float
) -> str:
    """Return the reason to skip a side; an empty string if it runs."""
    if side not in known:
        return f"there is no side '{side}', only {', '.join(known)}"
    if known[side]:
        return f"not here: {known[side]}"
    dense, mask = side == TRANSFORMERS, _DENSE_BYTES * tokens * tokens
    free = torch.cuda.mem_get_info()[0] if _DEVICE == "cuda" else psutil.virtual_memory().available
    if dense and mask > free / 2:
        return f"its T x T mask takes {mask / 1e9:.0f} GB, {free / 1e9:.0f} are free"
    lengths = [tokens] if dense else document_lengths(mix, tokens, seed=0)
    least = attention_flops(lengths, heads) * (2 if dense else 1) / floors.flops
    return f"its arithmetic alone takes {least:.0f} s" if least > slowest else ""


def attention_flops(lengths: list[int], heads: Heads) -> float:
    """Return the floating point operations of causal attention over documents, forward and backward.

    Two products forward and four backward over half of each square; nothing is recomputed.
    """
    return 6.0 * heads.query * heads.dim * sum(n * n for n in lengths)


def attention_bytes(tokens: int, heads: Heads, size: int) -> float:
    """Return the bytes to read and write once: query, key, value, output, and the gradients of all."""
    return 6.0 * (heads.query + heads.key_value) * heads.dim * tokens * size


def _floor(lengths: list[int], heads: Heads, floors: Floors) -> float:
    """Return the least seconds that any attention needs on this machine."""
    moved = attention_bytes(sum(lengths), heads, _DTYPE.itemsize)
    return max(attention_flops(lengths, heads) / floors.flops, moved / floors.bytes)


def _in_process(side: str, tokens: int, mix: str, seed: int, heads: Heads) -> dict[str, Any]:
    try:
        with large_heap(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, side, tokens, mix, seed, heads).result()
    except Exception as error:  # whatever a side raises, also if its process was killed
        return {"failed": f"failed: {type(error).__name__}: {error}"}


def measure(side: str, tokens: int, mix: str, seed: int, heads: Heads) -> dict[str, float]:
    """Measure in this process: median seconds of a forward and backward, and the peak memory that it adds."""
    layout = PackedLayout.from_lengths(document_lengths(mix, tokens, seed=seed), device=_DEVICE)
    shapes = [(tokens, number, heads.dim) for number in (heads.query, heads.key_value, heads.key_value)]
    tensors = [torch.randn(s, device=_DEVICE, dtype=_DTYPE, requires_grad=True) for s in shapes]
    upstream, attend = torch.randn_like(tensors[0]), attend_with(side, layout, heads)
    reset_peak()
    before, seconds = peak_bytes(), []
    while sum(seconds[_WARM_UP:]) < _SECONDS:
        start = time.perf_counter()
        attend(*tensors).backward(upstream)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[_WARM_UP:]), "bytes": peak_bytes() - before}


def attention_sides(request: AttentionRequest) -> dict[str, str]:
    """Return every side with the reason why it cannot run on this machine; an empty string if it can."""
    sides = {b.name: "; ".join(b.refusals(request)) for b in BACKENDS if b.capabilities.is_selectable}
    flex = "" if request.device.type == "cuda" else "on a CPU, flex_attention has no backward"
    return {**sides, **dict(zip(_OWN, ("", flex), strict=True))}


def attend_with(side: str, layout: PackedLayout, heads: Heads) -> Callable[..., torch.Tensor]:
    """Return the attention function of a side: query `(T, N, H)`, key and value `(T, K, H)` to output `(T, N, H)`.

    transformers' sides call its mask and attention functions, as an unpatched Llama does.
    """
    scaling = heads.dim**-0.5
    if side not in _OWN:
        call = AttentionArguments(scaling=scaling).on(layout.attention)
        return lambda query, key, value: get_backend(side)(query, key, value, call)
    config = LlamaConfig(hidden_size=heads.query * heads.dim, num_attention_heads=heads.query)
    config._attn_implementation = _OWN[side]
    attention: Any = AttentionInterface()[_OWN[side]]
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads.query // heads.key_value, True
    positions = layout.position_ids()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        embeddings = qkv[0].new_empty(1, layout.num_tokens, 1)
        mask = create_causal_mask(config, embeddings, None, None, position_ids=positions)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in qkv)
        return attention(module, query, key, value, mask, scaling=scaling)[0][0]

    return attend


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(10, 18)], help="row lengths")
    parser.add_argument("--mixes", nargs="+", default=["even", "uneven"], help=f"{', '.join(MIXES)}, or a .json file")
    parser.add_argument("--lengths", nargs="+", default=[], help="JSON lists of document lengths, instead of mixes")
    parser.add_argument("--sides", nargs="+", help="backends and transformers' paths (default: all)")
    parser.add_argument("--heads", type=int, default=Heads().query, help="query heads")
    parser.add_argument("--key_value_heads", type=int, default=Heads().key_value, help="key/value heads")
    parser.add_argument("--head_dim", type=int, default=Heads().dim, help="size of a head")
    parser.add_argument("--repeats", type=int, default=3, help="number of random draws of documents")
    parser.add_argument("--slowest", type=float, default=60.0, help="skip a side that needs more seconds than this")
    add_json(parser)
    args = parser.parse_args(argv)
    rows = bench_attention(
        tokens=args.tokens,
        mixes=args.lengths or args.mixes,
        sides=args.sides,
        heads=Heads(args.heads, args.key_value_heads, args.head_dim),
        repeats=args.repeats,
        slowest=args.slowest,
    )
    return print_rows(rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
