"""Rotary embeddings by Liger's kernel.

Shape letters: B rows, L row length, H head dim, R rotated part of it.
"""

from __future__ import annotations

import torch

from .library import DTYPES, LigerKernels, lies_on_cuda, liger_kernels


def rotation_on_cuda(query: torch.Tensor, cos: torch.Tensor) -> LigerKernels | None:
    """Return Liger's functions if they can rotate `query` by `cos`, else `None`."""
    kernels = liger_kernels() if lies_on_cuda(query) and lies_on_cuda(cos) else None
    dtype = torch.promote_types(query.dtype, cos.dtype)
    return kernels if dtype in DTYPES and cos.shape[-1] % 2 == 0 else None


def rotate_by_liger(
    kernels: LigerKernels, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, as Llama does.

    Both halves of `cos` and `sin` must be equal, because the kernel reads the first half only.
    """
    dtype = torch.promote_types(query.dtype, cos.dtype)
    # The kernel overwrites its inputs, so it gets copies: a backward or a hook may still need the inputs. In the
    # backward it overwrites the gradients of the attention, which nothing else reads.
    copies = (x.to(dtype, memory_format=torch.contiguous_format, copy=True).transpose(1, 2) for x in (query, key))
    rotated = kernels.rope.apply(*copies, cos.to(dtype), sin.to(dtype))
    query, key = (x.transpose(1, 2) for x in rotated)  # type: ignore[union-attr]
    return query, key
