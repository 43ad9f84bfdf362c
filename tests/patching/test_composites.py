"""Models with images or sounds: padded batches run without their pads in the text decoder; by spans, where the tokens
of an image see each other."""

import copy

import pytest
import tiny
import torch
from tiny_models import composites
from tiny_models.composites import image_batch, small_composite
from tolerance import assert_float32, assert_regrouped, assert_rounding, differs
from transformers import CONFIG_MAPPING

from trl_packfa import check, describe, patch, unpatch
from trl_packfa.checking.first_batch import compare_padded_batch
from trl_packfa.errors import PackingError
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.bidirectional import BidirectionalSpans
from trl_packfa.layout.padded_rows import PaddedRows
from trl_packfa.patching.handed_masks import HandedMasks
from trl_packfa.patching.mask_rules import spans_in_rule
from trl_packfa.patching.state import find_state

# Rows with positions of one kind; of three; of three, with features of images at several layers.
TYPES = ("llava", "qwen2_vl", "qwen3_vl")
# Tokens of an image see each other. Gemma 3: in all layers. PaliGemma: a prefix with its image. Gemma 4: in sliding
# layers only. Molmo 2: all images of a row see each other.
WITH_BLOCKS = ("gemma3", "paligemma", "gemma4", "molmo2")
# Layers of Gemma 4 share keys: transformers' own gradients through reentrant checkpoints are wrong.
CHECKPOINTED = [(name, reentrant) for name in (*TYPES, *WITH_BLOCKS) for reentrant in (False, True)
                if (name, reentrant) != ("gemma4", True)]  # fmt: skip


def without_pads(stock):
    return patch(copy.deepcopy(stock), unpad=True)


def run(model, inputs):
    model.zero_grad()
    outputs = model(**inputs, use_cache=False)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), outputs.logits.detach()[inputs["attention_mask"].bool()], gradients


def assert_same(found, expected):
    for actual, stock in zip(found[:2], expected[:2], strict=True):
        assert_float32(actual, stock.double())
    assert any("vis" in name or "audio" in name for name in expected[2])
    assert_regrouped(found[2], expected[2])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_batches_with_images_run_without_their_pads(name, left):
    stock = small_composite(name)
    inputs, model = image_batch(stock, left=left).inputs, without_pads(stock)
    state = find_state(model)
    before = state.unpadding.calls
    expected, found = run(stock, inputs), run(model, inputs)
    assert state.parts.takes_images and state.unpadding.calls == before + 1
    assert_same(found, expected)
    assert check(model).is_exact and "computed without padding" in describe(model)


def test_three_rows_with_positions_of_three_kinds(monkeypatch):
    """Their positions are `(3, 3, L)`: the first axis holds kinds, not rows."""
    monkeypatch.setattr(composites, "ROWS", composites.ROWS[:3])
    stock = small_composite("qwen3_vl")
    inputs = image_batch(stock).inputs
    assert len(inputs["input_ids"]) == 3
    assert_same(run(without_pads(stock), inputs), run(stock, inputs))


@pytest.mark.parametrize(("name", "reentrant"), CHECKPOINTED)
def test_checkpointing_changes_nothing(name, reentrant):
    """Layers are run again from their arguments, outside of the call: spans come with the layout."""
    stock = small_composite(name).train()
    inputs, model = image_batch(stock).inputs, without_pads(stock)
    expected = run(stock, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, inputs), expected)


# Granite Vision's decoder adds features of images at several layers, where a mask of tokens says so.
BESIDE = {"granite4_vision": "pixel_values", "voxtral": "input_features", "glmasr": "input_features",
          "qwen2_audio": "input_features"}  # fmt: skip


@pytest.mark.parametrize(("name", "left"), [*((name, False) for name in BESIDE), ("granite4_vision", True)])
def test_images_at_several_layers_and_sounds_run_without_their_pads(name, left):
    """The control moves them to other rows."""
    stock = small_composite(name)
    inputs, model = image_batch(stock, left=left).inputs, without_pads(stock)
    expected, found = run(stock, inputs), run(model, inputs)
    assert find_state(model).unpadding.calls > 0 and find_state(model).parts.takes_images
    assert_float32(found[1], expected[1].double())
    if name != "granite4_vision":
        assert_same(found, expected)
    others = {**inputs, BESIDE[name]: inputs[BESIDE[name]].roll(1, 0)}
    assert differs(run(model, others)[1], expected[1])


@pytest.mark.parametrize("name", TYPES)
def test_negative_control_rows_that_see_each_other(name, monkeypatch):
    stock = small_composite(name)
    inputs, model = image_batch(stock).inputs, without_pads(stock)
    _, logits, _ = run(stock, inputs)
    monkeypatch.setattr(PaddedRows, "layout", lambda self, device: PackedLayout.from_lengths([self.num_tokens]))
    assert differs(run(model, inputs)[1], logits)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("left", [False, True])
def test_cross_attention_to_images_runs_on_padded_rows(left, reentrant):
    """Mllama: each row attends to its own images. The control gives every row those of the next."""
    stock = small_composite("mllama")
    inputs, model = image_batch(stock, left=left).inputs, without_pads(stock)
    expected = run(stock, inputs)
    if reentrant is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(run(model, inputs), expected)
    assert find_state(model).unpadding.calls > 0
    others = {key: inputs[key].roll(1, 0) for key in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    assert differs(run(model, {**inputs, **others})[1], expected[1])


@pytest.mark.parametrize("name", ["mllama", "nemotron_h_omni"])
def test_the_first_batch_is_compared_with_its_rows_and_their_images(name):
    """The decoder of Nemotron Omni is a causal LM: it returns logits in the place of hidden states."""
    model = patch(small_composite(name), unpad=True)
    decoder, seen = find_state(model).unpadding.module, []
    find_state(model).unpadding.watch = lambda forward, call, rows, outputs: seen.append((forward, call, rows))
    inputs = image_batch(model).inputs
    run(model, inputs)
    find_state(model).unpadding.watch = None
    forward, call, rows = seen[0]
    assert_rounding(compare_padded_batch(decoder, forward, call, rows).difference)


def test_arguments_by_row_are_refused():
    """Without pads all rows are one, and each would see the states of all."""
    decoder = patch(tiny.model(layers=2), unpad=True).model
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    with pytest.raises(PackingError, match="cannot hold states_by_row"):
        decoder(input_ids=torch.ones_like(mask), attention_mask=mask, states_by_row=torch.zeros(2, 3, 8))


def test_packed_rows_hold_text_only():
    model = patch(small_composite("qwen2_vl"), unpad=True)
    ids = torch.randint(6, 60, (1, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions).logits[0]
        alone = torch.cat([model(input_ids=part).logits[0] for part in ids.split([5, 7], dim=1)])
    assert_float32(packed, alone.double())
    images = {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(PackingError, match="a packed row cannot hold pixel_values, image_grid_thw in this model"):
        model(input_ids=ids, position_ids=positions, **images)


@pytest.fixture(params=WITH_BLOCKS)
def stock(request):
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {request.param}")
    return small_composite(request.param)


@pytest.mark.versions
@pytest.mark.parametrize("left", [False, True])
def test_images_run_without_their_pads(stock, left):
    inputs, model = image_batch(stock, left=left).inputs, without_pads(stock)
    state = find_state(model)
    assert state.parts.takes_images and state.unpadding_report.bidirectional
    assert "in both directions" in describe(model)
    assert_same(run(model, inputs), run(stock, inputs))
    assert state.unpadding.calls == 1 and state.unpadding.bidirectional > 0
    with torch.no_grad():  # with a cache, and after the patch is gone, the masks are the model's own
        cached = model(**inputs, use_cache=True)
        name = "cache" if "cache" in cached else "past_key_values"  # before transformers 5.24
        assert cached[name] is not None and torch.equal(cached.logits, stock(**inputs, use_cache=True).logits)
        assert state.unpadding.calls == 1
        assert torch.equal(unpatch(model)(**inputs).logits, stock(**inputs).logits)
    if stock.config.model_type == "paligemma":  # without a mask its own text sees what comes after it
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        with pytest.raises(PackingError, match="PaliGemmaForConditionalGeneration cannot run packed rows: differs"):
            patch(model, unpad=True)(input_ids=torch.arange(6, 18)[None], position_ids=positions)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bidirectional_spans_equal_every_attention_with_a_mask(attention):
    stock = small_composite("gemma3")
    stock.set_attn_implementation(attention)
    inputs = image_batch(stock).inputs
    assert_same(run(without_pads(stock), inputs), run(stock, inputs))


def test_negative_controls_of_bidirectional_spans_are_seen(stock, monkeypatch):
    """Images whose tokens see only the ones before them, and spans in layers that have none."""
    inputs, model = image_batch(stock).inputs, without_pads(stock)
    _, logits, _ = run(stock, inputs)
    with monkeypatch.context() as context:
        context.setattr(HandedMasks, "bidirectional", lambda self, rows: None)
        assert differs(run(model, inputs)[1], logits)
    spans = HandedMasks.bidirectional
    everywhere = lambda self, rows: BidirectionalSpans(*[max(spans(self, rows)[:2], key=len)] * 2)  # noqa: E731
    monkeypatch.setattr(HandedMasks, "bidirectional", everywhere)
    assert differs(run(model, inputs)[1], logits) == (stock.config.model_type == "gemma4")


def rule_of(groups):
    """Transformers' rule for causal attention with groups that see each other; -1 is no group."""
    groups = torch.tensor(groups)

    def rule(batch, head, query, key):
        same = (groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0)
        return (key <= query) | same

    return rule


@pytest.mark.parametrize("by_index", [True, False])
def test_bidirectional_spans_are_read_off_the_rule(by_index):
    rule = rule_of([[-1, 0, 0, 1, 1, -1], [0, 0, 0, -1, -1, -1], [-1, -1, 2, 2, 2, 2]])
    mask = torch.tensor([[1] * 6, [1] * 6, [1] * 4 + [0] * 2])
    assert spans_in_rule(rule, mask, by_index=by_index) == ((((1, 3), (3, 5)), ((0, 3),), ((2, 4),)), False)
    # Images of a row that all see each other are joined.
    joined, apart = [0, 0, -1, 0, 0, -1, 0, 0], [0, 0, -1, 1, 1, -1, 2, 2]
    ones = torch.ones(2, 8, dtype=torch.long)
    for groups in (joined, apart):
        found = spans_in_rule(rule_of([groups, [-1] * 8]), ones, by_index=by_index)
        assert found == ((((0, 2), (3, 5), (6, 8)), ()), groups is joined)
    for groups in ([joined, apart], [[0, 0, -1, 1, 1, -1, 0, 0], [-1] * 8]):
        with pytest.raises(PackingError, match=r"tokens 0 and \d of row 0 see each other, .* tokens \d and"):
            spans_in_rule(rule_of(groups), ones, by_index=by_index)
