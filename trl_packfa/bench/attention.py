"""`trl-packfa bench attention`: time and memory of one packed attention for several row lengths and mixes.

The results are compared with transformers' own paths, and with the least time that arithmetic and memory traffic take.
Each measurement runs in its own process, so that its peak memory is its own. Sides take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

from ..attention import AttentionRequest
from ..layout import PackedLayout
from ..runtime.datasheet import datasheet_flops
from ..trainers.common.flops import bandwidth, matmul_flops
from .memory import PeakMemory, available_memory
from .mixes import document_lengths, draw_lengths
from .paths import TRANSFORMERS, attend_with, attention_sides, dense_bytes
from .process import HEAP

_WARM_UP, _SECONDS = 2, 1.0
_LAST_LINE = -1
Row = dict[str, Any]


class Heads(NamedTuple):
    """Numbers of query heads and key/value heads, and the size of a head."""

    query: int = 8
    key_value: int = 2
    dim: int = 64


FEW_HEADS = Heads()


class Floors(NamedTuple):
    """Best rates of this machine: floating point operations and bytes per second."""

    flops: float
    bytes: float


def bench_attention(
    *,
    tokens: list[int],
    mixes: list[str],
    sides: list[str] | None = None,
    heads: Heads = FEW_HEADS,
    repeats: int = 3,
    slowest: float = 60.0,
) -> list[Row]:
    """Measure one row per mix, number of tokens and side: medians over `repeats` draws, or the reason for none.

    Args:
        tokens (`list[int]`): row lengths.
        mixes (`list[str]`): names of [`mixes`](MIXES), or JSON files of document lengths.
        sides (`list[str]`, *optional*): names from `paths.attention_sides`; default: all.
        heads ([`Heads`]): heads of the attention; few and small by default, so that a CPU is fast enough.
        repeats (`int`): draws of documents.
        slowest (`float`): skip a side if the arithmetic of one forward and backward takes more seconds than this.

    Raises:
        [`InvalidConfig`] or [`InvalidDataset`]: if there is no such mix, before anything is measured.
    """
    for mix in mixes:
        draw_lengths(mix, 1, seed=0)
    known = attention_sides(_request(heads))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Known GPUs: take the peak of the data sheet, because a product of this size does not fill a GPU.
    peak = datasheet_flops(device, _dtype()) or matmul_flops(2048, 2048, 2048, dtype=_dtype(), device=device)
    floors = Floors(peak, bandwidth(device))
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


def _row(mix: str, tokens: int, side: str, runs: list[dict[str, Any]], reason: str, floor: float) -> Row:
    failed = [run["failed"] for run in runs if "failed" in run]
    row = {"mix": mix.rsplit("/", 1)[-1], "tokens": tokens, "side": side}
    if reason or failed:
        return {**row, "us/token": None, "times the floor": None, "KB/token": None, "remark": reason or failed[0]}
    seconds = statistics.median(run["seconds"] for run in runs)
    memory = statistics.median(run["bytes"] for run in runs)
    return {
        **row,
        "us/token": round(seconds / tokens * 1e6, 1),
        "times the floor": round(seconds / floor, 1),
        "KB/token": round(memory / tokens / 1e3, 1),
        "remark": "",
    }


def _reason(
    side: str, known: dict[str, str], mix: str, tokens: int, heads: Heads, floors: Floors, slowest: float
) -> str:
    """Return the reason to skip a side; an empty string if it runs."""
    if side not in known:
        return f"there is no side '{side}', only {', '.join(known)}"
    if known[side]:
        return f"not here: {known[side]}"
    dense = side == TRANSFORMERS
    if dense and dense_bytes(tokens) > available_memory() / 2:
        return f"its T x T mask takes {dense_bytes(tokens) / 1e9:.0f} GB, {available_memory() / 1e9:.0f} are free"
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
    size = torch.empty(0, dtype=_dtype()).element_size()
    flops, moved = attention_flops(lengths, heads), attention_bytes(sum(lengths), heads, size)
    return max(flops / floors.flops, moved / floors.bytes)


def _in_process(side: str, tokens: int, mix: str, seed: int, heads: Heads) -> dict[str, Any]:
    command = [sys.executable, "-m", "trl_packfa.bench.attention", side, mix, *map(str, (tokens, seed, *heads))]
    result = subprocess.run(command, capture_output=True, text=True, env={**HEAP, **os.environ}, check=False)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[_LAST_LINE:] or [f"exit code {result.returncode}"]
        return {"failed": f"failed: {reason[0]}"}
    return json.loads(result.stdout.splitlines()[-1])


def measure(side: str, tokens: int, mix: str, seed: int, heads: Heads) -> dict[str, float]:
    """Measure in this process: median seconds of a forward and backward, and the peak memory that it adds."""
    layout = PackedLayout.from_lengths(document_lengths(mix, tokens, seed=seed), device=_device())
    shapes = [(tokens, number, heads.dim) for number in (heads.query, heads.key_value, heads.key_value)]
    tensors = [torch.randn(s, device=_device(), dtype=_dtype(), requires_grad=True) for s in shapes]
    upstream = torch.randn_like(tensors[0])
    attend = attend_with(side, layout, heads=heads.query, key_value_heads=heads.key_value, head_dim=heads.dim)
    memory, seconds = PeakMemory(), []
    memory.reset()
    while sum(seconds[_WARM_UP:]) < _SECONDS:
        start = time.perf_counter()
        attend(*tensors).backward(upstream)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[_WARM_UP:]), "bytes": memory.peak() - memory.before}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _request(heads: Heads) -> AttentionRequest:
    return AttentionRequest(torch.device(_device()), _dtype(), heads.dim, heads.query, heads.key_value)


if __name__ == "__main__":
    tokens, seed, *shape = map(int, sys.argv[3:])
    print(json.dumps(measure(sys.argv[1], tokens, sys.argv[2], seed, Heads(*shape))))
