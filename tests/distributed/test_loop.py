"""What the loop of train.py does beside training: its clocks, its checks before a save, background saves, its end."""

import concurrent.futures
import gc
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

import train as loop
from checkpoint.manager import CheckpointManager
from config import TitaniteError, load_config
from data.loader import DataLoader
from norms import Norms
from storage import StoreError
from tests.runs import (
    STEPS,
    column,
    final_weights,
    flat,
    how_it_ended,
    launch,
    read,
    rows,
    saved_steps,
    validated,
)
from train import train

# ---------------------------------------------------------------- clocks


def train_by_a_clock(arguments):
    """A step takes 4 s, and 0.25 s of waiting for each of its 4 microbatches; what is no step takes far longer."""
    now = [0.0]

    def taking(seconds, function):
        def call(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return call

    with (
        mock.patch("time.perf_counter", side_effect=lambda: now[0]),
        mock.patch.object(Norms, "clip", taking(4, Norms.clip)),
        mock.patch.object(DataLoader, "_batch", taking(0.25, DataLoader._batch)),
        mock.patch.object(CheckpointManager, "load", taking(100, CheckpointManager.load)),
        mock.patch.object(CheckpointManager, "save", taking(1000, CheckpointManager.save)),
        mock.patch.object(loop, "validate_all", taking(10_000, loop.validate_all)),
        mock.patch.object(loop, "show_sample", taking(100_000, loop.show_sample)),
    ):
        train(load_config(arguments))


def test_saves_validations_and_samples_are_no_time_of_a_step(small, tmp_path):
    """Rows follow steps 1, 3, 6, 9 and 12. Steps 8 and 12 are validated, steps 5, 10 and 12 saved."""
    words = ["--metrics.log_interval=3", "--validation.interval=8", "--data.prefetch_steps=0"]
    launch(1, tmp_path, [*small, *words], function=train_by_a_clock)
    assert {step: row["interval_steps"] for step, row in rows(tmp_path).items()} == {1: 1, 3: 2, 6: 1, 9: 1, 12: 2}
    assert [*validated(tmp_path)] == [8, 12]
    assert column(tmp_path, "step_seconds") == [5.0] * 5
    assert column(tmp_path, "data_wait_pct") == [20.0] * 5
    assert column(tmp_path, "tps") == [8 * 32 / 5] * 5


# ---------------------------------------------------------------- what a loss that is not finite must not reach


def train_in_vain(arguments, stop_after=0):
    """The error that ends the run, which is asked to stop after a step."""
    config = load_config(arguments)

    def after_step(step):
        if step == stop_after:
            Path(config.run.folder, "stop").touch()

    with pytest.raises(TitaniteError) as caught:
        train(config, after_step)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "stop_after"),
    [
        (["--checkpoint.interval=4", "--validation.enable=false"], 0),
        (["--checkpoint.interval=100", "--validation.interval=4"], 0),
        (["--checkpoint.interval=100", "--validation.enable=false"], 4),
    ],
    ids=["save", "validation", "save after a stop"],
)
def test_a_loss_that_is_not_finite_is_found_before_anything_is_due(words, stop_after, small, tmp_path):
    """Where the next log line is far away."""
    words = ["--optimizer.lr=1e30", "--metrics.log_interval=100", *words]
    (said,) = launch(1, tmp_path, [*small, *words], stop_after, function=train_in_vain)
    assert "not finite, so nothing of it is saved" in said
    assert (saved_steps(tmp_path), validated(tmp_path)) == ([], {})


# ---------------------------------------------------------------- saves in the background


def train_without_room(arguments, stop_after):
    """Writes fail. Each has ended when its save returns."""
    save = CheckpointManager.save

    def save_and_await(manager, *step):
        save(manager, *step)
        assert manager.under_way
        concurrent.futures.wait([manager.under_way])

    with (
        mock.patch("checkpoint.files.write_items", side_effect=StoreError("the place is away")),
        mock.patch.object(CheckpointManager, "save", save_and_await),
    ):
        return train_in_vain(arguments, stop_after)


@pytest.mark.parametrize(("stop_after", "last"), [(0, 5), (2, 3)], ids=["between two saves", "after the last"])
def test_a_save_in_the_background_that_fails_ends_the_run_at_once(stop_after, last, small, tmp_path):
    words = [*small, "--checkpoint.mode=async"]
    assert launch(1, tmp_path / "run", words, stop_after, function=train_without_room) == ["the place is away"]
    assert (how_it_ended(tmp_path / "run")["step"], saved_steps(tmp_path / "run")) == (last, [])


# ---------------------------------------------------------------- the process, and its end


def train_and_look(arguments):
    """The steps in which garbage is collected, the threads that are left, and how torch is set up."""
    before, collected, step = set(threading.enumerate()), [], 1

    def note(phase, _):
        if phase == "start" and not gc.isenabled():  # the loop collects by itself
            collected.append(step)

    def after_step(ended):
        nonlocal step
        step = ended + 1

    gc.callbacks.append(note)
    with mock.patch("run.run.GC_INTERVAL_STEPS", 5):
        train(load_config(arguments), after_step)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    return collected, left, [torch.initial_seed(), torch.are_deterministic_algorithms_enabled()]


def test_a_run_says_what_it_trains_and_closes_what_it_has_opened(small, tmp_path, monkeypatch, capfd):
    tracker = f"def log(row): pass\ndef close(): open({str(tmp_path / 'closed')!r}, 'w')\n"
    (tmp_path / "closing_tracker.py").write_text(tracker)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*small, "--metrics.hook=closing_tracker:log", "--run.seed=7", "--run.deterministic"]
    ((collected, threads, setup),) = launch(1, tmp_path / "run", words, function=train_and_look)
    assert (collected, setup) == ([1, 5, 10], [7, True])
    assert not [name for name in threads if name.startswith(("reader", "prefetch"))]
    assert (tmp_path / "closed").exists()
    said, last = capfd.readouterr().err, read(tmp_path / "run", "metrics.jsonl")[-1]
    numbers = sum(weight.numel() for weight in flat(final_weights(tmp_path / "run", tmp_path)["model"]).values())
    assert f" model llama tiny: {numbers:,} parameters, in float32\n" in said
    assert f" tokens; {STEPS} steps of 256 read them " in said
    assert f"  validation loss {last['validation_loss']:.4f}  bits per byte {last['bits_per_byte']:.4f}  " in said
