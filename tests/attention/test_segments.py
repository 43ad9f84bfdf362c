"""Every backend on documents that share a prefix: one battery, as `test_attention.py` has for separate documents."""

import oracle
import pytest
import torch
from dense import dense_mask
from operations import OperationCounter
from pretended import pretend
from test_attention import CASES, DEVICE, NAMES, assert_as_precise, assert_right, backend_for, inputs, run
from test_block_mask import blocks_of, listed
from tolerance import assert_float32, differs
from torch.nn.attention.flex_attention import create_mask

from trl_packfa.attention import AttentionArguments, BackendChoice, get_backend, linear_bias
from trl_packfa.attention import block_mask as block_masks
from trl_packfa.layout import PackedLayout

LAYOUTS = {
    "a pair": ((40, 9, 21), ((0, 1), (0, 2))),
    "pairs in any order": ((17, 1, 30, 5, 25, 12), ((0, 1), (3, 4), (0, 2), (3, 5))),
    "a tree": ((20, 18, 2, 5, 1, 6), ((0, 1, 2), (5,), (0, 3), (0, 1, 4), (0, 1))),
    "longer than a chunk": ((300, 7, 280), ((0, 1), (0, 2))),
}


def shared_layout(name):
    lengths, documents = LAYOUTS[name]
    return PackedLayout.from_lengths(lengths, documents=documents, device=DEVICE)


def ours(name, layout):
    choice = BackendChoice(name)
    return lambda q, k, v, options: choice.attend(q, k, v, layout, AttentionArguments(**options))


def by_oracle(layout):
    """Each document by itself; of what is shared the first document's."""

    def attend(query, key, value, options):
        gather = layout.sequence_gather
        documents = (x[gather.index] for x in (query, key, value))
        out = oracle.attention_of_documents(*documents, layout.full_sequences.lengths, **options)
        return out[gather.first_index]

    return attend


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_float32_against_the_oracle(name, case):
    backend_for(name, torch.float32, case)
    for layout in map(shared_layout, LAYOUTS):
        assert_right(ours(name, layout), by_oracle(layout), layout.num_tokens, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_against_eager_attention(name, case, dtype):
    backend_for(name, dtype, case)
    assert_as_precise_as_eager_attention(name, case, dtype)


def assert_as_precise_as_eager_attention(name, case, dtype, layout_name="a tree"):
    layout = shared_layout(layout_name)
    ways = (ours(name, layout), ours("reference", layout), by_oracle(layout))
    assert_as_precise(*ways, layout.num_tokens, case, dtype)


@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("case", [CASES["causal"], CASES["window"]], ids=["causal", "window"])
def test_flash_attention_is_told_of_keys_apart_from_queries(backend, case, monkeypatch):
    """By stand-ins of the kernels, which align both at a document's end, as those do."""
    dtypes = pretend(monkeypatch, backend)
    for layout_name in LAYOUTS:
        assert_as_precise_as_eager_attention(backend, case, torch.bfloat16, layout_name)
    assert len(dtypes) == len(LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_branches_do_not_see_each_other_to_the_bit(name):
    backend_for(name, torch.float32, {})
    layout = shared_layout("a pair")
    before, upstream = inputs(layout.num_tokens), torch.randn(layout.num_tokens, 4, 16, device=DEVICE)
    after = [tensor.detach().clone() for tensor in before]
    for tensor in after[:3]:
        tensor[40:49] = torch.randn_like(tensor[40:49])
    given = (before, [tensor.requires_grad_() for tensor in after])
    outs = [run(ours(name, layout), tensors, {}, upstream) for tensors in given]
    others = torch.cat([torch.arange(40), torch.arange(49, 70)])
    assert torch.equal(outs[0][0][others], outs[1][0][others])
    branch = torch.arange(49, 70)
    assert all(torch.equal(a[branch], b[branch]) for a, b in zip(*outs, strict=True))
    assert not torch.equal(outs[0][0][40:49], outs[1][0][40:49]), "the change must be one"


def test_negative_controls_are_seen():
    layout, tensors = shared_layout("a pair"), inputs(70)
    arguments = AttentionArguments(scaling=0.3)
    expected = by_oracle(layout)(*tensors[:3], {"scaling": 0.3})
    for documents in ([(0, 1, 2)], [(0,), (1,), (2,)]):  # a branch that sees another; branches without a prefix
        wrong = PackedLayout.from_lengths(layout.lengths, documents=documents, device=DEVICE)
        assert differs(BackendChoice("reference").attend(*tensors[:3], wrong, arguments), expected)


def test_a_bias_is_told_of_documents():
    layout, (query, key, value, _) = shared_layout("a tree"), inputs(52)
    slopes, found = torch.tensor([0.5, 0.25, 0.1, 0.05], device=DEVICE), []
    for name in ("sdpa", "reference"):
        arguments = AttentionArguments(scaling=0.3, bias=linear_bias(slopes, layout.full_sequences))
        found.append(BackendChoice(name).attend(query, key, value, layout, arguments))
    gather = layout.sequence_gather
    documents = [gather.gather(x) for x in (query, key, value)]
    call = arguments.on(layout.full_sequences.attention)
    alone = get_backend("reference")(*documents, call)[gather.first_index]
    assert_float32(found[0], alone.double())
    assert_float32(found[1], alone.double())


@pytest.mark.parametrize("case", [CASES["causal"], CASES["window"], CASES["softcap"]], ids=["causal", "window", "cap"])
def test_flex_masks_and_scores_on_a_cpu_without_gradients(case):
    for name in LAYOUTS:
        lengths, documents = LAYOUTS[name]
        layout = PackedLayout.from_lengths(lengths, documents=documents)
        query, key, value = (t.detach().cpu() for t in inputs(layout.num_tokens)[:3])
        with torch.no_grad():
            key, value = (layout.attention.gather_keys(x) for x in (key, value))
            out = get_backend("flex")(query, key, value, AttentionArguments(scaling=0.3, **case).on(layout.attention))
            key, value = (x[layout.attention.key_gather.first_index] for x in (key, value))
        assert_float32(out, by_oracle(layout)(query, key, value, {**case, "scaling": 0.3}))


@pytest.mark.parametrize("window", [None, 1, 64, 130, 400])
@pytest.mark.parametrize("lengths", [(700, 30, 300), (128, 128, 256), (1, 5, 400), (130, 1, 1), (500, 129, 127)])
def test_blocks_of_keys_apart_hold_every_pair(lengths, window):
    layout = PackedLayout.from_lengths([*lengths, 90], documents=[(0, 1), (0, 2), (3,)])
    attention = layout.attention
    mask = block_masks.block_mask(attention, window)
    queries, keys, side = layout.num_tokens, attention.keys.num_tokens, block_masks.BLOCK
    dense = create_mask(mask.mask_mod, 1, 1, queries, keys, device="cpu")[0, 0]
    seen = torch.zeros(queries, queries, dtype=torch.bool)
    numbers = torch.arange(queries), torch.arange(keys)
    for own, place in zip(attention.queries.split(numbers[0]), attention.keys.split(numbers[1]), strict=True):
        seen[own[:, None], attention.key_gather.index[place]] = dense[own[:, None], place]
        assert dense[own].sum() == dense[own[:, None], place].sum(), "keys of another segment"
    assert torch.equal(seen, dense_mask(layout, window))
    counts = blocks_of(dense, side)
    partial, whole = listed(mask, counts.shape)
    assert (counts[whole] == side**2).all()
    assert (partial | whole)[counts > 0].all()
    if window is None:  # under one, blocks between two segments' keys may be looked at in vain
        assert torch.equal(partial | whole, counts > 0)


def test_what_is_copied_is_linear_in_the_documents():
    """No mask of pairs: the largest tensor is as long as the documents together."""
    layout = PackedLayout.from_lengths([900, 50, 60], documents=[(0, 1), (0, 2)])
    query, key, value, _ = inputs(layout.num_tokens)
    with OperationCounter() as counter:
        BackendChoice("sdpa").attend(query, key, value, layout, AttentionArguments(scaling=0.3)).sum().backward()
    assert counter.largest < 900 * 900
    assert counter.largest <= 8 * layout.full_sequences.num_tokens * 4 * 16
