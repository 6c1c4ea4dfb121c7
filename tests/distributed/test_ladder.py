"""Ladders: what the rule gives against a count by hand, the fit against known constants, a whole small ladder."""

import csv
import json
from pathlib import Path

import pytest

from checkpoint.branch import read_parent
from config import TitaniteError
from tests.distributed.test_sweep import write_study
from tests.runs import column, validated
from tools.ladder import fit_losses, fitted_loss, main, read_ladder

LADDER = """
multiples = {multiples}
decay = 0.25
[rule]
parameters = 2000
batch = 64
rate = 0.01
warmup = 0.02
{rule}
[sizes]
{sizes}
"""
SIZES = {name: f"{{model.dim = {dim}, model.hidden_dim = {3 * dim}, model.n_heads = 1, model.n_kv_heads = 1}}"
         for name, dim in (("a", 8), ("b", 12), ("c", 16), ("d", 24))}  # fmt: skip


def write_ladder(folder: Path, dataset: Path, multiples: str = "[0.5, 1]", rule: str = "", sizes: int = 4) -> Path:
    rows = [f"{name} = {size}" for name, size in list(SIZES.items())[:sizes]]
    text = LADDER.format(multiples=multiples, rule=rule, sizes="\n".join(rows))
    return write_study(folder, dataset, text)


def count(dim: int) -> int:
    """The parameters without embeddings of one layer: wq, wk, wv, wo; w1, w2, w3; three norms."""
    return 4 * dim * dim + 3 * dim * 3 * dim + 3 * dim


def test_what_the_rule_gives(tmp_path: Path, dataset: Path) -> None:
    study, runs, points = read_ladder(write_ladder(tmp_path, dataset))
    assert [(point["size"], point["multiple"]) for point in points] == [(s, m) for s in "abcd" for m in (0.5, 1)]
    assert [point["parameters"] for point in points[::2]] == [count(dim) for dim in (8, 12, 16, 24)]
    largest = points[-1]
    growth = count(24) / 2000
    # 64 x 3.83^(2/3) = 156.6 tokens are 4.9 sequences of 32: whole microbatches of 2, so 4.
    assert (largest["batch"], largest["rate"]) == (128, pytest.approx(0.01 * growth ** (-1 / 3)))
    assert largest["warmup_steps"] == round(0.02 * count(24) / 128) == 1
    # The first decay begins at 0.75 x 0.5 x 7,560 / 128 = 22.1 steps: 6 intervals of 4 in the config give 24.
    assert runs[0].name == "size=d"
    trunk = runs[0].config
    assert (trunk.training.steps, trunk.lr_scheduler.decay_fraction, trunk.checkpoint.keep_every) == (48, 0.0, 24)
    branch = next(run for run in runs if run.name == "size=d,multiple=1")
    assert branch.config.checkpoint.branch_from == f"{study.folder}/size=d@48"
    assert (branch.config.training.steps, branch.config.lr_scheduler.decay_steps, branch.after) == (64, 16, "size=d")
    assert largest["tokens"] == 64 * 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "bach_power = 1"}, "must have parameters, batch, rate, warmup, above 0, and may have batch_power"),
        ({"rule": "rate_power = 0.0\nsequences = 3"}, "size=a: training.global_batch_size = 3"),
        ({"multiples": "[2, 3]"}, "multiples, each one of the first"),
        ({"multiples": "[]"}, "multiples, each one of the first"),
        ({"multiples": "[0.01]"}, "sizes.a: too short: warms up to step 1, decays from 1 to 1"),
        ({"sizes": 3}, "has 3; to fit some and predict one takes 4"),
    ],
)
def test_a_mistake_is_found_before_any_run_starts(tmp_path: Path, dataset: Path, changes: dict, message: str) -> None:
    file = write_ladder(tmp_path, dataset, **changes)
    with pytest.raises(TitaniteError, match=message):
        main([str(file)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("limit", [1.7, 0.0])
def test_the_fit_finds_known_constants(limit: float) -> None:
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


def test_a_small_ladder(tmp_path: Path, dataset: Path) -> None:
    file = write_ladder(tmp_path, dataset, multiples="[0.5]")
    assert main([str(file), "--at-once=2"]) == 0
    folder = tmp_path / "runs"
    found = json.loads((folder / "ladder.json").read_text())
    for point in found["points"]:
        trunk = folder / f"size={point['size']}"
        branch = folder / f"size={point['size']},multiple=0.5"
        steps = point["tokens"] // point["batch"]
        parent = read_parent(branch)
        assert parent is not None
        assert (parent.folder, parent.step) == (trunk, len(column(trunk, "lr")))
        assert column(trunk, "lr")[-1] == pytest.approx(point["rate"])
        assert column(branch, "lr")[-1] == pytest.approx(0.1 * point["rate"]), "as far as lr_scheduler.min_lr_factor"
        assert point["loss"] == validated(branch)[steps]
    assert found["points"][-1]["predicted"] > 0
    with (folder / "ladder.csv").open() as table:
        assert [float(line["loss"]) for line in csv.DictReader(table)] == [point["loss"] for point in found["points"]]
    assert "drawLadder" in (folder / "ladder.html").read_text()
