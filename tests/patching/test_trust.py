"""What was not measured is checked before it is trusted; what a user meets in old habits stays exact."""

from pathlib import Path

import pytest
import tiny
import torch
import transformers
from calls import watched
from tiny_models import small_model
from tolerance import assert_float32, assert_regrouped
from torch import nn
from transformers import LlamaForCausalLM

from trl_packfa import PackedLayout, candidates, check, describe, patch, unpatch
from trl_packfa.errors import ContaminationError, UnsupportedModel
from trl_packfa.layout.call_context import packed_call
from trl_packfa.patches import measured, registry
from trl_packfa.patches.base import AttentionPatch, DocumentPatch, ModulePatch
from trl_packfa.patches.measured import fingerprint, known_sources, measured_transformers, results
from trl_packfa.patches.registry import registered_patches
from trl_packfa.patching.mixers import MixerOverride

LENGTHS = (13, 1, 29, 7)


def unknown_model():
    """A model of a type without a patch, by class and code a Llama."""
    model = tiny.model()
    model.config.model_type = "never_heard_of"
    return model


class Smear(nn.Module):
    """Mixes neighbouring tokens, and no patch knows."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x + x.roll(1, dims=1) * (torch.arange(x.shape[1])[:, None] > 0))


class Blur(Smear):
    """The same, in both directions: no order of running documents makes it causal."""

    def forward(self, x):
        return self.mlp(x + x.mean(dim=1, keepdim=True))


def mixing(mixer, model):
    """Put the mixer around an MLP."""
    model.model.layers[1].mlp = mixer(model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize(("mixer", "level"), [(None, "interface"), (Smear, "document")], ids=["attention", "smear"])
def test_an_unknown_type_gets_the_highest_general_level_that_is_exact(mixer, level, caplog):
    model = unknown_model() if mixer is None else mixing(mixer, unknown_model())
    assert f"level: {level}" in describe(patch(model))
    assert f"'never_heard_of' has no patch. The check found level {level} exact." in caplog.text
    assert check(model).is_exact


def test_an_unknown_type_that_nothing_makes_exact_is_refused_with_what_was_tried():
    model, tried = mixing(Blur, unknown_model()), r"level interface: (.|\n)*level document: packing is not exact"
    with pytest.raises(UnsupportedModel, match=tried) as refusal:
        patch(model)
    assert len(str(refusal.value)) < 1000, "without the names of all types"
    assert describe(model) == "not patched"
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_users_patch_that_does_not_fit_says_what_is_read(monkeypatch):
    """Its functions may raise anything when the check runs them."""
    model = unknown_model()
    config = model.config.model_type
    qkv = {"LlamaAttention": lambda module, hidden_states, *_: module.no_such_layer(hidden_states)}
    own = AttentionPatch(model_types=(config,), backbone="LlamaModel", attention=qkv, origin="my_package")
    monkeypatch.setitem(registry._table(), config, own)
    with pytest.raises(UnsupportedModel, match=r"registered for 'never_heard_of' (.|\n)*no_such_layer(.|\n)*scaling"):
        patch(model)
    assert describe(model) == "not patched"


class Renamed(nn.Module):
    """An attention module whose class a later transformers has renamed."""

    def __init__(self, attention):
        super().__init__()
        self.__dict__.update(attention.__dict__)


def test_code_that_a_patch_does_not_fit_is_blamed_on_the_version():
    model = tiny.model()
    model.model.layers[0].self_attn = Renamed(model.model.layers[0].self_attn)
    with pytest.raises(UnsupportedModel, match="does not fit its code in transformers") as refusal:
        patch(model)
    assert "but 3 attention modules of class LlamaAttention" in str(refusal.value)
    assert f"tested with transformers {', '.join(measured_transformers())}" in str(refusal.value)
    assert describe(model) == "not patched"


@pytest.fixture
def masks_of(monkeypatch):
    """A function that lets what all types rely on be that of a version of transformers, or of none."""

    def use(interface):
        monkeypatch.setattr(measured, "interface_fingerprint", lambda: interface)
        known_sources.cache_clear()

    yield use
    known_sources.cache_clear()


def test_code_of_every_measured_version_is_trusted_with_its_own_masks(masks_of):
    """Nobody waits for a check because a later version was measured."""
    sources = {name: result["sources"] for name, result in results().items()}
    interfaces = measured.read_committed(measured.RESULTS)["interfaces"]
    assert {"5.23.0", "5.24.0"} <= interfaces.keys() == set(measured_transformers())
    assert all(len(set(found.values())) > 1 for found in (interfaces, sources["mixtral"]))
    for version, interface in interfaces.items():
        masks_of(interface)
        assert known_sources()["mixtral"] == {sources["mixtral"][version]}


def test_known_code_with_masks_that_nobody_measured_is_checked(masks_of, monkeypatch):
    checked = watched(monkeypatch, candidates, "check")
    patch(tiny.model())
    assert not checked
    masks_of("of a release in between")
    patch(tiny.model())
    assert len(checked) == 1


@pytest.mark.parametrize("changed", ["masking_utils.py", "integrations/sdpa_attention.py", "modeling_utils.py"])
def test_fingerprint_of_what_all_types_rely_on_sees_a_change(tmp_path, changed):
    installed = Path(transformers.__file__).parent
    for name in (*measured._RELIED_ON, "modeling_utils.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((installed / name).read_bytes())

    def replace(name, old, new):
        path = tmp_path / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")

    replace("modeling_utils.py", "def from_pretrained", "def from_trained")
    known = measured.interface_fingerprint()
    assert measured.interface_fingerprint(tmp_path) == known, "loading is none of it"
    measured.interface_fingerprint.cache_clear()
    replace(changed, "attention", "attending")
    assert measured.interface_fingerprint(tmp_path) != known


def test_changed_code_is_checked_and_refused_if_it_leaks(monkeypatch):
    """A Llama that mixes tokens in its MLP is not the code that was measured: the check decides, and says where."""
    model = tiny.model()
    known = fingerprint(model)
    mixing(Smear, model)
    assert fingerprint(model) != known and known in known_sources()["llama"]
    with pytest.raises(ContaminationError, match=r"leak: (.|\n)*model.layers.1.mlp"):
        patch(model)
    assert describe(model) == "not patched"


def test_changed_code_that_is_exact_is_patched(monkeypatch):
    checked = watched(monkeypatch, candidates, "check")
    monkeypatch.setattr(candidates, "fingerprint", lambda model: "another transformers")
    assert "level: attention" in describe(patch(tiny.model())) and len(checked) == 1
    with torch.device("meta"):
        without_weights = LlamaForCausalLM(tiny.model().config)
    with pytest.raises(ContaminationError, match="its weights are on the meta device"):
        patch(without_weights)


@pytest.mark.parametrize("model_type", ["cpmant", "prophetnet", "reformer"])
def test_a_type_that_no_level_serves_is_refused_with_the_reason(model_type):
    with pytest.raises(UnsupportedModel, match="not causal under padding"):
        patch(small_model(model_type))


def test_every_registered_type_was_found_exact_with_the_level_it_has():
    served = {name: result["level"] for name, result in results().items() if result["verdict"] == "exact"}
    assert served == {name: patch.level for name, patch in registered_patches().items() if name in results()}


def batch_of(docs):
    return {"input_ids": torch.cat(docs)[None], "position_ids": PackedLayout.from_lengths(LENGTHS).position_ids()}


def test_pad_tokens_that_come_as_documents_of_one_token_change_nothing():
    """TRL's `pad_to_multiple_of` gives every pad token position 0."""
    model, docs = patch(tiny.model()), tiny.documents(LENGTHS)
    plain = batch_of(docs)
    padded = {name: torch.nn.functional.pad(value, (0, 14)) for name, value in plain.items()}
    assert_regrouped(model(**padded).logits[:, :50], model(**plain).logits)


def test_a_hybrid_of_attention_alone_needs_no_mixer():
    """granitemoehybrid without Mamba layers leaks under TRL's keys on any kernel: its mask has no position_ids."""
    model, docs = small_model("granitemoehybrid", layer_types=["full_attention"] * 4), tiny.documents(LENGTHS)

    def third():
        return tiny.split(model(**batch_of(docs)).logits, LENGTHS)[2]

    alone = model(input_ids=docs[2][None]).logits[0]
    assert (third() - alone).abs().max() > 0.1 * alone.std()
    assert check(patch(model)).is_exact
    assert_float32(third(), alone.double())


@pytest.mark.parametrize(
    ("model_type", "implementation"), [("doge", "flex_attention"), ("gpt_oss", "flash_attention_2")]
)
def test_the_models_own_attention_implementation_does_not_matter(model_type, implementation):
    """doge drops flex's block mask; gpt_oss's layers never get position_ids, which FlashAttention would need."""
    model, docs = patch(small_model(model_type)), tiny.documents(LENGTHS)
    expected = model(**batch_of(docs)).logits
    unpatch(model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = implementation
    assert torch.equal(patch(model)(**batch_of(docs)).logits, expected)


class Decay(nn.Module):
    """A mixer with a kernel that honours `seq_idx`, or ignores it, or has none (`None`)."""

    honours = True

    def forward(self, x, seq_idx=None, cu_seq_lens_q=None):
        if seq_idx is not None and self.honours is None:
            raise ValueError("can't keep packed sequences apart without the kernel")
        starts = torch.zeros(x.shape[1], dtype=torch.bool)
        if seq_idx is not None and self.honours:
            starts[1:] = seq_idx[0, 1:] != seq_idx[0, :-1]
            type(self).used = True
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = (0 if starts[t] else 0.9) * state + x[:, t]
            out.append(state)
        return torch.stack(out, dim=1)


@pytest.mark.parametrize("honours", [True, False, None])
def test_own_kernels_are_used_only_where_they_provably_honour_boundaries(honours):
    torch.manual_seed(0)
    mixer = type("Mixer", (Decay,), {"honours": honours, "used": False})
    module, layout, known = mixer(), PackedLayout.from_lengths([5, 1, 9]), {}
    x = torch.randn(1, 15, 4)
    exact = torch.cat([module(document[None])[0] for document in layout.split(x)])[None]
    module.forward = MixerOverride(module, ModulePatch(model_types=("decay",), mixers=("Decay",)), known)
    for _ in range(2):
        with packed_call(layout):
            assert_float32(module(x), exact)
    assert known == {(mixer, True): ("cu_seq_lens_q", "seq_idx") if honours else ()}
    assert mixer.used is bool(honours)


@pytest.mark.parametrize("honours", [True, False])
def test_a_real_mixer_uses_an_installed_kernel_that_honours_boundaries(monkeypatch, honours):
    """LFM2's short convolution with a stand-in for causal-conv1d: by `seq_idx`, or ignoring it."""
    from transformers.models.lfm2 import modeling_lfm2

    plain = modeling_lfm2.causal_conv1d_fn

    def kernel(hidden_states, weight, bias=None, activation=None, seq_idx=None, **kwargs):
        if seq_idx is None or not honours:
            return plain(hidden_states, weight, bias, activation)
        ends = [*(seq_idx[0].diff().nonzero().flatten() + 1).tolist(), seq_idx.shape[1]]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        documents = hidden_states.split(lengths, dim=-1)
        return torch.cat([plain(document, weight, bias, activation) for document in documents], dim=-1)

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", kernel)
    model = patch(small_model("lfm2"))
    assert check(model).is_exact
    how = "on its own kernels" if honours else "document by document"
    assert f"x Lfm2ShortConv: {how}" in describe(model)


def test_patch_of_a_third_party_is_checked_before_it_is_trusted(monkeypatch):
    wrong = DocumentPatch(model_types=("never_heard_of",), origin="somebody")
    monkeypatch.setitem(registry._table(), "never_heard_of", wrong)
    assert "patch from somebody" in describe(patch(unknown_model()))
    with pytest.raises(ContaminationError):
        patch(mixing(Blur, unknown_model()))
