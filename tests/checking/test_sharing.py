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


def _first_gradient_only(self, packed, own=TokenGather.gather):
    copies = own(self, packed)
    again = torch.ones(len(self.index), dtype=torch.bool)
    again[self.first_index] = False
    return torch.where(again.view(-1, *[1] * (copies.dim() - 1)), copies.detach(), copies)


def _without_prefix(self, query, key, value, layout, arguments, own=dispatch.BackendChoice.attend):
    """Attend as if each segment were a document."""
    alone = layout.attention.queries if layout.shares_prefixes else layout
    return own(self, query, key, value, alone, arguments)


def _positions_of_segments(self):
    starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
    return (torch.arange(self.num_tokens) - starts).view(self.rows, -1)


# What could be wrong between rows and the row that holds their prefix once: each must be found.
FAULTS = {
    "positions begin anew": (PackedLayout, "position_ids", _positions_of_segments, "rows that share a prefix are not"),
    "gradients are not added": (TokenGather, "gather", _first_gradient_only, "worst in the gradient of"),
    "attention loses the beginning": (dispatch.BackendChoice, "attend", _without_prefix, r"model\.layers\.0\.self_a"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch):
    model = shared(tiny.model(layers=2))
    owner, name, function, said = FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    report = check_unpadding(model)
    failed = {"sharing gradients"} if fault == "gradients are not added" else {"sharing", "sharing gradients"}
    assert report.verdict == "differs" and {row.kind for row in report.failed} == failed
    with pytest.raises(ContaminationError, match=said):
        report.require_exact()


def test_a_patch_and_a_check_of_packing_fail_with_it(monkeypatch):
    patched, other = shared(tiny.model(layers=2)), tiny.model(layers=2)
    monkeypatch.setattr(PackedLayout, "position_ids", _positions_of_segments)
    packing = check(patched)
    assert packing.verdict == "differs" and packing.failed[0].why.startswith("rows that share a prefix differ")
    with pytest.raises(ContaminationError, match="share_prefixes=False"):
        shared(other)
    assert find_state(other) is None
    patch(other, unpad=True)  # which shares nothing


# What could be wrong between rows and the row that holds their prefix once: each must be found.


def test_short_tables_of_positions_are_checked_or_never_share():
    for most, checked in ((24, True), (20, False)):
        model = shared(small_model("gpt2", n_positions=most, max_position_embeddings=most))
        assert ("sharing" in find_state(model).unpadding_report) == checked
