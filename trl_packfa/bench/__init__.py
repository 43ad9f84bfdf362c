"""`trl-packfa bench`: measure packed and padded training side by side on this machine, and their parts.

`run_bench` measures strategies, `bench_attention` one attention, and `bench_check` the exactness proof.
"""
