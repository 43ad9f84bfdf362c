"""Packed DPO, KTO and reward trainers, which also re-cut steps."""
