"""What a layer does besides matrix products, on a CPU: each one autograd function that goes through the tokens in
pieces which stay in its cache, keeps its inputs only, and computes the rest again in the backward.

torch's own operators pass over memory once each, and keep every result between them. Other devices, and compiled
graphs, which fuse by themselves, run the models' own code.
"""

from __future__ import annotations

from .norms import RMSNormOverride, is_rms_norm_on_cpu

__all__ = ["RMSNormOverride", "is_rms_norm_on_cpu"]
