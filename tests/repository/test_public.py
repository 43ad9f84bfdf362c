"""What others rely on, frozen: a change here is a change for users and belongs into the changelog."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from trl import ModelConfig, SFTConfig, SFTTrainer

import trl_packfa
from trl_packfa import PackedSFTConfig, PackedSFTTrainer, cli

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("trl_packfa", "patches", "recipes") for path in (ROOT / folder).rglob("*.py")]
# Names of the parameters, `=` where there is a default, `*` before those that are by name only.
SIGNATURES = {
    "check": "model * collator= documents= processing_class= seed= progress=",
    "describe": "model",
    "padding_free": "trainer * leave_padded= check_first_batch= options",
    "patch": "model * backend= fused_kernels= unpad= share_prefixes=",
    "patched": "model options",
    "shard_batch": "batch group",
    "register_patch": "new",
    "unpatch": "model",
}
FIELDS = {
    "check_packing": True, "recheck": False, "fused_kernels": True, "peak_tflops": None, "loss_by": None,
    "sequence_parallel": 1, "expand_turns": False, "share_prefixes": False, "loss_weighting": "token",
    "max_tokens_per_microbatch": None, "overflow": "truncate", "attention_backend": "auto",
}  # fmt: skip
# Fields of TRL's with another default.
DEFAULTS = {"packing": True, "packing_strategy": None, "use_peft": True, "dtype": None, "learning_rate": None}
COMMANDS = "train plan prepare demo check bench merge models recipes env".split()


def signature(function):
    words, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        words.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return " ".join(words)


def test_signatures_are_frozen():
    functions = {n: getattr(trl_packfa, n) for n in trl_packfa.__all__ if inspect.isfunction(getattr(trl_packfa, n))}
    assert {name: signature(function) for name, function in functions.items()} == SIGNATURES


def test_the_trainer_takes_what_trls_takes_in_its_order():
    ours, theirs = (list(inspect.signature(cls.__init__).parameters) for cls in (PackedSFTTrainer, SFTTrainer))
    assert ours == theirs
    for name in ("packing_reports", "packing_plan", "check_report"):
        assert name in PackedSFTTrainer.__doc__


def test_fields_of_the_config_are_frozen():
    fields = {field.name: field for field in dataclasses.fields(PackedSFTConfig)}
    trls = {field.name: field for cls in (ModelConfig, SFTConfig) for field in dataclasses.fields(cls)}
    assert {name: field.default for name, field in fields.items() if name not in trls} == FIELDS
    changed = {n: f.default for n, f in fields.items() if n in trls and f.default != trls[n].default}
    del changed["lora_target_modules"]  # a factory
    assert changed == DEFAULTS
    assert fields["lora_target_modules"].default_factory() == ["all-linear"]


def test_commands_are_frozen():
    assert list(cli.COMMANDS) == COMMANDS


def test_typed_and_complete():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in package_data["trl_packfa"] and (ROOT / "trl_packfa" / "py.typed").exists()
    patterns = package_data["trl_packfa.recipes"]
    packed = {path for pattern in patterns for path in (ROOT / "recipes").glob(pattern)}
    assert packed == {p for p in (ROOT / "recipes").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}


def test_sources_are_python_3_10():
    for path in SOURCES:
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def test_nothing_newer_than_python_3_10_is_called():
    """Names and arguments of the standard library, which syntax does not show."""
    pytest.importorskip("vermin")
    argv = [sys.executable, "-c", "from vermin import main; main()"]
    argv += ["--target=3.10-", "--eval-annotations", "--violations", "--no-tips"]
    found = subprocess.run([*argv, *map(str, SOURCES)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    newer = subprocess.run([*argv, str(Path(__file__))], capture_output=True, text=True)
    assert "tomllib" in newer.stdout and newer.returncode != 0, "the control: this file needs 3.11"
