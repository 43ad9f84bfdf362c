"""Contradicting boundaries are refused by name; what is not packed is left alone."""

import pytest
import tiny
import torch

from trl_packfa import PackedLayout, patch
from trl_packfa.boundaries import layout_of
from trl_packfa.errors import InvalidLayout, PackingError, UnsupportedModel

IDS = torch.ones(1, 10, dtype=torch.long)
LAYOUT = PackedLayout.from_lengths([4, 6])


def test_positions_that_run_through_are_no_boundaries():
    assert layout_of({"input_ids": IDS, "position_ids": torch.arange(10)[None]}) is None
    assert layout_of({"input_ids": IDS}) is None


def test_one_set_of_positions_serves_every_row():
    layout = layout_of({"input_ids": IDS.expand(2, -1), "position_ids": LAYOUT.position_ids()})
    assert (layout.lengths, layout.rows) == ((4, 6, 4, 6), 2)


def test_a_padded_batch_is_left_alone():
    for mask in (torch.tensor([[1] * 8 + [0] * 2]), torch.tensor([[0] * 2 + [1] * 8])):
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        for positions in (torch.arange(10)[None], counted, counted.masked_fill(mask == 0, 1)):
            assert layout_of({"input_ids": IDS, "position_ids": positions, "attention_mask": mask}) is None


def test_boundaries_may_be_finer_than_positions():
    """A document split in two keeps counting; only cu_seq_lens says so."""
    call = {"input_ids": IDS, "position_ids": torch.arange(10)[None], **LAYOUT.flash_kwargs()}
    assert layout_of(call).lengths == (4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"packed_layout": PackedLayout.from_lengths([4, 5])}, "describe 9 tokens, the batch has 1 x 10"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "describe 9 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 4, 10])}, "must not decrease"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 10]), "cu_seq_lens_k": torch.tensor([0, 5, 10])}, "differ"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5, 10]), "position_ids": LAYOUT.position_ids()},
            "disagree: positions restart at token 4",
        ),
        ({"packed_layout": LAYOUT, "attention_mask": torch.tensor([[1] * 9 + [0]])}, "not all ones"),
    ],
)
def test_contradictions_are_refused(call, message):
    with pytest.raises(InvalidLayout, match=message):
        layout_of({"input_ids": IDS, **call})


def test_a_document_may_not_cross_rows():
    with pytest.raises(InvalidLayout, match="crosses the end of a row"):
        layout_of({"input_ids": IDS.view(2, 5), "cu_seq_lens_q": LAYOUT.cu_seqlens})


def test_a_cache_in_use_is_left_alone():
    model = patch(tiny.model())
    prefix = model(input_ids=IDS, use_cache=True)
    assert prefix.past_key_values.get_seq_length() == 10
    layout = layout_of({"input_ids": IDS, "past_key_values": prefix.past_key_values, **LAYOUT.flash_kwargs()})
    assert layout is None


def test_attention_weights_of_a_packed_batch_are_refused():
    model = patch(tiny.model())
    with pytest.raises(PackingError, match="no T x T matrix exists"):
        model.model(input_ids=IDS, packed_layout=LAYOUT, output_attentions=True)


def test_an_attention_that_the_patch_missed_fails_instead_of_leaking():
    model = patch(tiny.model())
    del vars(model.model.layers[1].self_attn)["forward"]
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError):
            model(input_ids=IDS, packed_layout=LAYOUT)


def test_two_way_attention_is_refused_and_nothing_is_changed():
    model = tiny.model("gemma3", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="attends in both directions"):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())
