"""Islands that train alone and meet (DiLoCo): the weights of a plain loop by torch alone, resumed bit for bit."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from checkpoint.manager import CheckpointManager
from checkpoint.state import model_tensors
from config import load_config
from data.loader import DataLoader
from loss import IGNORED
from models import find_model
from models.llama.model import Llama
from models.weights import init_weights
from optim import learning_rate
from tests.runs import STEPS, column, final_weights, flat, launch, same, saved_steps
from train import train

LOCAL_STEPS, ISLANDS = 5, 2
APART = (f"--parallelism.dp_replicate={ISLANDS}", f"--parallelism.local_steps={LOCAL_STEPS}")
APART += (f"--validation.interval={LOCAL_STEPS}",)
# World size, settings, and an island's samples in a row, which decide what it trains on.
LAYOUTS = {
    "one rank each": (2, (), 2),
    "FSDP 2 each": (4, (), 4),
    "PP 2 each": (4, ("--parallelism.pp=2", "--training.local_batch_size=4"), 4),
}


def train_plainly(arguments):
    """One model for each island in one process, brought together by torch's own SGD with Nesterov momentum."""
    config = load_config(arguments)
    training = config.training
    islands = []
    for island in range(ISLANDS):
        loader = DataLoader(config, island, ISLANDS, pin_memory=False)
        model = Llama(find_model(config.model, loader.vocab_size)[1])
        init_weights(model, torch.device("cpu"), seed=config.run.seed)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False)
        islands.append((loader, model, adamw))
    common = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    losses = torch.zeros(training.steps)
    norms = torch.zeros(training.steps)
    for step in range(training.steps):
        for loader, model, optimizer in islands:
            batches = list(loader.next_step())
            n_tokens = sum((batch.labels != IGNORED).sum() for batch in batches)
            for batch in batches:
                logits = model(batch.tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / n_tokens
                loss.backward()
                losses[step] += loss.detach() / ISLANDS
            norms[step] += torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm) / ISLANDS
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step + 1, training.steps, config.optimizer.lr, config.lr_scheduler)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % LOCAL_STEPS:
            continue
        rows = list(zip(common, *(model.parameters() for _, model, _ in islands), strict=True))
        for weight, *own in rows:
            weight.grad = weight.detach() - torch.stack([p.detach() for p in own]).mean(0)
        outer.step()
        for weight, *own in rows:
            for p in own:
                p.data.copy_(weight.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                states = [optimizer.state[p][key] for (_, _, optimizer), p in zip(islands, own, strict=True)]
                mean = torch.stack(states).mean(0)
                for state in states:
                    state.copy_(mean)
    for loader, _, _ in islands:
        loader.close()
    return {"losses": losses.tolist(), "norms": norms.tolist(), "weights": dict(model.named_parameters())}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_equal_a_plain_loop(layout, small, tmp_path):
    """After two meetings, of which the second also has the momentum of the first."""
    world_size, overrides, in_a_row = LAYOUTS[layout]
    words = [*small, f"--training.steps={2 * LOCAL_STEPS}"]
    plain = train_plainly([*words, f"--training.local_batch_size={in_a_row}"])
    launch(world_size, tmp_path, [*words, *APART, *overrides])
    torch.testing.assert_close(column(tmp_path, "loss"), plain["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(column(tmp_path, "grad_norm"), plain["norms"], rtol=1e-3, atol=0)
    saved = flat(final_weights(tmp_path, tmp_path)["model"])
    for name, expected in plain["weights"].items():
        error = (saved[f"/{name}"] - expected).norm() / expected.norm()
        assert error < 1e-4, name


def test_islands_are_resumed_with_the_same_bits_and_may_change_in_number(small, tmp_path):
    words, whole, cut = [*small, *APART], tmp_path / "whole", tmp_path / "cut"
    launch(2, whole, words)
    launch(2, cut, words, 7)  # between two meetings: the one before counts
    launch(2, cut, words)
    assert column(cut, "loss") == column(whole, "loss")
    weights = flat(final_weights(whole, tmp_path))
    assert any(name.endswith("outer_momentum") and value.any() for name, value in weights.items())
    assert same(flat(final_weights(cut, tmp_path)), weights)
    launch(4, cut, [*words, "--parallelism.dp_replicate=4", f"--training.steps={STEPS + 2}"])
    assert all(math.isfinite(loss) for loss in column(cut, "loss"))
    assert len(column(cut, "loss")) == STEPS + 2


def test_a_stop_between_two_meetings_saves_one_model(small, tmp_path):
    first, second = launch(2, tmp_path, [*small, *APART], function=stop_after_7)
    assert same(first, second), "the islands have met before they save"
    assert saved_steps(tmp_path)[-1] in (7, 8)
    last, _ = launch(2, tmp_path, [*small, *APART], function=stop_after_7)
    assert same(last, flat(final_weights(tmp_path, tmp_path)["model"])), "nor do they meet again after the last step"
    assert len(column(tmp_path, "loss")) == STEPS


def stop_after_7(arguments):
    """The weights of this rank, which is an island, where the run ends."""
    config, weights, finish = load_config(arguments), {}, CheckpointManager.finish

    def note_and_finish(manager, step):
        weights.update(flat(model_tensors(manager.model)))
        finish(manager, step)

    def after_step(step):
        if step == 7:
            (Path(config.run.folder) / "stop").touch()

    with mock.patch.object(CheckpointManager, "finish", note_and_finish):
        train(config, after_step)
    return weights
