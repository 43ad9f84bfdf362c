"""What a call says beside its boundaries: each contradiction is refused by name, alone and through a model."""

import pytest
import tiny
import torch
from dense import dense_mask
from tiny_models import small_model
from tolerance import assert_float32

from trl_packfa import PackedLayout, patch
from trl_packfa.errors import InvalidLayout, PackingError
from trl_packfa.layout.from_call import layout_of

IDS = torch.ones(1, 10, dtype=torch.long)
LAYOUT = PackedLayout.from_lengths([4, 6])
FLASH = LAYOUT.flash_kwargs()
NATURAL = LAYOUT.position_ids()


def offsets(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def positions(*values, dtype=torch.long):
    return torch.tensor([values], dtype=dtype)


LONG = {"dtype": torch.int64}
LEFT_TRUNCATED = positions(5, 6, 7, 8, 0, 1, 2, 3, 4, 5)
CONTRADICTIONS = {
    "wrong total": ({"cu_seq_lens_q": offsets(0, 4, 11)}, "describe 11 tokens, the batch has 1 x 10"),
    "wrong total in int64": ({"cu_seq_lens_q": offsets(0, 4, 9, **LONG)}, "describe 9 tokens"),
    "decreasing in int64": ({"cu_seq_lens_q": offsets(0, 6, 4, 10, **LONG)}, "must not decrease"),
    "q unlike k in int64": ({"cu_seq_lens_q": offsets(0, 4, 10, **LONG), "cu_seq_lens_k": offsets(0, 5, 10, **LONG)},
                            "differ"),
    "positions restart elsewhere, int64": ({"cu_seq_lens_q": offsets(0, 5, 10, **LONG), "position_ids": NATURAL},
                                           "positions restart at token 4"),
    "layout of another batch": ({"packed_layout": PackedLayout.from_lengths([4, 5])}, "describe 9 tokens, the batch"),
    "decreasing": ({"cu_seq_lens_q": offsets(0, 6, 4, 10)}, "must not decrease"),
    "not from 0": ({"cu_seq_lens_q": offsets(1, 4, 10)}, "start at 0"),
    "empty": ({"cu_seq_lens_q": offsets()}, "start at 0"),
    "two-dimensional": ({"cu_seq_lens_q": offsets(0, 4, 10)[None]}, "one-dimensional"),
    "q unlike k": ({"cu_seq_lens_q": offsets(0, 4, 10), "cu_seq_lens_k": offsets(0, 5, 10)}, "differ"),
    "q without k's length": ({"cu_seq_lens_q": offsets(0, 4, 10), "cu_seq_lens_k": offsets(0, 10)}, "differ"),
    "k alone": ({"cu_seq_lens_k": offsets(0, 4, 10)}, "cu_seq_lens_k came without cu_seq_lens_q"),
    "seq_idx alone": ({"seq_idx": LAYOUT.document_ids()}, "seq_idx came without cu_seq_lens_q"),
    "floats": ({"cu_seq_lens_q": offsets(0, 4, 10, dtype=torch.float32)}, "cu_seq_lens_q are torch.float32, not int"),
    "a list": ({"cu_seq_lens_q": [0, 4, 10]}, "cu_seq_lens_q is a list, not a tensor"),
    "on meta": ({"cu_seq_lens_q": offsets(0, 4, 10, device="meta")}, "lie on the meta device"),
    "k on meta": ({**FLASH, "cu_seq_lens_k": offsets(0, 4, 10, device="meta")}, "cu_seq_lens_k lie on the meta"),
    "max_length_q": ({**FLASH, "max_length_q": 5}, "max_length_q=5 is shorter than the longest document, of 6"),
    "max_length_k": ({**FLASH, "max_length_k": torch.tensor(5)}, "max_length_k=5 is shorter"),
    "seq_idx": ({**FLASH, "seq_idx": PackedLayout.from_lengths([5, 5]).document_ids()},
                "disagree at token 4 of row 0"),
    "seq_idx of another batch": ({**FLASH, "seq_idx": IDS[:, :9]}, r"seq_idx has shape \(1, 9\)"),
    "seq_idx beside positions": ({"position_ids": NATURAL, "seq_idx": IDS}, "seq_idx and the boundaries disagree"),
    "positions restart elsewhere": ({"cu_seq_lens_q": offsets(0, 5, 10), "position_ids": NATURAL},
                                    "positions restart at token 4"),
    "positions jump inside": ({**FLASH, "position_ids": positions(0, 1, 5, 6, 0, 1, 2, 3, 4, 5)},
                              "positions jump at token 2"),
    "negative positions": ({**FLASH, "position_ids": NATURAL - 1}, "position_ids hold -1"),
    "float positions": ({**FLASH, "position_ids": NATURAL.float()}, "position_ids are torch.float32"),
    "positions of another batch": ({**FLASH, "position_ids": NATURAL[:, :9]}, r"position_ids have shape \(1, 9\)"),
    "positions of two rows": ({**FLASH, "position_ids": NATURAL.expand(2, -1)}, r"position_ids have shape \(2, 10\)"),
    "layout against positions": ({"packed_layout": PackedLayout.from_lengths([5, 5]), "position_ids": NATURAL},
                                 "positions restart at token 4"),
    "layout against cu_seq_lens": ({"packed_layout": LAYOUT, "cu_seq_lens_q": offsets(0, 5, 10)},
                                   r"packed_layout and cu_seq_lens_q disagree: lengths \[4, 6\] and \[5, 5\]"),
    "layout against seq_idx": ({"packed_layout": LAYOUT, "seq_idx": IDS}, "seq_idx and the boundaries disagree"),
    "layout against maximum": ({"packed_layout": LAYOUT, "max_length_q": 3}, "max_length_q=3 is shorter"),
    "no layout": ({"packed_layout": [4, 6]}, "packed_layout is a list"),
    "mask of another batch": ({**FLASH, "attention_mask": IDS[:, :9]}, "not all ones, one for each token"),
    "mask with holes": ({**FLASH, "attention_mask": IDS.index_fill(1, torch.tensor(3), 0)}, "not all ones"),
    "layout with a pad": ({"packed_layout": LAYOUT, "attention_mask": IDS.index_fill(1, torch.tensor(9), 0)},
                          "not all ones"),
    "restarts under padding": ({"position_ids": NATURAL, "attention_mask": IDS.index_fill(1, torch.tensor(9), 0)},
                               "restart at token 4 of row 0 under an attention_mask with zeros"),
}  # fmt: skip
ODD_POSITIONS = {
    "left-truncated": LEFT_TRUNCATED,
    "jump": positions(0, 1, 2, 7, 8, 9, 10, 11, 12, 13),
    "half way back": positions(0, 1, 2, 3, 1, 2, 3, 4, 5, 6),
    "repeat": positions(0, 1, 2, 2, 3, 4, 5, 6, 7, 8),
}


@pytest.fixture(scope="module", params=["llama", "mamba"])
def patched_model(request):
    return patch(tiny.MODELS[request.param]())


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(case, patched_model):
    call, message = CONTRADICTIONS[case]
    with pytest.raises(InvalidLayout, match=message):
        patched_model(input_ids=IDS, **call)


@pytest.mark.parametrize("style", ODD_POSITIONS)
def test_positions_alone_that_transformers_reads_in_two_ways_are_refused(style):
    from transformers.masking_utils import find_packed_sequence_indices
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    call = ODD_POSITIONS[style]
    by_mask = [0, *(find_packed_sequence_indices(call)[0].diff().nonzero().flatten() + 1).tolist(), 10]
    by_kernel = prepare_fa_kwargs_from_position_ids(call)[0][0].tolist()
    assert by_mask != by_kernel, "control: the two rules disagree"
    with pytest.raises(InvalidLayout, match="position_ids alone do not tell where documents begin"):
        layout_of({"input_ids": IDS, "position_ids": call})


@pytest.mark.parametrize("start", [0, 2])
def test_documents_that_begin_at_one_position_are_boundaries(start):
    layout = layout_of({"input_ids": IDS, "position_ids": (NATURAL + start).int()})
    assert layout.lengths == (4, 6)


def test_explicit_boundaries_take_documents_whose_beginning_was_cut_off():
    model, docs = patch(tiny.model(layers=1)), tiny.documents((4, 6))
    logits = model(input_ids=torch.cat(docs)[None], position_ids=LEFT_TRUNCATED, **FLASH).logits
    own = zip(docs, LAYOUT.split(LEFT_TRUNCATED), strict=True)
    expected = [model(input_ids=ids[None], position_ids=positions[None]).logits[0] for ids, positions in own]
    assert_float32(logits[0], torch.cat(expected).double())


@pytest.mark.parametrize("model_type", ["gpt_neo", "roberta", "mamba", "roformer"])
def test_models_that_count_positions_themselves_refuse_others(model_type):
    with pytest.raises(PackingError, match="do not count each document from 0: one begins at 5"):
        patch(small_model(model_type))(input_ids=IDS, position_ids=LEFT_TRUNCATED, **FLASH)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gpt_neo"])
def test_a_document_longer_than_the_learned_positions_is_refused(model_type):
    """An index error on a CPU, the end of the process's device on CUDA."""
    model = patch(small_model(model_type, max_position_embeddings=16))
    layout = PackedLayout.from_lengths([17, 3])
    ids = torch.ones(1, 20, dtype=torch.long)
    said = r"17 tokens, the model has 16 positions|hold 16, the model has 16 positions"
    with pytest.raises(PackingError, match=said):
        model(input_ids=ids, position_ids=layout.position_ids(), **layout.flash_kwargs())
    fits = PackedLayout.from_lengths([16, 4])
    assert model(input_ids=ids, position_ids=fits.position_ids(), **fits.flash_kwargs()).logits.shape[1] == 20


def test_the_text_axis_of_multimodal_positions_tells_documents():
    assert layout_of({"input_ids": IDS, "position_ids": NATURAL.expand(4, 1, 10)}).lengths == (4, 6)
    assert layout_of({"input_ids": IDS, "position_ids": NATURAL.expand(3, 1, 10)}) is None


def test_a_mask_of_ones_own_decides():
    mask = dense_mask(LAYOUT)[None, None]
    assert layout_of({"input_ids": IDS, "position_ids": NATURAL, "attention_mask": mask}) is None


def test_a_packed_batch_of_one_document_runs_where_mixers_are_patched():
    model, (ids,) = patch(small_model("mamba")), tiny.documents((6,))
    logits = model(**tiny.batch([ids])).logits
    assert torch.equal(logits, model(input_ids=ids[None]).logits)
