"""One battery for every architecture: a new one adds a row to `tiny.ARCHITECTURES`, not a file. What patches make and
leave is tried on some."""

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import oracle
import pytest
import tiny
import torch
from calls import watched
from peft import LoraConfig, get_peft_model
from pretended_liger import pretend_liger
from selection import in_full
from tiny_models import small_model
from tolerance import FORWARD_FACTOR, assert_float32, assert_low_precision, differs

from trl_packfa import PackedLayout, describe, patch, patched, unpatch
from trl_packfa.errors import NoBackend, PackingError
from trl_packfa.layout.call_context import empty_mask
from trl_packfa.override import override_in
from trl_packfa.patches.base import AttentionPatch
from trl_packfa.patches.registry import get_patch, registered_patches
from trl_packfa.patching import per_document
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target
from trl_packfa.patching.packed_attention import masked_by_choice
from trl_packfa.patching.state import find_state

every_architecture = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)

# Every way in which boundaries reach a model.
CALLS = {
    "our collator": lambda docs, layout: tiny.batch(docs),
    "TRL's keys": lambda docs, layout: {"position_ids": layout.position_ids(), **layout.flash_kwargs()},
    "position_ids only": lambda docs, layout: {"position_ids": layout.position_ids()},
    "cu_seq_lens only": lambda docs, layout: layout.flash_kwargs(),
    "all-ones mask": lambda docs, layout: {
        "position_ids": layout.position_ids(),
        "attention_mask": torch.ones(1, layout.num_tokens, dtype=torch.long),
    },
    "use_cache": lambda docs, layout: {"position_ids": layout.position_ids(), "use_cache": True},
}


def forward(model, docs, call="our collator"):
    ids = torch.cat(docs)[None]
    layout = PackedLayout.from_lengths([len(d) for d in docs])
    return model(**{"input_ids": ids, **CALLS[call](docs, layout)})


def loss_of(logits, docs):
    split = tiny.split(logits, [len(d) for d in docs])
    return sum(oracle.nll(x, ids) for x, ids in zip(split, docs, strict=True) if len(ids) > 1)


def oracle_dtype(architecture):
    """Float64, but for dynamic NTK, whose transformers code recomputes its base in float32."""
    return torch.float32 if architecture == "llama-dynamic" else torch.float64


def test_every_registered_architecture_has_a_row():
    rewritten = {name for name, patch in registered_patches().items() if patch.level == "attention"}
    # Held to transformers' own errors in tests/whole/test_architectures.py: XGLM does not run in float64, and Doge's
    # exponential bias makes its float32, unpatched, worse than the float32 tolerance allows. EXAONE is a Llama.
    assert {model_type for model_type, _ in tiny.ARCHITECTURES.values()} == rewritten - {"doge", "exaone", "xglm"}


@every_architecture
def test_packed_equals_alone(architecture):
    """Logits and gradients, on each backend. The control has no boundaries."""
    model, docs = tiny.model(architecture), tiny.documents()
    expected, expected_grads = oracle.alone(model, docs, dtype=oracle_dtype(architecture))
    assert differs(tiny.split(model(input_ids=torch.cat(docs)[None]).logits)[2], expected[2])
    for backend in ("sdpa", "reference"):
        model.zero_grad()
        logits = forward(patch(model, backend=backend), docs).logits
        for ours, theirs in zip(tiny.split(logits), expected, strict=True):
            assert_float32(ours, theirs)
        loss_of(logits, docs).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            assert_float32(grad, expected_grads[name])


@every_architecture
def test_boundaries_are_honoured_however_they_come(architecture):
    model, docs = patch(tiny.model(architecture)), tiny.documents()
    expected = forward(model, docs).logits
    for call in CALLS:
        output = forward(model, docs, call)
        assert torch.equal(output.logits, expected), call
        assert output.past_key_values is None


@every_architecture
def test_isolation_is_exact_to_the_bit(architecture):
    model, docs = patch(tiny.model(architecture)), tiny.documents()
    changed = [*docs[:2], tiny.documents(seed=1)[2], *docs[3:]]
    embeddings = [model.get_input_embeddings()(torch.cat(d))[None].detach().requires_grad_() for d in (docs, changed)]
    layout = PackedLayout.from_lengths(tiny.LENGTHS)
    weights = torch.randn(1, layout.num_tokens, tiny.VOCAB)
    for tensor in embeddings:
        (model(inputs_embeds=tensor.clone(), **layout.flash_kwargs()).logits * weights).sum().backward()
    logits = [forward(model, d).logits for d in (docs, changed)]
    for pair in (logits, [tensor.grad for tensor in embeddings]):
        before, after = (tiny.split(t) for t in pair)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [True, True, False, True, True]


@every_architecture
def test_bf16_is_as_good_as_eager_attention(architecture):
    reference, docs = tiny.model(architecture), tiny.documents()
    exact, _ = oracle.alone(reference, docs, dtype=oracle_dtype(architecture))
    model = copy.deepcopy(reference).to(torch.bfloat16)
    model.set_attn_implementation("eager")
    eager, _ = oracle.alone(model, docs, dtype=torch.bfloat16)
    ours = tiny.split(forward(patch(model), docs).logits)
    assert_low_precision(torch.cat(ours), torch.cat(eager), torch.cat(exact).double(), factor=FORWARD_FACTOR)


@every_architecture
def test_documents_of_a_batch_with_several_rows_equal_each_alone(architecture):
    model, docs = patch(tiny.model(architecture)), tiny.documents((9, 3, 5, 7, 12))
    expected = [model(input_ids=ids[None]).logits[0] for ids in docs]
    layout = PackedLayout.from_lengths([9, 3, 5, 7, 12], rows=3)
    for boundaries in ({"position_ids": layout.position_ids()}, layout.flash_kwargs(), {"packed_layout": layout}):
        logits = model(input_ids=torch.cat(docs).view(3, 12), **boundaries).logits
        for ours, alone in zip(layout.split(logits), expected, strict=True):
            assert_float32(ours, alone)


@every_architecture
def test_batches_without_boundaries_run_the_unpatched_code_and_unpatch_restores_it(architecture):
    model = tiny.model(architecture)
    ids = torch.stack(tiny.documents((12, 12)))
    padded = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    left = padded.flip(1)
    calls = [
        {"input_ids": ids},
        {"input_ids": ids, "position_ids": torch.arange(12).expand(2, -1)},
        {"input_ids": ids, "attention_mask": padded},
        {"input_ids": ids, "attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)},
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True},
    ]

    def run():
        generate = partial(model.generate, ids, max_new_tokens=5, do_sample=False)
        generated = [generate(attention_mask=mask) for mask in (torch.ones_like(padded), left)]
        return [model(**call).logits for call in calls] + generated

    before, attributes = run(), [dict(vars(module)) for module in model.modules()]
    patch(model)
    assert all(map(torch.equal, before, run()))
    forward(model, tiny.documents())
    unpatch(model)
    assert all(map(torch.equal, before, run())) and describe(model) == "not patched"
    if architecture not in ("llama-dynamic", "phi3-longrope"):  # their buffers change with every length they see
        assert [dict(vars(module)) for module in model.modules()] == attributes


def test_patch_is_idempotent_and_changes_backend():
    model = patch(tiny.model())
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert patch(model) is model
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert "reference" in describe(patch(model, backend="reference"))
    unpatch(unpatch(model))
    assert not any("forward" in vars(module) for module in model.modules())


def test_patched_is_for_the_length_of_the_block():
    model, docs = tiny.model("bloom"), tiny.documents()
    with pytest.raises(RuntimeError, match="inside"), patched(model):
        assert describe(model) != "not patched"
        raise RuntimeError("inside")
    assert describe(model) == "not patched"
    patch(model, fused_kernels=False)
    before, attributes = find_state(model), [dict(vars(module)) for module in model.modules()]
    expected = forward(model, docs).logits
    with patched(model, fused_kernels=False):
        assert find_state(model) is before
    with patched(model, unpad=True):
        assert find_state(model) is not before and find_state(model).options.unpad
    assert find_state(model) is before and [dict(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(forward(model, docs).logits, expected)
    with pytest.raises(NoBackend):
        patch(model, backend="none such")
    assert find_state(model) is before and torch.equal(forward(model, docs).logits, expected)
    unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_others_have_set_on_top_stays_and_calls_the_new_patch_only():
    model, docs = patch(tiny.model("bloom"), fused_kernels=False), tiny.documents()
    expected, below = forward(model, docs).logits, model.forward
    model.forward = on_top = lambda *args, **kwargs: below(*args, **kwargs)
    patch(model)
    assert torch.equal(forward(model, docs).logits, expected)
    unpatch(model)
    assert model.forward is on_top
    whole = torch.cat(docs)[None]
    with torch.no_grad():
        plain, own = model(input_ids=whole).logits, tiny.model("bloom")(input_ids=whole).logits
    assert torch.equal(plain, own) and not torch.equal(plain, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "phi3-longrope"])
def test_gradient_checkpointing_changes_nothing(architecture, use_reentrant):
    def gradients(checkpointing):
        model, docs = patch(tiny.model(architecture)).train(), tiny.documents()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        loss_of(forward(model, docs).logits, docs).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())


@pytest.mark.parametrize("what", ["model", "before the patch", *in_full("layers")])
def test_a_compiled_patched_model_equals_the_eager_one(what):
    model, batches = tiny.model(layers=2), [tiny.documents(), tiny.documents((4, 31, 2), seed=3)]
    expected = [torch.cat([model(input_ids=ids[None]).logits[0] for ids in docs]) for docs in batches]
    if what == "before the patch":
        compiled = patch(torch.compile(model, backend="aot_eager"))
    else:
        compiled = patch(model) if what == "layers" else torch.compile(patch(model), backend="aot_eager")
    for layer in model.model.layers if what == "layers" else ():
        layer.compile(backend="aot_eager")
    for docs, alone in zip(batches, expected, strict=True):
        assert_float32(forward(compiled, docs).logits[0], alone)


def test_a_long_document_does_not_change_the_others_rope():
    """Long rope picks its factors from the longest sequence of the batch: contamination without attention."""
    model, docs = tiny.model("phi3-longrope"), tiny.documents()
    alone = model(input_ids=docs[0][None]).logits[0]
    layout = PackedLayout.from_lengths(tiny.LENGTHS)
    theirs = tiny.split(model(input_ids=torch.cat(docs)[None], position_ids=layout.position_ids()).logits)[0]
    assert differs(theirs, alone), "control: transformers' own packing is contaminated here"
    assert_float32(tiny.split(forward(patch(model), docs).logits)[0], alone)


def test_overrides_of_norms_are_put_on_models_that_liger_may_run_only(monkeypatch):
    """Elsewhere their layers' checkpointing stays transformers' own, too."""
    pretend_liger(monkeypatch)

    def overridden(model):
        state = apply_patch(Target.of(model), get_patch(model.config))
        return Counter(type(override_in(module)).__name__ for module, slot, *_ in state.edits)

    here, elsewhere = overridden(tiny.model(layers=2)), overridden(tiny.model(layers=2).to("meta"))
    assert here["RMSNormOverride"] == 5 and here["LayerOverride"] == 2
    assert set(elsewhere) == {"BackboneOverride", "AttentionOverride"}


def test_patching_again_changes_nothing_until_there_is_a_new_lora_layer():
    model = get_peft_model(tiny.model(layers=1), LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    before = find_state(patch(model))
    assert len(before.adapted) == 2 and find_state(patch(model)) is before
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    assert len(find_state(patch(model)).adapted) == 3


def test_chosen_keys_hide_what_comes_later_where_transformers_leaves_the_mask_out():
    """Before 5.23 a plain causal call of DeepSeek V3.2 has no mask; decoding asks for the last rows of one."""
    indices = torch.tensor([[[0, 1, 2], [0, 1, 2], [0, 2, 1]]])
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    causal = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)
    expected = masked_by_choice(causal, indices, query, key)
    assert torch.equal(masked_by_choice(None, indices, query, key), expected)
    assert not torch.equal(expected, causal)


def test_a_patch_that_makes_two_dtypes_says_so():
    model = tiny.model(layers=1).to(torch.bfloat16)
    own = get_patch(model.config).attention["LlamaAttention"]

    def qkv(module, hidden_states, position_embeddings):
        query, key, value = own(module, hidden_states, position_embeddings)
        return query.float(), key.float(), value

    apply_patch(
        Target.of(model),
        AttentionPatch(model_types=("llama",), backbone="LlamaModel", attention={"LlamaAttention": qkv}),
    )
    batch = tiny.batch([torch.arange(1, 5), torch.arange(5, 9)])
    with pytest.raises(PackingError, match=r"query, key and value of different dtypes: torch.float32, torch.float32"):
        model(**batch)
    with torch.autocast("cpu", torch.bfloat16):  # the backend casts
        model(**batch)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt"])
def test_a_backbone_that_makes_its_mask_runs_in_another_thread_in_the_middle_of_a_packed_call(model_type):
    model, ids = small_model(model_type, num_hidden_layers=1), tiny.documents()[0][None]
    expected, own = model(input_ids=ids).logits, model.config._attn_implementation
    backbone, seen = patch(model).base_model, []

    def run_elsewhere(*call):
        handle.remove()
        with ThreadPoolExecutor(1) as other:
            elsewhere = other.submit(lambda: (backbone.config._attn_implementation, model(input_ids=ids).logits))
            seen.extend((*elsewhere.result(), backbone.config._attn_implementation))

    handle = backbone.get_input_embeddings().register_forward_hook(run_elsewhere)
    packed = forward(model, tiny.documents()).logits
    assert (seen[0], seen[2], model.config._attn_implementation) == (own, "packfa", own)
    assert torch.equal(seen[1], expected)
    assert torch.equal(forward(model, tiny.documents()).logits, packed)


def test_a_layout_of_inference_mode_serves_training():
    layout, x = PackedLayout.from_lengths((30, 5)), torch.randn(1, 35, 4, requires_grad=True)
    with torch.inference_mode():
        per_document.run_by_document(torch.sin, (x,), {}, layout)
    per_document.run_by_document(torch.sin, (x,), {}, layout).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_a_mask_is_made_only_for_modules_that_are_handed_one(monkeypatch):
    """It is quadratic in the longest document of a group: a state space model never looks at it."""
    made = watched(monkeypatch, torch, "full")
    layout = PackedLayout.from_lengths((300, 5))
    x = torch.randn(1, 305, 4)

    def mixer(hidden, attention_mask=None):
        assert attention_mask is None or attention_mask.shape[-2:] == (hidden.shape[1],) * 2
        return hidden * 2

    assert torch.equal(per_document.run_by_document(mixer, (x,), {}, layout), x * 2) and not made
    masked = {"attention_mask": empty_mask(layout, x.device, dtype=torch.float32)}
    assert torch.equal(per_document.run_by_document(mixer, (x,), masked, layout), x * 2)
    assert [tuple(shape) for shape, *_ in made] == [(300, 300), (5, 5)]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_run_on_their_own_weights_and_are_unpatched_alone(clone):
    model, docs = patch(tiny.model()), tiny.documents()
    twin = clone(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(forward(twin, docs).logits, forward(model, docs).logits)
    alone = torch.cat([twin(input_ids=ids[None]).logits[0] for ids in docs])
    assert_float32(forward(twin, docs).logits[0], alone)
    unpatch(twin)
    assert describe(model) != "not patched"
