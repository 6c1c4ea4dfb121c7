"""A small training run with checkpoints, in the shapes of parallelism there are: what the checkpoint tests train."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoint.lease import new_start
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import committed
from config import Checkpoint, Comm, Config, Training
from optim import allocate_state
from storage import open_store

IDENTITY = {"name": "tower", "dim": 12, "layers": [2, 2]}


class Tower(nn.Module):
    """Two residual blocks and a head; 13 rows do not divide by any world size here."""

    def __init__(self, dim=12, rows=13):
        super().__init__()
        self.blocks = nn.ModuleDict(
            {str(i): nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim, bias=False)) for i in range(2)}
        )
        self.head = nn.Linear(dim, rows)

    def forward(self, x_BD):
        for block in self.blocks.values():
            x_BD = x_BD + block(x_BD)
        return self.head(x_BD)


class Counter:
    """A data loader that only knows how far it is."""

    def __init__(self):
        self.samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state_dict):
        self.samples = state_dict["samples"]


def build_manager(config, parts, optimizer, **more):
    """A manager with a data loader of its own."""
    folder = more.pop("run_folder", Path("unused"))
    allocate = partial(allocate_state, optimizer)
    return CheckpointManager(config, folder, parts, optimizer, {"dataloader": Counter()}, IDENTITY, allocate, **more)


class Run:
    """Model, optimizer, data and checkpoints; `sharded`: by FSDP2 over all ranks."""

    def __init__(
        self,
        folder,
        sharded=False,
        seed=0,
        steps=400,
        run_folder=Path("unused"),
        retry_seconds=180,
        run_id="a run",
        **settings,
    ):
        torch.manual_seed(seed)
        self.model = Tower()
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.blocks.values():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        torch.manual_seed(1000 + (dist.get_rank() if dist.is_initialized() else 0))
        config = Config(
            training=Training(steps=steps),
            checkpoint=Checkpoint(folder=str(folder), **settings),
            comm=Comm(store_retry_seconds=retry_seconds),
        )
        start = new_start(run_folder, run=run_id)
        self.checkpoint = build_manager(config, [self.model], self.optimizer, run_folder=run_folder, start=start)
        self.data = self.checkpoint.stateful["dataloader"]

    def step(self):
        """One step on rank-independent data with noise from the rank's own random state."""
        generator = torch.Generator().manual_seed(self.data.samples)
        x = torch.randn(4, 12, generator=generator)
        loss = (self.model(x) + 1e-3 * torch.randn(4, 13)).square().mean()
        loss.backward()
        self.checkpoint.wait_for_copies()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.data.samples += 4

    def train(self, first, last):
        """Steps `first` + 1 to `last`, with a checkpoint whenever one is due and at the end."""
        if not first:
            self.checkpoint.load()
        for step in range(first + 1, last + 1):
            self.step()
            if step < last and step % self.checkpoint.settings.interval == 0:
                self.checkpoint.save(step)
        self.checkpoint.finish(last)
        self.checkpoint.wait()

    def everything(self):
        """All that a checkpoint must bring back, whole tensors, by name."""
        found = {"samples": self.data.samples, "random": torch.get_rng_state()}
        self.model.state_dict()  # sharded again
        for name, parameter in self.model.named_parameters():
            found[name] = full(parameter)
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = full(value)
        return found


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def load_model(place, model):
    """What `checkpoint.initial_load` gives a model, whatever its identity; the manifest of the checkpoint it took."""
    config = Config(checkpoint=Checkpoint(enable=False, initial_load=str(place)))
    manager = build_manager(config, [model], torch.optim.AdamW(model.parameters()))
    with patch("checkpoint.manager.check_identity") as check:
        assert manager.load() == 0
    return check.call_args.args[0]


def steps_in(place):
    """The steps of the checkpoints at a folder or URL, newest first."""
    return [int(name.split("-")[1]) for name in committed(open_store(place, 20))]


def flip_bit(file, position):
    """Damage a file in one bit of the byte at `position`."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def same(left, right, but=()):
    """Names whose values are not equal bit for bit."""
    assert left.keys() == right.keys()
    return [name for name in left.keys() - {*but} if not torch.equal(*map(torch.as_tensor, (left[name], right[name])))]
