"""Islands that train alone and meet (DiLoCo): the weights of a plain loop by torch alone, resumed bit for bit."""

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from checkpoint.manager import CheckpointManager
from checkpoint.state import model_tensors
from config import ConfigError, Parallelism, load_config
from data.loader import DataLoader
from float8.convert import convert_to_float8
from loss import IGNORED
from models import find_model
from models.init import init_weights
from models.llama.model import Llama
from optim import OuterOptimizer, learning_rate
from tests.distributed.test_train import SMALL, column, dataset, final_weights, flat, run  # noqa: F401
from tests.harness import run_ranks

COMMON = [word for word in SMALL if "local_batch_size" not in word and "training.steps" not in word]
LOCAL_STEPS, ISLANDS = 5, 2
COMMON += [f"--training.steps={2 * LOCAL_STEPS}"]  # two meetings: the second also has the momentum of the first
APART = (f"--parallelism.dp_replicate={ISLANDS}", f"--parallelism.local_steps={LOCAL_STEPS}")
FLOAT8 = ("--float8.enable", "--float8.filter=all")
# World size, settings, and an island's samples in a row, which decide what it trains on.
LAYOUTS: dict[str, tuple[int, tuple[str, ...], int]] = {
    "one rank each": (2, (), 2),
    "FSDP 2 each": (4, (), 4),
    "TP 2 each": (4, ("--parallelism.tp=2",), 2),
    "PP 2 each": (4, ("--parallelism.pp=2", "--training.local_batch_size=4"), 4),
    "bfloat16 moments": (2, ("--optimizer.state_dtype=bfloat16",), 2),
    "float8, one rank each": (2, FLOAT8, 2),
}
# Of losses and weights where values are rounded; a last bit that differs becomes a step of float8's, 6 %.
TOLERANCES = {"bfloat16 moments": (5e-3, 2e-2), "float8, one rank each": (1e-3, 5e-2)}


def train_plainly(arguments: list[str]) -> dict[str, Any]:
    """One model for each island in one process, brought together by torch's own SGD with Nesterov momentum."""
    config = load_config(arguments)
    training = config.training
    loaders = [DataLoader(config, island, ISLANDS, pin_memory=False) for island in range(ISLANDS)]
    _, flavor = find_model(config.model, loaders[0].vocab_size)
    models = [Llama(flavor) for _ in range(ISLANDS)]
    optimizers = []
    for model in models:
        init_weights(model, torch.device("cpu"), seed=config.run.seed)
        if config.float8.enable:  # torchao's layers as they are: nothing gathered, no scale computed ahead
            convert_to_float8(model, dataclasses.replace(config.float8, fsdp_all_gather="off"))
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False))
    common = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    losses, norms = [], list[float]()
    for step in range(1, training.steps + 1):
        of_islands = []
        for loader, model, optimizer in zip(loaders, models, optimizers, strict=True):
            batches = list(loader.next_step())
            n_tokens = sum((batch.labels != IGNORED).sum() for batch in batches)
            total = torch.zeros(())
            for batch in batches:
                logits = model(batch.tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / n_tokens
                loss.backward()
                total += loss.detach()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm).item())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, training.steps, config.optimizer.lr, config.lr_scheduler)
            optimizer.step()
            optimizer.zero_grad()
            of_islands.append(total.item())
        losses.append(sum(of_islands) / ISLANDS)
        if step % LOCAL_STEPS == 0:
            for i, weight in enumerate(common):
                own = [list(model.parameters())[i] for model in models]
                weight.grad = weight.detach() - torch.stack([p.detach() for p in own]).mean(0)
            outer.step()
            for i, weight in enumerate(common):
                own = [list(model.parameters())[i] for model in models]
                states = [optimizer.state[p] for optimizer, p in zip(optimizers, own, strict=True)]
                for key in ("exp_avg", "exp_avg_sq"):
                    mean = torch.stack([state[key] for state in states]).mean(0)
                    for state in states:
                        state[key].copy_(mean)
                for p in own:
                    p.data.copy_(weight.detach())
    for loader in loaders:
        loader.close()
    norms = [sum(norms[i : i + ISLANDS]) / ISLANDS for i in range(0, len(norms), ISLANDS)]
    return {"losses": losses, "norms": norms, "weights": dict(models[0].named_parameters())}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_equal_a_plain_loop(layout: str, dataset: Path, tmp_path: Path) -> None:  # noqa: F811
    world_size, overrides, in_a_row = LAYOUTS[layout]
    if not any("local_batch_size" in word for word in overrides):
        overrides = (*overrides, "--training.local_batch_size=2")
    arguments = [*COMMON, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    float8 = [word for word in overrides if "float8" in word]
    plain = train_plainly([*COMMON, *float8, f"--training.local_batch_size={in_a_row}", f"--data.datasets={dataset}"])
    run_ranks(world_size, run, [*arguments, *APART, *overrides], start_group=False)
    loss_tolerance, weight_tolerance = TOLERANCES.get(layout, (1e-5, 1e-4))
    torch.testing.assert_close(column(tmp_path / "run", "loss"), plain["losses"], rtol=loss_tolerance, atol=0)
    norms = column(tmp_path / "run", "grad_norm")
    torch.testing.assert_close(norms, plain["norms"], rtol=100 * loss_tolerance, atol=0)
    saved = flat(final_weights(tmp_path / "run", tmp_path)["model"])
    for name, expected in plain["weights"].items():
        error = (saved[f"/{name}"] - expected).norm() / expected.norm()
        assert error < weight_tolerance, name


def test_islands_are_resumed_with_the_same_bits_and_may_change_in_number(
    dataset: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    def arguments(name: str, islands: int = ISLANDS) -> list[str]:
        words = [*SMALL, *APART[1:], f"--parallelism.dp_replicate={islands}"]
        return [*words, f"--data.datasets={dataset}", f"--run.folder={tmp_path / name}"]

    run_ranks(2, run, arguments("whole"), start_group=False)
    run_ranks(2, run, arguments("cut"), 12, start_group=False)  # between two meetings: the one before counts
    run_ranks(2, run, arguments("cut"), start_group=False)
    assert column(tmp_path / "cut", "loss") == column(tmp_path / "whole", "loss")
    whole, cut = (flat(final_weights(tmp_path / name, tmp_path)) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert any(name.endswith("outer_momentum") and value.any() for name, value in whole.items())
    assert all(torch.equal(cut[name], value) for name, value in whole.items())

    run_ranks(2, run, arguments("other"), 12, start_group=False)
    run_ranks(4, run, arguments("other", islands=4), start_group=False)
    assert column(tmp_path / "other", "tokens") == column(tmp_path / "whole", "tokens")
    assert column(tmp_path / "other", "loss")[:10] == column(tmp_path / "whole", "loss")[:10]
    assert all(math.isfinite(loss) for loss in column(tmp_path / "other", "loss"))


def test_islands_go_on_from_a_run_that_had_none(dataset: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = [*SMALL, APART[0], f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(2, run, arguments, 10, start_group=False)
    run_ranks(2, run, [*arguments, APART[1]], start_group=False)
    assert (tmp_path / "run" / "starts.jsonl").read_text().count("local_steps") == 1
    assert all(math.isfinite(loss) for loss in column(tmp_path / "run", "loss"))
    assert len(column(tmp_path / "run", "loss")) == 20
    assert any(name.endswith("outer_momentum") for name in flat(final_weights(tmp_path / "run", tmp_path)))


def test_a_stop_between_two_meetings_saves_one_model(dataset: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = [*SMALL, *APART, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]

    first, second = run_ranks(2, _stop_after_7, arguments, start_group=False)
    assert len(first) > 1
    assert first == second, "the islands have met before they save"
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert any(name.startswith(("step-00000007", "step-00000008")) for name in steps)
    run_ranks(2, run, arguments, start_group=False)
    assert len(column(tmp_path / "run", "loss")) == 20


def _stop_after_7(arguments: list[str]) -> list[dict[str, bytes]]:
    """The weights that this rank had at each save, as bytes."""
    from train import train

    config, saved = load_config(arguments), []
    save = CheckpointManager.save

    def note_and_save(manager: CheckpointManager, step: int, *rest: Any, **options: Any) -> Any:
        weights = model_tensors(manager.model).items()
        saved.append({name: value.detach().numpy().tobytes() for name, value in weights})  # one rank is an island
        return save(manager, step, *rest, **options)

    def after_step(step: int) -> None:
        if step == 7:
            (Path(config.run.folder) / "stop").touch()

    with mock.patch.object(CheckpointManager, "save", note_and_save):
        train(config, after_step)
    return saved


def step_with_an_unused_weight() -> str:
    used, unused = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4, 5)))
    optimizer = torch.optim.AdamW([used, unused])
    OuterOptimizer(optimizer, init_device_mesh("cpu", (2,)), Parallelism(local_steps=3), steps=9)
    used.grad = torch.ones(2, 3)
    with pytest.raises(ConfigError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_weight_without_a_gradient_is_named_before_the_islands_meet() -> None:
    for said in run_ranks(2, step_with_an_unused_weight):
        assert said.startswith("parallelism.local_steps = 3: a weight of shape (4, 5) got no gradient")


def meet_with_adagrad() -> tuple[list[float], list[float], float]:
    """Of two islands that had gradients of their rank: Adagrad's sums, a state of another shape, and its step."""
    rank, weight = dist.get_rank(), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adagrad([weight])
    islands = init_device_mesh("cpu", (2,))
    outer = OuterOptimizer(optimizer, islands, Parallelism(local_steps=1), steps=9)
    weight.grad = torch.full((2, 3), float(rank))
    optimizer.step()
    state = optimizer.state[weight]
    state["rows"] = torch.full((2,), float(rank))
    outer.meet(1)
    averaged = state["sum"].flatten().tolist(), state["rows"].tolist(), state["step"].item()
    met = weight.detach().clone()
    outer.meet(1)
    weight.grad = None
    optimizer.step()
    outer.restart()  # as after a rollback
    outer.meet(1)
    assert torch.equal(weight, met), "islands that have not trained since they met have nothing to bring"
    return averaged


def test_whatever_an_optimizer_keeps_of_each_weight_is_averaged() -> None:
    for sums, rows, step in run_ranks(2, meet_with_adagrad):
        assert sums == [0.5] * 6
        assert rows == [0.5] * 2
        assert step == 1
