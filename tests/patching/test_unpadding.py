"""`patch(model, unpad=True)`: padded batches run without their pads, and nobody outside can tell."""

import copy
import pickle

import oracle
import pytest
import tiny
import torch
from padded import SIDES, padded, rows
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import small_model
from tolerance import assert_float32, assert_gradients, differs
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from trl_packfa import describe, patch, patched, unpatch
from trl_packfa.errors import ContaminationError, InvalidLayout, PackingError
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.padded_rows import PaddedRows
from trl_packfa.patching.state import find_state

# A type of every level: rewritten attention, transformers' interface, recurrent state, document by document.
TYPES = ("llama", "gemma2", "bloom", "mixtral", "qwen3_next", "mamba2", "roformer")


def counted(model):
    return find_state(model).unpadding


def run(model, batch, **options):
    for parameter in model.parameters():
        parameter.grad = None
    logits = model(**batch, use_cache=False, **options).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights * batch["attention_mask"][..., None]).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, batch):
    real = batch["attention_mask"].bool()
    assert_float32(found[0][real], expected[0][real].double())
    assert_gradients(found[1], expected[1])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("model_type", [*TYPES[1:], pytest.param(TYPES[0], marks=pytest.mark.versions)])
def test_padded_batches_are_what_they_were(model_type, side):
    model, batch = small_model(model_type), padded(tiny.documents(), side)
    (expected, expected_grads), mask = run(model, batch), batch["attention_mask"]
    patch(model, unpad=True)
    before = counted(model).tokens
    logits, grads = run(model, batch)
    assert counted(model).tokens - before == sum(tiny.LENGTHS)
    for ours, theirs in zip(rows(logits, mask), rows(expected, mask), strict=True):
        assert_float32(ours, theirs.double())
    assert_gradients(grads, expected_grads)


@pytest.mark.parametrize("side", SIDES)
def test_rows_are_their_documents_alone_whatever_the_positions(side):
    """Learned positions count from the first token, on whichever side the pads are."""
    model = small_model("gpt2")
    expected, _ = oracle.alone(model, tiny.documents())
    batch = padded(tiny.documents(), side)
    stock = rows(model(**batch).logits, batch["attention_mask"])
    logits = rows(patch(model, unpad=True)(**batch, use_cache=False).logits, batch["attention_mask"])
    for ours, alone in zip(logits, expected, strict=True):
        assert_float32(ours, alone)
    assert differs(stock[0], expected[0]) == (side != "right")
    assert "left-padded rows whose positions count from the pads on" in describe(model)


def test_negative_control_without_boundaries_rows_see_each_other(monkeypatch):
    model, batch = tiny.model(), padded(tiny.documents())
    expected, _ = oracle.alone(model, tiny.documents())
    patch(model, unpad=True)
    monkeypatch.setattr(PaddedRows, "layout", lambda rows, device: PackedLayout.from_lengths([rows.num_tokens]))
    logits = rows(model(**batch).logits, batch["attention_mask"])
    assert differs(logits[2], expected[2])
    unpatch(model)
    with pytest.raises(ContaminationError, match="without their pads are not exact on this model: differs"):
        patch(model, unpad=True)
    assert find_state(model) is None


def compare_adapters(order, reentrant, documents, **options):
    """An adapted model on padded rows as it was, and without its pads; what was counted in the call without them."""

    def adapted(model):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))

    batch = padded(documents, "left")
    expected = run(adapted(tiny.model(layers=2)).train(), batch)
    model = tiny.model(layers=2)
    model = adapted(model if order == "adapter first" else patch(model, unpad=True, **options))
    model = patch(model, unpad=True, **options)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    made, real = run(model.train(), batch), batch["attention_mask"].bool()
    found = copy.copy(counted(model))
    assert_same(made, expected, batch)
    with model.disable_adapter():  # DPO's reference
        reference = model(**batch).logits[real]
    with unpatch(model).disable_adapter():
        assert_float32(reference, model(**batch).logits[real].double())
    return found


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_sequence_classification_pools_what_it_pooled(pad_is_eos):
    config = small_model("llama", num_labels=1, pad_token_id=2 if pad_is_eos else 0, eos_token_id=2).config
    model = AutoModelForSequenceClassification.from_config(config).eval()
    documents = [torch.cat([ids, torch.tensor([2])]) for ids in tiny.documents()]  # an eos at the end of each
    for side in ("right", "left"):
        batch = padded(documents, side, pad=config.pad_token_id)
        expected = model(**batch).logits
        with patched(model, unpad=True):
            scores = model(**batch).logits
            assert counted(model).calls and scores.shape == (5, 1)
        assert_float32(scores, expected.double())


def test_token_classification_and_value_heads():
    config = small_model("qwen3", num_labels=3).config
    model, batch = AutoModelForTokenClassification.from_config(config).eval(), padded(tiny.documents(), "both")
    real, head = batch["attention_mask"].bool(), torch.nn.Linear(config.hidden_size, 1)

    def values():
        outputs = model(**batch, output_hidden_states=True)
        return outputs.logits[real], [head(states)[real] for states in outputs.hidden_states]

    logits, states = values()
    patch(model, unpad=True)
    ours, our_states = values()
    assert counted(model).calls and len(states) == len(our_states)
    for actual, expected in zip([ours, *our_states], [logits, *states], strict=True):
        assert_float32(actual, expected.double())


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_question_answering_of_a_decoder_has_the_padded_loss_and_takes_no_packed_rows(model_type):
    model, batch = AutoModelForQuestionAnswering.from_config(small_model(model_type).config), padded(tiny.documents())
    spans = {"start_positions": torch.tensor([2, 0, 5, 0, 4]), "end_positions": torch.tensor([8, 0, 13, 0, 6])}
    model.eval()
    expected, logits = model(**batch, **spans).loss, model(**batch).end_logits
    patch(model, unpad=True)
    assert torch.equal(model(**batch, **spans).loss, expected)
    real, before = batch["attention_mask"].bool(), counted(model).calls
    assert_float32(model(**batch, use_cache=False).end_logits[real], logits[real].double())
    assert counted(model).calls == before + 1
    ids, layout = torch.cat(tiny.documents())[None], PackedLayout.from_lengths(tiny.LENGTHS)
    for one in (model, patch(unpatch(model))):
        with pytest.raises(PackingError, match="start_positions and end_positions cannot come with packed rows"):
            one(input_ids=ids, packed_layout=layout, **{name: value[:1] for name, value in spans.items()})


def test_labels_at_pads_are_refused():
    """A causal LM predicts the first pad from a true token, the others from pads."""
    model, batch = patch(tiny.model(layers=2), unpad=True), padded(tiny.documents())
    with pytest.raises(ContaminationError, match=r"LlamaModel: the loss depends on what the model computes at a pad"):
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    patch(unpatch(model), unpad=True)(**batch, labels=labels, use_cache=False).loss.backward()


def test_decoding_by_hand_goes_on_from_its_prompt():
    """A call without gradients whose config asks for a cache is its beginning, whoever does not pass use_cache."""
    model, batch = tiny.model(), padded(tiny.documents(), "left", extra=0)
    asked = model(**batch, use_cache=True).logits
    with torch.no_grad():
        expected = decoded(model, batch)
        patch(model, unpad=True)
        before = counted(model).calls
        assert torch.equal(decoded(model, batch), expected)
        assert torch.equal(model(**batch, use_cache=True).logits, asked) and counted(model).calls == before
        model(**batch, use_cache=False)
        assert counted(model).calls == before + 1
    with pytest.raises(InvalidLayout, match=r"attention_mask of 30 columns came with 1 tokens and no cache"):
        decoded(model, batch)  # with gradients a call without pads returns none
    model.config.use_cache = False
    with torch.no_grad():
        model(**batch)
    assert counted(model).calls == before + 3


def decoded(model, batch, steps=4):
    """Greedy tokens of a loop by hand, from the prompt's cache on."""
    ids, mask, cache, made = batch["input_ids"], batch["attention_mask"], None, []
    for _ in range(steps):
        outputs = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        cache, ids = outputs.past_key_values, outputs.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        made.append(ids)
    return torch.cat(made, dim=1)


def test_batches_without_pads_run_the_unpatched_code_and_packed_rows_are_those_of_a_plain_patch():
    model, ids = tiny.model(), torch.stack(tiny.documents((12, 12)))
    calls = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    expected = [model(**call).logits for call in calls]
    patch(model, unpad=True)
    assert all(torch.equal(model(**call).logits, old) for call, old in zip(calls, expected, strict=True))
    packed = patch(tiny.model())(**tiny.batch(tiny.documents())).logits
    assert torch.equal(model(**tiny.batch(tiny.documents())).logits, packed)


def compare_copies(batch, **options):
    """The counts of copies, after the patch was made twice, copied and undone."""
    model = tiny.model()
    expected = model(**batch).logits
    state = find_state(patch(model, unpad=True, **options))
    assert find_state(patch(model, unpad=True, **options)) is state
    ours = model(**batch).logits
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(torch.equal(other(**batch).logits, ours) for other in copies)
    assert counted(patch(model, unpad=True)).sharing is None
    assert find_state(patch(model)).unpadding is None
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(unpatch(patch(model, unpad=True, **options))(**batch).logits, expected)
    return [counted(other) for other in copies]


def classifier_without_pad_token():
    config = small_model("llama").config
    config.pad_token_id = None
    return AutoModelForSequenceClassification.from_config(config)


def with_prompt(kind):
    return get_peft_model(tiny.model(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))


@pytest.mark.parametrize(("build", "said"), [
    (classifier_without_pad_token, "LlamaForSequenceClassification has no pad_token_id"),
    (lambda: small_model("rwkv"), "RwkvForCausalLM passes its backbone no attention_mask"),
    (lambda: with_prompt(PrefixTuningConfig), "PEFT's prefix_tuning"),
    (lambda: with_prompt(PromptTuningConfig), "PEFT's prompt_tuning"),
], ids=["no pad token", "no mask", "prefix", "prompt"])  # fmt: skip
def test_models_that_cannot_run_without_pads_are_refused(build, said):
    with pytest.raises(PackingError, match=said):
        patch(build(), unpad=True)


def test_calls_that_cannot_be_answered_are_refused():
    model = patch(tiny.model(), unpad=True)
    batch = padded(tiny.documents())
    with pytest.raises(PackingError, match="attention weights cannot be returned"):
        model(**batch, output_attentions=True)
    hole = {**batch, "attention_mask": batch["attention_mask"].clone()}
    hole["attention_mask"][2, 4] = 0
    with pytest.raises(PackingError, match="the attention_mask has a hole: row 2"):
        model(**hole)
    with pytest.raises(PackingError, match="a batch without its pads cannot hold pixel_values"):
        model(**batch, pixel_values=torch.zeros(1, 3, 4, 4))


def test_training_calls_that_ask_for_a_cache_are_told(caplog):
    model = patch(tiny.model(), unpad=True).train()
    for _ in range(2):
        model(**padded(tiny.documents()), use_cache=True)
    said = "trl-packfa: padded calls of LlamaModel ask for a cache (use_cache=True), so they run with their pads. "
    said += "Set use_cache=False to train without them."
    assert [r.message for r in caplog.records if "ask for a cache" in r.message] == [said]


def test_calls_with_a_cache_and_generation_run_with_their_pads():
    model, batch = tiny.model(), padded(tiny.documents(), "left")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **options)
    asked = model(**batch, use_cache=True).logits
    patch(model, unpad=True)
    before = counted(model).calls
    assert torch.equal(model.generate(**batch, **options), expected)
    assert torch.equal(model(**batch, use_cache=True).logits, asked)
    assert counted(model).calls == before
