"""What a step of training computes, in any layout: the model's parts on this rank, its loss and its optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from config import Config
from data.loader import Batch
from loss import build_chunked_loss, build_loss, count_trained, loss_chunks, sum_losses, term_names
from models import ModelSpec
from models.weights import build_refresh, init_weights
from norms import Norms, layer_of
from optim import OuterOptimizer, allocate_state, build_optimizer, due, summarize_groups
from parallel.mesh import Mesh, ParallelDims
from parallel.pipeline import Compute, build_compute


class Computed(NamedTuple):
    """The results of a step before its update, over all ranks, on the device."""

    loss: Tensor  # cross-entropy per trained token
    terms: dict[str, Tensor]  # what else the loss has, by name
    grad_norm: Tensor  # before clipping


def run_microbatches(compute: Compute, batches: Sequence[Batch], n_tokens: Tensor) -> list[Tensor]:
    """The losses of the microbatches of a step of `n_tokens`, after forward and backward."""
    last = len(batches) - 1
    return [compute.forward_backward(*batch, n_tokens, number == last) for number, batch in enumerate(batches)]


class Trainer:
    """A model in a layout, with its loss and optimizer.

    A step is `compute_gradients`, `update`, unless the gradients are bad, and `end_step`. After weights were loaded or
    changed from outside comes `begin`. `model` is on the meta device; the trainer splits and fills it. `on_progress` is
    called after each weight is filled.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        spec: ModelSpec,
        flavor: Any,
        dims: ParallelDims,
        mesh: Mesh,
        device: torch.device,
        on_progress: Callable[[], None] = lambda: None,
    ):
        self.config = config
        self.dims = dims
        self.mesh = mesh
        self.device = device
        self.term_names = term_names(config.training.z_loss)
        groups = summarize_groups(model, config.optimizer)
        layers = list(dict.fromkeys(layer_of(name) for name, _ in model.named_parameters()))
        self.parts = spec.apply_parallelism(model, mesh, config)
        home = torch.device("cpu") if config.parallelism.cpu_offload else device
        for part in self.parts:
            init_weights(part, home, config.run.seed, on_progress)
        self.compute = self._build_compute(flavor)
        group = dims.build_update_group() if groups else None
        self.optimizer = build_optimizer(
            self.parts, config.optimizer, config.compile, group, config.training.param_dtype
        )
        self.islands: OuterOptimizer | None = None
        if mesh.islands is not None:
            self.islands = OuterOptimizer(self.optimizer, mesh.islands, config.parallelism)
        self.refresh_weights = build_refresh(self.parts, config)
        self.norms = Norms(layers, self.parts, mesh, dims, device)

    def _build_compute(self, flavor: Any) -> Compute:
        config, z_loss = self.config, self.config.training.z_loss
        chunks = loss_chunks(config)
        chunked = None
        if chunks > 1:
            chunked = build_chunked_loss(config.compile, self.mesh, chunks, z_loss)
        return build_compute(
            self.parts, build_loss(config.compile, self.mesh, z_loss), flavor, self.mesh, config, chunked
        )

    def allocate_state(self) -> None:
        """Give every weight the state that its first update would begin with, for a load to fill."""
        allocate_state(self.islands or self.optimizer)

    def begin(self) -> None:
        """Take note of weights that were loaded."""
        if self.islands:
            self.islands.begin()
        self.refresh_weights()

    def compute_gradients(
        self,
        batches: Sequence[Batch],
        forward_backward: Callable[[Compute, Sequence[Batch], Tensor], list[Tensor]] = run_microbatches,
        measure: bool = False,
    ) -> Computed:
        """Forward and backward of a step's microbatches, and clipping. Collective.

        `forward_backward` runs them. With `measure`, `update` returns the norms of layers.
        """
        n_tokens = count_trained((batch.labels for batch in batches), self.dims, self.device)
        losses = forward_backward(self.compute, batches, n_tokens)
        loss, *others = sum_losses(losses, self.dims, self.device).reshape(-1)
        self._measures = measure and self.config.metrics.per_layer
        if self._measures:
            self.norms.begin()
        grad_norm = self.norms.clip(self.config.training.max_norm)
        return Computed(loss, dict(zip(self.term_names, others, strict=False)), grad_norm)

    def update(self) -> dict[str, Tensor]:
        """Let the optimizer make its step. Returns the norms of layers, if they are measured. Collective."""
        self.optimizer.step()
        if self.islands:
            self.islands.apart = True
        return self.norms.end() if self._measures else {}

    def end_step(self, step: int) -> None:
        """Let islands meet if it is time, and forget the gradients. Collective."""
        if self.islands and due(step, self.config.parallelism.local_steps, self.config.training.steps):
            self.islands.meet()
        self.refresh_weights()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Let islands meet that have trained since they met. Collective."""
        if self.islands:
            self.islands.meet()
