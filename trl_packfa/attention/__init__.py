"""Packed attention: one file a backend, one rule to choose between them.

Knows layouts and tensors; imports neither transformers nor trl (`bridge.py` excepted).
"""

from .request import AttentionArguments, AttentionBackend, AttentionRequest
from .resolve import BACKENDS, BackendChoice, get_backend, refusals, resolve

__all__ = [
    "BACKENDS",
    "AttentionArguments",
    "AttentionBackend",
    "AttentionRequest",
    "BackendChoice",
    "get_backend",
    "refusals",
    "resolve",
]
