"""Reuse a check, of a checkpoint or of this machine, for a run that is the same in all that the check depends on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import astuple, fields, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comparison import Comparison
from ..errors import figure
from ..override import hooks_of, override_in
from ..patches.measured import RESULTS, fingerprint
from ..patching.inspect import inner_model, model_config, own_config
from ..patching.state import find_state
from ..versions import MINIMUM_VERSIONS, installed_version
from .report import CheckReport
from .subject import device_of

_PACKAGES = ("trl-packfa", *MINIMUM_VERSIONS, "bitsandbytes", "flash-attn", "liger-kernel", "kernels", "deepspeed")
# Environment variable with the folder of kept checks; empty: keep none. Default: `trl-packfa` in the user's cache.
CACHE = "TRL_PACKFA_CACHE"
# Environment variables that also choose kernels.
_ENVIRONMENT = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
# Config fields that do not affect the computation.
_NAMES = ("_name_or_path", "transformers_version", "base_model_name_or_path", "revision")


def check_identity(model: nn.Module, **facts: Any) -> str:
    """Return a hash of everything that a check depends on, except the values of the weights.

    That is: versions, our code and the model's, config, modules, forwards, implementations, parameters with dtypes and
    which of them train, adapters, device and autocast; and other `facts` that its calls depend on: collator, engine.
    """
    device, state = device_of(model), find_state(model)
    patched = [] if state is None else [state.patch.origin, state.patch.level, *astuple(state.options)]
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    content = [
        [installed_version(package) for package in _PACKAGES],
        [_own_code(), fingerprint(model), patched],
        _settings_of(model_config(model)),
        # Wrappers around the transformers model, and its LM head's forward in training, are not part of a check: the
        # first batch does.
        [
            [name, type(module).__qualname__, _forward(module), *_settings(module)]
            for name, module in inner_model(model).named_modules()
            if name
        ],
        [[name, tuple(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()],
        [[name, _settings_of(config)] for name, config in sorted(getattr(model, "peft_config", {}).items())],
        [device.type, cuda, torch.backends.cpu.get_cpu_capability(), str(autocast)],
        [os.environ.get(name) for name in _ENVIRONMENT],
        sorted((name, str(fact)) for name, fact in facts.items()),
    ]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:32]


def reusable_check(checkpoint: str | Path, identity: str) -> CheckReport | None:
    """Return the report beside a checkpoint if a model of this identity was checked exact, else `None`."""
    return _read(Path(checkpoint) / "check_report.json", identity, f"before {Path(checkpoint).name}")


def check_of_machine(model: nn.Module, identity: str) -> CheckReport | None:
    """Return the report of an earlier run on this machine, of the same identity and weights; else `None`."""
    path = _cached_path(model, identity)
    if path is None or not path.is_file():
        return None
    day = datetime.fromtimestamp(path.stat().st_mtime).date()
    return _read(path, identity, f"on this machine on {day} (recheck=True checks again)")


@figure("check kept for the next run")
def keep_check(model: nn.Module, report: CheckReport) -> None:
    """Keep a report for later runs on this machine, if it is exact."""
    path = _cached_path(model, report.identity)
    if path is not None and report.is_exact:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(report.to_dict()), encoding="utf-8")
        os.replace(partial, path)  # another process may read it


@figure("check of this machine")  # offloaded weights have no values to read
def _cached_path(model: nn.Module, identity: str) -> Path | None:
    """Return the file of a check in the user's cache; `None` if checks are not kept."""
    folder = os.environ.get(CACHE)
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl-packfa"
    if not str(folder):
        return None
    key = hashlib.sha256(identity.encode() + _some_values(model)).hexdigest()[:32]
    return Path(folder) / "checks" / f"{key}.json"


def _some_values(model: nn.Module) -> bytes:
    """Read eight values of each frozen parameter, or of each if all train: what tells weights from others."""
    parameters = list(model.parameters())
    frozen = [p for p in parameters if not p.requires_grad] or parameters
    some = [p.detach().flatten()[:: max(p.numel() // 8, 1)][:8].float() for p in frozen if p.numel()]
    return torch.cat([values.cpu() for values in some]).numpy().tobytes()


def _read(path: Path, identity: str, taken_from: str) -> CheckReport | None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        # JSON of another version may have more or fewer fields, and tuples are lists there. This run has a first batch
        # of its own.
        values = {field.name: saved[field.name] for field in fields(CheckReport) if field.name in saved}
        rows = (Comparison(**{name: row[name] for name in Comparison._fields}) for row in saved["rows"])
        values |= {"rows": tuple(row for row in rows if not row.words.is_of_batch), "lengths": tuple(saved["lengths"])}
        report = CheckReport(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no report, or one of another version
        return None
    if report.identity != identity or not report.is_exact:
        return None
    return replace(report, taken_from=taken_from)


def _settings(module: nn.Module) -> list[str]:
    """Return what a module's config dictionary lacks: implementations, activation checkpointing, and hooks."""
    config = own_config(module)
    config = vars(config).get("trl_packfa_source", config) if config is not None else None
    chosen = [str(getattr(config, name, "")) for name in ("_attn_implementation", "_experts_implementation")]
    again = vars(module).get("gradient_checkpointing", False)
    how = getattr(vars(module).get("_gradient_checkpointing_func"), "keywords", {}) if again else ""
    names = [
        f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__qualname__)}" for hook in hooks_of(module)
    ]
    # transformers' own come with activation checkpointing, which is told above.
    return [*chosen, str(again), str(how), *(name for name in names if not name.startswith("transformers."))]


def _settings_of(config: Any) -> dict[str, str]:
    content = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    # A set, such as PEFT's target modules, is sorted: its order differs from process to process.
    return {
        name: str(sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value)
        for name, value in sorted(content.items())
        if name not in _NAMES
    }


def _forward(module: nn.Module) -> str:
    # The class of our override that computes the module in packed calls, empty if there is none.
    forward = override_in(module) or vars(module).get("forward")
    return "" if forward is None else type(forward).__qualname__


@cache
def _own_code() -> str:
    # In a clone, `patches` is no subfolder of the package.
    return code_digest(Path(__file__).parent.parent, RESULTS.parent)


def code_digest(*roots: Path) -> str:
    """Return a hash of every Python file in these folders."""
    digest = hashlib.sha256()
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
