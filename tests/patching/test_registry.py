import copy
import pickle
import subprocess
import sys

import pytest
import tiny
import torch
from tiny_models import NOT_BUILDABLE, all_types, small_model

import trl_packfa
from trl_packfa import describe, patch, register_patch, unpatch
from trl_packfa.config.options import PatchOptions
from trl_packfa.errors import InvalidConfig, NoBackend, UnsupportedModel
from trl_packfa.patches import registry
from trl_packfa.patches.base import (
    AttentionPatch,
    DocumentPatch,
    FunctionPatch,
    GroupsPatch,
    Instead,
    InterfacePatch,
    ModulePatch,
    StackPatch,
)
from trl_packfa.patches.registry import get_patch, registered_patches
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target
from trl_packfa.patching.state import find_state


@pytest.fixture
def fresh_registry():
    registry._table.cache_clear()
    yield
    registry._table.cache_clear()


def test_what_no_patch_or_backend_serves_is_refused_and_left_as_it_was():
    """An unknown type: with the nearest and what was tried."""
    model = small_model("cpmant")
    model.config.model_type = "lama"
    expected = r"type 'lama'(.|\n)*nearest: llama(.|\n)*level document: packing is not(.|\n)*register_patch\(\)"
    with pytest.raises(UnsupportedModel, match=expected):
        patch(model)
    assert describe(model) == "not patched"
    with pytest.raises(UnsupportedModel, match="Linear holds no transformers model"):
        patch(torch.nn.Linear(2, 2))
    model = tiny.model()
    with pytest.raises(NoBackend, match="no attention backend 'fa2'"):
        patch(model, backend="fa2")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_patch_is_registered_for_this_process_and_duplicates_raise_and_name_both(fresh_registry):
    register_patch(InterfacePatch(model_types=("new",), backbone="X"))
    assert "new" in registered_patches()
    theirs = InterfacePatch(model_types=("llama",), backbone="X", origin="other_package")
    with pytest.raises(InvalidConfig, match=r"'llama'(.|\n)*one from trl_packfa(.|\n)*one from other_package"):
        register_patch(theirs)


def test_a_patch_that_does_not_fit_the_model_is_refused(fresh_registry):
    llama = registered_patches()["llama"]
    register_patch(AttentionPatch(model_types=("other",), backbone="OtherModel", attention=llama.attention))
    register_patch(
        AttentionPatch(model_types=("fewer",), backbone="LlamaModel", attention={"OtherAttention": lambda *_: None})
    )
    model = tiny.model()
    for model_type, message in (("other", "expects one OtherModel, found 0"), ("fewer", "4 layers, but 0 attention")):
        model.config.model_type = model_type
        with pytest.raises(UnsupportedModel, match=message):
            patch(model)


def one_type_of_each_patch():
    """One model type for each built-in patch, and for the patch of the models that it does not serve."""
    buildable = {name: p for name, p in registered_patches().items() if name in set(all_types()) - set(NOT_BUILDABLE)}
    found = dict(reversed([(id(p), name) for name, p in buildable.items()]))
    assert len(found) >= 20
    return sorted(found.values())


@pytest.mark.parametrize("model_type", one_type_of_each_patch())
@torch.no_grad()
def test_patched_model_is_copied_pickled_and_saved(model_type, tmp_path):
    def by_torch(model):
        torch.save(model, tmp_path / "model.pt")
        return torch.load(tmp_path / "model.pt", weights_only=False)

    model = small_model(model_type)
    apply_patch(Target.of(model), get_patch(model.config), PatchOptions(unpad=True))
    packed = tiny.batch(tiny.documents())
    ids = {"input_ids": tiny.documents()[0][None], "use_cache": False}
    expected, alone = model(**packed).logits, model(**ids).logits
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch):
        twin = copied(model)
        assert find_state(twin).parts.backbone is not find_state(model).parts.backbone
        assert torch.equal(twin.eval()(**packed).logits, expected)
        unpatch(twin)
        assert torch.equal(twin(**ids).logits, alone) and find_state(model) is not None
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(**packed).logits, expected), "it has weights of its own"
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=model.dtype).eval()
    assert find_state(loaded) is None
    assert torch.equal(loaded(**ids).logits, alone)


PACKAGE = {
    "pyproject.toml": """
[project]
name = "my-patches"
version = "1.0"
[project.entry-points."trl_packfa.patches"]
my_llama = "my_patches:PATCH"
[tool.setuptools]
py-modules = ["my_patches"]
""",
    "my_patches.py": """
from trl_packfa.patches.base import InterfacePatch
PATCH = InterfacePatch(model_types=("my_llama",), backbone="LlamaModel", origin="my_patches")
""",
}


@pytest.mark.slow
def test_a_third_party_package_registers_by_entry_point(tmp_path):
    """A real, tiny package, really installed, really found."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name, text in PACKAGE.items():
        (source / name).write_text(text)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(source)], check=True)
    script = "import sys, trl_packfa.patches.registry; sys.path.append(sys.argv[1]); "
    script += "print(trl_packfa.patches.registry.registered_patches()['my_llama'].origin)"
    found = subprocess.check_output([sys.executable, "-c", script, str(site)], text=True)
    assert found.strip() == "my_patches"


def test_describe_tells_level_windows_and_backend():
    model = patch(tiny.model("gemma3"))
    model(**tiny.batch(tiny.documents()))
    text = trl_packfa.describe(model)
    for part in ("level: attention", "4 attention modules", "window 8", "backend used: sdpa", "gemma3_text"):
        assert part in text


def test_a_type_taken_off_its_list_is_tried_like_an_unknown_one(monkeypatch):
    """That it was measured says which level it needs, not that there is none: only refused types are refused."""
    table = {name: patch for name, patch in registered_patches().items() if name != "smollm3"}
    monkeypatch.setattr(registry, "_table", lambda: table)
    model = patch(small_model("smollm3", num_hidden_layers=1))
    assert "level: interface" in describe(model)
    with pytest.raises(UnsupportedModel, match=r"level document: packing is not exact|sorts the row's tokens"):
        patch(small_model("reformer"))


@pytest.mark.parametrize("model_types", [(), "llama"])
def test_a_patch_for_no_type_or_that_names_a_class_twice_is_refused(model_types):
    with pytest.raises(InvalidConfig, match=r"InterfacePatch with model_types=.* serves nothing"):
        InterfacePatch(model_types=model_types)
    with pytest.raises(InvalidConfig, match="names M twice"):
        ModulePatch(model_types=("mine",), mixers=("M",), masked_mixers=("M",))
    ModulePatch(model_types=("mine",), mixers=("M",), masked_mixers=("N",), beside=("B",), window=len)


@pytest.mark.parametrize("kind", [InterfacePatch, DocumentPatch, StackPatch, GroupsPatch, FunctionPatch])
@pytest.mark.parametrize("field", [{"mixers": ("M",)}, {"makes_mask": True}, {"output": "out_proj"}, {"bias": len}])
def test_a_patch_takes_no_field_that_its_level_never_reads(kind, field):
    own = {"functions": {"A": "_attn"}, "arguments": len} if kind is FunctionPatch else {}
    kind(model_types=("mine",), **own)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        kind(model_types=("mine",), **own, **field)


def test_a_model_whose_config_another_patch_is_for_gets_that_patch(fresh_registry):
    other = DocumentPatch(model_types=("mine",))
    mine = InterfacePatch(model_types=("mine",), instead=Instead(lambda config: config.hidden_act == "gelu", other))
    register_patch(mine)
    model = tiny.model()
    model.config.model_type = "mine"
    assert get_patch(model.config) is mine
    model.config.hidden_act = "gelu"
    assert get_patch(model.config) is other
