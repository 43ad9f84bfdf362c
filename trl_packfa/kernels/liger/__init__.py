"""Liger's Triton kernels for the parts of a layer between its matrix products, on CUDA with liger-kernel installed.

torch's operators each pass over memory once. transformers' RMSNorm takes eight passes, and a rotation takes a dozen.
Compiled graphs run the model's own code, because they fuse these operators themselves. Other devices run it too.
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
