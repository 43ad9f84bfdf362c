"""Attention of a row that ranks share, against the same row on one rank."""

from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from tolerance import assert_recomputed

from trl_packfa import AttentionArguments, PackedLayout
from trl_packfa.attention import BackendChoice
from trl_packfa.errors import PackingError

LENGTHS = (5, 1, 9, 3, 6)  # 24 tokens, which 2, 3 and 4 ranks share
SPECIAL = {
    "plain": {},
    "window": {"sliding_window": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)},
}


def tensors(heads, key_value_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), n, 8) for n in (heads, key_value_heads, key_value_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def with_gradients(attend, query, key, value, grad, layout, arguments):
    """The attention's output, and the gradients of its inputs and sinks."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    if arguments.sinks is not None:
        leaves.append(arguments.sinks.clone().requires_grad_())
        arguments = replace(arguments, sinks=leaves[-1])
    out = attend(*leaves[:3], layout, arguments)
    out.backward(grad)
    return out.detach(), *(leaf.grad for leaf in leaves)


def assert_shared(
    monkeypatch, size, heads, key_value_heads, arguments, *, documents=None, layout_of=None, backend="reference"
):
    attend, layout = BackendChoice(backend).attend, PackedLayout.from_lengths(LENGTHS, documents=documents)
    given = tensors(heads, key_value_heads)
    expected = with_gradients(attend, *given, layout, arguments)

    def work(shard):
        own = layout_of(shard) if layout_of else replace(layout, shard=shard)
        return with_gradients(attend, *map(shard.local, given), own, arguments)

    ranks = Ranks(size).run(monkeypatch, work)
    for place, whole in enumerate(expected):
        parts = [rank[place] for rank in ranks]
        # Sinks are whole on each rank, and each has the gradient of its own heads.
        together = sum(parts) if place == 4 else torch.cat(parts)
        assert_recomputed(together, whole)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_ranks_share_a_row_exactly(monkeypatch, name, backend):
    arguments = AttentionArguments(scaling=8**-0.5, **SPECIAL[name])
    assert_shared(monkeypatch, 2, 12, 4, arguments, backend=backend)


@pytest.mark.parametrize(("size", "heads", "key_value_heads"), [
    (4, 8, 8), (4, 8, 2), (4, 4, 1), (4, 12, 6), (3, 6, 2)
])  # fmt: skip
def test_key_value_heads_are_dealt_or_repeated(monkeypatch, size, heads, key_value_heads):
    assert_shared(monkeypatch, size, heads, key_value_heads, AttentionArguments(scaling=1.0))


def test_documents_may_share_a_prefix(monkeypatch):
    """5 tokens that two documents begin with."""
    documents = [(0, 1), (0, 2), (3,), (4,)]
    assert_shared(monkeypatch, 2, 4, 2, AttentionArguments(scaling=1.0), documents=documents)


def test_heads_that_ranks_cannot_divide_and_terms_from_tokens_are_refused(monkeypatch):
    said = r"sequence_parallel=4 does not divide the model's 6 attention heads(.|\n)*\["
    with pytest.raises(PackingError, match=said):
        assert_shared(monkeypatch, 4, 6, 2, AttentionArguments(scaling=1.0))
    arguments = AttentionArguments(scaling=1.0, bias=lambda queries, keys: torch.zeros(()))
    monkeypatch.setattr(BackendChoice, "_attend_causally", lambda self, qkv, *_: qkv[0])
    with pytest.raises(PackingError, match=r"shared by 2 processes cannot have a term added(.|\n)*ALiBi"):
        assert_shared(monkeypatch, 2, 4, 2, arguments)


def test_the_layout_of_the_own_part_is_wrong(monkeypatch):
    """The control."""
    with pytest.raises(AssertionError, match="not close"):
        arguments, half = AttentionArguments(scaling=1.0), PackedLayout.from_lengths([sum(LENGTHS) // 2] * 2)
        assert_shared(monkeypatch, 2, 4, 2, arguments, layout_of=lambda shard: replace(half, shard=shard))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_moved_as_it_is(monkeypatch, dtype):
    attend, layout, given = BackendChoice("sdpa").attend, PackedLayout.from_lengths(LENGTHS), tensors(4, 2, dtype)
    whole = attend(*given[:3], layout, AttentionArguments(scaling=1.0))

    def work(shard):
        own = replace(layout, shard=shard)
        return attend(*map(shard.local, given[:3]), own, AttentionArguments(scaling=1.0))

    assert torch.equal(torch.cat(Ranks(2).run(monkeypatch, work)), whole)
