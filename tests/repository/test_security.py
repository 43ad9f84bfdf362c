"""What a training library must not do to its user: run text as code, load pickles, write outside its folders."""

import ast
import json
import logging
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from training import arguments, packed_trainer

from trl_packfa.errors import InvalidConfig
from trl_packfa.packing import PackingReport
from trl_packfa.patches import registry
from trl_packfa.patches.base import InterfacePatch
from trl_packfa.trainers.packed_run import PackedRun

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("trl_packfa", "patches", "recipes") for path in (ROOT / folder).rglob("*.py")]
FORBIDDEN = {"eval", "exec", "compile", "__import__"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
SHELL = {"system", "popen"}


def called(node):
    """`(object, name)` of a call: `("torch", "load")`, `("", "eval")`."""
    if isinstance(node.func, ast.Name):
        return "", node.func.id
    if isinstance(node.func, ast.Attribute):
        return node.func.value.id if isinstance(node.func.value, ast.Name) else "?", node.func.attr
    return "?", ""


def option(node, name):
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def dangers(source):
    """What a file does that none of ours may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        where, name = called(node)
        if where == "" and name in FORBIDDEN:
            found.append(name)
        if where == "os" and name in SHELL:
            found.append(f"os.{name}")
        if (where, name) == ("torch", "load") and getattr(option(node, "weights_only"), "value", None) is not True:
            found.append("torch.load without weights_only=True")
        if where in ("np", "numpy") and name in ("load", "save", "savez"):
            if getattr(option(node, "allow_pickle"), "value", None) is not False:
                found.append(f"numpy.{name} without allow_pickle=False")
        if (where, name) == ("yaml", "load"):
            found.append("yaml.load")
        if getattr(option(node, "shell"), "value", None) is True:
            found.append("shell=True")
        if getattr(option(node, "trust_remote_code"), "value", None) is True:
            found.append("trust_remote_code=True")
    return found


def test_no_source_runs_text_or_loads_pickles():
    assert not {str(path): found for path in SOURCES if (found := dangers(path.read_text()))}


@pytest.mark.parametrize("source", [
    "eval('1')", "exec(x)", "import pickle", "from dill import loads", "torch.load(f)",
    "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)", "os.system(x)",
    "subprocess.run(x, shell=True)", "AutoConfig.from_pretrained(x, trust_remote_code=True)", "yaml.load(x)",
])  # fmt: skip
def test_negative_control_dangers_are_seen(source):
    assert dangers(source)


def test_trust_remote_code_is_the_users_word_alone():
    """It is passed on, never set: wherever the sources name it, the value is the arguments' own, and that is off."""
    for path in SOURCES:
        for line in path.read_text().splitlines():
            assert not re.search(r"trust_remote_code\W+True", line), (path, line)
    assert arguments().trust_remote_code is False


def test_reports_are_plain_json_inside_their_folder(tmp_path):
    out = tmp_path / "run"
    trainer = packed_trainer(arguments(out=out, max_steps=1, save_strategy="steps", save_steps=1, check_packing=False))
    trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for path in out.rglob("packing_*.json"):
        assert path.resolve().is_relative_to(out) and isinstance(json.loads(path.read_text()), dict)
    for path in out.rglob("*.np[yz]"):
        np.load(path, allow_pickle=False)


def test_reports_of_names_with_slashes_stay_inside(tmp_path):
    """A dataset's name is a key of the report, never a path."""
    report = PackingReport(*([0] * len(PackingReport.__dataclass_fields__)))
    run = SimpleNamespace(packing_reports={"../../escaped": report}, check_report=None, packing_plan={})
    PackedRun.save_reports(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["packing_report.json"]
    assert not (tmp_path.parent.parent / "escaped").exists()


@pytest.fixture
def install(monkeypatch):
    """Install a package with a patch for a type, for the length of a test; `load` is called when its code runs."""

    def install(model_type, load=lambda: None):
        class Foreign(EntryPoint):
            def load(self):
                load()
                return InterfacePatch(model_types=(model_type,), origin="foreign_package")

        entry_point = Foreign(name="foreign", value="foreign_package:PATCH", group=registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry_point])
        registry._table.cache_clear()

    yield install
    registry._table.cache_clear()


def test_entry_points_are_named_before_their_code_runs(install, caplog):
    seen = []
    install("foreign", load=lambda: seen.extend(record.getMessage() for record in caplog.records))
    with caplog.at_level(logging.INFO, logger="trl_packfa"):
        assert registry.registered_patches()["foreign"].origin == "foreign_package"
    assert any("foreign_package:PATCH" in line for line in seen), "named only after its code had run"


def test_an_entry_point_may_not_replace_a_patch_that_was_measured(install):
    install("llama")
    with pytest.raises(InvalidConfig, match=r"one from trl_packfa.*\n  - one from foreign_package"):
        registry.registered_patches()
