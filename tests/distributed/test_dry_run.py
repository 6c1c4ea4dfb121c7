"""Configs of families with other layers take a real step of train.py, on as many fake ranks as they are meant for.

Two layers stand for all, which are alike (tests/unit/test_plan.py).
"""

from pathlib import Path

import pytest

from config import check_effects, load_config
from tests.harness import run_ranks
from tools.plan_count import Case, check, dry_runs
from tools.plan_tally import Message

CONFIGS = Path(__file__).parents[2] / "train_configs"
WORLD_SIZES = {
    "llama3_8b": 64,
    "olmo2_7b": 32,  # other norms
    "qwen3_0.6b": 32,  # one weight is embedding and output layer
    "smollm3_3b": 32,  # layers without positions
}
BLOCK_OF_8B, ENDS_OF_8B = 218_112_000, 1_050_677_248  # numbers: (8,030,261,248 as published - ends) / 32


def step(name, world_size, *arguments):
    """A dry run in a process of its own."""
    config = load_config([f"--config={CONFIGS}/{name}.toml", "--model.n_layers=2", *arguments])
    check_effects(config)
    check(config, world_size)
    [counts] = dry_runs([Case(config, world_size)], 1)
    return counts


@pytest.mark.parametrize(("name", "world_size"), WORLD_SIZES.items())
def test_a_config_takes_a_step(name, world_size):
    (counts,) = run_ranks(1, step, name, world_size, start_group=False)
    if name == "llama3_8b":
        share = 4 * (2 * BLOCK_OF_8B + ENDS_OF_8B) / world_size
        assert share <= counts["weights"] < 1.01 * share, "rows are filled up to a multiple of the ranks, not more"
    kinds = {key.kind for key in counts if isinstance(key, Message)}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}
    assert counts["optimizer"] == pytest.approx(2 * counts["weights"], rel=1e-3, abs=2**20)
    assert counts["peak"] > counts["weights"] + counts["optimizer"]
