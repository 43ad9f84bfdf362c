"""Faults that an earlier check called exact, put into exact models one at a time: it must see them in every dtype."""

from contextlib import nullcontext
from itertools import combinations, permutations

import pytest
import tiny
import torch
from faults import HalvesGradients, wrap
from selection import exhaustive, in_turn
from tiny_models import small_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_packfa import PackedLayout, candidates, check, patch
from trl_packfa.checking import documents as drawing
from trl_packfa.checking.documents import LONG, draw_documents
from trl_packfa.errors import ContaminationError
from trl_packfa.layout.call_context import find_layout, packed_call
from trl_packfa.patching.state import find_state

LAYER = "model.layers.1.self_attn"
DTYPES = ["float32", "bfloat16", "float16", "autocast"]


def with_dtype(model, dtype):
    """A model in a dtype, and what to run it under."""
    if dtype == "autocast":
        return model, torch.autocast("cpu", torch.bfloat16)
    return model.to(getattr(torch, dtype)), nullcontext()


def faulty(change):
    """A small Llama, in one layer of which `change(output (B * L, D), layout)` is what attention gives."""

    def fault(override, args, kwargs):
        attended, weights = override(*args, **kwargs)
        layout = find_layout((), kwargs)
        if layout is None:
            return attended, weights
        flat = attended.flatten(0, 1)
        return change(flat, layout).to(flat.dtype).view_as(attended), weights

    return wrap(patch(tiny.model(layers=2)), LAYER, fault)


def by_document(change):
    """`change(i, documents)` in the place of each document's output."""

    def apply(flat, layout):
        documents = list(flat.split(list(layout.lengths)))
        return torch.cat([change(i, documents) for i in range(len(documents))])

    return apply


def leak(share, source):
    """A share of the mean of another document, whose number `source(i, documents)` tells."""

    def change(i, documents):
        other = source(i, documents)
        return documents[i] if other is None else documents[i] + share * documents[other].mean(0)

    return by_document(change)


def leak_if(wanted):
    """A share of the first document's mean in layouts that are one of the wanted."""
    leaks = leak(0.01, lambda i, documents: 0 if i else None)
    return lambda flat, layout: leaks(flat, layout) if wanted(layout) else flat


def of_equal_length(i, documents):
    return next((j for j in range(i) if len(documents[j]) == len(documents[i])), None)


class MixesGradients(torch.autograd.Function):
    """Right forwards; backwards some of a row's gradient goes to the next row."""

    @staticmethod
    def forward(ctx, flat, rows):
        ctx.rows = rows
        return flat.clone()

    @staticmethod
    def backward(ctx, grad):
        by_row = grad.view(ctx.rows, -1, grad.shape[-1])
        return (by_row + 0.01 * by_row.roll(1, 0)).flatten(0, 1), None


def of_length(wanted):
    """Another result for documents whose length is one of the wanted."""
    return by_document(lambda i, documents: documents[i] * (1.5 if wanted(len(documents[i])) else 1.0))


def if_layout(wanted):
    """Another result for all documents of a layout that is one of the wanted."""
    return lambda flat, layout: flat * (1.5 if wanted(layout) else 1.0)


def lengths_are(order):
    """Layouts of several documents in one row whose lengths are in an order."""
    return if_layout(lambda layout: layout.rows == 1 < layout.num_documents and order(list(layout.lengths)))


def from_position(flat, layout, first=700):
    return torch.cat([row[:first] if part else row[first:] * 1.5
                      for row in flat.view(layout.rows, layout.row_length, -1) for part in (1, 0)])  # fmt: skip


def backward_if(wanted):
    return lambda flat, layout: HalvesGradients.apply(flat) if wanted(layout) else flat


FAULTS = {
    # What few short documents cannot show.
    "documents over 64 tokens": of_length(lambda n: n > 64),
    "documents over 128 tokens": of_length(lambda n: n > 128),
    "more than 8 documents": by_document(lambda i, documents: documents[i] * (1.5 if i >= 8 else 1.0)),
    "rows over 512 tokens": if_layout(lambda layout: layout.row_length > 512),
    "a leak from document i to i + 5": leak(0.01, lambda i, documents: i - 5 if i >= 5 else None),
    "a leak from document i + 5 to i": leak(0.01, lambda i, documents: i + 5 if i + 5 < len(documents) else None),
    "a leak between documents of equal length": leak(0.01, of_equal_length),
    "a leak backwards between rows": lambda flat, layout: MixesGradients.apply(flat, layout.rows),
    "a leak of a thousandth of another document": leak(0.001, lambda i, documents: 0 if i else None),
    # Code that takes another path for some lengths, rows, numbers and orders of documents.
    "documents of 2 tokens": of_length(lambda n: n == 2),
    "documents of a multiple of 16": of_length(lambda n: n % 16 == 0),
    "documents of 64 tokens": of_length(lambda n: n == 64),
    "documents of 128 tokens": of_length(lambda n: n == 128),
    "documents of powers of two over 4": of_length(lambda n: n > 4 and n & (n - 1) == 0),
    "documents over 200 tokens": of_length(lambda n: n > 200),
    "rows over 600 tokens": if_layout(lambda layout: layout.row_length > 600),
    "rows over 1,024 tokens": if_layout(lambda layout: layout.row_length > 1024),
    "rows of a multiple of 64": if_layout(lambda layout: layout.row_length % 64 == 0),
    "one document": if_layout(lambda layout: layout.num_documents == 1),
    "two documents": if_layout(lambda layout: layout.num_documents == 2),
    "two to four documents": if_layout(lambda layout: 2 <= layout.num_documents <= 4),
    "more than 16 documents": if_layout(lambda layout: layout.num_documents > 16),
    "equal lengths": lengths_are(lambda lengths: len(set(lengths)) == 1),
    "ascending lengths": lengths_are(lambda lengths: lengths == sorted(lengths)),
    "descending lengths": lengths_are(lambda lengths: lengths == sorted(lengths, reverse=True)),
    "longest first": lengths_are(lambda lengths: lengths[0] == max(lengths)),
    "rows of one document": if_layout(lambda layout: layout.rows > 1 and layout.num_documents == layout.rows),
    "more than three rows": if_layout(lambda layout: layout.rows > 3),
    "from position 700": from_position,
    "a leak of two documents": leak_if(lambda layout: layout.num_documents == 2),
    "a leak of more than three rows": leak_if(lambda layout: layout.rows > 3),
    "a backward of rows over 600 tokens": backward_if(lambda layout: layout.row_length > 600),
    "a backward of two documents": backward_if(lambda layout: layout.num_documents == 2),
    "a backward of equal lengths": backward_if(lambda layout: len(set(layout.lengths)) == 1),
    "a backward of more than three rows": backward_if(lambda layout: layout.rows > 3),
    "two rows": if_layout(lambda layout: layout.rows == 2),
    "a leak of two rows": leak_if(lambda layout: layout.rows == 2),
    "a leak of seven documents": leak_if(lambda layout: layout.num_documents == 7),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "dtype"), in_turn(FAULTS, DTYPES))
def test_every_fault_is_seen(fault, dtype):
    model, context = with_dtype(faulty(FAULTS[fault]), dtype)
    with context:
        report = check(model)
    assert report.verdict == ("leak" if fault.startswith("a leak") else "differs"), str(report)


# The layouts in which a fault of one mode acts, or of a mode with or without a graph.
OF_A_MODE = {
    "over 64 tokens": lambda layout: layout.row_length > 64,
    "more than three documents": lambda layout: layout.num_documents > 3,
    "two rows": lambda layout: layout.rows == 2,
}
WHEN = {
    "evaluation": lambda model: not model.training,
    "training": lambda model: model.training,
    "no graph": lambda model: not torch.is_grad_enabled(),
    "evaluation without a graph": lambda model: not (model.training or torch.is_grad_enabled()),
}


@pytest.mark.parametrize(("fault", "wanted", "when"), [
    ("a leak", "more than three documents", "evaluation"), ("differs", "over 64 tokens", "no graph"),
    *exhaustive(*((fault, wanted, when) for fault in ("a leak", "differs") for wanted in OF_A_MODE for when in WHEN)),
])  # fmt: skip
def test_a_fault_of_one_mode_in_some_layouts_is_seen(fault, wanted, when):
    """Three documents of 31 tokens once told that both modes compute the same."""
    make = leak_if if fault == "a leak" else if_layout
    model = faulty(make(lambda layout: OF_A_MODE[wanted](layout) and WHEN[when](model)))
    report = check(model)
    assert report.verdict == ("leak" if fault == "a leak" else "differs"), str(report)


def by_tokens(change):
    """A small Llama, in one layer of which `change(flat, ids, layout)` is what attention gives for these token ids."""
    ids = []
    model = faulty(lambda flat, layout: change(flat, ids[-1].flatten(), layout))
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: ids.append(args[0]))
    return model


def sees_the_row(flat, ids, layout):
    return torch.where((ids == 0)[:, None], flat + 0.1 * flat.mean(0), flat)


def begins_alike(flat, ids, layout):
    firsts = ids[layout.cu_seqlens[:-1].long()].tolist()
    return leak(0.1, lambda i, documents: next((j for j in range(i) if firsts[j] == firsts[i]), None))(flat, layout)


@pytest.mark.parametrize("seed", [1, *exhaustive(*range(2, 21))])
@pytest.mark.parametrize("change", [sees_the_row, begins_alike])
def test_a_leak_by_token_ids_is_seen(change, seed):
    assert check(by_tokens(change), seed=seed).verdict == "leak"


@pytest.mark.parametrize("wrong", [lambda position: position == 0, lambda position: position > 100], ids=["0", "100"])
def test_an_lm_head_that_is_wrong_at_a_few_positions_is_seen(wrong):
    layouts, model = [], patch(tiny.model(layers=2))
    model.register_forward_pre_hook(lambda module, args, kwargs: layouts.append(kwargs.get("packed_layout")),
                                    with_kwargs=True)  # fmt: skip

    def off(module, args, output):
        if layouts[-1] is not None and output.shape[:2] == (1, layouts[-1].num_tokens):
            return torch.where(wrong(layouts[-1].position_ids().view(1, -1, 1)), output * 1.1, output)

    model.lm_head.register_forward_hook(off)
    assert check(model).verdict == "differs"


@pytest.mark.parametrize("dtype", ["float32", "autocast", *exhaustive("bfloat16", "float16")])
def test_rotation_that_ends_at_position_64_is_seen(dtype):
    model, context = with_dtype(patch(tiny.model(layers=2)), dtype)
    rotary = model.model.rotary_emb

    def fault(override, args, kwargs):
        layout = find_layout((), kwargs)
        if layout is not None:
            hidden, positions = args[0] if args else kwargs["hidden_states"], layout.position_ids().clamp(max=63)
            kwargs = {**kwargs, "position_embeddings": type(rotary).forward(rotary, hidden, positions)}
        return override(*args, **kwargs)

    with context:
        report = check(wrap(model, LAYER, fault))
    assert report.verdict == "differs" and report["parity"].where.startswith(LAYER), str(report)


@pytest.mark.parametrize(("mode", "dtype"), in_turn([True, False], ["float32", "bfloat16"]))
def test_a_kernel_of_one_mode_that_ignores_boundaries_is_seen(mode, dtype):
    """As Mamba's in transformers, which has another kernel for training."""
    model, context = with_dtype(patch(small_model("lfm2")), dtype)
    mixer = next(iter(find_state(model).parts.mixers.values()))
    override = vars(mixer)["forward"]

    def forward(*args, **kwargs):
        if mixer.training is not mode:
            return override(*args, **kwargs)
        with packed_call(None):
            ignored = ("packed_call", "attention_mask")
            return type(mixer).forward(mixer, *args, **{k: v for k, v in kwargs.items() if k not in ignored})

    mixer.forward = forward
    with context:
        report = check(model.train(not mode))
    assert report.verdict == "leak", str(report)
    assert model.training is not mode


def test_an_exact_model_is_measured_in_one_mode_if_both_compute_the_same():
    assert check(patch(tiny.model(layers=1))).mode == "training"


@pytest.mark.parametrize("seed", [0, *exhaustive(1, 2)])
@pytest.mark.parametrize(("std", "dtype"), in_turn([0.35, 0.5, 0.02], ["bfloat16", "autocast"]))
def test_large_weights_in_half_precision_are_no_false_alarm(std, seed, dtype):
    """Rounding decides there what a narrow model gives: two of three seeds were refused."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=97, num_hidden_layers=3, initializer_range=std, **sizes)
    model, context = with_dtype(patch(Qwen2ForCausalLM(config)), dtype)
    with context:
        report = check(model, seed=seed)
    assert report.is_exact, str(report)


def test_every_two_documents_are_told_apart_in_both_directions():
    for documents in range(2, 21):
        runs = drawing.replacements(documents)
        assert not any(runs[0])
        for i, j in permutations(range(documents), 2):
            assert any(one[i] != other[i] and one[j] == other[j] for one, other in combinations(runs, 2)), (i, j)
    for documents in range(2, 7):
        for i, j in permutations(range(documents), 2):
            assert any(i in with_loss and j not in with_loss for with_loss in drawing.losses(documents, 4)), (i, j)
    with pytest.raises(ValueError, match="4 runs tell 6 documents apart, not 7"):
        drawing.losses(7, 4)


def test_what_is_drawn_contains_what_faults_need():
    for seed in range(100):
        seven, two, more = drawing.draw_shapes(seed).values()
        assert [*map(len, seven)] == [7] and [*map(len, two)] == [2, 2] and sum(map(len, more)) >= 8
        assert all(len(set(sum(rows, ()))) == sum(map(len, rows)) for rows in (seven, two, more))
        tokens, others = draw_documents(LONG, torch.empty(0, dtype=torch.long), 5000, seed)
        drawing.add_templates(tokens, others, [0, 4], seed)
        firsts = [int(ids[0]) for ids in tokens]
        alike = [firsts[i] == int(others[i][0]) for i in range(len(LONG)) if firsts.count(firsts[i]) > 1]
        assert len(alike) >= 8 and 2 <= sum(alike) < len(alike), seed
        assert all(float((a != b).float().mean()) >= 0.4 for a, b in zip(tokens, others, strict=True))
        assert all(sum(special in ids for ids in tokens) >= 3 and special not in firsts for special in (0, 4))


def test_documents_are_cut_out_of_what_the_model_knows():
    known = torch.arange(5, 60)
    tokens, others = draw_documents((4, 3, 1), known, 97, seed=0)
    assert torch.equal(torch.cat([*tokens, *others]), torch.arange(5, 21))
    same = torch.full((100,), 7)  # replacing would change nothing: random tokens
    tokens, others = draw_documents((4, 3, 1), same, 97, seed=0)
    assert all((a != b).any() for a, b in zip(tokens, others, strict=True))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, torch.OutOfMemoryError, MemoryError])
def test_a_check_that_does_not_end_leaves_no_patch(interruption, monkeypatch):
    """An unknown model is patched by what the check finds exact: interrupted, nothing was found."""
    from test_trust import unknown_model

    def interrupted(model):
        raise interruption

    monkeypatch.setattr(candidates, "check", interrupted)
    monkeypatch.setattr(candidates, "fingerprint", lambda model: "another code")
    for model in (unknown_model(), tiny.model(layers=1)):
        for _ in range(2):
            with pytest.raises(interruption):
                patch(model)
            assert find_state(model) is None


def test_logits_that_are_not_finite_are_said_to_be():
    model = patch(tiny.model(layers=1))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    report = check(model)
    assert report.verdict == "not finite"
    with pytest.raises(ContaminationError, match="the model's own logits are not finite in float32"):
        report.require_exact()


def test_a_layout_is_still_what_a_fault_gets():
    """The faults above act in packed calls only: without boundaries nothing is changed."""
    seen = []
    model = faulty(lambda flat, layout: seen.append(layout) or flat)
    model(input_ids=torch.arange(3, 9)[None])
    assert not seen
    model(**tiny.batch(tiny.documents()))
    assert isinstance(seen[0], PackedLayout)


def test_a_large_loss_is_no_alarm():
    """A last place of losses of 60 is more than the rounding of usual ones."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight *= 2000
    report = check(patch(model))
    assert report.verdict == "exact", str(report)


@pytest.mark.parametrize("model_type", ["zaya", "minimax_m3_vl_text"])
def test_gradients_that_cancel_are_no_alarm(model_type):
    """Little is left of zaya's sum of a scalar's gradient over documents, and MiniMax's router rounds worse in longer
    documents than in short ones: both were refused under autocast with this seed."""
    model = patch(small_model(model_type, seed=2))
    with torch.autocast("cpu", torch.bfloat16):
        report = check(model, seed=2)
    assert report.verdict == "exact", str(report)
    assert report["gradients"].difference < 0.5 * report["gradients"].allowed
