"""`trl-packfa bench attention`: time and memory per token of one packed attention, against transformers' own path.

Sides run interleaved in fresh processes, so that peak memory is each one's own; document lengths are those of a real
data set (a JSON list of token counts) or drawn from a log-normal that resembles one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..attention import AttentionArguments, get_backend
from ..layout import PackedLayout

_HEADS, _KEY_VALUE_HEADS, _HEAD_DIM = 8, 2, 64
_WARM_UP, _SECONDS = 2, 1.5
TRANSFORMERS = "transformers-sdpa"


def document_lengths(source: str | None, tokens: int, seed: int) -> list[int]:
    """Lengths in tokens that add up to `tokens`, drawn from a JSON list or a log-normal (median 150)."""
    rng = np.random.default_rng(seed)
    pool = json.loads(Path(source).read_text()) if source else np.exp(rng.normal(5.0, 0.8, 10_000)).astype(int) + 1
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(int(rng.choice(pool)), tokens - sum(lengths)))
    return lengths


def bench_attention(
    *, tokens: list[int], source: str | None = None, repeats: int = 3, dense_up_to: int = 8192
) -> list[dict[str, float | int | str]]:
    """One row per number of tokens and side: medians over `repeats` draws, microseconds and bytes per token.

    The side of transformers builds its T x T mask, so it runs up to `dense_up_to` tokens only.
    """
    rows: list[dict[str, float | int | str]] = []
    for count in tokens:
        sides = ["sdpa", TRANSFORMERS] if count <= dense_up_to else ["sdpa"]
        runs = {side: [_in_process(side, count, source, seed) for seed in range(repeats)] for side in sides}
        for side, results in runs.items():
            seconds = statistics.median(result["seconds"] for result in results)
            memory = statistics.median(result["bytes"] for result in results)
            row = {"tokens": count, "side": side, "us_per_token": round(seconds / count * 1e6, 1)}
            rows.append({**row, "mb_peak": round(memory / 1e6, 1), "kb_per_token": round(memory / count / 1e3, 1)})
    return rows


def _in_process(side: str, tokens: int, source: str | None, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "trl_packfa.bench.attention", side, str(tokens), str(seed), source or ""]
    # Large tensors from the heap, where they are reused, on either side: else page faults drown the arithmetic.
    heap = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **heap})
    return json.loads(result.stdout.splitlines()[-1])


def _measure(side: str, tokens: int, source: str | None, seed: int) -> dict[str, float]:
    """Median seconds of a forward and backward, and the peak memory that it added, in this process."""
    layout = PackedLayout.from_lengths(document_lengths(source, tokens, seed))
    shapes = [(tokens, heads, _HEAD_DIM) for heads in (_HEADS, _KEY_VALUE_HEADS, _KEY_VALUE_HEADS)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    upstream = torch.randn(shapes[0])
    attend = _transformers_side(layout) if side == TRANSFORMERS else _our_side(layout, side)
    before = _peak_memory()
    seconds: list[float] = []
    while sum(seconds[_WARM_UP:]) < _SECONDS:
        start = time.perf_counter()
        attend(*tensors).backward(upstream)
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[_WARM_UP:]), "bytes": _peak_memory() - before}


def _our_side(layout: PackedLayout, backend: str) -> Callable[..., torch.Tensor]:
    arguments = AttentionArguments(scaling=_HEAD_DIM**-0.5)
    return lambda query, key, value: get_backend(backend)(query, key, value, layout, arguments)


def _transformers_side(layout: PackedLayout) -> Callable[..., torch.Tensor]:
    """Mask and attention by transformers' own functions, as an unpatched Llama calls them."""
    from transformers import LlamaConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(hidden_size=_HEADS * _HEAD_DIM, num_attention_heads=_HEADS)
    config._attn_implementation = "sdpa"
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = _HEADS // _KEY_VALUE_HEADS, True
    embeddings, positions = torch.empty(1, layout.num_tokens, 1), layout.position_ids()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        mask = create_causal_mask(config, embeddings, None, None, position_ids=positions)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in qkv)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=_HEAD_DIM**-0.5)[0][0]

    return attend


def _peak_memory() -> int:
    """Peak resident memory of this process, in bytes (Linux and macOS count in different units)."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), sys.argv[4] or None, int(sys.argv[3]))))
