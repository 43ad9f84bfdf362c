"""Every backend without causality: whole documents, and blocks inside causal documents."""

import oracle
import pytest
import torch
from dense import dense_mask
from pretended import pretend
from test_attention import CASES, DEVICE, LAYOUTS, NAMES, assert_as_precise, assert_right, backend_for, inputs
from test_block_mask import blocks_of, listed
from tolerance import differs
from torch.nn.attention.flex_attention import create_mask

from trl_packfa.attention import AttentionArguments, BackendChoice, get_backend
from trl_packfa.attention import block_mask as block_masks
from trl_packfa.errors import InvalidLayout, PackingError
from trl_packfa.layout import AttentionLayout, PackedLayout
from trl_packfa.layout.blocks import Blocks, plan_blocks

# Blocks inside documents of 5, 70, 1, 30 and 28 tokens: at a beginning, in the middle, two that touch, at the end.
DOCUMENTS = (5, 70, 1, 30, 28)
BLOCKS = ((5, 12), (30, 44), (80, 84), (84, 90), (130, 134))


def masked(mask):
    """Attention in float64 by a dense mask `(T, T)`."""

    def attend(query, key, value, options):
        options = {name: value for name, value in options.items() if name != "sliding_window"}
        return oracle.masked_attention(query, key, value, mask, **options)

    return attend


def both_ways(lengths, window):
    """Return who sees whom if all tokens of a document see each other, bool `(T, T)`."""
    ids = PackedLayout.from_lengths(lengths, device=DEVICE).document_ids().flatten()
    places = torch.arange(len(ids), device=DEVICE)
    same, distance = ids[:, None] == ids, (places[:, None] - places).abs()
    return same if window is None else same & (distance < window)


def whole(name, lengths):
    layout = PackedLayout.from_lengths(lengths, device=DEVICE)
    attention = AttentionLayout(layout, layout, causal=False)
    return lambda q, k, v, options: get_backend(name)(q, k, v, AttentionArguments(**options).on(attention))


def blocks_layout(joined=False):
    blocks = Blocks(BLOCKS, BLOCKS, joined)
    return PackedLayout.from_lengths(DOCUMENTS, device=DEVICE).with_blocks(blocks)


def by_blocks(name, joined=False):
    layout = blocks_layout(joined)
    return lambda q, k, v, options: BackendChoice(name).attend(q, k, v, layout, AttentionArguments(**options))


def skip_if_refused(name, dtype, case):
    for causal in (True, False):
        backend_for(name, dtype, case, causal=causal)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_documents_against_the_oracle(name, case):
    skip_if_refused(name, torch.float32, case)
    for lengths in (lengths for lengths, rows in LAYOUTS.values() if rows == 1):
        expected = masked(both_ways(lengths, case.get("sliding_window")))
        assert_right(whole(name, lengths), expected, sum(lengths), case)


BLOCK_CASES = [(case, False) for name, case in CASES.items() if name != "window of one"]
BLOCK_CASES += [(case, True) for case in CASES.values() if "sliding_window" not in case]


@pytest.mark.parametrize(("case", "joined"), BLOCK_CASES)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_against_the_oracle(name, case, joined):
    skip_if_refused(name, torch.float32, case)
    expected = masked(dense_mask(blocks_layout(joined), case.get("sliding_window")))
    assert_right(by_blocks(name, joined), expected, sum(DOCUMENTS), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [CASES["causal"], CASES["window"], CASES["sinks"]], ids=["full", "window", "sinks"])
@pytest.mark.parametrize("name", NAMES)
def test_bidirectional_attention_in_low_precision_is_as_precise_as_the_reference(name, case, dtype):
    skip_if_refused(name, dtype, case)
    assert_as_precise_as_reference(name, case, dtype)


def assert_as_precise_as_reference(name, case, dtype):
    """Documents and blocks, against float64, beside the reference backend."""
    window = case.get("sliding_window")
    for ours, mask in ((lambda name: whole(name, DOCUMENTS), both_ways(DOCUMENTS, window)),
                       (by_blocks, dense_mask(blocks_layout(), window))):  # fmt: skip
        assert_as_precise(ours(name), ours("reference"), masked(mask), sum(DOCUMENTS), case, dtype)


@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("case", [CASES["causal"], CASES["window"]], ids=["full", "window"])
def test_flash_attention_is_told_of_both_directions(backend, case, monkeypatch):
    """By stand-ins of the kernels, which refuse any window that they are not to be asked for."""
    dtypes = pretend(monkeypatch, backend)
    assert_as_precise_as_reference(backend, case, torch.bfloat16)
    assert len(dtypes) == 3, "one call for documents, two for blocks"


@pytest.mark.parametrize("window", [None, 1, 64, 130, 400])
@pytest.mark.parametrize("lengths", [(700,), (128, 256, 128), (1, 300, 5, 127, 129, 1, 1, 640, 20), (3,) * 150])
def test_flex_lists_the_blocks_of_the_pairs(lengths, window):
    layout = PackedLayout.from_lengths(lengths)
    mask = block_masks.block_mask(AttentionLayout(layout, layout, causal=False), window)
    dense = both_ways(lengths, window).cpu()
    tokens = layout.num_tokens
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0], dense)
    assert_lists(mask, dense)


def test_flex_lists_the_blocks_of_keys_apart():
    layout = PackedLayout.from_lengths([300, 200]).with_blocks(Blocks(((140, 290), (310, 330)), ()))
    gather, attention = layout.block_attention(None)
    mask = block_masks.block_mask(attention, None)
    dense = torch.zeros(170, 320, dtype=torch.bool)
    dense[:150, :290], dense[150:, 290:] = True, True
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, 170, 320, device="cpu")[0, 0], dense)
    assert torch.equal(gather.index, torch.cat([torch.arange(140, 290), torch.arange(310, 330)]))
    assert_lists(mask, dense)


def assert_lists(mask, dense):
    """Every block with a visible pair is listed, and only those."""
    expected = blocks_of(dense, block_masks.BLOCK) > 0
    partial, whole = listed(mask, expected.shape)
    assert torch.equal(partial | whole, expected)


def test_negative_controls_are_seen():
    tensors, options = inputs(sum(DOCUMENTS))[:3], {"scaling": 0.3}
    causal = PackedLayout.from_lengths(DOCUMENTS, device=DEVICE)
    expected = masked(dense_mask(blocks_layout()))(*tensors, options)
    without = BackendChoice("sdpa").attend(*tensors, causal, AttentionArguments(**options))
    assert differs(without, expected)
    joined = causal.with_blocks(Blocks(((5, 12), (30, 44), (80, 90), (130, 134)), ()))
    assert differs(BackendChoice("sdpa").attend(*tensors, joined, AttentionArguments(**options)), expected)
    assert differs(by_blocks("sdpa", joined=True)(*tensors, options), expected)


def test_blocks_that_cannot_be_computed_are_refused():
    with pytest.raises(InvalidLayout, match=r"block \(4, 7\) is not inside a document"):
        plan_blocks([(4, 7)], [5, 6])
    tensors = inputs(sum(DOCUMENTS))[:3]
    with pytest.raises(PackingError, match="images of a row see each other, but the layer has a sliding window of 90"):
        BackendChoice("sdpa").attend(*tensors, blocks_layout(True), AttentionArguments(scaling=0.3, sliding_window=90))
    said = "14 tokens of an image see each other, but the layer's sliding window has 8"
    with pytest.raises(PackingError, match=said):
        BackendChoice("sdpa").attend(*tensors, blocks_layout(), AttentionArguments(scaling=0.3, sliding_window=8))
    bias = AttentionArguments(scaling=0.3, bias=lambda q, k: torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1]))
    with pytest.raises(PackingError, match="adds a term to its scores"):
        BackendChoice("sdpa").attend(*tensors, blocks_layout(), bias)
    with pytest.raises(InvalidLayout, match="cannot share prefixes"):
        PackedLayout.from_lengths([3, 2, 1], documents=[(0, 1), (0, 2)]).with_blocks(Blocks(((0, 2),), ()))
