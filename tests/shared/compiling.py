"""Compiling from nothing: what the tests that count graphs share. `trl_packfa.bench.tracing` counts them."""

import torch
from torch._dynamo.utils import counters


def compile_anew():
    """No graph is kept, and none counted."""
    torch._dynamo.reset()
    counters.clear()
