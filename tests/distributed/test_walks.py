"""Runs that change their layout from start to start, at random, against the same training in one process.

WALKS=50 python -m pytest tests/distributed/test_walks.py
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from data.prepare import main as prepare
from tests.harness import run_ranks
from tests.runs import column, final_weights, flat, run
from tools.audit import prove
from tools.verify import verify_checkpoints

WALKS = int(os.environ.get("WALKS", "0"))  # 0: the same few each time
FEW = (2, 3)  # between them DDP, FSDP, TP, CP and PP
STEPS = 9
MOST_RANKS = 6
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


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of documents of all lengths in small blocks, with one tokenizer of 512."""
    folder, dice = tmp_path_factory.mktemp("data"), random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    for name, n_documents in (("large", 150), ("small", 60)):
        (folder / f"text-{name}").mkdir()
        for i in range(n_documents):
            words = ("".join(dice.choices(syllables, k=dice.randint(1, 3))) for _ in range(dice.randint(5, 200)))
            (folder / f"text-{name}" / f"{i:03}.txt").write_text(" ".join(words))
        tokenizer = "--vocab-size=512" if name == "large" else f"--tokenizer={folder / 'large'}"
        command = [f"--source={folder / f'text-{name}'}", f"--output={folder / name}", tokenizer]
        prepare([*command, "--validation-fraction=0.1", "--block-mb=0.005"])
    return [str(folder / "large"), str(folder / "small")]


def draw_training(dice: random.Random, datasets: list[str]) -> tuple[int, list[str]]:
    """Sequences of a step, and the settings that all starts of a run have in common."""
    sequences = dice.choice([8, 12, 24])
    words = [
        f"--training.global_batch_size={sequences}",
        f"--training.seq_len={dice.choice([16, 24, 32, 48])}",
        f"--training.max_norm={dice.choice([0, 0.1, 1])}",
        f"--validation.max_samples={dice.choice([3, 8, 10])}",
        f"--run.seed={dice.randrange(1000)}",
        f"--model.vocab_size={dice.choice([0, 0, 576, 600])}",
        f"--data.mask_documents={dice.choice(['false', 'true'])}",
        f"--data.prefetch_steps={dice.choice([2, 0])}",
        f"--data.window_blocks={dice.choice([1, 3, 16])}",
    ]
    used = dice.choice([datasets[:1], datasets])
    words.append(f"--data.datasets={json.dumps(used)}")
    if len(used) > 1:
        words.append(f"--data.weights={dice.choice(['[]', '[1.0, 3.0]', '[0.9, 0.1]'])}")
    return sequences, words


def draw_layout(dice: random.Random, sequences: int) -> tuple[int, list[str]]:
    """Ranks and settings of a start. Most fit together."""
    while True:
        axes = {axis: dice.choice([1, 1, 2, 3]) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
        n_data = axes["dp_replicate"] * axes["dp_shard"]
        world_size = n_data * axes["cp"] * axes["tp"] * axes["pp"]
        if world_size <= MOST_RANKS and sequences % n_data == 0:
            break
    per_rank = sequences // n_data
    words = [f"--parallelism.{axis}={size}" for axis, size in axes.items()]
    microbatches = dice.choice([n for n in (1, 2, 3, 4) if per_rank % n == 0])
    words.append(f"--training.local_batch_size={per_rank // microbatches}")
    words.append(f"--activation_checkpoint.mode={dice.choice(['none', 'none', 'selective', 'full'])}")
    options = [
        ("--compile.enable=true", "--compile.backend=aot_eager"),
        ("--activation_checkpoint.every_n_layers=2",),
        ("--parallelism.reshard_after_forward=false",),
        ("--parallelism.prefetch_layers=2",),
        ("--parallelism.reduce_scatter=all_to_all",),
        ("--parallelism.cpu_offload=true",),
        ("--checkpoint.mode=async",),
    ]
    if axes["cp"] > 1:
        options.append(("--parallelism.cp_method=ring",))
    if axes["pp"] > 1:
        words.append(f"--parallelism.pp_schedule={dice.choice(['1F1B', 'Interleaved1F1B'])}")
        options.append(("--parallelism.pp_microbatch_size=2",))
    else:
        options.append(("--parallelism.reshard_group_size=2",))
        options.append(("--parallelism.sync_every_microbatch=false",))
    if axes["tp"] == axes["pp"] == 1:
        options.append((f"--training.loss_chunks={dice.choice([0, 2, 3])}",))
    for option in options:
        if dice.random() < 0.2:
            words += option
    return world_size, words


def start(dice: random.Random, sequences: int, words: list[str], stop_after: int) -> str:
    """A start in a layout that is drawn till one is not refused; cut off after a step, if not 0, as by a crash."""
    for _ in range(TRIES):
        world_size, layout = draw_layout(dice, sequences)
        try:
            run_ranks(world_size, run, [*words, *layout], stop_after, start_group=False)
        except AssertionError as failed:
            if "config.ConfigError: " not in str(failed):
                raise AssertionError(f"{world_size} ranks, {' '.join([*words, *layout])}") from failed
        else:
            return f"{world_size} ranks, {' '.join(layout)}, till step {stop_after or STEPS}"
    raise AssertionError(f"{TRIES} layouts in a row were refused")


def validation_losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line["validation_loss"] for line in lines if line["validation_loss"]}.values())


@pytest.mark.parametrize("seed", range(WALKS) if WALKS else FEW)
def test_no_change_of_layout_changes_the_training(seed: int, datasets: list[str], tmp_path: Path) -> None:
    """Tokens are the same, losses within 1e-6 and weights within 1e-3 of a tensor's norm, as Adam enlarges what
    differs in gradients near 0; each checkpoint is intact, and the ledger proves that no token came twice."""
    dice = random.Random(seed)
    sequences, training = draw_training(dice, datasets)
    alone, walk = tmp_path / "alone", tmp_path / "walk"
    words = [*WORDS, *training]
    run_ranks(1, run, [*words, f"--training.local_batch_size={sequences}", f"--run.folder={alone}"], start_group=False)
    stops = [*sorted(dice.sample(range(2, STEPS), dice.choice([1, 1, 2]))), 0]
    print(*training)  # pytest shows it where the test fails, and with -rP
    for stop in stops:
        print(start(dice, sequences, [*words, f"--run.folder={walk}"], stop))

    for name in ("tokens", "lr"):
        assert column(walk, name) == column(alone, name)
    torch.testing.assert_close(column(walk, "loss"), column(alone, "loss"), rtol=1e-6, atol=0)
    torch.testing.assert_close(validation_losses(walk), validation_losses(alone), rtol=1e-6, atol=0)
    assert verify_checkpoints(str(walk / "checkpoints"), reads=True) == 0
    assert prove(walk)[0].startswith(f"{STEPS} steps")
    left, right = (flat(final_weights(folder, tmp_path)) for folder in (walk, alone))
    for name, value in right.items():
        if name.startswith("/model/"):
            assert (left[name] - value).norm() <= 1e-3 * value.norm(), name
