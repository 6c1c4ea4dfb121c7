"""Ladders: what the rule gives against a count by hand, the fit against known constants, a whole small ladder."""

import json

import pytest

from checkpoint.branch import read_parent
from config import TitaniteError
from tests.distributed.test_sweep import forked, write_study  # noqa: F401
from tests.runs import column, validated
from tools.ladder import fit_losses, fitted_loss, main, measure_model, read_ladder

LADDER = """
multiples = {multiples}
decay = {decay}
[rule]
parameters = 5000
batch = 64
rate = 0.01
warmup = 0.02
sequences = 2
{rule}
[sizes]
{sizes}
"""
SIZES = {name: f"{{model.dim = {dim}, model.hidden_dim = {3 * dim}, model.n_heads = 1, model.n_kv_heads = 1}}"
         for name, dim in (("a", 8), ("b", 12), ("c", 16), ("d", 24))}  # fmt: skip


def write_ladder(folder, dataset, multiples="[0.1, 0.2]", rule="", sizes=4, decay="0.25", steps=""):
    lines = [f"{name} = {size}" for name, size in list(SIZES.items())[:sizes]]
    lines[-1] = lines[-1].replace("{", f"{{{steps}")
    text = LADDER.format(multiples=multiples, rule=rule, sizes="\n".join(lines), decay=decay)
    return write_study(folder, dataset, text)


def count(dim):
    """The parameters of one layer, without the embedding: wq, wk, wv, wo; w1, w2, w3; three norms; the output."""
    return 4 * dim * dim + 3 * dim * 3 * dim + 3 * dim + 512 * dim


def test_what_the_rule_gives(tmp_path, dataset):
    """And a size with settings of its own."""
    file = write_ladder(tmp_path, dataset)
    own = ", training.global_batch_size = 2, optimizer.lr = 0.5, checkpoint.interval = 3}"
    file.write_text(file.read_text().replace(SIZES["d"], SIZES["d"].replace("}", own)))
    folder, chains = read_ladder(file)
    assert [measure_model(runs[0].config)[0] for runs in chains] == [count(dim) for dim in (16, 12, 8, 24)]
    trunk, _, branch = (run.config for run in chains[0])
    assert [run.name for run in chains[0]] == ["size=c", "size=c,multiple=0.1", "size=c,multiple=0.2"]
    growth = count(16) / 5000
    # 64 x 2.31^(2/3) = 112 tokens are 3.5 sequences of 32, and 4 the nearest multiple of 2.
    assert (trunk.training.global_batch_size, trunk.optimizer.lr) == (4, pytest.approx(0.01 * growth ** (-1 / 3)))
    assert trunk.lr_scheduler.warmup_steps == round(0.02 * count(16) / 128) == 2
    # The first decay begins at 0.75 x 0.1 x 11,568 / 128 = 6.8 steps: 2 saves, 3 steps apart, give 6.
    assert (trunk.training.steps, trunk.lr_scheduler.decay_fraction, trunk.checkpoint.keep_every) == (12, 0.0, 6)
    assert branch.checkpoint.branch_from == f"{folder}/size=c@12"
    assert (branch.training.steps, branch.lr_scheduler.decay_steps) == (16, 4)
    trunk, first, second = (run.config for run in chains[3])  # of the highest rate
    assert [(run.training.global_batch_size, run.optimizer.lr) for run in (trunk, first, second)] == [(2, 0.5)] * 3
    # 0.75 x 0.1 x 19,848 parameters / 64 tokens = 23.3 steps: 8 saves, 3 steps apart, give 24.
    assert (trunk.checkpoint.interval, trunk.checkpoint.keep_every, trunk.training.steps) == (3, 24, 48)
    assert [run.training.steps for run in (first, second)] == [32, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "bach = 1"}, "bach.*rule"),
        ({"multiples": "[2, 3]"}, r"multiples = .2, 3"),
        ({"steps": "training.steps = 9, "}, r"\[sizes.d\] training.steps"),
        ({"decay": "1.0"}, "decay"),
        ({"sizes": 3}, ">= 4 - at .*sizes"),
    ],
)
def test_a_mistake_is_found_before_any_run_starts(tmp_path, dataset, changes, message):
    file = write_ladder(tmp_path, dataset, **changes)
    with pytest.raises(TitaniteError, match=message):
        main([str(file)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("limit", [1.7, 0.0])
def test_the_fit_finds_known_constants(limit):
    factors = {2.0: 300.0, 4.0: 250.0}
    points = []
    for flops in (1e12, 1e13, 2e14, 3e15):
        for multiple, factor in factors.items():
            points.append({"multiple": multiple, "flops": multiple * flops})
            points[-1]["loss"] = limit + factor * (multiple * flops) ** -0.15
    fit = fit_losses(points[:-2])
    assert (fit["limit"], fit["exponent"]) == (pytest.approx(limit, abs=0.02), pytest.approx(0.15, rel=0.02))
    for point in points[-2:]:
        assert fitted_loss(fit, point) == pytest.approx(point["loss"], rel=1e-3)


def test_a_small_ladder(tmp_path, dataset, forked):  # noqa: F811
    file = write_ladder(tmp_path, dataset, multiples="[0.1]")
    assert main([str(file), "--at-once=2"]) == 0
    folder = tmp_path / "runs"
    found = json.loads((folder / "ladder.json").read_text())
    assert [point["parameters"] for point in found["points"]] == [count(dim) for dim in (8, 12, 16, 24)]
    trunk = folder / "size=d"
    branch = folder / "size=d,multiple=0.1"
    fork = len(column(trunk, "lr"))
    parent = read_parent(branch)
    assert (parent.folder, parent.step) == (trunk, fork)
    rate = 0.01 * (count(24) / 5000) ** (-1 / 3)
    assert column(trunk, "lr")[-1] == pytest.approx(rate)
    assert column(branch, "lr")[-1] == pytest.approx(0.1 * rate), "as far as lr_scheduler.min_lr_factor"
    largest = found["points"][-1]
    steps = fork + len(column(branch, "lr"))
    assert (largest["loss"], largest["tokens"]) == (validated(branch)[steps], 192 * steps)
    assert largest["fitted"] == fitted_loss(fit_losses(found["points"][:-1]), largest)
    assert largest["off_percent"] == pytest.approx(100 * (largest["fitted"] - largest["loss"]) / largest["loss"])
    assert "drawLadder" in (folder / "ladder.html").read_text()
