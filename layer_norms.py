"""Norms of gradients, weights and updates per layer, in any layout, by one collective."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoint.state import clean_name
from muon import local
from parallel.mesh import Mesh, ParallelDims

KINDS = ("grad_norm", "weight_norm", "update_norm")


def layer_of(name: str) -> str:
    """The layer of a weight: `layers.0` of a block's, otherwise its module, such as `tok_embeddings`."""
    first, second, *_ = clean_name(name).split(".")
    return f"{first}.{second}" if first == "layers" else first


@dataclass
class LayerNorms:
    """Measures a step: `begin` before gradients are clipped, `end` after the update. `layers` are the whole model's.

    In between it holds a copy of this rank's weights.
    """

    layers: Sequence[str]
    parts: list[nn.Module]
    mesh: Mesh
    dims: ParallelDims
    device: torch.device  # of collectives; weights may be on the host

    def __post_init__(self) -> None:
        self.weights: list[Tensor] = []
        numbers: list[int] = []  # of their layers
        for part in self.parts:
            for name, weight in part.named_parameters():
                self.weights.append(weight)
                numbers.append(self.layers.index(layer_of(name)))
        self.numbers = torch.tensor(numbers, device=self.device)
        self.copies = torch.tensor([self._copies(weight) for weight in self.weights], device=self.device)

    def _copies(self, weight: Tensor) -> int:
        """Ranks that hold the same part of a weight, of those that compute an update together."""
        shards = 1
        if isinstance(weight, DTensor):
            for size, place in zip(weight.device_mesh.shape, weight.placements, strict=True):
                shards *= 1 if place.is_replicate() else size
        return self.mesh.fsdp.size() * self.mesh.tp.size() // shards

    @torch.no_grad()
    def begin(self) -> None:
        """Measure the gradients and keep the weights."""
        self.grads = self._squares(weight.grad for weight in self.weights)
        self.before = [local(weight).clone() for weight in self.weights]

    @torch.no_grad()
    def end(self) -> dict[str, Tensor]:
        """`grad_norm/LAYER` and so on, of all ranks, the means of islands; on the device. Collective."""
        for old, weight in zip(self.before, self.weights, strict=True):
            old.sub_(local(weight))
        squares = torch.stack((self.grads, self._squares(self.weights), self._squares(self.before)))
        self.before = []
        shape = self.dims.islands, len(KINDS), len(self.layers)
        of_layers = torch.zeros(shape, dtype=torch.float64, device=self.device)
        of_layers[self.dims.island(dist.get_rank())].index_add_(1, self.numbers, squares / self.copies)
        dist.all_reduce(of_layers)
        norms = of_layers.sqrt().mean(0)
        return {f"{kind}/{layer}": norms[i, j] for i, kind in enumerate(KINDS) for j, layer in enumerate(self.layers)}

    def _squares(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """The sum of squares of this rank's part of each tensor, in float64; 0 for None."""
        norms = []
        for tensor in tensors:
            norm = torch.zeros((), dtype=torch.float64)
            if tensor is not None:
                norm = torch.linalg.vector_norm(local(tensor), dtype=torch.float64)
            norms.append(norm.to(self.device, non_blocking=True))
        return torch.stack(norms).square()
