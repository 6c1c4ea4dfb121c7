"""Norms of gradients, weights and updates per layer, in any layout, by one collective."""

import re
from collections.abc import Sequence

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
    return re.match(r"[^.]+\.\d+|[^.]+", clean_name(name))[0]  # type: ignore[index]


class LayerNorms:
    """Measures a step: `begin` before gradients are clipped, `end` after the update. In between it copies the weights.

    `layers` are the whole model's. Collectives are on `device`; weights may be on the host.
    """

    def __init__(
        self, layers: Sequence[str], parts: list[nn.Module], mesh: Mesh, dims: ParallelDims, device: torch.device
    ):
        self.layers = layers
        self.weights: list[tuple[Tensor, int, float]] = []  # with the layer's number, and a share as of `_share`
        for part in parts:
            for name, weight in part.named_parameters():
                self.weights.append((weight, layers.index(layer_of(name)), _share(weight, mesh)))
        self.squares = torch.zeros(dims.islands, len(KINDS), len(layers), dtype=torch.float64, device=device)
        self.own = self.squares[dims.island(dist.get_rank())]

    @torch.no_grad()
    def begin(self) -> None:
        """Measure the gradients and copy the weights."""
        self.squares.zero_()
        self.before = [local(weight).clone() for weight, *_ in self.weights]
        for weight, layer, share in self.weights:
            if weight.grad is not None:
                self._add(0, layer, weight.grad, share)

    @torch.no_grad()
    def end(self) -> dict[str, Tensor]:
        """`grad_norm/LAYER` and so on, of all ranks, the means of islands; on the device. Collective."""
        for (weight, layer, share), old in zip(self.weights, self.before, strict=True):
            self._add(1, layer, weight, share)
            self._add(2, layer, old.sub_(local(weight)), share)
        self.before = []
        dist.all_reduce(self.squares)
        norms = self.squares.sqrt().mean(0).flatten()
        names = [f"{kind}/{layer}" for kind in KINDS for layer in self.layers]
        return dict(zip(names, norms, strict=True))

    def _add(self, kind: int, layer: int, tensor: Tensor, share: float) -> None:
        norm = torch.linalg.vector_norm(local(tensor), dtype=torch.float64)
        self.own[kind, layer] += norm.to(self.own.device).square() * share


def _share(weight: Tensor, mesh: Mesh) -> float:
    """1 / the ranks that hold the same part of a weight, of those that compute an update together."""
    parts = 1
    if isinstance(weight, DTensor):
        for size, place in zip(weight.device_mesh.shape, weight.placements, strict=True):
            parts *= 1 if place.is_replicate() else size
    return parts * mesh.pp.size() / mesh.size()
