"""`benchmarks/half_attention.py`: one side attends in float32, the other in half precision; each length is a row."""

import json

import half_attention
import pytest
import torch
import torch.nn.functional as F

from trl_packfa.attention import sdpa


def test_only_one_side_attends_in_float32(monkeypatch, capsys):
    monkeypatch.setattr(sdpa, "has_half_products", lambda dtype, device: True)
    computed, attend = [], F.scaled_dot_product_attention

    def noted(*args, **options):
        out = attend(*args, **options)
        computed.append(out.dtype)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    argv = ["--documents", "16", "32", "--tokens", "32", "--width", "192", "--layers", "1", "--repeats", "2", "--json"]
    assert half_attention.main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["documents"] for row in rows] == [16, 32]
    # Two lengths, three pairs of steps each, one layer.
    assert computed.count(torch.float32) == computed.count(torch.bfloat16) == 2 * 3


def test_a_pair_needs_repeats():
    model = half_attention.build(width=192, layers=1)
    with pytest.raises(ValueError, match="at least"):
        half_attention.measure(model, tokens=16, document=16, repeats=0)
