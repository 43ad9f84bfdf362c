"""Installed packages that are too old are named, and only those that are needed for what is asked; newer ones are told
of once."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from packaging.requirements import Requirement
from packaging.version import Version
from tiny_models import small_model

import trl_packfa
from trl_packfa import candidates, versions
from trl_packfa.cli.main import main
from trl_packfa.errors import VersionTooOld

ROOT = Path(__file__).parents[2]
# Older TRL has neither module; with no TRL at all, nothing of it can be imported.
WITHOUT_TRL = """
import sys
sys.modules["trl"] = None
import torch, transformers, trl_packfa
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=2, vocab_size=64)
model = trl_packfa.patch(transformers.LlamaForCausalLM(config), unpad=True)
print(trl_packfa.check(model).verdict, trl_packfa.describe(trl_packfa.unpatch(model)))
"""


def test_old_versions_are_named(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda package: "0.9" if package == "trl" else "99")
    with pytest.raises(VersionTooOld, match=r"trl 0.9, needed >= 1.16\npip install --upgrade"):
        versions.require_versions()
    with pytest.raises(VersionTooOld, match=r"trl 0\.9"):
        trl_packfa.__getattr__("PackedSFTTrainer")
    monkeypatch.setattr(versions.sys, "version_info", (3, 10, 13))
    with pytest.raises(VersionTooOld, match=r"Use Python 3.11 or newer.*patch\(\) and check\(\) work"):
        versions.require_versions()
    monkeypatch.setattr(versions, "installed_version", lambda package: "5.15.1" if package == "transformers" else "99")
    with pytest.raises(VersionTooOld, match=r"transformers 5\.15\.1, needed >= 5\.16"):
        trl_packfa.__getattr__("patch")


def test_models_are_patched_and_checked_without_trls_trainer(monkeypatch, tmp_path, capsys):
    """TRL 1.16 does not install on Python 3.10; 1.14 there lacks the fused LM head. Training is refused, in a word."""
    monkeypatch.setattr("trl_packfa.versions.installed_version", lambda package: "1.14" if package == "trl" else "99")
    monkeypatch.delattr("trl.trainer.utils.FusedCausalLMOutput")
    tiny.model(layers=1).save_pretrained(tmp_path)
    assert trl_packfa.__getattr__("patch") and trl_packfa.__getattr__("check")
    assert main(["check", str(tmp_path)]) == 0
    assert main(["train", "--model_name_or_path", str(tmp_path)]) == 1
    assert "trl 1.14, needed >= 1.16" in capsys.readouterr().err


def test_models_are_patched_and_checked_without_trl():
    """In a process of its own, where no other test has imported TRL already."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_TRL], capture_output=True, text=True)
    assert "exact not patched" in found.stdout, found.stderr


@pytest.mark.parametrize(("found", "expected"), [
    ({"transformers": "5.25.0"}, ["transformers 5.25.0 (tested up to 5.24.0)"]),
    ({"torch": "2.16.0+cpu", "trl": "2.0.0.dev0"}, ["torch 2.16.0+cpu (", "trl 2.0.0.dev0 ("]),
    ({"transformers": "5.24.9", "torch": "2.15.7", "trl": None}, []),
])  # fmt: skip
def test_newer_releases_are_told_of_once_a_process(monkeypatch, caplog, found, expected):
    tested = {package: "5.24.0" if package == "transformers" else t.newest for package, t in versions.TESTED.items()}
    monkeypatch.setattr(versions, "installed_version", {**tested, **found}.get)
    fresh = versions.cache(versions.tell_of_newer_versions.__wrapped__)
    newer = versions.newer_than_tested()
    assert len(newer) == len(expected) and all(map(str.startswith, newer, expected))
    with caplog.at_level(logging.WARNING, "trl_packfa"):
        fresh()
        fresh()
    assert len(caplog.records) == bool(expected)
    assert all(text in caplog.text for text in expected)


@pytest.mark.parametrize("newer", [[], ["transformers 5.99.0 (tested up to 5.24.0)"]])
def test_a_newer_release_is_checked_before_it_is_trusted(monkeypatch, newer):
    """A model's own code may be the same while masks and the attention interface are others."""
    model, checks = small_model("llama", num_hidden_layers=1), []
    known = candidates.fingerprint(model)
    monkeypatch.setattr(candidates, "known_sources", lambda: {"llama": {known}})
    monkeypatch.setattr(candidates, "newer_than_tested", lambda: newer)
    monkeypatch.setattr(candidates, "_require_exact", lambda model, state: checks.append(model))
    trl_packfa.patch(model)
    assert checks == [model] * len(newer)


def test_what_is_declared_is_what_is_asked_for():
    """A wheel's requirements admit the oldest and the newest tested versions, and of what patch() needs none older."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {r.name: r for r in map(Requirement, project["dependencies"])}
    for package, tested in versions.TESTED.items():
        assert Version(versions.MINIMUM_VERSIONS[package]) <= Version(tested.oldest) <= Version(tested.newest)
        assert all(declared[package].specifier.contains(version) for version in tested), package
        if package != "trl":
            assert str(declared[package].specifier) == f">={versions.MINIMUM_VERSIONS[package]}"


def test_env_prints_the_tested_versions(capsys):
    assert main(["env"]) == 0
    assert "transformers 5.16.0 to 5.24.0" in capsys.readouterr().out
