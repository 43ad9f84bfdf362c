"""Packed DPO, KTO and reward trainers, which also re-cut steps.

`dpo`, `kto` and `reward` hold the trainers and their configs, `trainer` their common base. `cutting` deals pairs to
micro-batches, `recutting` runs them and passes the model's recorded outputs to TRL's loss for its metrics.
"""
