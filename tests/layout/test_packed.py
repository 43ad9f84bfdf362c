import pytest
import torch
from dense import dense_mask

from trl_packfa import PackedLayout
from trl_packfa.errors import InvalidLayout


def test_the_docstrings_example_has_the_values_it_shows():
    layout = PackedLayout.from_lengths([2, 3, 5], rows=2)
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 10]
    assert layout.cu_seqlens.dtype == torch.int32
    assert (layout.lengths, layout.rows, layout.row_length, layout.num_tokens) == ((2, 3, 5), 2, 5, 10)
    assert (layout.max_seqlen, layout.num_documents) == (5, 3)
    assert layout.position_ids().tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert layout.document_ids().tolist() == [[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]]


@pytest.mark.parametrize(("lengths", "rows"), [([1], 1), ([4, 1, 3], 1), ([2, 2, 4, 1, 3], 3), ([5, 5], 2)])
def test_constructors_invert_the_views(lengths, rows):
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    by_offsets = PackedLayout.from_cu_seqlens(layout.cu_seqlens, rows=rows)
    for again in (PackedLayout.from_position_ids(layout.position_ids()), by_offsets):
        assert (again.lengths, again.rows) == (layout.lengths, rows)
        assert torch.equal(again.cu_seqlens, layout.cu_seqlens)


def test_flash_kwargs_are_trls():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    theirs = collator([{"input_ids": [1] * n} for n in (3, 1, 4)])
    layout = PackedLayout.from_lengths([3, 1, 4])
    ours = {**layout.flash_kwargs(), "position_ids": layout.position_ids()}
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name
        assert type(value) is type(theirs[name])


def test_dense_mask_is_block_diagonal_causal_and_windowed():
    mask = dense_mask(PackedLayout.from_lengths([2, 3]), sliding_window=2)
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert mask.int().tolist() == rows


def test_positions_that_jump_start_documents_and_repeated_offsets_do_not():
    positions = torch.tensor([[5, 6, 7, 9, 9, 0, 1]], dtype=torch.int32)
    assert PackedLayout.from_position_ids(positions).lengths == (3, 1, 1, 2)
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 2, 5, 5, 5], dtype=torch.int32))  # padded to a fixed size
    assert layout.lengths == (2, 3) and layout.cu_seqlens.tolist() == [0, 2, 5]


def test_split_is_the_inverse_of_concatenation():
    documents = [torch.randn(n, 4) for n in (3, 1, 2)]
    layout = PackedLayout.from_lengths([3, 1, 2], rows=1)
    for packed in (torch.cat(documents), torch.cat(documents)[None]):
        assert all(torch.equal(a, b) for a, b in zip(layout.split(packed), documents, strict=True))


@pytest.mark.parametrize(("build", "message"), [
    (lambda: PackedLayout.from_lengths([]), "must all be positive"),
    (lambda: PackedLayout.from_lengths([3, 0]), "must all be positive, but document 1 has 0"),
    (lambda: PackedLayout.from_lengths([3, -1]), "must all be positive"),
    (lambda: PackedLayout.from_lengths([2.5, 3]), "must be integers"),
    (lambda: PackedLayout.from_lengths([2**31]), "2147483647 tokens at most"),
    (lambda: PackedLayout.from_lengths([3, 2], rows=2), "cannot be laid out in rows=2"),
    (lambda: PackedLayout.from_lengths([3, 1], rows=2), "crosses the end of a row"),
    (lambda: PackedLayout.from_cu_seqlens(torch.tensor([1, 3])), "start at 0"),
    (lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 3, 2])), "must not decrease"),
    (lambda: PackedLayout.from_position_ids(torch.arange(3)), r"must have shape \(B, L\)"),
    (lambda: PackedLayout(torch.tensor([0, 3]), (3,)), "cu_seqlens must be int32"),
])  # fmt: skip
def test_bad_layouts_are_refused(build, message):
    with pytest.raises(InvalidLayout, match=message):
        build()


def test_true_lengths_leave_out_padding_of_several_documents():
    from_lengths = PackedLayout.from_lengths
    assert from_lengths([3, 2, 1, 4], padding=5).true_lengths == (3, 2)
    assert from_lengths([3, 2, 1], padding=6).true_lengths == ()  # an example of three parts that runs idle
    assert from_lengths([3, 2]).true_lengths == (3, 2)


def test_to_a_device_is_made_once_for_each_device_and_keeps_everything_else():
    layout = PackedLayout.from_lengths([2, 3, 5], rows=2)
    moved = layout.to("meta")
    assert moved.cu_seqlens.device.type == "meta"
    assert (moved.lengths, moved.rows) == (layout.lengths, layout.rows)
    assert layout.to(torch.device("meta")) is moved and moved.to("meta") is moved
    assert layout.to("cpu") is layout
    with torch.inference_mode():
        saved = PackedLayout.from_lengths([2, 3]).to("meta")
    assert not saved.cu_seqlens.is_inference(), "a backward can save it"
