"""`benchmarks/layer_parts.py`: both sides of each part compute the same, and bad arguments are one message."""

import layer_parts
import pytest
import torch
from layer_parts import main
from tolerance import assert_float32, assert_half

from trl_packfa.errors import InvalidConfig


@pytest.mark.parametrize("part", [layer_parts._rotation, layer_parts._norm, layer_parts._attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_sides_compute_the_same(part, dtype):
    assert_same = assert_float32 if dtype == torch.float32 else assert_half
    theirs, ours = part(40, dtype)
    for expected, actual in zip(theirs(), ours(), strict=True):
        assert_same(actual, expected)
        assert not torch.equal(actual, expected.roll(1))


def test_every_part_is_a_row(capsys):
    assert main(["--tokens", "8", "--dtypes", "bfloat16", "--repeats", "2", "--json"]) == 0
    told = capsys.readouterr().out
    assert all(part in told for part in ("rotation, 8", "RMSNorm, 8", "documents of 256", "ours, ms"))


@pytest.mark.parametrize("argv", [["--repeats", "1"], ["--tokens", "0"]], ids=str)
def test_what_cannot_be_measured_is_refused(argv):
    with pytest.raises(InvalidConfig, match="Pass 1 token or more, and 2 repeats or more"):
        main(argv)
