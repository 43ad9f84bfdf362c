"""Memory that the check has freed goes back to the system."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from trl_packfa.memory import return_freed_memory


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no malloc_trim")
def test_freed_pieces_go_back_to_the_system():
    pieces = [torch.ones(2**12) for _ in range(2**13)]  # 128 MB in pieces of 16 KB
    del pieces[1::2]  # the others keep the heap from shrinking by itself
    kept = resident()
    return_freed_memory()
    assert resident() < kept - 2**25
    assert all(piece.sum() == 2**12 for piece in pieces)
