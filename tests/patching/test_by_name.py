"""`attn_implementation="packfa"`: transformers' two registries, no patch, against documents alone by eager."""

import copy
import importlib

import pytest
import torch
from oracle import alone
from padded import padded, rows
from tiny import LENGTHS, documents, split
from tiny_models import small_model
from tolerance import assert_float32, assert_low_precision, assert_recomputed, differs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.masking_utils import causal_mask_function

import trl_packfa
import trl_packfa.register
from trl_packfa import PackedLayout
from trl_packfa.attention import BackendChoice
from trl_packfa.errors import InvalidConfig, InvalidLayout, PackingError, UnsupportedModel, VersionTooOld
from trl_packfa.patches.registry import find_patch_for_type
from trl_packfa.patching.attention_interface import register_name
from trl_packfa.patching.by_name import mask_by_name
from trl_packfa.versions import MINIMUM_VERSIONS

TYPES = ("llama", "mistral", "gemma2", "mixtral", "gpt_oss", "smollm3", "olmo2")  # all: tests/whole/test_by_name.py
LAYOUT = PackedLayout.from_lengths(LENGTHS)
OFFSETS = {name: value for name, value in LAYOUT.flash_kwargs().items() if name != "seq_idx"}
TOLD = {
    "position_ids": {"position_ids": LAYOUT.position_ids()},
    "cu_seq_lens": OFFSETS,
    "both": {"position_ids": LAYOUT.position_ids(), **LAYOUT.flash_kwargs()},
    "packed_layout": {"position_ids": LAYOUT.position_ids(), "packed_layout": LAYOUT},
    "all-ones mask": {"position_ids": LAYOUT.position_ids(), "attention_mask": torch.ones(1, sum(LENGTHS))},
}


@pytest.fixture(autouse=True)
def registered():
    """The name and the backend as the import leaves them, whatever a test makes of them."""
    yield
    AttentionInterface._global_mapping.pop("packfa", None)
    AttentionMaskInterface._global_mapping.pop("packfa", None)
    register_name()
    trl_packfa.register.use_backend("auto")


def named(model_type, **options):
    return small_model(model_type, attn_implementation="packfa", **options)


def eager(model_type, **options):
    model = small_model(model_type, attn_implementation="eager", **options)
    model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    return model


def row():
    return torch.cat(documents())[None]


def packed(model, **told):
    return split(model(input_ids=row(), use_cache=False, **told).logits)


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_are_what_they_are_alone(model_type):
    model = named(model_type)
    expected, gradients = alone(eager(model_type), documents())
    scale = torch.cat(expected).std()
    for told in ("position_ids", "cu_seq_lens"):
        model.zero_grad()
        with_loss = packed(model, **TOLD[told])
        losses = [torch.nn.functional.cross_entropy(x[:-1], ids[1:], reduction="sum")
                  for x, ids in zip(with_loss, documents(), strict=True) if len(ids) > 1]  # fmt: skip
        torch.stack(losses).sum().backward()
        assert_recomputed(torch.cat(with_loss) / scale.float(), torch.cat(expected) / scale)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name in gradients:
                assert_recomputed(parameter.grad, gradients[name])
    with torch.no_grad():
        for told in ("both", "packed_layout", "all-ones mask"):
            by_positions = packed(model, **TOLD["position_ids"])
            assert torch.equal(torch.cat(packed(model, **TOLD[told])), torch.cat(by_positions))
        leaking = packed(model)
    assert differs(torch.cat(leaking), torch.cat(expected))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2"])
def test_bfloat16_is_as_good_as_eager_alone(model_type):
    oracle, _ = alone(eager(model_type), documents())
    theirs, _ = alone(eager(model_type), documents(), dtype=torch.bfloat16)
    with torch.no_grad():
        ours = packed(named(model_type).to(torch.bfloat16), **TOLD["both"])
    for actual, expected, exact in zip(ours, theirs, oracle, strict=True):
        assert_low_precision(actual, expected, exact, factor=2.0)


@pytest.mark.parametrize("backend", ["sdpa", "flex", "reference"])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_every_backend_serves_a_model_by_name(model_type, backend):
    trl_packfa.register.use_backend(backend)
    model = named(model_type, num_hidden_layers=2)
    expected, _ = alone(eager(model_type, num_hidden_layers=2), documents())
    try:
        with torch.no_grad():
            actual = packed(model, **TOLD["both"])
    except PackingError as error:  # what a backend lacks it refuses by name
        assert backend in str(error)
        return
    assert_float32(torch.cat(actual), torch.cat(expected))


class Squares(TorchDispatchMode):
    """The operations that made a tensor of length times length."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-2:] == (self.length, self.length):
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_no_mask_is_built(model_type):
    for told in ("position_ids", "cu_seq_lens", "both"):
        for make in (named, eager):
            with torch.no_grad(), Squares(sum(LENGTHS)) as seen:
                packed(make(model_type), **TOLD[told])
            assert bool(seen.found) == (make is eager)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss", "gpt2"])
@torch.no_grad()
def test_padded_rows_are_eagers(model_type, side):
    batch = padded(documents(), side)
    ours, theirs = (make(model_type)(**batch, use_cache=False).logits for make in (named, eager))
    ours, theirs = (torch.cat(rows(logits, batch["attention_mask"])) for logits in (ours, theirs))
    assert_float32(ours, theirs.double())
    if side == "left":  # the control: pads are seen
        without = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
        seen = torch.cat(rows(named(model_type)(**without).logits, batch["attention_mask"]))
        assert differs(seen, theirs)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_gives_the_same_tokens(model_type, cache):
    batch = padded(documents(), "left")
    other = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"  # sdpa knows neither softcap nor sinks
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    ours = named(model_type).generate(**batch, **options)
    theirs = small_model(model_type, attn_implementation=other).generate(**batch, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    models = [named("gemma2", num_hidden_layers=2).train() for _ in range(2)]
    models[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in models:
        model.enable_input_require_grads()
        torch.cat(packed(model, **TOLD["both"])).square().mean().backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad, other.grad)


@torch.no_grad()
def test_boundaries_in_the_same_buffer_are_read_anew_and_transformers_collator_is_understood():
    """A plain Trainer sends positions together with cu_seq_lens."""
    examples = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in documents()]
    batch = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples))
    assert {"position_ids", "cu_seq_lens_q"} <= set(batch)
    model, positions = named("llama", num_hidden_layers=2), LAYOUT.position_ids()
    first = torch.cat(packed(model, position_ids=positions))
    assert torch.equal(torch.cat(split(model(**batch, use_cache=False).logits)), first)
    positions.copy_(torch.arange(sum(LENGTHS))[None])
    assert differs(torch.cat(packed(model, position_ids=positions)), first)


@torch.no_grad()
def test_compiled_it_packs_too():
    model = named("gemma2", num_hidden_layers=2)
    compiled = torch.compile(model, backend="eager")
    for told in ("position_ids", "cu_seq_lens", "both"):
        ours = torch.cat(split(compiled(input_ids=row(), use_cache=False, **TOLD[told]).logits))
        assert_float32(ours, torch.cat(packed(model, **TOLD[told])).double())
    assert differs(torch.cat(packed(model)), torch.cat(packed(model, **TOLD["both"])))


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral"])
def test_bfloat16_of_experts_is_exact(model_type):
    """By the check, which hands routers the same input: rounding sends single tokens to another expert."""
    assert trl_packfa.check(named(model_type).to(torch.bfloat16)).is_exact


def test_check_proves_it_and_the_patch_still_works():
    model = named("gemma2")
    assert trl_packfa.check(model).is_exact and "packfa" in trl_packfa.describe(model)
    with torch.no_grad():
        before = torch.cat(packed(model, **TOLD["both"]))
        patched = torch.cat(packed(trl_packfa.patch(model), **TOLD["both"]))
        assert_float32(patched, before.double())
        assert torch.equal(torch.cat(packed(trl_packfa.unpatch(model), **TOLD["both"])), before)
    with pytest.raises(UnsupportedModel, match="does not serve model type 'mamba'"):
        trl_packfa.check(named("mamba", num_hidden_layers=1))  # it never calls the registries


def test_an_adapter_packs():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(named("llama"), config)
    plain = copy.deepcopy(model)
    plain.base_model.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [plain(input_ids=ids[None], use_cache=False).logits[0].double() for ids in documents()]
        assert_float32(torch.cat(packed(model, **TOLD["both"])), torch.cat(expected))
    assert trl_packfa.check(model).is_exact


UNSERVED = {
    "jamba": "not only attention mixes its tokens",
    "bert": "counts positions itself", "bloom": "does not go through", "llama4_text": "one by one",
    "stablelm": "does not pass cu_seq_lens_q on", "persimmon": "does not pass position_ids on",
    "xglm": "does not go through",
}  # fmt: skip


@pytest.mark.parametrize("model_type, why", UNSERVED.items(), ids=list(UNSERVED))
def test_unserved_types_are_refused_at_their_first_call(model_type, why):
    for told in ({}, TOLD["both"], TOLD["position_ids"]):
        with pytest.raises(UnsupportedModel, match=rf"does not serve model type '{model_type}'") as refusal:
            packed(named(model_type), **told)
        assert why in str(refusal.value) and "trl_packfa.patch(model)" in str(refusal.value)


def test_an_unserved_type_runs_by_another_name_and_by_a_patch():
    model = named("jamba")
    model.set_attn_implementation("sdpa")
    expected, _ = alone(eager("jamba"), documents())
    with torch.no_grad():
        assert differs(torch.cat(packed(model, **TOLD["both"])), torch.cat(expected))
        assert_recomputed(torch.cat(packed(trl_packfa.patch(model), **TOLD["both"])), torch.cat(expected))


def test_a_type_that_nobody_measured_is_refused():
    config = small_model("llama").config
    config.model_type = "stranger"  # a type of somebody's own
    config._attn_implementation = "packfa"
    assert find_patch_for_type("stranger") is None
    model = type(small_model("llama"))(config).eval()
    for call in (packed, lambda model, **told: trl_packfa.check(model)):
        with pytest.raises(UnsupportedModel, match=r"'stranger'.\n  - it was never measured\nLoad it with"):
            call(model, **TOLD["both"])


def test_contradicting_boundaries_and_filled_caches_are_refused_by_name():
    model, ids = named("llama", num_hidden_layers=1), row()
    pads = torch.ones_like(ids)
    pads[0, -1] = 0
    for told in ("cu_seq_lens", "packed_layout"):
        with pytest.raises(InvalidLayout, match="not all ones"):
            packed(model, **{**TOLD[told], "attention_mask": pads})
    with pytest.raises(InvalidLayout, match="restart at token 13 of row 0"):
        packed(model, position_ids=LAYOUT.position_ids(), attention_mask=pads)
    filled = model(input_ids=ids[:, :5], use_cache=True).past_key_values
    for told in ("cu_seq_lens", "position_ids"):
        with pytest.raises(InvalidLayout, match="came with a filled cache"):
            model(input_ids=ids, past_key_values=filled, **TOLD[told])
    with pytest.raises(InvalidLayout, match="disagree"):
        packed(model, position_ids=LAYOUT.position_ids(), **PackedLayout.from_lengths((20, 51)).flash_kwargs())
    with pytest.raises(InvalidLayout, match="the batch has"):
        packed(model, **PackedLayout.from_lengths((20, 50)).flash_kwargs())


def test_boundaries_beside_a_mask_by_a_models_own_rule_are_refused():
    model, ones = named("llama", num_hidden_layers=1), torch.ones_like(row())
    sizes = {"batch_size": 1, "q_length": ones.shape[1], "kv_length": ones.shape[1], "device": "cpu"}
    rule = {"mask_function": causal_mask_function, "use_vmap": True, "allow_is_causal_skip": False}
    mask = mask_by_name({"config": model.config, "attention_mask": ones, **sizes, **rule})
    assert mask is not None and mask.shape[-2:] == (ones.shape[1],) * 2
    with pytest.raises(InvalidLayout, match="not all ones"):
        packed(model, **OFFSETS, attention_mask=mask)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_rows_without_pads_equal_eagers_and_run_by_the_backends(model_type, monkeypatch):
    ids, ran = torch.cat(documents())[:60].view(2, 30), []
    attend = BackendChoice.attend
    monkeypatch.setattr(BackendChoice, "attend", lambda *given: ran.append(given[4].lengths) or attend(*given))
    with torch.no_grad():
        ours, theirs = (make(model_type)(input_ids=ids, use_cache=False).logits for make in (named, eager))
    assert_float32(ours, theirs.double())
    assert set(ran) == {(30, 30)}


def test_positions_that_a_model_computes_with_must_come():
    model = named("gpt2")
    with pytest.raises(PackingError, match="without position_ids that restart: a gpt2 model"):
        packed(model, **OFFSETS)
    packed(model, **TOLD["both"])


def test_documents_that_change_the_frequencies_of_others_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = {"max_position_embeddings": 16, "rope_parameters": rope}
    model = named("llama", **config)
    with pytest.raises(PackingError, match="a document of 29 tokens changes the rotary frequencies"):
        packed(model, **TOLD["both"])
    short, positions = documents((13, 1, 9)), PackedLayout.from_lengths((13, 1, 9)).position_ids()
    logits = model(input_ids=torch.cat(short)[None], position_ids=positions, use_cache=False).logits
    expected, _ = alone(eager("llama", **config), short)
    assert_float32(logits[0].detach(), torch.cat(expected))


def test_another_packages_function_of_the_name_no_import_and_old_transformers_are_refused(monkeypatch):
    AttentionInterface.register("packfa", lambda *args, **kwargs: pytest.fail("called"))
    with pytest.raises(InvalidConfig, match=r"registered twice.\n  - .*<lambda> has taken the name"):
        register_name()
    with pytest.raises(InvalidConfig, match="registered twice"):
        packed(named("llama", num_hidden_layers=1), **TOLD["both"])
    AttentionInterface._global_mapping.pop("packfa")
    with pytest.raises(ValueError, match='attn_implementation="packfa"` is not supported'):
        named("llama", num_hidden_layers=1)
    monkeypatch.setitem(MINIMUM_VERSIONS, "transformers", "99")
    with pytest.raises(VersionTooOld, match=r"transformers .*, needed >= 99"):
        importlib.reload(trl_packfa.register)
