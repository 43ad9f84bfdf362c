"""The check of `unpad=True` and of `share_prefixes=True`: it finds what is wrong, and says what is as it is."""

import sys
from contextlib import nullcontext

import pytest
import tiny
import torch
from tiny_models import small_model
from tiny_models.composites import small_composite

from trl_packfa import check, describe, patch
from trl_packfa.attention import dispatch
from trl_packfa.checking import check_unpadding, depth
from trl_packfa.checking.unpadding import PaddedProbe
from trl_packfa.config.options import PatchOptions
from trl_packfa.errors import ContaminationError, UnsupportedModel
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.padded_rows import PaddedRows
from trl_packfa.layout.shared_prefix import TokenGather
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target
from trl_packfa.patching.rotary import RotaryOverride
from trl_packfa.patching.state import find_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "shared"), [
    *[(name, False) for name in ("llama", "mamba2", "mixtral", "camembert")],
    *[(name, True) for name in ("llama", "gpt_oss", "mixtral", "gpt2", "bloom")],
])  # fmt: skip
def test_exact_models_are_found_exact(model_type, shared, dtype):
    model = patch(small_model(model_type).to(dtype), unpad=True, share_prefixes=shared)
    report, kind = find_state(model).unpadding_report, "sharing" if shared else "unpadding"
    assert report.verdict == "exact" and report["unpadding"].of == "padded" and "pads seen" not in report, str(report)
    assert report[f"{kind} control"].difference > 100 * report[kind].difference
    assert str(report[kind]) in describe(model)


def sharing(model):
    return patch(model, unpad=True, share_prefixes=True)


def test_a_model_whose_padded_rows_are_not_its_documents_is_compared_with_these():
    """BART counts positions from the pads on, whatever it is told."""
    model = patch(small_model("bart"), unpad=True)
    report = find_state(model).unpadding_report
    assert report.is_exact and report["unpadding"].of == "alone" and report["pads seen"].difference > 0.1
    assert "its own padded rows are from their documents alone by 1" in describe(model)


def test_a_head_that_runs_without_pads_is_compared_by_its_logits():
    """Kosmos-2.5's decoder holds its LM head. With pads the head gets other rows than without."""
    model = patch(small_composite("kosmos-2.5"), unpad=True)
    state = find_state(model)
    assert state.unpadding_report.is_exact and not state.parts.takes_images, describe(model)


# What could be wrong between a padded batch and its row: each must be found.
FAULTS = {
    "a row is forgotten": ("take_call", lambda own: lambda rows, call: _without_last_row(own(rows, call), rows)),
    "outputs are put back off by one": (
        "put_back", lambda own: lambda rows, tensor: own(rows, tensor.roll(1, dims=1) if tensor.dim() == 3 else tensor)
    ),
    "gradients are cut": ("put_back", lambda own: lambda rows, tensor: _half_detached(own(rows, tensor))),
}  # fmt: skip


def _without_last_row(call, rows):
    ids = call["input_ids"].clone()
    ids[:, -rows.lengths[-1] :] = 5
    return {**call, "input_ids": ids}


def _half_detached(tensor):
    return torch.cat([tensor[:1].detach(), tensor[1:]])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, large, monkeypatch):
    model = patch(tiny.model(layers=2), unpad=True)
    if large:
        monkeypatch.setattr(depth, "CHEAP", 0)
    name, change = FAULTS[fault]
    monkeypatch.setattr(PaddedRows, name, change(getattr(PaddedRows, name)))
    report = check_unpadding(model)
    assert report.verdict == "differs", str(report)
    packing = check(model)
    assert packing.verdict == "differs" and "padded batches without their pads" in packing.failed[0].why


def scale_gradient(model, layer, factor, monkeypatch):
    """Scale the gradient of one weight in the runs without pads."""
    run, is_unpadded = PaddedProbe.run, [False]

    def told(self, *args, unpad, **kwargs):
        is_unpadded[0] = unpad
        return run(self, *args, unpad=unpad, **kwargs)

    monkeypatch.setattr(PaddedProbe, "run", told)
    weight = model.model.layers[layer].mlp.down_proj.weight
    weight.register_hook(lambda gradient: gradient * factor if is_unpadded[0] else gradient)


def test_a_large_model_on_a_cpu_runs_left_pads_through_one_layer_of_each_kind(monkeypatch):
    """Rows padded on the right run through all layers, so a wrong gradient of any layer is found."""
    model, calls = patch(tiny.model(layers=4), unpad=True), [0, 0, 0, 0]
    forward = type(model.model.layers[0].self_attn).__call__

    def counted(self, *args, **kwargs):
        if hasattr(self, "layer_idx"):
            calls[self.layer_idx] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "__call__", counted)
    assert check_unpadding(model).verdict == "exact"
    assert len(set(calls)) == 1
    monkeypatch.setattr(depth, "CHEAP", 0)
    calls[:] = [0, 0, 0, 0]
    assert check_unpadding(model).verdict == "exact"
    assert calls[1] == calls[2] == calls[3] < 0.8 * calls[0]
    scale_gradient(model, 2, 0.5, monkeypatch)
    report = check_unpadding(model)
    assert report.verdict == "differs" and report["unpadding gradients"].where == "model.layers.2.mlp.down_proj.weight"


def test_a_gradient_that_is_nan_without_pads_alone_is_not_exact(monkeypatch):
    model = patch(tiny.model(), unpad=True)
    scale_gradient(model, 1, float("nan"), monkeypatch)
    report = check_unpadding(model)
    assert report.verdict != "exact", str(report)


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_without_power_is_said_to_have_none(shared):
    model = tiny.model(layers=1)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            torch.nn.init.zeros_(parameter)
    apply_patch(Target.of(model), get_patch(model.config), PatchOptions(unpad=True, share_prefixes=shared))
    report = check_unpadding(model)
    assert report.verdict == "no power"
    assert not report["sharing control" if shared else "unpadding control"].holds


def test_frequencies_that_a_long_row_has_changed_are_forgotten_between_measurements():
    """Dynamic NTK's base grows for a long sequence and stays: a document alone would depend on those before it."""
    model = tiny.model("llama-dynamic", layers=2)
    rotary = model.model.rotary_emb
    model(input_ids=torch.randint(3, tiny.VOCAB, (1, 60)))  # longer than any document of the check's
    grown, seen = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    assert check(patch(model)).verdict == "exact"
    report = find_state(patch(model, unpad=True)).unpadding_report
    # Padded rows have the longest one's frequencies.
    assert report.verdict == "exact" and report["unpadding"].of == "alone"
    assert torch.equal(rotary.inv_freq, grown) and rotary.max_seq_len_cached == seen
    assert not rotary._forward_pre_hooks


@pytest.mark.parametrize("fault", ["remembers", "no document has its own"])
def test_negative_control_frequencies_of_other_documents_are_found(fault, monkeypatch):
    if fault == "remembers":
        monkeypatch.setattr(sys.modules["trl_packfa.checking.modes"], "fresh_frequencies", nullcontext)
    else:
        plain = lambda self, *args, **options: self.call_original(*args, **options)  # noqa: E731
        monkeypatch.setattr(RotaryOverride, "__call__", plain)
    assert check(patch(tiny.model("llama-dynamic", layers=2))).verdict == "differs"


@pytest.mark.parametrize("shared", [False, True])
def test_the_check_leaves_no_trace(shared):
    model = patch(tiny.model(layers=2), unpad=True, share_prefixes=shared)
    counted, state = vars(find_state(model).unpadding).copy(), torch.get_rng_state()
    check_unpadding(model)
    assert vars(find_state(model).unpadding) == counted and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    report = check(model)
    assert report.is_exact and "unpadding" in report and ("sharing" in report) == shared
    if shared:
        assert report["sharing control"].difference > 0.1
        assert [row["verdict"] for row in report.table()][-3:] == ["sharing", "", ""]
    with pytest.raises(UnsupportedModel, match="not patched to run without pads"):
        check_unpadding(patch(model))


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
SHARING_FAULTS = {
    "positions begin anew": (PackedLayout, "position_ids", _positions_of_segments, "rows that share a prefix are not"),
    "gradients are not added": (TokenGather, "gather", _first_gradient_only, "worst in the gradient of"),
    "attention loses the beginning": (dispatch.BackendChoice, "attend", _without_prefix, r"model\.layers\.0\.self_a"),
}


@pytest.mark.parametrize("fault", SHARING_FAULTS)
def test_faults_of_shared_prefixes_are_found(fault, monkeypatch):
    model = sharing(tiny.model(layers=2))
    owner, name, function, said = SHARING_FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    report = check_unpadding(model)
    failed = {"sharing gradients"} if fault == "gradients are not added" else {"sharing", "sharing gradients"}
    assert report.verdict == "differs" and {row.kind for row in report.failed} == failed
    with pytest.raises(ContaminationError, match=said):
        report.require_exact()


def test_a_patch_and_a_check_of_packing_fail_with_a_fault_of_shared_prefixes(monkeypatch):
    patched, other = sharing(tiny.model(layers=2)), tiny.model(layers=2)
    monkeypatch.setattr(PackedLayout, "position_ids", _positions_of_segments)
    packing = check(patched)
    assert packing.verdict == "differs" and packing.failed[0].why.startswith("rows that share a prefix differ")
    with pytest.raises(ContaminationError, match="share_prefixes=False"):
        sharing(other)
    assert find_state(other) is None
    patch(other, unpad=True)  # which shares nothing


# What could be wrong between rows and the row that holds their prefix once: each must be found.


def test_short_tables_of_positions_are_checked_or_never_share():
    for most, checked in ((24, True), (20, False)):
        model = sharing(small_model("gpt2", n_positions=most, max_position_embeddings=most))
        assert ("sharing" in find_state(model).unpadding_report) == checked
