"""Packed attention: one file per backend, and one rule that chooses a backend. It knows layouts and tensors only."""

from .backends import BACKENDS as BACKENDS
from .backends import get_backend as get_backend
from .backends import refusals as refusals
from .base import AttentionArguments as AttentionArguments
from .base import AttentionCall as AttentionCall
from .base import AttentionRequest as AttentionRequest
from .base import Bias as Bias
from .biases import chosen_keys as chosen_keys
from .biases import key_bias as key_bias
from .biases import linear_bias as linear_bias
from .capabilities import AttentionBackend as AttentionBackend
from .capabilities import Capabilities as Capabilities
from .dispatch import BackendChoice as BackendChoice
from .dispatch import resolve as resolve
