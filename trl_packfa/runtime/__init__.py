"""Basics of the model side: documents of a call, graphs, autocast, quantized and sharded weights. It holds no
patch."""
