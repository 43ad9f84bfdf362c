"""TRL's trainers without padding: `padding_free` for any of them, and thin subclasses of three that re-cut a step too.

`models` finds what a trainer runs, `padding_free` patches it, `run` reports, `first_call` proves on the first batch,
`collating` counts rows on the host. `dpo`, `reward` and `kto` are the packed trainers and their configs, `packed` what
they share; `cutting` deals pairs to micro-batches, `recutting` runs them, `replaying` shows TRL's loss what came out.
"""
