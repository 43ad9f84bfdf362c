"""Where true tokens lie in a padded batch, and the way there and back."""

import pytest
import tiny
import torch
from padded import SIDES, padded

from trl_packfa.errors import InvalidLayout
from trl_packfa.runtime.padded_rows import PaddedRows, rows_of, rows_of_lengths, tell_rows


@pytest.mark.parametrize("side", SIDES)
def test_tokens_go_and_come_back(side):
    batch = padded(tiny.documents(), side)
    rows = PaddedRows.from_mask(batch["attention_mask"])
    assert rows.lengths == tiny.LENGTHS and rows.layout(torch.device("cpu")).lengths == tiny.LENGTHS
    taken = rows.take(batch["input_ids"])
    assert torch.equal(taken[0], torch.cat(tiny.documents()))
    assert torch.equal(rows.put_back(taken), batch["input_ids"])  # pads are 0 in both
    states = torch.randn(*rows.shape, 4)
    real = batch["attention_mask"][..., None].bool()
    assert torch.equal(rows.put_back(rows.take(states)), states.masked_fill(~real, 0))
    positions = rows.take(rows.position_ids(torch.device("cpu")))
    assert torch.equal(positions, rows.layout(torch.device("cpu")).position_ids())


def test_arguments_and_outputs_of_every_kind():
    batch = padded(tiny.documents())
    rows = PaddedRows.from_mask(batch["attention_mask"].bool())
    axes, embedded = torch.arange(3 * rows.shape[0] * rows.shape[1]).view(3, *rows.shape), torch.randn(*rows.shape, 8)
    call = rows.take_call({**batch, "position_ids": axes, "inputs_embeds": embedded, "use_cache": False, "x": None})
    assert "attention_mask" not in call and call["use_cache"] is False and call["x"] is None
    assert torch.equal(call["position_ids"][1], rows.take(axes[1]))
    assert torch.equal(call["inputs_embeds"], rows.take(embedded))
    routed = torch.randn(rows.num_tokens, 6)
    last, (again,), logits, cache = rows.put_back_outputs(
        (call["inputs_embeds"], [call["inputs_embeds"]], routed, None)
    )
    assert last.shape == embedded.shape and torch.equal(last, again) and cache is None
    assert torch.equal(logits.view(*rows.shape, 6)[batch["attention_mask"].bool()], routed)


def test_a_row_of_pads_alone_is_no_document():
    rows = PaddedRows.from_mask(torch.tensor([[0, 0, 0], [0, 1, 1]]))
    assert rows.lengths == (0, 2) and rows.layout(torch.device("cpu")).lengths == (2,) and rows.num_pads == 4
    assert rows.put_back(torch.ones(1, 2, 1)).flatten().tolist() == [0, 0, 0, 0, 1, 1]


def test_a_mask_with_a_hole_is_refused():
    with pytest.raises(InvalidLayout, match=r"hole: row 1 has 3 tokens between columns 0 and 4, and a 0 at column 2"):
        PaddedRows.from_mask(torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1]]))
    with pytest.raises(InvalidLayout, match="meta device"):
        PaddedRows.from_mask(torch.ones(2, 2, device="meta"))


def test_a_mask_is_read_once(monkeypatch):
    mask = padded(tiny.documents())["attention_mask"]
    read = []
    original = PaddedRows.from_mask.__func__
    monkeypatch.setattr(PaddedRows, "from_mask", classmethod(lambda cls, m: read.append(1) or original(cls, m)))
    assert rows_of(mask) is rows_of(mask) and len(read) == 1
    mask[0, 0] = 0  # another mask now
    assert rows_of(mask).starts[0] == 1 and len(read) == 2
    known = rows_of_lengths([2, 3], 4, left=True)
    other = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    tell_rows(other, known)
    assert rows_of(other) is known and len(read) == 2
    assert PaddedRows.from_mask(other).starts == known.starts
