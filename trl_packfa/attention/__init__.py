"""Packed attention: one file per backend, and one rule that chooses a backend.

This package uses layouts and tensors only. It imports neither transformers nor trl.
"""

from .backends import BACKENDS, get_backend, refusals
from .base import AttentionArguments, AttentionCall, AttentionRequest, Bias
from .bias import chosen_keys, key_bias, linear_bias
from .capabilities import AttentionBackend, Capabilities
from .dispatch import BackendChoice, resolve

__all__ = [
    "BACKENDS",
    "AttentionArguments",
    "AttentionBackend",
    "AttentionCall",
    "AttentionRequest",
    "BackendChoice",
    "Bias",
    "Capabilities",
    "chosen_keys",
    "get_backend",
    "key_bias",
    "linear_bias",
    "refusals",
    "resolve",
]
