"""Groups of ranks that share rows, and decisions of all ranks together.

Weights may be sharded over ranks. A packed row is whole on one rank, or shared by a group of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.common import CommonConfig
from ..errors import InvalidConfig, InvalidDataset, PackingError

# The dimension of accelerate's mesh whose ranks get the same batches. Under DeepSpeed its loaders know no other one.
_SAME_BATCHES = "tp"


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


def refuse_short_rows(args: CommonConfig, largest: int) -> None:
    """Refuse rows that have fewer tokens than ranks share them. `largest` is the tokens of the largest micro-batch."""
    if largest < args.sequence_parallel:
        raise InvalidConfig(
            f"sequence_parallel={args.sequence_parallel}, but no micro-batch has more than {largest} tokens.",
            why=["some processes would never hold a token"],
            do=f"Set sequence_parallel={largest} or less, or pack more documents into a micro-batch.",
        )


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
    reports: list[tuple[type[Exception], str] | None] = gather_object([mine])
    failed = [(rank, *one) for rank, one in enumerate(reports) if one is not None]
    if not failed:
        return result
    messages = [f"rank {rank} of {accelerator.num_processes}: {text}" for rank, _, text in failed[:_SHOWN]]
    _, kind, _ = failed[0]
    raise kind("\n".join(messages)) from error


def from_main_rank(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, and return its result, or raise its error, on every rank."""
    found: list[Any] = [agree(accelerator, lambda: work() if accelerator.is_main_process else None)]
    return found[0] if accelerator.num_processes == 1 else broadcast_object_list(found)[0]


def summed(accelerator: Accelerator, counts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Add up what every rank has counted under each name, numbers or tuples of them; names may differ over ranks."""
    ranks = gather_object([dict(counts)]) if accelerator.num_processes > 1 else [counts]
    names = dict.fromkeys(chain.from_iterable(ranks))
    return {name: np.sum([of_rank[name] for of_rank in ranks if name in of_rank], axis=0) for name in names}


def require_same_documents(accelerator: Accelerator, lengths: np.ndarray) -> None:
    """Require the same training documents on every rank, because every rank plans the steps of all ranks."""
    if accelerator.num_processes == 1:
        return
    # Send a checksum, because the lengths of a large dataset would be megabytes.
    found = gather_object([(len(lengths), zlib.crc32(np.ascontiguousarray(lengths).data))])
    if len(set(found)) > 1:
        counts = ", ".join(f"rank {rank} {count} ({check:08x})" for rank, (count, check) in enumerate(found))
        raise InvalidDataset(
            f"the ranks do not have the same training documents; their number and checksum of lengths: {counts}.",
            why=["every rank plans the steps of all ranks"],
            do="Load and shuffle the same dataset on every rank. The trainer deals it to the ranks.",
        )
