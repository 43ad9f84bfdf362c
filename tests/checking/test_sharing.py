"""The check of `share_prefixes=True`: it finds what is wrong, and says what is as it is."""

import pytest
import tiny
import torch
from tiny_models import small_model

from trl_packfa import check, describe, patch
from trl_packfa.attention import dispatch
from trl_packfa.checking import check_unpadding
from trl_packfa.errors import ContaminationError
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.shared_prefix import TokenGather
from trl_packfa.patching.state import find_state


def shared(model):
    return patch(model, unpad=True, share_prefixes=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "mixtral", "gpt2", "bloom"])
def test_exact_models_are_found_exact(model_type, dtype):
    model = shared(small_model(model_type).to(dtype))
    report = find_state(model).unpadding_report
    assert report.is_exact, str(report)
    assert report["sharing control"].difference > 100 * report["sharing"].difference
    assert str(report["sharing"]) in describe(model)


def _first_gradient_only(own):
    def gather(self, packed):
        copies = own(self, packed)
        again = torch.ones(len(self.index), dtype=torch.bool)
        again[self.first_index] = False
        return torch.where(again.view(-1, *[1] * (copies.dim() - 1)), copies.detach(), copies)

    return gather


def _without_prefix(own):
    """Attend as if each segment were a document."""

    def attend(self, query, key, value, layout, arguments):
        alone = layout.attention.queries if layout.shares_prefixes else layout
        return own(self, query, key, value, alone, arguments)

    return attend


def _positions_of_segments(self):
    starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
    return (torch.arange(self.num_tokens) - starts).view(self.rows, -1)


# What could be wrong between rows and the row that holds their prefix once: each must be found.


def test_positions_that_begin_anew_are_found(monkeypatch):
    model = shared(tiny.model(layers=2))
    monkeypatch.setattr(PackedLayout, "position_ids", _positions_of_segments)
    assert {row.kind for row in check_unpadding(model).failed} == {"sharing", "sharing gradients"}
    with pytest.raises(ContaminationError, match="rows that share a prefix are not exact on this model"):
        check_unpadding(model).require_exact()
    packing = check(model)
    assert packing.verdict == "differs" and packing.failed[0].why.startswith("rows that share a prefix differ")


def test_gradients_that_are_not_added_are_found(monkeypatch):
    model = shared(tiny.model(layers=2))
    monkeypatch.setattr(TokenGather, "gather", _first_gradient_only(TokenGather.gather))
    report = check_unpadding(model)
    assert report.verdict == "differs" and not report.is_exact
    assert [(row.kind, bool(row.where)) for row in report.failed] == [("sharing gradients", True)]
    with pytest.raises(ContaminationError, match="worst in the gradient of"):
        report.require_exact()


def test_attention_that_loses_the_beginning_is_found(monkeypatch):
    model = shared(tiny.model(layers=2))
    own = dispatch.BackendChoice.attend
    monkeypatch.setattr(dispatch.BackendChoice, "attend", _without_prefix(own))
    report = check_unpadding(model)
    assert not report["sharing"].holds and report["sharing"].where == "model.layers.0.self_attn"


def test_a_model_that_is_not_checked_is_not_patched(monkeypatch):
    monkeypatch.setattr(PackedLayout, "position_ids", _positions_of_segments)
    model = tiny.model(layers=2)
    with pytest.raises(ContaminationError, match="share_prefixes=False"):
        shared(model)
    assert find_state(model) is None
    patch(model, unpad=True)  # which shares nothing


def test_short_tables_of_positions_are_checked_or_never_share():
    for most, checked in ((24, True), (20, False)):
        model = shared(small_model("gpt2", n_positions=most, max_position_embeddings=most))
        assert ("sharing" in find_state(model).unpadding_report) == checked
