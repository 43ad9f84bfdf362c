"""Kernels for the parts of a layer between its matrix products, on a CPU.

Each kernel is one autograd function. It computes pieces of tokens that fit into the cache, saves its inputs only, and
computes the rest again in the backward. torch's operators each pass over memory once and save all results between
them. Other devices run the model's own code, and so do compiled graphs, because they fuse these operators themselves.
"""
