"""Where true tokens lie in a padded batch, and the way there and back."""

import pytest
import tiny
import torch
from padded import SIDES, masks_read, padded
from tolerance import assert_float32

from trl_packfa import PackedLayout, patch
from trl_packfa.errors import InvalidLayout
from trl_packfa.layout.padded_rows import PaddedRows, rows_of, rows_of_lengths, tell_rows


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
    taken, routed = call["inputs_embeds"], torch.randn(rows.num_tokens, 6)
    last, (again,), logits, cache = rows.put_back_outputs((taken, [taken], routed, None))
    assert last.shape == embedded.shape and torch.equal(last, again) and cache is None
    assert torch.equal(logits.view(*rows.shape, 6)[batch["attention_mask"].bool()], routed)


@pytest.mark.parametrize(
    "names", [("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features")]
)
def test_a_row_by_itself_has_the_features_of_its_own_image_tokens(names):
    """Lists of them by layer, and dictionaries (Granite 4 Vision)."""
    rows, place = rows_of_lengths([3, 2], 4, left=False), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    features = torch.arange(3.0)[:, None]
    mask = place if names[0] == "visual_pos_masks" else place[..., None]
    by_layer = [features, -features] if names[0] == "visual_pos_masks" else {0: features, 7: -features}
    for row, expected in ((0, [0.0, 1.0]), (1, [2.0])):
        own = rows.row_of_call({names[0]: mask, names[1]: by_layer}, row)
        assert own[names[0]].sum() == len(expected)
        found = own[names[1]]
        first, second = found if isinstance(found, list) else (found[0], found[7])
        assert first[:, 0].tolist() == expected and (-second[:, 0]).tolist() == expected


def test_a_row_of_pads_alone_is_no_document_and_a_mask_with_a_hole_is_refused():
    rows = PaddedRows.from_mask(torch.tensor([[0, 0, 0], [0, 1, 1]]))
    assert rows.lengths == (0, 2) and rows.layout(torch.device("cpu")).lengths == (2,) and rows.num_pads == 4
    assert rows.put_back(torch.ones(1, 2, 1)).flatten().tolist() == [0, 0, 0, 0, 1, 1]
    with pytest.raises(InvalidLayout, match=r"hole: row 1 has 3 tokens between columns 0 and 4, and a 0 at column 2"):
        PaddedRows.from_mask(torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1]]))
    with pytest.raises(InvalidLayout, match="meta device"):
        PaddedRows.from_mask(torch.ones(2, 2, device="meta"))


def test_a_mask_is_read_once(monkeypatch):
    mask, read = padded(tiny.documents())["attention_mask"], masks_read(monkeypatch)
    assert rows_of(mask) is rows_of(mask) and len(read) == 1
    mask[0, 0] = 0  # another mask now
    assert rows_of(mask).starts[0] == 1 and len(read) == 2
    mask.data[2, 0] = 0  # torch counts no such write, nor one through numpy
    assert rows_of(mask).starts[2] == 1 and len(read) == 3
    mask.numpy()[3, 0] = 0
    assert rows_of(mask).starts[3] == 1 and len(read) == 4
    read.clear()
    read += [1, 1]
    known = rows_of_lengths([2, 3], 4, left=True)
    other = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    tell_rows(other, known)
    assert rows_of(other) is known and len(read) == 2
    assert PaddedRows.from_mask(other).starts == known.starts


@pytest.mark.parametrize("shared", [False, True])
def test_masks_of_inference_mode_are_read_and_what_is_known_there_serves_training(shared):
    """Score, then train: the usual loop of RL."""
    model = patch(tiny.model(layers=1), unpad=True, share_prefixes=shared)
    with torch.inference_mode():
        made_there = padded([torch.arange(5, 40), torch.arange(5, 30)])
        expected = model(**made_there, use_cache=False).logits
    batch = padded([torch.arange(5, 40), torch.arange(5, 30)])
    with torch.inference_mode():
        assert torch.equal(model(**batch, use_cache=False).logits, expected)
    logits = model(**batch, use_cache=False).logits
    assert torch.equal(logits.detach(), expected)
    logits[batch["attention_mask"].bool()].sum().backward()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "roformer"])
def test_positions_of_one_row_are_every_rows(name):
    """Positions are expanded also where the packed row has as many tokens as a padded row."""
    model = tiny.MODELS[name]()
    documents = [torch.arange(5, 5 + n) for n in (12, 5, 4, 3)]
    batch = padded(documents, extra=12)
    assert batch["attention_mask"].sum() == batch["attention_mask"].shape[1] == 24
    real, positions = batch["attention_mask"].bool(), torch.arange(24)[None]
    if name in ("llama", "gpt2"):
        batch["position_ids"] = positions
    expected = model(**batch, use_cache=False).logits[real]
    patch(model, unpad=True)
    assert_float32(model(**batch, use_cache=False).logits[real].detach(), expected.detach().double())
    if name == "gpt2":
        batch["position_ids"] = positions[0]
        assert_float32(model(**batch, use_cache=False).logits[real].detach(), expected.detach().double())


def test_positions_of_one_row_with_several_packed_rows():
    model, layout = patch(tiny.MODELS["gpt2"]()), PackedLayout.from_lengths([3, 5, 3, 5], rows=2)
    ids = torch.randint(3, tiny.VOCAB, (2, 8))
    one = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    expected = model(input_ids=ids, position_ids=one.expand(2, -1), packed_layout=layout).logits
    assert torch.equal(model(input_ids=ids, position_ids=one, packed_layout=layout).logits, expected)
