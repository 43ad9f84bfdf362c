"""Groups of ranks that share rows (`sequence_parallel`): their device mesh, and what they refuse, with the reasons."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, DistributedType, ParallelismConfig
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import InvalidConfig, VersionTooOld
from ...layout.shard import RowShard
from ...packing import MINIBATCH
from ...patching.apply import find_state
from ...patching.inspect import model_config
from ...versions import installed_version
from .config import CommonConfig

# The dimension of accelerate's mesh whose ranks get the same batches. accelerate has no other name for it.
_SAME_BATCHES = "tp"
# The first transformers that was measured.
_TRANSFORMERS = "5.23.0"


class RowGroups(ParallelismConfig):
    """accelerate's parallelism config for a mesh of data-parallel groups and the ranks of each.

    accelerate's loaders deal batches to the groups. DDP and FSDP2 run over all ranks.

    Args:
        groups (`int`), size (`int`): number of groups, and of ranks in each. Ranks of a group are neighbours.
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
    """Give accelerate the groups of ranks that share rows, if the arguments ask for them. Call it before the Trainer's
    `__init__`."""
    if args.sequence_parallel > 1:
        args.parallelism_config = RowGroups(args.data_parallel_size, args.sequence_parallel)


def row_group(args: CommonConfig, accelerator: Accelerator) -> DeviceMesh | None:
    """Return the mesh of the ranks that share rows with this one, `None` if each row is whole on one rank."""
    mesh: Any = accelerator.torch_device_mesh
    return mesh[_SAME_BATCHES] if args.sequence_parallel > 1 else None


def refuse_sharded_rows(args: CommonConfig, *, own_loss: bool) -> None:
    """Refuse arguments with which ranks cannot share rows.

    `own_loss`: the user's `compute_loss_func` computes the loss.
    """
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
        "compute_loss_func": (own_loss, "no process has the logits of the whole row"),
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
