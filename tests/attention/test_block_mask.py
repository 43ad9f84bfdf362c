"""The flex backend's block mask: exactly the pairs of the layout, found without looking at pairs."""

import pytest
import torch
from dense import dense_mask
from operations import OperationCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from trl_packfa import PackedLayout
from trl_packfa.attention import block_mask as module

LENGTHS = {
    "one": (700,),
    "even blocks": (128, 256, 128),
    "mixed": (1, 300, 5, 127, 129, 1, 1, 640, 20),
    "tiny": (3,) * 150,
    "one token": (1,),
    "two rows": (100, 200, 299, 1),
}


def blocks_of(mask, side):
    """The counts of a mask's true pairs in each block of queries and keys."""
    rows, columns = (-(-tokens // side) for tokens in mask.shape)
    padded = torch.zeros(rows * side, columns * side, dtype=torch.int64)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    return padded.view(rows, side, columns, side).sum(dim=(1, 3))


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


@pytest.mark.parametrize("window", [None, 1, 64, 130, 400])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_blocks_are_those_of_the_pairs(lengths, window):
    layout = PackedLayout.from_lengths(lengths, rows=2 if lengths == LENGTHS["two rows"] else 1)
    mask, tokens = module.block_mask(layout.attention, window), layout.num_tokens
    dense = dense_mask(layout, window)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0], dense)
    counts = blocks_of(dense, module.BLOCK)
    partial, whole = listed(mask, counts.shape)
    assert torch.equal(whole, counts == module.BLOCK**2)
    assert torch.equal(partial | whole, counts > 0)
    for ours, transposed in ((partial, (mask.q_num_blocks, mask.q_indices)),
                             (whole, (mask.full_q_num_blocks, mask.full_q_indices))):  # fmt: skip
        assert torch.equal(as_matrix(*transposed, counts.T.shape), ours.T)


def largest(make):
    with OperationCounter() as counter:
        make()
    assert counter.syncs == 0
    return counter.largest


def test_nothing_is_quadratic_in_tokens():
    layout = PackedLayout.from_lengths([1000] * 4)
    ours = module.block_mask(layout.attention, None)
    assert largest(lambda: module.block_mask(layout.attention, None)) < layout.num_tokens**2 / 100
    tokens = layout.num_tokens
    theirs = largest(lambda: create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu"))
    assert theirs >= tokens**2, "the control: torch's own"
