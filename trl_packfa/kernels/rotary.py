"""Rotary embeddings of queries and keys, by Liger's kernel on CUDA.

Shape letters: B rows, L row length, H head dim, R rotated part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .liger import rotate_by_liger, rotation_on_cuda

_IS_PLAIN: ContextVar[bool] = ContextVar("trl_packfa_plain_rotation", default=False)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, overwrites: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, as Llama does.

    Features after the first R stay as they are (partial rotary). The result is that of transformers'
    `apply_rotary_pos_emb`. CUDA uses Liger's kernel, which assumes that the second half of `cos` and `sin` is a copy
    of the first, as in Llama's tables. Compiled graphs and all other cases use transformers' function. `overwrites`
    allows to overwrite query and key, which nobody else may then hold.
    """
    if torch.compiler.is_compiling() or _IS_PLAIN.get() or cos.requires_grad or sin.requires_grad:
        return _rotate_by_transformers(query, key, cos, sin)
    if (kernels := rotation_on_cuda(query, cos)) is None:
        return _rotate_by_transformers(query, key, cos, sin)
    return rotate_by_liger(kernels, query, key, cos, sin, overwrites=overwrites)


def rotates(function: Callable[..., Any]) -> bool:
    """Tell whether a patch's function calls [`rotate`]."""
    return inspect.isfunction(function) and any(
        value is rotate for value in inspect.getclosurevars(function).globals.values()
    )


class PlainRotation:
    """A patch's function from hidden states to query, key and value, with [`rotate`] set to transformers' function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function and return its result."""
        if torch.compiler.is_compiling():  # graphs have no context variables, and use transformers' function anyway
            return self.function(*args)
        token = _IS_PLAIN.set(True)
        try:
            return self.function(*args)
        finally:
            _IS_PLAIN.reset(token)


def _rotate_by_transformers(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    width = cos.shape[-1]
    rotated = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin, unsqueeze_dim=2)
    if width == query.shape[-1]:
        return rotated
    return tuple(torch.cat((r, x[..., width:]), dim=-1) for r, x in zip(rotated, (query, key), strict=True))  # type: ignore[return-value]
