"""Rotary embeddings by Liger.

Shape letters: B rows, L row length, H head dim, R rotated part of it.
"""

from __future__ import annotations

import torch

from .library import DTYPES, LigerKernels, lies_on_cuda, liger_kernels


def rotation_on_cuda(query: torch.Tensor, cos: torch.Tensor) -> LigerKernels | None:
    """Liger's functions, if they can rotate `query` by `cos`."""
    kernels = liger_kernels() if lies_on_cuda(query) and lies_on_cuda(cos) else None
    dtype = torch.promote_types(query.dtype, cos.dtype)
    return kernels if dtype in DTYPES and cos.shape[-1] % 2 == 0 else None


def rotate_by_liger(
    kernels: LigerKernels, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's rotation of `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, whose halves are
    the same: the kernel reads the first."""
    dtype = torch.promote_types(query.dtype, cos.dtype)
    # The kernel writes over its inputs, which their maker may have kept for a backward or a hook: it is given copies.
    # In the backward it writes over the gradients, which come straight out of the attention and have no other reader.
    copies = (x.to(dtype, memory_format=torch.contiguous_format, copy=True).transpose(1, 2) for x in (query, key))
    rotated = kernels.rope.apply(*copies, cos.to(dtype), sin.to(dtype))
    query, key = (x.transpose(1, 2) for x in rotated)  # type: ignore[union-attr]
    return query, key
