"""Ways of parallel training: checks that refuse those which packing does not support, with the reasons.

Weights may be sharded over ranks. A packed row is whole on one rank, or shared by a group of ranks
(`sharded_rows.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from packaging.version import Version
from torch import nn

from ...errors import TRAIN_PADDED, InvalidConfig, VersionTooOld
from ...patching.apply import find_state
from ...versions import installed_version
from .config import CommonConfig

# The first tested DeepSpeed whose engine can leave gradients alone while the exactness check reads them.
_DEEPSPEED = "0.19.8"


def refuse_zero3(args: CommonConfig) -> None:
    """Refuse ZeRO-3 settings under which the exactness check cannot run."""
    config: Any = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    enabled = config.get("fp16", {}).get("enabled")
    # transformers replaces "auto" values, some of them later than now.
    if args.fp16 or enabled is True or (enabled == "auto" and args.fp16_full_eval):
        raise InvalidConfig(
            "fp16 under DeepSpeed ZeRO-3 cannot be packed.",
            why=[
                "there DeepSpeed runs every backward with its loss scaling, but the exactness check measures gradients"
            ],
            do="Use bf16=True, or FSDP2 (fsdp=True).",
        )
    found = installed_version("deepspeed")
    if Version(found or "0") < Version(_DEEPSPEED):
        raise VersionTooOld(
            f"deepspeed {found or 'is not installed'}, but ZeRO-3 needs >= {_DEEPSPEED}.",
            why=["the exactness check needs an engine that can leave gradients alone (coalesce_grad_reduction)"],
            do=f"pip install 'deepspeed>={_DEEPSPEED}', or use FSDP2 (fsdp=True).",
        )


def refuse_uneven_calls(model: nn.Module, fsdp_plugin: Any) -> None:
    """Refuse sharded weights of modules that a patched model runs document by document.

    All ranks gather weights together, each time a module runs. Ranks with different documents would run such a module
    a different number of times, and would gather parts of different weights into one. A mixer, or a layer around it,
    is called once, so it may gather. The modules in a mixer run once for each group of documents, so they may not.
    `fsdp_plugin` is accelerate's; `None` for DeepSpeed ZeRO-3.
    """
    state = find_state(model)
    if state is None:
        return
    gathers = _gathering_policy(model, fsdp_plugin)
    inside = {
        name: [module for module in mixer.modules() if module is not mixer] for name, mixer in state.mixers.items()
    }
    uneven = sorted(name for name, modules in inside.items() if any(map(gathers, modules)))
    uneven = ["the backbone"] if state.patch.rebatch else uneven
    if uneven:
        named = ", ".join([*uneven[:3], *(["..."] if len(uneven) > 3 else [])])
        raise InvalidConfig(
            f"{'DeepSpeed ZeRO-3' if fsdp_plugin is None else 'FSDP2'} cannot run {named} document by document.",
            why=["it gathers weights each time they are used, but ranks would use them a different number of times"],
            do="Use DDP or ZeRO-2.",
        )


def _gathering_policy(model: nn.Module, fsdp_plugin: Any) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module gathers weights when it is called.

    Under ZeRO-3 (no plugin) every module does. Under FSDP2 wrapped modules do: these are layers, unless the
    `auto_wrap_policy` goes by size or names other classes.
    """
    if fsdp_plugin is None:
        return lambda module: True
    return fsdp2_prepare_auto_wrap_policy(fsdp_plugin, model) or (lambda module: False)


# Ways to divide a model or a row over ranks, by the argument that switches them on.
_DIVIDED = {
    "tp_size": "tensor parallelism: ranks that share a layer need the same rows, but each rank gets its own rows",
    "ep_size": "expert parallelism: ranks that share a layer need rows that pass it together",
    "pp_size": "pipeline parallelism: stages pass hidden states on without the boundaries of their documents",
    "cp_size": "context parallelism: a row is cut anywhere, and attention across the cut has no document boundaries",
    "sp_size": "sequence parallelism: ranks exchange heads for tokens inside the attention that packing replaces",
}


def asked_parallelism(args: CommonConfig) -> dict[str, int]:
    """Read the parallel sizes that arguments, accelerate's environment or DeepSpeed's config ask for."""
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    # Five places can ask for a size: accelerate's config, its environment, transformers' `distributed_config` and
    # loading arguments, DeepSpeed's config. The largest counts.
    sizes = {name: getattr(config, name, None) or 1 for name in _DIVIDED}
    kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    native = kwargs.get("distributed_config")
    of_native: Any = native.get if isinstance(native, dict) else partial(getattr, native)
    deepspeed: Any = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    sizes["tp_size"] = max(sizes["tp_size"], deepspeed.get("tensor_parallel", {}).get("autotp_size") or 1)
    for name in ("tp_size", "ep_size", "pp_size"):
        sizes[name] = max(sizes[name], kwargs.get(name) or 1, of_native(name, None) or 1)
    if kwargs.get("tp_plan") or of_native("tp_plan", None):
        sizes["tp_size"] = max(sizes["tp_size"], args.world_size)
    return sizes


def refuse_parallelism(sizes: dict[str, int]) -> None:
    """Refuse to divide a model or a row over ranks."""
    found = {name: size for name, size in sizes.items() if size > 1}
    if found:
        raise InvalidConfig(
            f"{', '.join(f'{name}={size}' for name, size in found.items())} cannot be packed.",
            why=[_DIVIDED[name] for name in found],
            do="Share rows with PackedSFTConfig(sequence_parallel=N), shard the model with FSDP2 (fsdp=True), or "
            f"{TRAIN_PADDED}.",
        )
