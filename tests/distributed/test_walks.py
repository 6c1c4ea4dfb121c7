"""Runs that change their layout from start to start, at random, against the same training in one process.

WALKS=50 python -m pytest tests/distributed/test_walks.py
"""

import math
import os
import random

import pytest

from tests.corpus import write_dataset
from tests.harness import run_ranks
from tests.runs import column, final_weights, flat, run, validated
from tools.audit import prove
from tools.verify import verify_checkpoints

WALKS = int(os.environ.get("WALKS", "0"))  # 0: the same one each time
STEPS = 9
MOST_RANKS = 6 if WALKS else 2
TRIES = 100  # of a layout: what does not fit together is refused
WORDS = (
    "--model.flavor=tiny",
    "--training.param_dtype=float32",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.interval=4",
    "--checkpoint.interval=2",
    "--checkpoint.keep=0",
)
TRAINING = {  # what all starts of a run have in common
    "training.global_batch_size": (8, 12, 24),
    "training.seq_len": (16, 24, 32, 48),
    "training.max_norm": (0, 0.1, 1),
    "validation.max_samples": (3, 8, 10),
    "model.vocab_size": (0, 0, 576, 600),
    "data.mask_documents": ("false", "true"),
    "data.window_blocks": (1, 3, 16),
    "data.datasets": ('["large"]', '["large", "small"]'),
}
AXES = ("parallelism.dp_replicate", "parallelism.dp_shard", "parallelism.cp", "parallelism.tp", "parallelism.pp")
LAYOUT = {
    **dict.fromkeys(AXES, (1, 1, 2, 3)),
    "training.local_batch_size": (1, 2, 4),
    "parallelism.pp_schedule": ("1F1B", "Interleaved1F1B"),
    "activation_checkpoint.mode": ("none", "none", "selective", "full"),
}
OPTIONS = {  # each once in five times
    "compile.enable": "true",
    "activation_checkpoint.every_n_layers": 2,
    "parallelism.reshard_after_forward": "false",
    "parallelism.sync_every_microbatch": "false",
    "parallelism.reduce_scatter": "all_to_all",
    "parallelism.cpu_offload": "true",
    "parallelism.cp_method": "ring",
    "training.loss_chunks": 3,
    "checkpoint.mode": "async",
}


NEEDED = {  # option → a setting and its value with which the option would have no effect
    "parallelism.pp_schedule": ("parallelism.pp", 1),
    "parallelism.cp_method": ("parallelism.cp", 1),
    "activation_checkpoint.every_n_layers": ("activation_checkpoint.mode", "none"),
}


def draw_layout(dice):
    """Ranks and settings of a start. Many do not fit together."""
    drawn = {key: dice.choice(values) for key, values in LAYOUT.items()}
    drawn |= {key: value for key, value in OPTIONS.items() if dice.random() < 0.2}
    for key, without in NEEDED.items():
        if drawn[without[0]] == without[1]:
            drawn.pop(key, None)
    world_size = math.prod(int(drawn[axis]) for axis in AXES)
    return world_size, ["--compile.backend=aot_eager", *(f"--{key}={value}" for key, value in drawn.items())]


def start(dice, words, stop_after):
    """A start in a layout that is drawn till one is not refused; cut off after a step, if not 0, as by a crash."""
    for _ in range(TRIES):
        world_size, layout = draw_layout(dice)
        if world_size > MOST_RANKS:
            continue
        try:
            run_ranks(world_size, run, [*words, *layout], stop_after, start_group=False)
        except AssertionError as failed:
            if "config.ConfigError: " not in str(failed):
                raise AssertionError(f"{world_size} ranks, {' '.join([*words, *layout])}") from failed
        else:
            return f"{world_size} ranks, {' '.join(layout)}, till step {stop_after or STEPS}"
    raise AssertionError(f"{TRIES} layouts in a row were refused")


@pytest.mark.parametrize("seed", range(WALKS) if WALKS else [1])
def test_no_change_of_layout_changes_the_training(seed, tmp_path, monkeypatch):
    """Tokens are the same, losses within 1e-6 and weights within 1e-3 of a tensor's norm, as Adam enlarges what
    differs in gradients near 0; each checkpoint is intact, and the ledger proves that no token came twice."""
    monkeypatch.chdir(tmp_path)
    dice = random.Random(seed)
    for name, n_documents in (("large", 150), ("small", 60)):
        documents = [[*dice.choices(range(1, 512), k=dice.randint(5, 200)), 0] for _ in range(n_documents)]
        write_dataset(tmp_path / name, [documents[9:80], documents[80:]], documents[:9], 512, block_tokens=2000)
    words = [*WORDS, f"--run.seed={seed}", *(f"--{key}={dice.choice(values)}" for key, values in TRAINING.items())]
    run_ranks(1, run, [*words, "--training.local_batch_size=4", "--run.folder=alone"], start_group=False)
    stops = [*sorted(dice.sample(range(2, STEPS), dice.choice([1, 1, 2]))), 0]
    print(*words)  # pytest shows it where the test fails, and with -rP
    for stop in stops:
        print(start(dice, [*words, "--run.folder=walk"], stop))

    alone, walk = tmp_path / "alone", tmp_path / "walk"
    for name in ("tokens", "lr"):
        assert column(walk, name) == column(alone, name)
    assert column(walk, "loss") == pytest.approx(column(alone, "loss"), rel=1e-6)
    assert validated(walk) == pytest.approx(validated(alone), rel=1e-6)
    assert verify_checkpoints("walk/checkpoints", reads=True) == 0
    assert prove(walk)[0].startswith(f"{STEPS} steps")
    left, right = (flat(final_weights(folder, tmp_path)) for folder in (walk, alone))
    for name, value in right.items():
        if name.startswith("/model/"):
            assert (left[name] - value).norm() <= 1e-3 * value.norm(), name
