"""`trl-packfa bench`: packed and padded training side by side on this machine, and the parts that it is made of.

`run_bench` measures strategies, `bench_attention` one attention, `bench_pack` planning, `bench_check` the proof.
"""
