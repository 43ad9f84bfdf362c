"""TRL's trainers without padding: `padding_free` for any of them, and subclasses of three that also re-cut steps.

`models` finds the models of a trainer, `padding_free` patches them, `run` reports, `first_call` checks the first
batch, `collating` counts rows on the host. `dpo`, `reward` and `kto` hold the packed trainers and their configs, and
`packed` their common base. `cutting` deals pairs to micro-batches, `recutting` runs them, `replaying` passes the
model's recorded outputs to TRL's loss for its metrics.
"""
