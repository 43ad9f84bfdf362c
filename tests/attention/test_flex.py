"""The flex backend: a block mask of exactly the pairs of the layout, found without looking at pairs; compiled kernels
that are no other graph for other documents, and never torch's unfused way, however many kinds a process asks for."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from dense import dense_mask
from operations import OperationCounter
from tolerance import FORWARD_FACTOR, assert_low_precision
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, flex, get_backend
from trl_packfa.attention.block_mask import BLOCK, block_mask
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.layout.bidirectional import BidirectionalSpans

WINDOWS = pytest.mark.parametrize("window", [None, 1, 64, 130, 400])
LENGTHS = {
    "one": (700,),
    "even blocks": (128, 256, 128),
    "mixed": (1, 300, 5, 127, 129, 1, 1, 640, 20),
    "tiny": (3,) * 150,
    "one token": (1,),
    "two rows": (100, 200, 299, 1),
}


def blocks_of(mask):
    """The counts of a mask's true pairs in each block of queries and keys."""
    rows, columns = (-(-tokens // BLOCK) for tokens in mask.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.int64)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    return padded.view(rows, BLOCK, columns, BLOCK).sum(dim=(1, 3))


def as_matrix(numbers, indices, shape):
    listed = torch.zeros(shape, dtype=torch.bool)
    for row, (count, index) in enumerate(zip(numbers[0, 0].tolist(), indices[0, 0], strict=True)):
        assert len(set(index[:count].tolist())) == count, "a block is listed twice"
        listed[row, index[:count].long()] = True
    return listed


def listed(mask, shape):
    """Return the blocks that are listed as partial and as whole, as masks of this shape."""
    partial = as_matrix(mask.kv_num_blocks, mask.kv_indices, shape)
    whole = as_matrix(mask.full_kv_num_blocks, mask.full_kv_indices, shape)
    assert not (partial & whole).any(), "a block is listed twice"
    return partial, whole


def pairs_of(mask, queries, keys):
    """The pairs that flex's function of a mask lets see each other, bool `(queries, keys)`."""
    return create_mask(mask.mask_mod, 1, 1, queries, keys, device="cpu")[0, 0]


@WINDOWS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_blocks_are_those_of_the_pairs(lengths, causal, window):
    layout = PackedLayout.from_lengths(lengths, rows=2 if lengths == LENGTHS["two rows"] else 1)
    layout = layout if causal else layout.in_both_directions()
    mask, dense = block_mask(layout.attention, window), dense_mask(layout, window)
    assert torch.equal(pairs_of(mask, layout.num_tokens, layout.num_tokens), dense)
    counts = blocks_of(dense)
    partial, whole = listed(mask, counts.shape)
    assert torch.equal(whole, counts == BLOCK**2)
    assert torch.equal(partial | whole, counts > 0)
    for ours, transposed in ((partial, (mask.q_num_blocks, mask.q_indices)),
                             (whole, (mask.full_q_num_blocks, mask.full_q_indices))):  # fmt: skip
        assert torch.equal(as_matrix(*transposed, counts.T.shape), ours.T)


def test_blocks_of_keys_apart_from_the_tokens_of_images_are_those_of_the_pairs():
    layout = PackedLayout.from_lengths([300, 200]).with_bidirectional(BidirectionalSpans(((140, 290), (310, 330)), ()))
    gather, attention = layout.bidirectional_attention(None)
    mask, dense = block_mask(attention, None), torch.zeros(170, 320, dtype=torch.bool)
    dense[:150, :290], dense[150:, 290:] = True, True
    assert torch.equal(pairs_of(mask, 170, 320), dense)
    assert torch.equal(gather.index, torch.cat([torch.arange(140, 290), torch.arange(310, 330)]))
    counts = blocks_of(dense)
    partial, whole = listed(mask, counts.shape)
    assert torch.equal(partial | whole, counts > 0)


@WINDOWS
@pytest.mark.parametrize("lengths", [(700, 30, 300), (128, 128, 256), (1, 5, 400), (130, 1, 1), (500, 129, 127)])
def test_blocks_of_keys_that_documents_share_hold_every_pair(lengths, window):
    layout = PackedLayout.from_lengths([*lengths, 90], documents=[(0, 1), (0, 2), (3,)])
    attention, queries = layout.attention, layout.num_tokens
    mask, keys = block_mask(attention, window), attention.keys.num_tokens
    dense, seen = pairs_of(mask, queries, keys), torch.zeros(queries, queries, dtype=torch.bool)
    segments = attention.queries.split(torch.arange(queries)), attention.keys.split(torch.arange(keys))
    for own, place in zip(*segments, strict=True):
        seen[own[:, None], attention.key_gather.index[place]] = dense[own[:, None], place]
        assert dense[own].sum() == dense[own[:, None], place].sum(), "keys of another segment"
    assert torch.equal(seen, dense_mask(layout, window))
    counts = blocks_of(dense)
    partial, whole = listed(mask, counts.shape)
    assert (counts[whole] == BLOCK**2).all()
    assert (partial | whole)[counts > 0].all()
    if window is None:  # under one, blocks between two segments' keys may be looked at in vain
        assert torch.equal(partial | whole, counts > 0)


def largest(make):
    with OperationCounter() as counter:
        make()
    assert counter.syncs == 0
    return counter.largest


def test_nothing_is_quadratic_in_tokens():
    layout = PackedLayout.from_lengths([1000] * 4)
    ours, tokens = block_mask(layout.attention, None), layout.num_tokens
    assert largest(lambda: block_mask(layout.attention, None)) < tokens**2 / 100
    theirs = largest(lambda: create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu"))
    assert theirs >= tokens**2, "the control: torch's own"


ROWS = ((300, 20), (5, 130, 64), (250, 250, 1, 1), (129,), (140, 2, 290, 33, 7))
WINDOWS, SOFTCAPS, SINKS, GRADIENTS = (None, 64), (None, 30.0), (False, True), (True, False)


@pytest.fixture(autouse=True)
def _flex_anew():
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


@pytest.fixture
def limits(monkeypatch):
    """torch's own, at which it raises; graphs run without torch's inductor, which needs a GPU for the backward."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    names = {"recompile_limit": 8, "accumulated_recompile_limit": 8, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**names):
        yield


def attend(lengths, window=None, softcap=None, sinks=False, gradients=True):
    layout = PackedLayout.from_lengths(lengths)
    query, key, value = (torch.randn(1, heads, layout.num_tokens, 16) for heads in (4, 2, 2))
    score_mod = None if softcap is None else flex._capped(softcap)
    options = {"score_mod": score_mod, "block_mask": flex._block_mask(layout.attention, window), "return_lse": sinks}
    with torch.set_grad_enabled(gradients):
        return flex._compiled()(query, key, value, scale=0.25, enable_gqa=True, **options)


def attend_in_every_way():
    for kind in product(WINDOWS, SOFTCAPS, SINKS, GRADIENTS):
        for lengths in ROWS[:2]:
            attend(lengths, *kind)


@pytest.mark.usefixtures("limits")
def test_other_documents_are_the_same_graph():
    for lengths in ROWS:
        attend(lengths)
    assert compiled_graphs() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("limits")
def test_every_kind_of_attention_is_compiled(monkeypatch):
    """The control leaves torch's limit as it is."""
    with monkeypatch.context() as patch, pytest.raises(FailOnRecompileLimitHit):
        patch.setattr(flex, "allow_graphs", lambda most: nullcontext())
        attend_in_every_way()
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    attend_in_every_way()
    assert compiled_graphs() > 8


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, 256), (torch.bfloat16, 192)])
def test_flex_has_block_sizes_for_heads_of_192_in_float32(dtype, wide, monkeypatch):
    """Seen on an H200 with torch 2.11: more shared memory than the GPU has. Zeros change nothing."""
    widths, attend = [], flex.flex_attention

    def flex_attention(query, key, value, **options):
        widths.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    layout = PackedLayout.from_lengths([5, 130, 2])
    q, k, v = (torch.randn(137, 4, width).to(dtype) for width in (192, 192, 128))
    call = AttentionArguments(scaling=192**-0.5).on(layout.attention)
    out, expected = (get_backend(name)(q, k, v, call) for name in ("flex", "reference"))
    assert widths == [(wide, wide, 128)] and out.shape == v.shape
    exact = get_backend("reference")(q.double(), k.double(), v.double(), call)
    assert_low_precision(out, expected, exact, factor=FORWARD_FACTOR)
