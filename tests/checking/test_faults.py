"""Faults put into exact models one at a time: the check must catch each and name where it is."""

from dataclasses import replace

import pytest
import tiny
import torch
from faults import HalvesGradients, wrap
from tiny_models import small_model

from trl_packfa import DataCollatorForPacking, PackedLayout, check, patch
from trl_packfa.attention import get_backend
from trl_packfa.errors import ContaminationError
from trl_packfa.layout.call_context import PackedCall, find_layout, packed_call
from trl_packfa.override import override_in
from trl_packfa.patching.state import find_state

LAYER = "model.layers.2.self_attn"


def with_layout(change):
    """A fault that hands one module another layout of one row: of several, documents might cross from row to row."""

    def fault(override, args, kwargs):
        call = kwargs.get("packed_call")
        if call is not None and call.layout.rows == 1:
            kwargs = {**kwargs, "packed_call": PackedCall(PackedLayout.from_lengths(change(call.layout.lengths)))}
        return override(*args, **kwargs)

    return fault


def backend_with(change):
    """A fault that changes the arguments of one layer's attention."""

    def install(model):
        module = model.get_submodule(LAYER)
        override = override_in(module)
        override.patch = replace(override.patch, arguments=lambda m, read=override.patch.arguments: change(read(m)))
        return model

    return install


def swapped_documents(override, args, kwargs):
    """The third and the fourth document of a row change places in one layer's output."""
    output = override(*args, **kwargs)
    layout = find_layout((), kwargs)
    if layout is None or layout.num_documents < 5:
        return output
    parts = list(layout.split(output[0]))
    parts[2], parts[3] = parts[3], parts[2]
    return torch.cat(parts).view_as(output[0]), output[1]


def rope_not_restarted(model):
    def fault(override, args, kwargs):
        layout = find_layout((), kwargs)
        if layout is not None:
            # Rotation is relative: positions that run on along the row would change nothing, at another speed they do.
            positions, rotary = torch.arange(layout.row_length).expand(layout.rows, -1) // 2, model.model.rotary_emb
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs = {**kwargs, "position_embeddings": type(rotary).forward(rotary, hidden, positions)}
        return override(*args, **kwargs)

    return wrap(model, LAYER, fault)


def dropout_left_on(override, args, kwargs):
    attended, weights = override(*args, **kwargs)
    return torch.dropout(attended, 0.1, train=True), weights


def joined(lengths):
    return (sum(lengths[:2]), *lengths[2:])


def shifted(lengths):
    """One token more for the third document, one less for the fourth."""
    if len(lengths) < 4 or lengths[3] < 2:
        return lengths
    return (*lengths[:2], lengths[2] + 1, lengths[3] - 1, *lengths[4:])


FAULTS = {
    "off by one in cu_seqlens": (lambda m: wrap(m, LAYER, with_layout(shifted)), "leak", LAYER),
    "a missing boundary": (lambda m: wrap(m, LAYER, with_layout(joined)), "leak", LAYER),
    "a window off by one": (backend_with(lambda a: replace(a, sliding_window=9)), "differs", LAYER),
    "another scale": (backend_with(lambda a: replace(a, scaling=a.scaling * 1.01)), "differs", LAYER),
    "swapped documents": (lambda m: wrap(m, LAYER, swapped_documents), "leak", LAYER),
    "rope not restarted": (rope_not_restarted, "differs", LAYER),
    "dropout left on": (lambda m: wrap(m, LAYER, dropout_left_on), "leak", LAYER),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_attention_is_caught_and_named(fault):
    """The same model without one is exact: `test_check.py`."""
    put, verdict, where = FAULTS[fault]
    report = check(put(patch(tiny.model("mistral"))))
    assert report.verdict == verdict, str(report)
    with pytest.raises(ContaminationError, match=where.replace(".", r"\.")):
        report.require_exact()


def test_positions_that_do_not_restart_are_caught_and_named():
    model = patch(small_model("gpt2"))
    table = model.transformer.wpe

    def running(position_ids):
        positions = torch.arange(position_ids.shape[1]).expand(position_ids.shape) % table.num_embeddings
        return type(table).forward(table, positions)

    table.forward = running
    report = check(model)
    assert (report.verdict, report["parity"].where) == ("differs", "transformer.wpe"), str(report)


def test_a_missing_boundary_label_is_caught_and_named():
    def forgets_a_boundary(examples):
        batch = DataCollatorForPacking()(examples)
        start = batch["packed_layout"].lengths[0]
        batch["labels"][0, start] = batch["input_ids"][0, start]
        return batch

    model = patch(tiny.model(layers=2))
    assert check(model, collator=DataCollatorForPacking(pad_to_multiple_of=16)).verdict == "exact"
    report = check(model, collator=forgets_a_boundary)
    assert (report.verdict, report["parity"].holds, report["labels"].holds) == ("differs", True, False)
    with pytest.raises(ContaminationError, match="a boundary is not masked"):
        report.require_exact()


def test_a_wrong_backward_is_caught_although_every_logit_is_right():
    def halves(override, args, kwargs):
        attended, weights = override(*args, **kwargs)
        return (attended if find_layout((), kwargs) is None else HalvesGradients.apply(attended)), weights

    report = check(wrap(patch(tiny.model()), LAYER, halves))
    assert (report.verdict, report["parity"].holds, report["gradients"].holds) == ("differs", True, False)
    with pytest.raises(ContaminationError, match="the packed gradient is not the sum of the documents' own"):
        report.require_exact()


def mixer_of(model):
    return next(iter(find_state(model).parts.mixers.items()))


@pytest.mark.parametrize("model_type", ["jamba", "lfm2", "qwen3_next", "minimax"])
def test_a_mixer_left_unpatched_is_caught_and_named(model_type):
    model = patch(small_model(model_type))
    name, mixer = mixer_of(model)
    del mixer.forward
    report = check(model)
    assert report.verdict == "leak" and name in report["isolation"].where, str(report)


@pytest.mark.parametrize("model_type", ["lfm2", "mamba"])
def test_a_state_carried_over_by_one_token_is_caught_and_named(model_type):
    model = patch(small_model(model_type))
    name, mixer = mixer_of(model)
    override = vars(mixer)["forward"]
    call = override.__call__

    def carried(*args, **kwargs):
        layout = find_layout((), {})
        if layout is None or layout.rows > 1:
            return call(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "packed_call" and "mask" not in key}
        with packed_call(PackedLayout.from_lengths(shifted(layout.lengths), rows=layout.rows)):
            return call(*args, **kwargs)

    mixer.forward = carried
    report = check(model)
    assert report.verdict == "leak" and name in report["isolation"].where, str(report)


def test_the_reference_backend_tells_a_kernel_from_a_patch(monkeypatch):
    """A kernel that forgets the causal mask of the last document: caught with `sdpa`, exact with `reference`."""
    sdpa = type(get_backend("sdpa"))
    exact = sdpa.__call__

    def forgets(self, query, key, value, call):
        return exact(self, query, key, value.flip(0) if call.layout.queries.num_documents > 4 else value, call)

    monkeypatch.setattr(sdpa, "__call__", forgets)
    assert check(patch(tiny.model(), backend="sdpa")).verdict == "leak"
    assert check(patch(tiny.model(), backend="reference")).verdict == "exact"
