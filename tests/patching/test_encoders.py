"""Encoders without padding: their stack of layers runs on the true tokens, embeddings and pooling see padded rows."""

import copy

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from selection import in_full
from tiny_models.encoders import small_encoder
from tolerance import assert_float32, assert_low_precision, assert_regrouped, differs
from transformers import AutoModel, BartConfig, BartForConditionalGeneration, BartForSequenceClassification

from trl_packfa import check, describe, patch, unpatch
from trl_packfa.errors import ContaminationError, InvalidLayout, PackingError, UnsupportedModel
from trl_packfa.layout.padded_rows import PaddedRows
from trl_packfa.override import override_in
from trl_packfa.patching.handed_masks import HandedMasks
from trl_packfa.patching.state import find_state
from trl_packfa.patching.unpadding import SpanLossOverride

LENGTHS = (9, 3, 14, 1)
# Pooling of a first column, positions from the padding index, one layer run several times, windows on both sides, and
# two types whose attention cannot be reached.
TYPES = ["bert", "roberta", "albert", "modernbert", *in_full("distilbert", "eurobert", "mpnet", "deberta-v2")]
GROUPS = ("mpnet", "deberta-v2")


def batch(*, left=False, dtype=torch.long):
    rows = PaddedRows((4, 16), tuple(16 - n if left else 0 for n in LENGTHS), LENGTHS)
    ids, mask = torch.zeros(rows.shape, dtype=torch.long), torch.zeros(rows.shape, dtype=dtype)
    for i, (start, tokens) in enumerate(zip(rows.starts, tiny.documents(LENGTHS), strict=True)):
        ids[i, start : start + len(tokens)], mask[i, start : start + len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def run(model, inputs):
    """Logits of a head's labels and the gradients of their loss."""
    model.zero_grad()
    logits = model(**inputs).logits
    if logits.dim() == 3:  # a label for each token: those at pads are not read
        logits = logits[inputs["attention_mask"].bool()]
    logits.float().sin().sum().backward()
    parameters = getattr(model, "_orig_mod", model).named_parameters()
    return logits.detach(), {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def assert_same(found, expected):
    assert_float32(found[0], expected[0])
    assert_regrouped(found[1], expected[1])


@pytest.mark.parametrize("head", ["SequenceClassification", *in_full("TokenClassification", "MaskedLM")])
@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_run_without_their_pads(model_type, head):
    model = small_encoder(model_type, head)
    expected = run(model, batch())
    patch(model, unpad=True)
    state = find_state(model)
    assert state.patch.level == ("groups" if model_type in GROUPS else "stack")
    assert "exact: without pads against padded" in describe(model)
    assert_same(run(model, batch()), expected)
    assert_same(run(model, batch(dtype=torch.bool)), expected)
    assert state.unpadding.calls == 2
    saved, places = state.unpadding.pads, 2 * 4 * 16
    assert saved == places - 2 * sum(LENGTHS) if model_type not in GROUPS else 0 < saved < places - 2 * sum(LENGTHS)

    unpatch(model)
    assert torch.equal(run(model, batch())[0], expected[0]) and describe(model) == "not patched"


@pytest.mark.parametrize("model_type", ["roberta", "modernbert", *in_full("bert", "distilbert")])
def test_left_pads_keep_their_positions(model_type):
    model = small_encoder(model_type, "TokenClassification")
    expected = run(model, batch(left=True))
    assert_same(run(patch(model, unpad=True), batch(left=True)), expected)
    assert find_state(model).unpadding.calls == 1


def test_pooling_of_the_first_column_runs_left_pads_as_they_are(caplog):
    model = small_encoder("bert", "SequenceClassification")
    expected = run(model, batch(left=True))
    patch(model, unpad=True)
    assert torch.equal(run(model, batch(left=True))[0], expected[0])
    assert find_state(model).unpadding.calls == 0 and not find_state(model).unpadding_report.takes_left
    assert "its pooling reads the first column of a row. Set tokenizer.padding_side='right'" in caplog.text
    run(model, batch())
    assert find_state(model).unpadding.calls == 1
    with pytest.raises(UnsupportedModel):  # what was checked about left pads stays
        patch(model, unpad=True, backend="none such")
    assert torch.equal(run(model, batch(left=True))[0], expected[0]) and find_state(model).unpadding.calls == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model_type", ["bert", *in_full("modernbert")])
def test_checkpointing_and_adapters_change_nothing(model_type, lora, reentrant):
    model = small_encoder(model_type, "SequenceClassification").train()
    if lora:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
        model = get_peft_model(model, config)
    expected = run(model, batch())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(run(patch(model, unpad=True), batch()), expected)
    assert find_state(model).unpadding.calls == 1


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_bfloat16_is_no_further_from_the_truth_than_padded(model_type):
    model = small_encoder(model_type, "SequenceClassification")
    exact = run(copy.deepcopy(model).double(), batch())[0]
    half = model.bfloat16()
    padded = run(half, batch())[0]
    assert_low_precision(run(patch(half, unpad=True), batch())[0], padded, exact, factor=3.0)


class Output(dict):
    """A dict that torch's tree functions do not open."""


@pytest.mark.parametrize(("changed", "message"), [
    (Output, r"a value of type Output(.|\n)*only tensors of several calls"),
    # The share of each group's loss in the whole is not known.
    (lambda outputs: (outputs[0].mean(), outputs[0]), "unpad=True cannot join the single numbers"),
], ids=["unknown", "numbers"])  # fmt: skip
def test_outputs_that_groups_cannot_join_are_refused(changed, message, monkeypatch):
    model = patch(small_encoder("mpnet", "SequenceClassification"), unpad=True).base_model
    override = override_in(model)
    forward = override.call_original
    monkeypatch.setattr(override, "call_original", lambda **call: changed(forward(**call)))
    with pytest.raises(PackingError, match=message):
        model(**batch())


def spans():
    return {"start_positions": torch.tensor([2, 0, 5, 0]), "end_positions": torch.tensor([8, 2, 13, 0])}


def loss_of(model, labels):
    """The loss that the model itself computes, and its gradients."""
    model.zero_grad()
    loss = model(**batch(), **labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_under_torch_compile():
    model = small_encoder("bert", "SequenceClassification")
    expected = run(model, batch())
    assert_same(run(torch.compile(patch(model, unpad=True), backend="eager"), batch()), expected)
    model = small_encoder("bert", "QuestionAnswering")
    loss, _ = loss_of(model, spans())
    assert loss_of(torch.compile(patch(model, unpad=True), backend="eager"), spans())[0] == loss


@pytest.mark.parametrize("model_type", ["bert", "mpnet", "t5", *in_full("bart", "modernbert", "mt5", "led")])
def test_question_answering_has_the_padded_loss(model_type, caplog):
    """The model's own loss is a softmax over all columns of a row, pads too."""
    model = small_encoder(model_type, "QuestionAnswering")
    expected, logits = loss_of(model, spans()), model(**batch()).start_logits
    unpadding = find_state(patch(model, unpad=True)).unpadding
    for _ in range(2):
        loss, gradients = loss_of(model, spans())
        assert loss == expected[0] and gradients.keys() == expected[1].keys()
        assert all(torch.equal(gradient, expected[1][name]) for name, gradient in gradients.items())
    said = f"{type(model).__name__} with start_positions run with their pads: its own loss is a softmax over all"
    assert sum(said in record.message for record in caplog.records) == 1 and not unpadding.calls
    tokens = batch()["attention_mask"].bool()
    assert_float32(model(**batch()).start_logits[tokens], logits[tokens])
    assert unpadding.calls == 1


@pytest.mark.parametrize("head", ["TokenClassification", "MaskedLM"])
@pytest.mark.parametrize("model_type", ["bert", "mpnet"])
def test_labels_at_pads_are_refused_and_masked_ones_are_not(model_type, head):
    """Stock code trains on pads whose labels are not -100; without pads nothing is computed there."""
    model, tokens = small_encoder(model_type, head), batch()["attention_mask"].bool()
    masked = {"labels": (batch()["input_ids"] % 2).masked_fill(~tokens, -100)}
    expected = loss_of(model, masked)
    patch(model, unpad=True)
    with pytest.raises(ContaminationError, match=r"computes at a pad, column 9 of row 0(?s:.*)labels of -100"):
        loss_of(model, {"labels": batch()["input_ids"] % 2})
    unpatch(model)
    assert_same(loss_of(patch(model, unpad=True), masked), expected)


def test_negative_controls_are_seen(monkeypatch):
    """Rows that see each other, tokens that see only the tokens before them, and a loss of spans without pads."""
    model, answers = (small_encoder("bert", head) for head in ("SequenceClassification", "QuestionAnswering"))
    expected, (of_spans, _) = run(model, batch())[0], loss_of(answers, spans())
    patch(model, unpad=True)
    patch(answers, unpad=True)
    with monkeypatch.context() as once:
        once.setattr(SpanLossOverride, "_trains_on_spans", lambda self, call: False)
        assert differs(answers(**batch(), **spans()).loss, of_spans)
        with pytest.raises(ContaminationError, match=r"BertEncoder: the loss depends on what the model computes at a"):
            loss_of(answers, spans())
    with monkeypatch.context() as once:
        once.setattr(HandedMasks, "sees_both_directions", lambda self, rows: False)
        assert differs(run(model, batch())[0], expected)
    layout = PaddedRows.layout
    one = lambda self, device: type(layout(self, device)).from_lengths([self.num_tokens], device=device)  # noqa: E731
    monkeypatch.setattr(PaddedRows, "layout", one)
    assert differs(run(model, batch())[0], expected)


def test_results_of_each_layer_and_batches_without_a_mask_run_as_they_are():
    model = small_encoder("bert", "SequenceClassification")
    whole = model(**batch(), output_hidden_states=True).hidden_states
    plain = model(input_ids=batch()["input_ids"]).logits
    patch(model, unpad=True)
    assert all(map(torch.equal, model(**batch(), output_hidden_states=True).hidden_states, whole))
    assert torch.equal(model(input_ids=batch()["input_ids"]).logits, plain)
    assert find_state(model).unpadding.calls == 0


@pytest.mark.parametrize(("model_type", "told"), [
    *[(name, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}) for name in ("bert", "modernbert", "mpnet")],
    *[(name, {"cu_seq_lens_q": torch.tensor([0, 3, 8])}) for name in ("bert", "modernbert")],  # MPNet takes none
], ids=lambda value: value if isinstance(value, str) else next(iter(value)))  # fmt: skip
def test_packed_rows_are_refused(model_type, told):
    model = patch(small_encoder(model_type, "TokenClassification"), unpad=True)
    with pytest.raises(PackingError, match=r"cannot run packed rows(?s:.*)Pass a padded batch"):
        model(input_ids=torch.arange(3, 11)[None], **told)


SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip
BART = BartConfig(vocab_size=tiny.VOCAB, pad_token_id=0, dropout=0.0, **SIZES)


def test_bad_input_is_refused():
    model = patch(small_encoder("bert", "SequenceClassification"), unpad=True)
    holes = batch()
    holes["attention_mask"][0, 4] = 0
    with pytest.raises(InvalidLayout, match="the attention_mask has a hole: row 0"):
        model(**holes)
    with pytest.raises(UnsupportedModel, match=r"attends in both directions(?s:.*)patch\(model, unpad=True\)"):
        patch(small_encoder("bert", "SequenceClassification"))
    for options in ({}, {"unpad": True}):
        with pytest.raises(UnsupportedModel, match=r"Train an encoder-decoder model padded"):
            patch(BartForSequenceClassification(BART), **options)
    with pytest.raises(UnsupportedModel, match="BertForSequenceClassification gets padded batches only"):
        check(model)


def test_rows_with_a_text_for_the_decoder_run_as_they_are(caplog):
    """Its pads are others, although both texts may be equally long in the batch."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BART)
    inputs = {**batch(), "labels": batch()["input_ids"].flip(0)}
    expected = model(**inputs)
    patch(model, unpad=True)
    state = find_state(model)
    assert torch.equal(model(**inputs).logits, expected.logits) and state.unpadding.calls == 0
    assert "calls of BartModel that bring inputs of its decoder run with their pads" in caplog.text
    model(**batch())
    assert state.unpadding.calls == 1


@pytest.mark.parametrize("head", ["Embeddings", "SequenceClassification"])
@pytest.mark.parametrize("model_type", ["modernbert", "gte", "mpnet"])
def test_a_patched_encoder_is_saved_as_it_was_loaded_and_copies_stand_on_their_own(model_type, head, tmp_path):
    """A user may also change its config after it was patched."""
    model = small_encoder(model_type, head)
    config, stock, attention = model.config, model.config.to_json_string(), model.config._attn_implementation
    patch(model, unpad=True)
    assert isinstance(model.config, type(config)) and vars(model.config) is vars(config)
    assert model.config.to_json_string() == stock
    other = AutoModel.from_config(model.config)
    assert other.config._attn_implementation == model.config._attn_implementation == attention
    model.config.output_hidden_states = True
    assert model(**batch()).hidden_states is not None
    model.config.output_hidden_states = False
    expected, twin = model(**batch())[0], copy.deepcopy(model)
    assert torch.equal(twin(**batch())[0], expected)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    unpatch(twin)
    assert torch.equal(model(**batch())[0], expected)
    model.save_pretrained(tmp_path)
    loaded, tokens = type(model).from_pretrained(tmp_path), batch()["attention_mask"].bool()
    assert "packfa" not in (tmp_path / "config.json").read_text()
    found = loaded(**batch())[0]
    assert_regrouped(*(x[tokens] if x.dim() == 3 else x for x in (found, expected)))
