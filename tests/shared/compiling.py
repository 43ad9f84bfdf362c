"""Shared function of the tests that count compiled graphs with `trl_packfa.bench.measuring`."""

import torch
from torch._dynamo.utils import counters


def compile_anew():
    """Drop all compiled graphs and reset their count."""
    torch._dynamo.reset()
    counters.clear()
