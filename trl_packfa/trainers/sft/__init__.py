"""`PackedSFTTrainer` and its parts: datasets and loaders, proof, loss head, padded terms of the loss."""
