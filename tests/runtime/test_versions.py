"""Installed packages that are too old are named, and only those that are needed for what is asked."""

import pytest
import tiny

import trl_packfa
from trl_packfa import versions
from trl_packfa.cli.main import main
from trl_packfa.errors import VersionTooOld


def test_old_versions_are_named(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda package: "0.9" if package == "trl" else "99")
    with pytest.raises(VersionTooOld, match=r"trl 0.9, needed >= 1.16\npip install --upgrade"):
        versions.require_versions()
    with pytest.raises(VersionTooOld, match=r"trl 0\.9"):
        trl_packfa.__getattr__("PackedSFTTrainer")
    monkeypatch.setattr(versions.sys, "version_info", (3, 10, 13))
    with pytest.raises(VersionTooOld, match=r"Use Python 3.11 or newer.*patch\(\) and check\(\) work"):
        versions.require_versions()


def test_models_are_patched_and_checked_without_trls_trainer(monkeypatch, tmp_path, capsys):
    """TRL 1.16 does not install on Python 3.10; 1.14 there lacks the fused LM head. Training is refused, in a word."""
    monkeypatch.setattr("trl_packfa.versions.installed_version", lambda package: "1.14" if package == "trl" else "99")
    monkeypatch.delattr("trl.trainer.utils.FusedCausalLMOutput")
    tiny.model(layers=1).save_pretrained(tmp_path)
    assert trl_packfa.__getattr__("patch") and trl_packfa.__getattr__("check")
    assert main(["check", str(tmp_path)]) == 0
    assert main(["train", "--model_name_or_path", str(tmp_path)]) == 1
    assert "trl 1.14, needed >= 1.16" in capsys.readouterr().err
