"""How a Llama is checkpointed, compiled and sharded: one recipe, in the order that matters."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from config import Config
from models.llama.model import Llama
from parallel.activation_checkpoint import apply_activation_checkpoint
from parallel.fsdp import apply_fsdp


def apply_parallelism(model: Llama, mesh: DeviceMesh, config: Config) -> None:
    """Change `model` (on the meta device) in place: activation checkpointing → compile → FSDP2."""
    blocks = list(model.layers.values())
    for block in blocks:
        apply_activation_checkpoint(block, config.activation_checkpoint)

    if config.compile.enable:
        # Per block: all layers share one compiled graph, and FSDP's hooks stay between the graphs.
        for block in blocks:
            block.compile(backend=config.compile.backend, fullgraph=True)

    if mesh.size() == 1 and not config.float8.enable:
        # Alone there is nothing to gather: weights are cast where they are used, which FSDP's copies only slow down.
        model.compute_dtype = getattr(torch, config.training.param_dtype)
        return
    groups: list[list[nn.Module]] = [[block] for block in blocks]
    if model.output is not None:  # tied, the weight at both ends is the root's, gathered for the whole step
        groups = [[model.tok_embeddings], *groups, [model.norm, model.output]]
    apply_fsdp(model, groups, mesh, config)
