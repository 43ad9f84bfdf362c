"""`PackedSFTTrainer` and its parts: datasets and loaders, check, loss head, padded terms of the loss."""
