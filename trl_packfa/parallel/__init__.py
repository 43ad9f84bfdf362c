"""Batches and weights that several processes share."""
