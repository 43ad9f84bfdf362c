"""From datasets to batches: lengths, cutting, plans of steps, samplers, streams, images."""
