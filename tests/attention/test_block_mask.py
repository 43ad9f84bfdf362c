"""The flex backend's block mask: exactly the pairs of the layout, found without looking at pairs."""

import pytest
import torch
from dense import dense_mask
from operations import OperationCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from trl_packfa import PackedLayout
from trl_packfa.attention.block_mask import BLOCK, block_mask
from trl_packfa.layout.blocks import Blocks

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
    layout = PackedLayout.from_lengths([300, 200]).with_blocks(Blocks(((140, 290), (310, 330)), ()))
    gather, attention = layout.block_attention(None)
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
