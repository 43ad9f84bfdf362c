"""Liger's Triton kernels for the parts of a layer between its matrix products, on CUDA with liger-kernel installed.

torch's operators each pass over memory once. transformers' RMSNorm takes eight passes, and a rotation takes a dozen.
Compiled graphs run the model's own code, because they fuse these operators themselves. Other devices run it too.
"""
