"""What the model side stands on: documents of a call, graphs, autocast, quantized and sharded weights; no patch."""
