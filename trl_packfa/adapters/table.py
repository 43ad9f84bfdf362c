"""The measured results of every PEFT tuner under packing: `adapters.json`, made by `python tools/adapter_matrix.py`.

An adapter that was measured exact is trusted as long as PEFT's code for it is the measured code. An adapter without a
row, or with changed code, is checked on the user's own model. An adapter that was measured wrong is refused by name.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
from torch import nn

from ..errors import UnsupportedModel
from ..patches.measured import read_committed

RESULTS = Path(__file__).with_name("adapters.json")
EXACT, REFUSED, UNKNOWN = "exact", "refused", "unknown"

# Config fields that do not make another kind of adapter: sizes, target layers, scales, noise, initial weights,
# bookkeeping.
_NEUTRAL = re.compile(
    r"(auto_mapping|peft_version|base_model_name_or_path|revision|task_type|inference_mode|peft_type)"
    r"|r|.*_r|.*alpha|.*_lambda|.*scaling|.*dropout|rank_dropout_scale|.*_pattern|.*seed|.*prng_key|init_.*|save_.*"
    r"|target_modules|exclude_modules|modules_to_save|feedforward_modules|layers_to_transform|token_indices"
    r"|fan_in_fan_out|bias|init_weights|megatron_core|(loftq|eva|corda|lora_ga|runtime)_config|progressbar"
    r"|num_.*|.*_len|adapter_layers|.*block_size|.*block_num|.*_factor|n_frequency|group_size|qalora_group_size"
    r"|effective_rank|subspace_rank|stride_A|u|sparsity|select_top|sparse_rate|eps|.*_eps|topk|vector_length"
    r"|theta_d_length|hidden_size|xlora_(depth|size)|adapters|total_step|tinit|tfinal|deltaT|beta[12]|depth|act_fn"
    r"|ensure_weight_tying|.*_bound|.*_std|d_initial|weight_tying|gralora_k|block_size_pattern|wavelet_family"
)


def results() -> dict[str, dict[str, Any]]:
    """Return the committed rows by kind."""
    return read_committed(RESULTS)["kinds"]


def measured_with() -> dict[str, str]:
    """Return the package versions of the committed measurements, by package name."""
    return read_committed(RESULTS)["versions"]


def tuners() -> list[str]:
    """List the folders of all tuners in the installed PEFT."""
    folder = Path(peft.__file__).parent / "tuners"
    return sorted(path.name for path in folder.iterdir() if (path / "__init__.py").exists())


@cache
def source_of(tuner: str) -> str:
    """Return a hash of a tuner's code in the installed PEFT."""
    digest = hashlib.sha256()
    for path in sorted((Path(peft.__file__).parent / "tuners" / tuner).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kinds_of(config: Any) -> list[str]:
    """List the kinds of a config: its tuner, and one more for each field that makes it another kind.

    The table may have no row for a kind in the list.
    """
    # The PEFT folder that the config belongs to, or its full module name if the config is not from PEFT.
    parts = type(config).__module__.split(".")
    tuner = parts[2] if parts[:2] == ["peft", "tuners"] and len(parts) > 2 else type(config).__module__
    kinds = [tuner]
    # `LoraConfig(use_dora=True)` has the kinds `lora` and `lora use_dora`. A rank or a seed adds no kind.
    for name, value in _set_fields(config):
        candidates = [f"{tuner} {name}{detail}" for detail in (*_details(value), "")]
        known = next((kind for kind in candidates if kind in results()), None)
        if known is not None or not _NEUTRAL.fullmatch(name):
            kinds.append(known or candidates[0])
    return kinds


def _set_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field of a config that differs from its default."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != default and not (value is None or value == {} or value == []):
            yield field.name, value


def _details(value: Any) -> Iterator[str]:
    """Yield the names that a field's value may have in the table, the most specific first."""
    parts = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[call-overload]
    if isinstance(parts, Mapping):
        yield from (f".{name}={part}" for name, part in parts.items() if isinstance(part, str))
    elif isinstance(value, enum.Enum):
        yield f"={value.value}"
    elif isinstance(value, str):
        # PiSSA's `pissa_niter_16` has the kind `pissa_niter`, for any number of iterations.
        yield f"={re.sub(r'_niter_[0-9]+$', '_niter', value)}"
    elif isinstance(value, bool) and not value:
        yield "=False"


def verdict_of(config: Any) -> tuple[str, str]:
    """Return `exact`, `refused` or `unknown`, and the kind that decides it."""
    kinds = kinds_of(config)
    # `refused` is tested first, because a kind that was measured wrong stays wrong with any other field.
    for kind in kinds:
        if results().get(kind, {}).get("verdict") == REFUSED:
            return REFUSED, kind
    unknown = [kind for kind in kinds if kind not in results()]
    if unknown:
        return UNKNOWN, unknown[0]
    tuner = kinds[0]
    return (EXACT if read_committed(RESULTS)["sources"].get(tuner) == source_of(tuner) else UNKNOWN), tuner


def configs_of(model: nn.Module) -> dict[str, Any]:
    """Return the configs of a model's adapters by adapter name, inactive ones too, because they may become active."""
    found: dict[str, Any] = {}
    for module in model.modules():
        configs = getattr(module, "peft_config", None)  # of PEFT's models and of models with `add_adapter`
        found |= configs if isinstance(configs, dict) else {}
    return found


def refuse_adapter(config: Any, *, name: str | None = None) -> None:
    """Raise [`UnsupportedModel`] for an adapter that was measured wrong under packing.

    `config` is its `PeftConfig`, or `None`; `name` is its name, if a model already has it.
    """
    if not dataclasses.is_dataclass(config):
        return
    verdict, kind = verdict_of(config)
    if verdict != REFUSED:
        return
    row = results()[kind]
    where = "" if name is None else f" (adapter '{name}')"
    raise UnsupportedModel(
        f"{type(config).__name__} cannot be packed: PEFT's {kind}{where}.", why=[row["why"]], do=row["do"]
    )
