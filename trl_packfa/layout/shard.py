"""`RowShard`, the part of a packed row that one process holds if several processes share the row.

Shape letters: T packed tokens of the whole row, N processes that share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed

from ..errors import InvalidConfig


@dataclass(frozen=True, eq=False)
class RowShard:
    """One of N equal parts of a row's tokens: rank r of the group holds tokens `r * T / N` to `(r + 1) * T / N`."""

    rank: int  # this process's number in its group
    size: int  # the number of processes N
    group: distributed.ProcessGroup | None = None  # without it nothing can be exchanged

    @classmethod
    def of(cls, group: distributed.ProcessGroup | distributed.DeviceMesh) -> RowShard:
        """Make this process's shard of a group or mesh of one dimension.

        Raise [`InvalidConfig`] if this process is not in the group.
        """
        group = group.get_group() if isinstance(group, distributed.DeviceMesh) else group
        rank = distributed.get_rank(group)
        if rank < 0:
            raise InvalidConfig(
                "this process is not in the group that shares its row.", do="Pass the group of this process."
            )
        return cls(rank, distributed.get_world_size(group), group)

    @staticmethod
    def require_divisible(heads: int, size: int) -> None:
        """Raise [`InvalidConfig`] unless `size` processes can attend with an equal number of a model's heads."""
        if heads % size:
            raise InvalidConfig(
                f"sequence_parallel={size} does not divide the model's {heads} attention heads.",
                why=["each process of a group attends with an equal number of heads"],
                do=f"Use one of {[n for n in range(1, heads + 1) if heads % n == 0]}.",
            )

    def local(self, tokens: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        """Return this process's part of a tensor with all T tokens in a dimension."""
        length = tokens.shape[dim] // self.size
        return tokens.narrow(dim, self.rank * length, length)

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over the processes that share the row."""
        distributed.all_reduce(tensor, group=self.group)
        tensor /= self.size
