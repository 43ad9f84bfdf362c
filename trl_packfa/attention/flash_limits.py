"""Limits that the FlashAttention kernels share, whichever package they come from."""

from __future__ import annotations

import torch

from ..errors import NoBackend
from ..layout import PackedLayout
from .base import AttentionRequest

_MAX_HEAD_DIM = 256
# FlashAttention 2's backward indexes its padded accumulator, (T + 128 * S) * N * H elements, with 32-bit integers
# (flash-attention issue 1311).
_PADDED_TOKENS_PER_DOCUMENT = 128
_MAX_ELEMENTS = 2**31
BIAS = "adds no term to the scores, as sparse key selection and position biases do"


def flash_refusals(request: AttentionRequest, *, min_capability: tuple[int, int]) -> list[str]:
    """What every FlashAttention kernel needs of a request: a CUDA device, half precision, a head dim up to 256."""
    reasons = []
    if request.device.type != "cuda":
        reasons.append(f"needs a CUDA or ROCm device, the model is on {request.device}")
    elif torch.version.hip is None and torch.cuda.get_device_capability(request.device) < min_capability:
        found = torch.cuda.get_device_capability(request.device)
        reasons.append(f"needs compute capability {_dotted(min_capability)} or newer, this GPU has {_dotted(found)}")
    if request.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"needs float16 or bfloat16, got {str(request.dtype).removeprefix('torch.')}")
    if request.head_dim > _MAX_HEAD_DIM or request.head_dim % 8:
        reasons.append(f"needs a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, got {request.head_dim}")
    if request.bias:
        reasons.append(BIAS)
    return reasons


def require_indexable(query: torch.Tensor, layout: PackedLayout, backend: str) -> None:
    """Refuse a batch whose backward would overflow FlashAttention 2's 32-bit index (silent garbage otherwise)."""
    _, num_heads, head_dim = query.shape
    padded = layout.num_tokens + _PADDED_TOKENS_PER_DOCUMENT * layout.num_documents
    if query.requires_grad and padded * num_heads * head_dim >= _MAX_ELEMENTS:
        raise NoBackend(
            f"attention backend '{backend}' cannot index this batch: {layout.num_tokens} tokens in "
            f"{layout.num_documents} documents, {num_heads} heads of {head_dim}.",
            why=[f"(tokens + 128 * documents) * heads * head_dim is {padded * num_heads * head_dim}, the limit 2^31"],
            do="Lower per_device_train_batch_size or max_length, or choose attention_backend='flex' or 'sdpa'.",
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
