"""Ways of parallel training: refusals, groups of ranks that share rows, and decisions of all ranks together.

Weights may be sharded over ranks. A packed row is whole on one rank, or shared by a group of ranks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import TRAIN_PADDED, InvalidConfig, InvalidDataset, PackingError, VersionTooOld
from ...layout.shard import RowShard
from ...packing import MINIBATCH
from ...patching.apply import find_state
from ...patching.inspect import model_config
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
    policy = None if fsdp_plugin is None else fsdp2_prepare_auto_wrap_policy(fsdp_plugin, model)

    def gathers(module: nn.Module) -> bool:
        # Under ZeRO-3 all modules do; under FSDP2 layers, unless the `auto_wrap_policy` goes by size or names others.
        return fsdp_plugin is None or (policy is not None and policy(module))

    inside = {
        name: [module for module in mixer.modules() if module is not mixer]
        for name, mixer in state.parts.mixers.items()
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


# The dimension of accelerate's mesh whose ranks get the same batches. accelerate has no other name for it.
_SAME_BATCHES = "tp"
# The first transformers that was measured.
_TRANSFORMERS = "5.23.0"


class RowGroups(ParallelismConfig):
    """accelerate's parallelism config for a mesh of data-parallel groups, and the ranks of each, which are neighbours.

    Loaders deal batches to the groups. DDP and FSDP2 run over all ranks.
    """

    def __init__(self, groups: int, size: int) -> None:
        super().__init__(dp_shard_size=groups * size)
        self.shape = (groups, size)

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Make the mesh, with a flat one of all ranks under the name that accelerate gives to FSDP2's."""
        mesh = init_device_mesh(device_type, self.shape, mesh_dim_names=("dp_shard", _SAME_BATCHES))
        mesh._flatten("dp_shard_cp")
        return mesh

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:  # accelerate knows no mesh there, but gloo does
            super()._validate_accelerator(accelerator)

    def __getstate__(self) -> dict[str, Any]:
        # The Trainer saves its arguments. Process groups end with the processes.
        return {name: value for name, value in vars(self).items() if name != "device_mesh"}


def share_rows(args: CommonConfig) -> None:
    """Give accelerate the groups of ranks that share rows, if any, before the Trainer's `__init__`."""
    if args.sequence_parallel > 1:
        args.parallelism_config = RowGroups(args.data_parallel_size, args.sequence_parallel)
    elif isinstance(args.parallelism_config, RowGroups):  # of an earlier trainer with this config
        args.parallelism_config = None


def row_group(args: CommonConfig, accelerator: Accelerator) -> DeviceMesh | None:
    """Return the mesh of the ranks that share rows with this one, `None` if each row is whole on one rank."""
    mesh: Any = accelerator.torch_device_mesh
    return mesh[_SAME_BATCHES] if args.sequence_parallel > 1 else None


def refuse_sharded_rows(args: CommonConfig, *, own_loss: str) -> None:
    """Refuse arguments with which ranks cannot share rows. `own_loss` names the user's own loss, if there is one."""
    size, world = args.sequence_parallel, args.world_size
    if size == 1:
        return
    found = installed_version("transformers")
    if Version(found or "0") < Version(_TRANSFORMERS):
        raise VersionTooOld(
            f"sequence_parallel={size} needs transformers >= {_TRANSFORMERS}, found {found}.",
            why=["how older Trainers count processes with the same batch was not measured"],
            do="Upgrade transformers, or drop sequence_parallel.",
        )
    if world % size:
        what = "is more than" if size > world else "does not divide"
        raise InvalidConfig(
            f"sequence_parallel={size} {what} the number of processes, {world}.",
            why=["processes share rows in groups of equal size"],
            do=f"Start a multiple of {size} processes (torchrun --nproc_per_node {size}), or lower sequence_parallel.",
        )
    refusals = {
        "parallelism_config": (
            args.parallelism_config is not None and not isinstance(args.parallelism_config, RowGroups),
            "sequence_parallel makes accelerate's device mesh itself",
        ),
        "expand_turns" if args.expand_turns else "share_prefixes": (
            args.share_prefixes,
            "a prefix is computed once by a process that holds the whole row",
        ),
        own_loss or "compute_loss_func": (own_loss, "no process has the logits of the whole row"),
        "label_smoothing_factor": (args.label_smoothing_factor, "no process has the logits of the whole row"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "its noise was not measured on parts of a row"),
        "train_sampling_strategy='group_by_length'": (
            args.train_sampling_strategy == "group_by_length" and args.strategy == MINIBATCH,
            "its sampler draws other batches in each process of a group; packing_strategy='step' sends them",
        ),
    }
    for name, (given, why) in refusals.items():
        if given:
            raise InvalidConfig(
                f"{name} with sequence_parallel={size} cannot be trained.",
                why=[why],
                do=f"Drop {name}, or sequence_parallel.",
            )


def refuse_short_rows(args: CommonConfig, largest: int) -> None:
    """Refuse rows that have fewer tokens than ranks share them. `largest` is the tokens of the largest micro-batch."""
    if largest < args.sequence_parallel:
        raise InvalidConfig(
            f"sequence_parallel={args.sequence_parallel}, but no micro-batch has more than {largest} tokens.",
            why=["some processes would never hold a token"],
            do=f"Set sequence_parallel={largest} or less, or pack more documents into a micro-batch.",
        )


def require_shareable(model: nn.Module, args: CommonConfig) -> None:
    """Require a patched model that runs rows which ranks share."""
    size, state = args.sequence_parallel, find_state(model)
    if size == 1 or state is None:
        return
    state.require_shareable(model, size)
    heads = getattr(model_config(model).get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int):
        RowShard.require_divisible(heads, size)


Result = TypeVar("Result")

# Number of failing ranks whose messages are shown. More would repeat them.
_SHOWN = 2


def agree(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` and return its result; if it fails on any rank, raise the same error on every rank.

    Raises:
        [`PackingError`]: of the type that the first failing rank raised, with the failing ranks.
        `RuntimeError`: for any other error of that rank.
    """
    if accelerator.num_processes == 1:
        return work()
    result: Any = None
    error: Exception | None = None
    # Send types and texts, because some exceptions cannot be pickled.
    mine: tuple[type[Exception], str] | None = None
    try:
        result = work()
    except PackingError as caught:
        error, mine = caught, (type(caught), str(caught))
    except Exception as caught:
        error, mine = caught, (RuntimeError, f"{type(caught).__name__}: {caught}")
    # Every rank reaches this line, even if its work failed. A rank that raised earlier would leave the others waiting.
    told: list[tuple[type[Exception], str] | None] = gather_object([mine])
    failed = [(rank, *one) for rank, one in enumerate(told) if one is not None]
    if not failed:
        return result
    messages = [f"rank {rank} of {accelerator.num_processes}: {text}" for rank, _, text in failed[:_SHOWN]]
    _, kind, _ = failed[0]
    raise kind("\n".join(messages)) from error


def from_main_rank(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, and return its result, or raise its error, on every rank."""
    found: list[Any] = [agree(accelerator, lambda: work() if accelerator.is_main_process else None)]
    return found[0] if accelerator.num_processes == 1 else broadcast_object_list(found)[0]


def require_same_documents(accelerator: Accelerator, lengths: np.ndarray) -> None:
    """Require the same training documents on every rank, because every rank plans the steps of all ranks."""
    if accelerator.num_processes == 1:
        return
    # Send a checksum, because the lengths of a large dataset would be megabytes.
    found = gather_object([(len(lengths), zlib.crc32(np.ascontiguousarray(lengths).tobytes()))])
    if len(set(found)) > 1:
        counts = ", ".join(f"rank {rank} {count} ({check:08x})" for rank, (count, check) in enumerate(found))
        raise InvalidDataset(
            f"the ranks do not have the same training documents; their number and checksum of lengths: {counts}.",
            why=["every rank plans the steps of all ranks"],
            do="Load and shuffle the same dataset on every rank. The trainer deals it to the ranks.",
        )
