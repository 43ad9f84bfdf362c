"""Measure the parts of a CPU layer besides matrix products: transformers' and torch's code and ours, in turn.

Each part is timed forward and backward.

    python benchmarks/layer_parts.py --tokens 1400 8192

Shape letters: B rows, L row length, G documents of a group, N heads, H head dim.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from trl_packfa.attention import AttentionArguments, get_backend
from trl_packfa.autocast import HALF
from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.errors import InvalidConfig
from trl_packfa.kernels.norms import RMSNormOverride
from trl_packfa.kernels.rotary import rotate
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.call_context import packed_call

Act = Callable[[], Any]
DTYPES = ("float32", "bfloat16", "float16")
_HEADS, _HEAD_DIM = 8, 64
# Document lengths with attention that a CPU may compute faster in float32 than in half precision, at least in part.
_DOCUMENTS = (32, 128, 256, 512, 1024)


def bench_layer(*, tokens: Sequence[int], dtypes: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Measure the milliseconds of each part, theirs and ours, and our speed-up with its quartiles in brackets.

    `tokens` are row lengths of rotation and norm; attention has 1,024 tokens in documents.

    Raises:
        [`InvalidConfig`]: for rows without tokens, or fewer than 2 pairs.
    """
    if min(tokens) < 1 or repeats < 2:
        raise InvalidConfig(
            f"tokens={list(tokens)}, repeats={repeats}.", do="Pass 1 token or more, and 2 repeats or more."
        )
    rows = []
    for dtype in (getattr(torch, name) for name in dtypes):
        parts = {f"rotation, {count:,} tokens": _rotation(count, dtype) for count in tokens}
        parts |= {f"RMSNorm, {count:,} tokens": _norm(count, dtype) for count in tokens}
        if dtype in HALF:
            parts |= {f"attention, documents of {n:,}": _attention(n, dtype) for n in _DOCUMENTS}
        rows += [{"part": name, "dtype": str(dtype)[6:], **_in_turn(*both, repeats)} for name, both in parts.items()]
    return rows


def _rotation(tokens: int, dtype: torch.dtype) -> tuple[Act, Act]:
    heads = [torch.randn(1, tokens, _HEADS, _HEAD_DIM, dtype=dtype).requires_grad_() for _ in range(2)]
    tables, upstream = torch.randn(2, 1, tokens, _HEAD_DIM, dtype=dtype), [torch.randn_like(x) for x in heads]

    def run(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], **options: Any) -> Any:
        return torch.autograd.grad(function(*heads, *tables, **options), heads, upstream)

    return lambda: run(apply_rotary_pos_emb, unsqueeze_dim=2), lambda: run(rotate)


def _norm(tokens: int, dtype: torch.dtype) -> tuple[Act, Act]:
    norm = LlamaRMSNorm(_HEADS * _HEAD_DIM).to(dtype).requires_grad_(False)
    ours, layout = RMSNormOverride(norm), PackedLayout.from_lengths((tokens,))
    x = torch.randn(1, tokens, _HEADS * _HEAD_DIM, dtype=dtype).requires_grad_()
    upstream = torch.randn_like(x)

    def packed() -> Any:
        with packed_call(layout):
            return torch.autograd.grad(ours(x), x, upstream)

    return lambda: torch.autograd.grad(norm.forward(x), x, upstream), packed


def _attention(length: int, dtype: torch.dtype) -> tuple[Act, Act]:
    lengths = (length,) * (_DOCUMENTS[-1] // length)
    layout, arguments = PackedLayout.from_lengths(lengths), AttentionArguments(scaling=_HEAD_DIM**-0.5)
    shape = (layout.num_tokens, _HEADS, _HEAD_DIM)
    qkv = q, k, v = tuple(torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn_like(q)

    def theirs() -> torch.Tensor:
        query, key, value = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(0, 1)

    def run(attend: Act) -> Any:
        return torch.autograd.grad(attend(), qkv, upstream)

    return lambda: run(theirs), lambda: run(lambda: get_backend("sdpa")(q, k, v, arguments.on(layout.attention)))


def _in_turn(theirs: Act, ours: Act, repeats: int) -> dict[str, Any]:
    times: tuple[list[float], list[float]] = ([], [])
    for act in (theirs, ours):
        act()
    for _ in range(repeats):
        for act, seconds in zip((theirs, ours), times, strict=True):
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles([t / o for t, o in zip(*times, strict=True)], n=4)
    ms = [round(statistics.median(seconds) * 1e3, 2) for seconds in times]
    return {"theirs, ms": ms[0], "ours, ms": ms[1], "times": f"{middle:.2f} ({low:.2f} to {high:.2f})"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1400, 8192], help="row lengths")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES[:2]))
    parser.add_argument("--repeats", type=int, default=41, help="pairs of runs, at least 2")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    return print_rows(bench_layer(**options), as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
