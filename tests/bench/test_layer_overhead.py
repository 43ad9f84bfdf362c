"""`benchmarks/layer_overhead.py`: counts repeat, a checkpoint runs more than none, bad arguments are one message."""

import layer_overhead
import pytest

from trl_packfa.errors import InvalidConfig


def test_counts_repeat_and_grow_with_what_runs():
    """The first time fills caches of the libraries."""

    def count(which):
        return layer_overhead._count(layer_overhead._call(layer_overhead.SIDES[1], which, 2))

    _, first, again = ([count(which) for which in layer_overhead.PASSES] for _ in range(3))
    assert first == again and first[0] < first[1] < first[2]


def test_no_pair_is_refused():
    with pytest.raises(InvalidConfig, match="repeats=0"):
        layer_overhead.bench_overhead(repeats=0)
