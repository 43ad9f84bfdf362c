"""PEFT's activated LoRA: in a packed row every document has the beginning that it has alone."""

import itertools

import pytest
import tiny
import torch
from datasets import Dataset
from padded import padded
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tiny_models import small_model
from tolerance import assert_float32, assert_gradients, assert_low_precision, assert_trajectory, differs
from training import FORMATS, arguments, losses, packed_trainer, padded_trainer, trained
from trl import SFTConfig

from trl_packfa import PackedLayout, PackedSFTConfig, patch, unpatch
from trl_packfa.errors import PackingError, UnsupportedModel
from trl_packfa.kernels.lora.activated import activated_tokens
from trl_packfa.override import override_in

CALL = [5, 6, 7]
LENGTHS = (13, 2, 29, 3, 29, 21)


def config(**fields):
    fields = {"alora_invocation_tokens": CALL, "target_modules": "all-linear", "init_lora_weights": False, **fields}
    return LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **fields)


def adapted(base=None, **fields):
    torch.manual_seed(0)
    return get_peft_model(tiny.model(layers=2) if base is None else base, config(**fields))


def documents():
    """Invoked in the middle, at the start and twice, not, at their first token, not at all across a boundary."""
    docs = tiny.documents(LENGTHS)
    for number, at in ((0, 4), (2, 0), (2, 20), (3, 0), (5, 18)):
        docs[number][at : at + len(CALL)] = torch.tensor(CALL)
    docs[3][-1], docs[4][:2] = CALL[0], torch.tensor(CALL[1:])  # half in one document, half in the next
    return docs


def alone(model, docs):
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in docs])


def packed(model, docs):
    return model(**tiny.batch(docs)).logits[0]


def gradients(model, run, docs):
    model.zero_grad()
    run(model, docs).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("fused", [True, False])
def test_logits_and_gradients_are_those_of_each_document_alone(architecture, fused):
    base = small_model(architecture) if architecture == "gpt2" else tiny.model(architecture, layers=2)
    model, docs = adapted(base).train(), documents()
    expected, expected_gradients = alone(model, docs), gradients(model, alone, docs)
    patch(model, fused_kernels=fused)
    assert_float32(packed(model, docs), expected.double())
    for name, gradient in gradients(model, packed, docs).items():
        assert_float32(gradient, expected_gradients[name].double())
    assert torch.equal(alone(model, docs), expected)
    unpatch(model)
    assert torch.equal(alone(model, docs), expected)
    with model.disable_adapter():
        assert differs(alone(model, docs), expected)  # the adapter does something


def test_peft_s_offsets_of_rows_are_wrong_for_packed_rows():
    """The control: the same comparison without our forwards of LoRA layers and PeftModel."""
    model, docs = adapted(), documents()
    expected = alone(model, docs)
    packed(patch(model), docs)  # the first packed call asks whether all of them are there
    for module in model.modules():
        if "Activated" in type(override_in(module)).__name__ or hasattr(module, "lora_variant"):
            vars(module).pop("forward", None)
    assert differs(packed(model, docs), expected)


def test_one_document_changes_no_other():
    model, docs = patch(adapted()), documents()
    before = packed(model, docs).split(LENGTHS)
    docs[2] = docs[2].flip(0)  # no invocation is left
    after = packed(model, docs).split(LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, True, True, True]


@pytest.mark.parametrize("autocast", [False, True])
def test_activated_lora_in_bfloat16_is_as_precise_as_alone(autocast):
    oracle, docs = alone(adapted().double(), documents()), documents()
    model = adapted() if autocast else adapted(tiny.model(layers=2).bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = alone(model, docs)
        assert_low_precision(packed(patch(model), docs), eager, oracle, factor=2.0)


def test_activated_lora_in_four_bits_has_the_gradients_of_documents_alone(tmp_path):
    model, docs = adapted(tiny.quantized(tmp_path)).train(), documents()
    expected = gradients(model, alone, docs)
    assert_gradients(gradients(patch(model), packed, docs), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant):
    """PEFT's own hooks allow one forward for each backward, and none without; ours are not in their way."""
    model, docs = adapted().train(), documents()
    expected = gradients(model, alone, docs)
    patch(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with torch.no_grad():
        packed(model, docs), alone(model, docs)
    packed(model, docs)  # without a backward
    assert_gradients(gradients(model, packed, docs), expected)


def test_activated_lora_in_several_rows_with_pads_equals_documents_alone():
    model, docs = adapted(), documents()
    expected = alone(model, docs)
    patch(model)
    rows = padded([torch.cat(docs[:3]), torch.cat(docs[3:])], extra=0)
    pads = (rows["attention_mask"] == 0).sum(1).tolist()
    lengths = [*LENGTHS[:3], pads[0], *LENGTHS[3:], pads[1]]
    layout = PackedLayout.from_lengths([n for n in lengths if n], rows=2)
    logits = model(input_ids=rows["input_ids"], position_ids=layout.position_ids(), packed_layout=layout).logits
    assert_float32(logits[rows["attention_mask"].bool()], expected.double())


@pytest.mark.parametrize("lengths", [(1,), (2, 2), (3,), (7, 1, 3, 9), (30, 30)])
@pytest.mark.parametrize("call", [(1,), (1, 0), (0, 0, 1)])
def test_activated_tokens_against_a_plain_search(lengths, call):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        docs = [torch.randint(0, 2, (length,), generator=generator) for length in lengths]
        expected, begin = [], 0
        for ids in docs:
            starts = [i for i in range(len(ids)) if tuple(ids[i : i + len(call)].tolist()) == call]
            expected += range(begin + starts[-1], begin + len(ids)) if starts else []
            begin += len(ids)
        found = activated_tokens(torch.cat(docs)[None], PackedLayout.from_lengths(lengths), call)
        assert found.tolist() == expected


def test_adapters_are_switched_under_the_patch():
    model, docs = adapted(), documents()
    model.add_adapter("other", config(alora_invocation_tokens=[9]))
    model.add_adapter("plain", config(alora_invocation_tokens=None))
    docs[1][0] = 9
    expected = {}
    for name in ("default", "other", "plain"):
        model.set_adapter(name)
        expected[name] = alone(model, docs)
    patch(model)
    for name in ("default", "other", "plain"):
        model.set_adapter(name)
        assert_float32(packed(model, docs), expected[name].double())
    assert all(differs(a, b) for a, b in itertools.combinations(expected.values(), 2))


@pytest.mark.parametrize("fused", [True, False, None], ids=["fused", "PEFT's", "wrapped later"])
def test_one_that_came_after_the_patch_is_an_error_until_patched_again(fused):
    docs, name = documents(), "default" if fused is None else "late"
    if fused is None:
        model = adapted(patch(tiny.model(layers=2)))
    else:
        model = patch(adapted(alora_invocation_tokens=None), fused_kernels=fused)
        packed(model, docs)
        model.add_adapter("late", config())
        model.set_adapter("late")
    with pytest.raises(PackingError, match=rf"(?s)'{name}' was added after.*patch\(model\) again"):
        packed(model, docs)
    expected = alone(model, docs)
    assert_float32(packed(patch(model), docs), expected.double())


def test_calls_without_ids_and_adapters_without_a_peft_model_are_refused():
    model, batch = patch(adapted()), tiny.batch(documents())
    embedded = model.get_input_embeddings()(batch.pop("input_ids"))
    with pytest.raises(PackingError, match=r"(?s)without input_ids.*Pass input_ids"):
        model(inputs_embeds=embedded, **batch)
    own = tiny.model(layers=1)
    # `own.add_adapter` of transformers 5.24 asks for PEFT 0.22, which is not released.
    inject_adapter_in_model(config(), own, adapter_name="own")
    with pytest.raises(UnsupportedModel, match=r"(?s)'own' is on a model without a PeftModel.*get_peft_model"):
        patch(own)


@pytest.mark.parametrize(("model_type", "targets"), [("mamba", ["in_proj"]), ("roformer", ["query"])])
def test_what_runs_document_by_document_is_refused(model_type, targets):
    model = get_peft_model(small_model(model_type), config(target_modules=targets))
    with pytest.raises(UnsupportedModel, match=r"(?s)runs document by document.*packing=False"):
        patch(model)


def test_boundaries_in_any_form_are_honoured_and_keep_no_tokens():
    model, docs = patch(adapted()), documents()
    batch, expected = tiny.batch(docs), packed(model, docs)
    trls = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for names in (["position_ids"], ["position_ids", *trls], list(batch)):
        told = {name: batch[name] for name in names}
        assert torch.equal(model(**{"input_ids": batch["input_ids"], **told}).logits[0], expected)
    assert not any(kept is batch["input_ids"] for kept in batch["packed_layout"].memo.values())
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    assert torch.equal(model(**other).logits, model(**other).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_as_trl_does_padded(checkpointing):
    """`assistant` in the chat template is what activates the adapter."""
    data = Dataset.from_list(FORMATS["messages"])
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": checkpointing, "max_steps": 3}

    ours, theirs = (
        trained(make(arguments(cls, **options), train_dataset=data,
                     peft_config=config(alora_invocation_tokens=[5], init_lora_weights=True)))
        for make, cls in ((packed_trainer, PackedSFTConfig), (padded_trainer, SFTConfig))
    )  # fmt: skip
    assert ours.check_report is not None and ours.check_report.verdict == "exact"
    assert_trajectory(losses(ours), losses(theirs))
