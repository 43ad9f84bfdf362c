"""Liger's Triton kernels in the place of what a layer does between its matrix products, on CUDA, where liger-kernel is
installed.

torch's own operators pass over memory once each: an RMSNorm of transformers' takes eight such passes, a rotation a
dozen. Compiled graphs fuse them by themselves, and other devices have no such kernels: both run the models' own code.
"""

from __future__ import annotations

from .library import liger_unavailable
from .norms import LigerRMSNormOverride, is_rms_norm_on_cuda
from .swiglu import SwiGLUOverride, is_swiglu_on_cuda, multiplies_by_liger

__all__ = [
    "LigerRMSNormOverride",
    "SwiGLUOverride",
    "is_rms_norm_on_cuda",
    "is_swiglu_on_cuda",
    "liger_unavailable",
    "multiplies_by_liger",
]
