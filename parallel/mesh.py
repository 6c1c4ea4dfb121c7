"""The axes of the mesh of ranks.

Outermost first: pp (pipeline stages), dp_replicate (replicas of the model), dp_shard (ranks that share one copy), cp
(ranks that share each sequence), tp (ranks that share each matmul). Ranks of an inner axis are neighbours, so that the
axes that communicate most stay within a node.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config import ConfigError, Parallelism


class Mesh(NamedTuple):
    """A device mesh per use. Each exists even if its size is 1."""

    pp: DeviceMesh
    fsdp: DeviceMesh  # dp_shard and cp as one axis, which shares the weights; and dp_replicate, unless 1 or islands
    cp: DeviceMesh
    tp: DeviceMesh
    islands: DeviceMesh | None  # dp_replicate, if parallelism.local_steps makes islands of the replicas

    def size(self) -> int:
        """Ranks that compute an update together: all, or those of an island."""
        return self.pp.size() * self.fsdp.size() * self.tp.size()


@dataclass(frozen=True)
class ParallelDims:
    """The size of every axis."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    islands: int = 1  # groups that do not sum their gradients with each other: dp_replicate, or 1 for all ranks

    @classmethod
    def from_config(cls, parallelism: Parallelism, world_size: int) -> "ParallelDims":
        """Fill in `dp_shard` if it is -1. Raises ConfigError, with all sizes, if they do not fit `world_size`."""
        dp_replicate, dp_shard = parallelism.dp_replicate, parallelism.dp_shard
        cp, tp, pp = parallelism.cp, parallelism.tp, parallelism.pp
        others = dp_replicate * cp * tp * pp
        if dp_shard == -1 and world_size % others == 0:
            dp_shard = world_size // others
        if others * dp_shard != world_size:
            needed = others * max(dp_shard, 1)
            raise ConfigError(
                f"parallelism: pp {pp} x dp_replicate {dp_replicate} x dp_shard {dp_shard} x cp {cp} x tp {tp} "
                f"must multiply to the world size, {world_size}; try NGPU={needed} ./run_llama_train.sh"
            )
        if parallelism.local_steps and dp_replicate == 1:
            raise ConfigError(f"parallelism.local_steps = {parallelism.local_steps}: needs dp_replicate above 1")
        # With pp, weights stay gathered. FSDP2's groups support neither tp's DTensors nor islands' ranks.
        group = parallelism.reshard_group_size
        possible = parallelism.reshard_after_forward and tp == pp == 1 and not parallelism.local_steps
        shards = dp_shard * cp
        if group and not (possible and 1 < group < shards and shards % group == 0):
            raise ConfigError(
                f"parallelism.reshard_group_size = {group}: must divide the {shards} ranks that share the weights "
                "into smaller groups, and needs reshard_after_forward = true, pp = 1, tp = 1 and local_steps = 0"
            )
        islands = dp_replicate if parallelism.local_steps else 1
        return cls(dp_replicate, dp_shard, cp, tp, pp, islands)

    def __str__(self) -> str:
        words = []
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            size = getattr(self, axis)
            if size > 1:
                words.append(f"{axis} {size}")
        return " x ".join(words) or "one rank"

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that share the weights."""
        return self.dp_shard * self.cp

    @property
    def copies(self) -> int:
        """Ranks that are given the same samples."""
        return self.pp * self.cp * self.tp

    def dp_rank(self, rank: int) -> int:
        """Number of a rank among the data-parallel ranks."""
        return rank // (self.cp * self.tp) % self.dp

    def island(self, rank: int) -> int:
        """The island of a rank; 0 if there is only one.

        Islands are blocks of data-parallel ranks, as `dp_replicate` is outside `dp_shard`. Assigned round-robin, they
        would count other ranks' tokens than those whose gradients `fsdp` sums.
        """
        return self.dp_rank(rank) * self.islands // self.dp

    def is_first_copy(self, rank: int) -> bool:
        """Whether a rank is the first of those with the same samples."""
        return rank < self.dp * self.cp * self.tp and rank % (self.cp * self.tp) == 0

    def build_update_group(self) -> dist.ProcessGroup | None:
        """Build the group of the ranks that compute an update together: of a pipeline's stage and an island."""
        if self.pp == self.islands == 1:
            return None
        ranks = list(range(dist.get_world_size()))
        size = len(ranks) // (self.pp * self.islands)
        groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return dist.new_subgroups_by_enumeration(groups)[0]

    def build_mesh(self, device_type: str) -> Mesh:
        """Build the device meshes. Needs a process group."""
        axes = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        ranks = init_device_mesh(device_type, (self.pp, self.dp_replicate, self.shards, self.tp), mesh_dim_names=axes)
        # A second mesh for cp: a flattened axis cannot be sliced together with another one.
        split = init_device_mesh(
            device_type, (self.pp * self.dp, self.cp, self.tp), mesh_dim_names=("pp_dp", "cp", "tp")
        )
        apart = self.dp_replicate == 1 or self.islands > 1
        fsdp = ranks["dp_shard_cp"] if apart else ranks["dp_replicate", "dp_shard_cp"]
        islands = ranks["dp_replicate"] if self.islands > 1 else None
        return Mesh(pp=ranks["pp"], fsdp=fsdp, cp=split["cp"], tp=ranks["tp"], islands=islands)
