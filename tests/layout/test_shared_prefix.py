"""Documents that share what they begin with: their layout, copies there and back, and rows in which they are found."""

from dataclasses import replace

import pytest
import torch
from calls import watched
from dense import dense_mask
from padded import SIDES, padded

from trl_packfa import PackedLayout
from trl_packfa.errors import InvalidLayout
from trl_packfa.layout import shared_prefix, shared_rows
from trl_packfa.layout.padded_rows import PaddedRows, rows_of
from trl_packfa.layout.prefix_tree import SHORTEST
from trl_packfa.layout.shared_rows import SharedRows, share, shared_documents_of, shared_rows_of, tell_shared, tree_of

# A prefix of two documents, one of which goes on in two ways; one document that is a prefix; one by itself.
LENGTHS, DOCUMENTS = (4, 3, 2, 5, 1, 6), ((0, 1, 2), (5,), (0, 3), (0, 1, 4), (0, 1))
CPU = torch.device("cpu")


def layout():
    return PackedLayout.from_lengths(LENGTHS, documents=DOCUMENTS)


def test_the_example_of_the_docstring():
    made = PackedLayout.from_lengths([3, 2, 1, 2], documents=[(0, 1), (0, 2), (3,)])
    assert (made.lengths, made.full_sequences.lengths) == ((3, 2, 1, 2), (5, 4, 2))
    keys = made.attention.key_gather.index
    assert made.attention.keys.lengths == (3, 5, 4, 2)
    assert keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert made.sequence_gather.index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert made.position_ids().tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert (made.rows, made.row_length, made.num_tokens, made.num_documents, made.max_seqlen) == (1, 8, 8, 3, 5)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_token_attends_to_what_lies_before_it_in_its_documents(window):
    made, seen = layout(), torch.zeros(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    for tokens in made.full_sequences.split(made.sequence_gather.index):
        for i, token in enumerate(tokens.tolist()):
            for other in tokens[max(0, i + 1 - (window or len(tokens))) : i + 1].tolist():
                seen[token, other] = True
    assert torch.equal(dense_mask(made, window), seen)
    by_keys = torch.zeros_like(seen)
    attention = made.attention
    numbers, keys = torch.arange(made.num_tokens), attention.key_gather.index
    segments = zip(attention.queries.split(numbers), attention.keys.split(keys), strict=True)
    for own, keys in segments:
        assert torch.equal(keys[-len(own) :], own), "a segment's queries are the last of its keys"
        by_keys[own[:, None], keys] = dense_mask(PackedLayout.from_lengths([len(keys)]), window)[-len(own) :]
    assert torch.equal(by_keys, seen)


def test_positions_go_on_from_the_prefix():
    made = layout()
    expected = torch.empty(made.num_tokens, dtype=torch.long)
    for tokens in made.full_sequences.split(made.sequence_gather.index):
        expected[tokens] = torch.arange(len(tokens))
    assert torch.equal(made.position_ids()[0], expected)


@pytest.mark.parametrize("by_index", [True, False])
def test_copies_there_and_back_and_their_gradients(by_index, monkeypatch):
    monkeypatch.setattr(shared_prefix, "_by_index", lambda tensor: by_index)
    made, generator = layout(), torch.Generator().manual_seed(0)
    packed = torch.randn(made.num_tokens, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gather = made.sequence_gather
    for plan, numbers in ((gather, gather.index), (made.attention.key_gather, made.attention.key_gather.index)):
        copies = plan.gather(packed)
        assert torch.equal(copies, packed[numbers])
        upstream = torch.randn(copies.shape, generator=generator, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(copies, packed, upstream)
        assert torch.equal(gradient, torch.zeros_like(packed).index_add(0, numbers, upstream))
    documents = torch.randn(len(gather.index), 5, generator=generator, requires_grad=True)
    collected = gather.take_first(documents)
    assert torch.equal(collected, documents[gather.first_index])
    assert torch.equal(gather.index[gather.first_index], torch.arange(21))
    upstream = torch.randn(collected.shape, generator=generator)
    (gradient,) = torch.autograd.grad(collected, documents, upstream)
    assert torch.equal(gradient, torch.zeros_like(documents).index_add(0, gather.first_index, upstream))


def test_what_is_no_layout_is_refused():
    with pytest.raises(InvalidLayout, match=r"segment 2 follows segments \[0\] in one document and \[1\] in another"):
        PackedLayout.from_lengths([3, 2, 1], documents=[(0, 2), (1, 2)])
    with pytest.raises(InvalidLayout, match=r"the documents use segments \[0, 1\], but the row has 3 segments"):
        PackedLayout.from_lengths([3, 2, 1], documents=[(0, 1)])
    with pytest.raises(InvalidLayout, match="must all be positive"):
        PackedLayout.from_lengths([3, 0], documents=[(0, 1)])


def test_shared_rows_move_to_a_device():
    made = layout().to("meta")
    gather, attention = made.sequence_gather, made.attention
    tensors = (gather.index, gather.first_index, made.cu_seqlens, made.full_sequences.cu_seqlens)
    assert {t.device.type for t in (*tensors, attention.keys.cu_seqlens, attention.key_gather.index)} == {"meta"}
    assert made.to("meta") is made and made.memo is not layout().memo


def tree(seed):
    """Rows made of random prefixes that branch at random."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
    rows = [torch.randint(1, 4, (n,), generator=generator) for n in lengths]
    for _ in range(8):
        old = rows[int(torch.randint(len(rows), (1,), generator=generator))]
        kept = int(torch.randint(1, len(old) + 1, (1,), generator=generator))
        more = torch.randint(1, 4, (int(torch.randint(0, 6, (1,), generator=generator)),), generator=generator)
        rows.append(torch.cat([old[:kept], more]))
    return rows


@pytest.mark.parametrize("shortest", [1, 3, 6])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(8))
def test_rows_come_back_whatever_they_share(seed, side, shortest):
    documents = tree(seed)
    batch = padded(documents, side)
    rows = PaddedRows.from_mask(batch["attention_mask"])
    shared = share(rows, batch["input_ids"], shortest=shortest)
    if shared is None:
        return
    made, taken = shared.layout(CPU), shared.take(batch["input_ids"])
    assert taken.shape == (1, shared.num_packed) and shared.num_packed < rows.num_tokens == shared.num_tokens
    copies = made.full_sequences.split(taken[0][made.sequence_gather.index])
    assert all(torch.equal(a, b) for a, b in zip(copies, documents, strict=True))
    assert torch.equal(shared.put_back(taken), batch["input_ids"])
    assert torch.equal(shared.put_back(made.position_ids()), rows.put_back(rows.take(rows.position_ids(CPU))))
    states = torch.randn(1, shared.num_packed, 3, requires_grad=True)
    (returned,) = shared.put_back_outputs((states,))
    returned.sum().backward()
    assert torch.equal(states.grad[0, :, 0], made.sequence_gather.index.bincount().float())
    prefixes = [shared.segments[i] for document in shared.documents for i in document[:-1]]
    assert all(length >= shortest for length in prefixes)


def test_as_much_is_shared_as_there_is_and_nothing_where_little_is_alike():
    def shared(documents, **options):
        batch = padded(documents)
        return share(rows_of(batch["attention_mask"]), batch["input_ids"], **options)

    same, other = torch.arange(1, 31), torch.arange(50, 70)
    cut, long = torch.cat([same[:20], other[5:9]]), torch.cat([same, other])
    found = shared([torch.cat([same, other[:5]]), other[:3], cut, same, long])
    # What follows the 20 tokens of four rows is alike in 10 and 15 tokens more: too few for a segment of its own.
    assert sorted(found.segments) == [3, 4, 10, 15, 20, 30]
    assert [found.segments[document[0]] for document in found.documents] == [20, 3, 20, 20, 20]
    rows = [same[:16], same[:16], same, same]
    nested = shared([torch.cat([row, torch.tensor([i])]) for i, row in enumerate(rows)], shortest=10)
    assert sorted(nested.segments) == [1, 1, 1, 1, 14, 16] and [len(d) for d in nested.documents] == [2, 2, 3, 3]
    assert shared([same, same]).documents == ((0,), (0,))
    assert shared([torch.cat([same[: SHORTEST - 1], torch.tensor([i])]) for i in (70, 71)]) is None
    assert share(PaddedRows((2, 3), (0, 0), (3, 0)), torch.ones(2, 3)) is None


def test_ids_are_compared_once(monkeypatch):
    batch = padded([torch.arange(1, 30), torch.arange(1, 40)])
    rows, ids = rows_of(batch["attention_mask"]), batch["input_ids"]
    compared = watched(monkeypatch, shared_rows, "share")
    assert shared_rows_of(rows, ids) is shared_rows_of(rows, ids) and len(compared) == 1
    ids[0, 3] = 9  # other ids now
    assert shared_rows_of(rows, ids) is None and len(compared) == 2
    other = torch.zeros_like(ids)
    assert shared_rows_of(rows, other).documents == ((0,), (0, 1)) and len(compared) == 3
    known = SharedRows(rows.shape, rows.starts, rows.lengths, segments=(29, 39), documents=((0,), (1,)))
    told = ids.clone()
    tell_shared(told, known)
    assert shared_rows_of(rows, told) is known
    tell_shared(told, rows)
    assert shared_rows_of(rows, told) is None and len(compared) == 3


def test_prefixes_of_packed_documents_are_those_of_the_ids_not_of_the_layout(monkeypatch):
    made = PackedLayout.from_lengths([30, 40])
    alike = torch.cat([torch.arange(1, 31), torch.arange(1, 41)])[None]
    other = torch.arange(1, 71)[None]
    compared = watched(monkeypatch, shared_rows, "tree_of")
    first = shared_documents_of(made, alike)
    assert first.documents == ((0,), (0, 1)) and shared_documents_of(made, alike) is first and len(compared) == 1
    assert shared_documents_of(made, other) is None and len(compared) == 2
    assert shared_documents_of(PackedLayout.from_lengths([35, 35]), alike) is None  # other documents of the same ids
    alike[0, 30] = 99  # other ids now
    assert shared_documents_of(made, alike) is None


def test_the_prefixes_that_a_collator_tells_serve_its_own_ids_only(monkeypatch):
    alike = torch.cat([torch.arange(1, 31), torch.arange(1, 41)])[None]
    told = replace(
        PackedLayout.from_lengths([30, 40]), prefix_tree=tree_of(PackedLayout.from_lengths([30, 40]), alike)
    )
    compared = watched(monkeypatch, shared_rows, "tree_of")
    on_accelerator = alike.to("meta")  # whose ids nobody can read
    assert shared_documents_of(told, on_accelerator).documents == ((0,), (0, 1)) and not compared
    with pytest.raises(NotImplementedError):  # it may be another batch of the same layout
        shared_documents_of(told, torch.arange(1, 71, device="meta")[None])
    assert shared_documents_of(told, torch.arange(1, 71)[None]) is None and len(compared) == 2
