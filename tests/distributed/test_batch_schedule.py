"""Runs whose batch and length grow with the tokens seen: stopped, resumed, on other ranks; each token once."""

import math

import pytest

from tests.runs import SMALL, STEPS, column, launch, read
from tools.audit import prove

# Of 32 tokens a sample: 4 steps of 4 samples until 500 tokens are seen, 3 of 8 until 1,200 are, then 12.
WORDS = (
    *SMALL,
    "--training.global_batch_size=4 @ 0, 8 @ 500, 12 @ 1.2k",
    "--training.seq_len=8 @ 0, 16 @ 700, 32 @ 1.5k",
    "--lr_scheduler.follow_batch=8",
    "--lr_scheduler.schedule=constant",
    "--validation.max_samples=0",
)
BATCHES = [4] * 4 + [8] * 3 + [12] * 5
LENGTHS = [8] * 5 + [16] * 3 + [32] * 4


def test_a_run_follows_its_schedule_through_stops_and_on_other_ranks(dataset, tmp_path):
    words = [*WORDS, f"--data.datasets={dataset}"]
    whole, stopped, pair = (tmp_path / name for name in ("whole", "stopped", "pair"))
    launch(1, whole, words)
    launch(1, stopped, words, 8)  # goes on from step 5
    launch(1, stopped, words)
    launch(2, pair, words)
    seen = [32 * sum(BATCHES[: step + 1]) for step in range(STEPS)]
    lr = [1e-3 * min(1, (step + 1) / 2) * math.sqrt(size / 8) for step, size in enumerate(BATCHES)]
    for folder in (whole, stopped, pair):
        assert column(folder, "tokens") == seen
        assert column(folder, "lr") == pytest.approx(lr, rel=1e-12)
        lines = prove(folder)
        assert lines[0].startswith(f"12 steps, {seen[-1]:,} tokens, without gap or overlap")
        per_token = zip(column(folder, "tflops"), column(folder, "tps"), strict=True)
        flops = [1e12 * tflops / tps for tflops, tps in per_token]
        attention = 12 * 2 * 64  # by PaLM's definition, for each token of the length: 12 x layers x dim
        assert [round((each - flops[0]) / attention) for each in flops] == [length - 8 for length in LENGTHS]
    assert column(stopped, "loss") == column(whole, "loss")
    assert column(pair, "loss") == pytest.approx(column(whole, "loss"), rel=1e-5)
    assert prove(stopped)[1].startswith("steps made void by a resume, left out: 3")
    starts = [line for line in read(pair, "data/rank-00001.jsonl") if "start" in line]
    assert [line["shape"]["accumulation"] for line in starts] == [1, 2, 2, 3, 3]
