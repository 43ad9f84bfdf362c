"""Models in which the tokens of an image see each other: their text decoder without pads, by blocks."""

import pytest
import torch
from test_composites import run, without_pads
from tiny_models.composites import image_batch, small_composite
from tolerance import assert_float32, assert_regrouped, differs
from transformers import CONFIG_MAPPING

from trl_packfa import describe, patch, unpatch
from trl_packfa.errors import PackingError
from trl_packfa.layout.blocks import Blocks
from trl_packfa.patching.handed_masks import HandedMasks
from trl_packfa.patching.mask_rules import blocks_in_rule
from trl_packfa.patching.state import find_state

# Gemma 3: in all layers. PaliGemma: a prefix with its image. Gemma 4: in sliding layers only. Molmo 2: all images of a
# row see each other.
TYPES = ("gemma3", "paligemma", "gemma4", "molmo2")
# Layers of Gemma 4 share keys: transformers' own gradients through reentrant checkpoints are wrong.
CHECKPOINTED = [
    (name, reentrant) for name in TYPES for reentrant in (False, True) if (name, reentrant) != ("gemma4", True)
]


def assert_same(found, expected):
    assert_float32(found[0], expected[0].double())
    assert_float32(found[1], expected[1].double())
    assert any("vis" in name for name in expected[2])
    assert_regrouped(found[2], expected[2])


@pytest.fixture(params=TYPES)
def stock(request):
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {request.param}")
    return small_composite(request.param)


@pytest.mark.versions
@pytest.mark.parametrize("left", [False, True])
def test_images_run_without_their_pads(stock, left):
    inputs, model = image_batch(stock, left=left).inputs, without_pads(stock)
    state = find_state(model)
    assert state.parts.takes_images and state.unpadding_report.blocks and "in both directions" in describe(model)
    assert_same(run(model, inputs), run(stock, inputs))
    assert state.unpadding.calls == 1 and state.unpadding.blocks > 0
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


@pytest.mark.parametrize(("name", "reentrant"), CHECKPOINTED)
def test_checkpointing_changes_nothing(name, reentrant):
    """Layers are run again from their arguments, outside of the call: the blocks come with the layout."""
    stock = small_composite(name)
    inputs, model = image_batch(stock).inputs, without_pads(stock).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, inputs), run(stock.train(), inputs))


def test_negative_controls_are_seen(stock, monkeypatch):
    """Images whose tokens see only the ones before them, and blocks in layers that have none."""
    inputs, model = image_batch(stock).inputs, without_pads(stock)
    _, logits, _ = run(stock, inputs)
    with monkeypatch.context() as context:
        context.setattr(HandedMasks, "blocks", lambda self, rows: None)
        assert differs(run(model, inputs)[1], logits)
    blocks = HandedMasks.blocks
    everywhere = lambda self, rows: Blocks(*[max(blocks(self, rows)[:2], key=len)] * 2)  # noqa: E731
    monkeypatch.setattr(HandedMasks, "blocks", everywhere)
    assert differs(run(model, inputs)[1], logits) == (stock.config.model_type == "gemma4")


def rule_of(groups):
    """Transformers' rule for causal attention with groups that see each other; -1 is no group."""
    groups = torch.tensor(groups)

    def rule(batch, head, query, key):
        same = (groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0)
        return (key <= query) | same

    return rule


@pytest.mark.parametrize("by_index", [True, False])
def test_blocks_are_read_off_the_rule(by_index):
    rule = rule_of([[-1, 0, 0, 1, 1, -1], [0, 0, 0, -1, -1, -1], [-1, -1, 2, 2, 2, 2]])
    mask = torch.tensor([[1] * 6, [1] * 6, [1] * 4 + [0] * 2])
    assert blocks_in_rule(rule, mask, by_index=by_index) == ((((1, 3), (3, 5)), ((0, 3),), ((2, 4),)), False)
    # Images of a row that all see each other are joined.
    joined, apart = [0, 0, -1, 0, 0, -1, 0, 0], [0, 0, -1, 1, 1, -1, 2, 2]
    ones = torch.ones(2, 8, dtype=torch.long)
    for groups in (joined, apart):
        found = blocks_in_rule(rule_of([groups, [-1] * 8]), ones, by_index=by_index)
        assert found == ((((0, 2), (3, 5), (6, 8)), ()), groups is joined)
    for groups in ([joined, apart], [[0, 0, -1, 1, 1, -1, 0, 0], [-1] * 8]):
        with pytest.raises(PackingError, match=r"tokens 0 and \d of row 0 see each other, .* tokens \d and"):
            blocks_in_rule(rule_of(groups), ones, by_index=by_index)
