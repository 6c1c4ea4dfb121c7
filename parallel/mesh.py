"""The mesh of ranks: which axes there are and what they are called.

Axes, outermost first: dp_replicate (replicas of the model), dp_shard (ranks sharing one copy).
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import config as settings
from config import ConfigError

AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class ParallelDims:
    """Size of every axis."""

    dp_replicate: int
    dp_shard: int

    @classmethod
    def from_config(cls, parallelism: settings.Parallelism, world_size: int) -> "ParallelDims":
        """Fill in what is left to be found. Raises ConfigError, with every factor, if they do not multiply."""
        dp_replicate, dp_shard = parallelism.dp_replicate, parallelism.dp_shard
        if dp_shard == 0:
            raise ConfigError("parallelism.dp_shard = 0: must be at least 1, or -1 for all ranks that are left")
        if dp_shard == -1 and world_size % dp_replicate == 0:
            dp_shard = world_size // dp_replicate
        if dp_replicate * dp_shard != world_size:
            raise ConfigError(
                f"parallelism: dp_replicate {dp_replicate} x dp_shard {dp_shard} "
                f"must multiply to the world size, {world_size}"
            )
        return cls(dp_replicate, dp_shard)

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that see different samples."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, rank: int) -> int:
        """Place of a rank among the data-parallel ranks."""
        return rank % self.dp

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh, every axis present, those of size 1 too. Needs a process group."""
        return init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=AXES)
