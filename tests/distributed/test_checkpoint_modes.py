"""Async saves, what is kept, and the room that must be there."""

import concurrent.futures
import os
import re
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from checkpoint import CheckpointError, files, lease
from checkpoint.checks import check_checkpoints
from checkpoint.manifest import committed
from config import Checkpoint, Config, ConfigError, Optimizer, Training
from optim import build_optimizer
from storage import LocalStore, StoreError, open_store
from tests.distributed.checkpoint_runs import IDENTITY, Run, build_manager, same, steps_in
from tests.harness import run_ranks


def test_async_saves_the_state_of_its_step_whatever_training_does_meanwhile(tmp_path):
    """Background writes wait until the run has taken two more steps, and use the default group at the same time."""
    settings = {"interval": 1, "keep": 0, "mode": "async"}
    at_1 = run_ranks(2, _train_one_step, str(tmp_path / "sync"))
    run_ranks(2, _train_past_a_save, str(tmp_path / "async"), settings)
    for (step, loaded), expected in zip(run_ranks(2, _load, str(tmp_path / "async")), at_1, strict=True):
        assert step == 1
        assert same(loaded, expected) == []


def _train_one_step(folder):
    run = Run(folder, sharded=True)
    run.train(0, 1)
    return run.everything()


def _load(folder):
    """The step and everything after a load into differently initialised weights."""
    run = Run(folder, sharded=True, seed=99)
    step = run.checkpoint.load()
    return step, run.everything()


def _train_past_a_save(folder, settings):
    run = Run(folder, sharded=True, **settings)
    gate, write_items = threading.Event(), files.write_items
    _copy_only_once_waited_for(run.checkpoint.staging)
    run.checkpoint.load()

    def write_when_open(*arguments):
        assert gate.wait(60)
        return write_items(*arguments)

    files.write_items = write_when_open
    run.step()
    run.checkpoint.save(1)
    run.step()
    assert run.checkpoint.staging.queued.is_set()
    run.step()
    run.checkpoint.check()  # waits for nothing
    assert not run.checkpoint.under_way.done()
    gate.set()
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))  # training's own collectives, while the background thread has its own
    run.checkpoint.wait()


def _copy_only_once_waited_for(staging):
    """Copies begin as late as can be: when the optimizer waits for them, after the next forward and backward."""
    waited, prepare, wait = threading.Event(), staging.prepare, staging.wait

    def prepare_late(sources):
        copy = prepare(sources)
        return lambda: (waited.wait(60), copy())

    def say_and_wait():
        waited.set()
        wait()

    staging.prepare, staging.wait = prepare_late, say_and_wait


def test_a_failed_background_save_surfaces_on_all_ranks_and_the_one_before_stays(tmp_path):
    for message, safe in run_ranks(2, _fail_in_the_background, str(tmp_path)):
        assert "no room, on purpose" in message
        assert safe == [1]
    assert steps_in(tmp_path) == [1]


def _fail_in_the_background(folder):
    run, safe = Run(folder, sharded=True, interval=1, mode="async"), []
    run.checkpoint.on_commit = safe.append
    run.train(0, 1)

    def fail(*arguments):
        raise CheckpointError("no room, on purpose")

    if dist.get_rank() == 1:
        files.write_items = fail
    run.step()
    run.checkpoint.save(2)
    concurrent.futures.wait([run.checkpoint.under_way])
    with pytest.raises(CheckpointError) as caught:
        run.checkpoint.check()  # as after every step
    return str(caught.value), safe


def test_a_run_that_has_saved_never_begins_anew(tmp_path):
    """As where it is started again and the folder that was named for its checkpoints is forgotten."""
    run, saved, other = (tmp_path / name for name in ("run", "saved", "other"))
    run.mkdir()
    assert Run(saved, run_folder=run).checkpoint.load() == 0
    assert Run(other, run_folder=run, interval=1).checkpoint.load() == 0, "nothing was saved yet"
    last = Run(saved, run_folder=run, interval=1)
    last.train(last.checkpoint.load(), 2)
    with pytest.raises(CheckpointError, match=f"{other}: no checkpoint .* has saved {saved}/step-00000002-.*; set"):
        Run(other, run_folder=run).checkpoint.load()
    shutil.rmtree(other)
    saved.rename(other)
    assert Run(other, run_folder=run).checkpoint.load() == 2


def test_a_disk_with_no_room_for_what_is_kept_is_refused_before_the_first_step(tmp_path, monkeypatch):
    """By the bytes that the run then really writes: Muon has one moment, here in bfloat16."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": torch.nn.Linear(1024, 512, bias=False)})})
    optimizer = build_optimizer([model], Optimizer(name="muon", state_dtype="bfloat16"))
    manager = build_manager(Config(checkpoint=Checkpoint(folder=str(tmp_path), keep=2)), [model], optimizer)
    one = 1024 * 512 * (4 + 2)
    _fake_disk(monkeypatch, lambda: int(2.99 * one))
    with pytest.raises(StoreError, match="3 checkpoints of"):
        manager.load()
    _fake_disk(monkeypatch, lambda: int(3.01 * one))
    assert os.listdir(tmp_path) == []
    assert manager.load() == 0
    assert not optimizer.state
    assert os.listdir(tmp_path) == [".lease"]
    model["layers"]["0"].weight.grad = torch.ones(512, 1024)
    optimizer.step()
    manager.save(1)
    assert _bytes_in(tmp_path) == pytest.approx(one, rel=0.02)


def _fake_disk(monkeypatch, free_bytes):
    monkeypatch.setattr(lease.shutil, "disk_usage", lambda folder: mock.Mock(free=free_bytes()))


def _bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _check(folder, steps=10_000, **settings):
    settings = {"folder": str(folder), **settings}
    check_checkpoints(
        Config(training=Training(steps=steps), checkpoint=Checkpoint(**settings)), IDENTITY, Path("unused")
    )


def test_a_run_that_has_come_further_than_it_is_to_go_is_refused(tmp_path):
    """Its weights are those of another schedule's middle, and what is due at the last step would be left out."""
    Run(tmp_path).train(0, 4)
    with pytest.raises(ConfigError, match=r"training.steps = 3: this run has reached step 4.*set 4 or more"):
        _check(tmp_path, 3)
    _check(tmp_path, 4)
    assert Run(tmp_path, steps=4).checkpoint.load() == 4


def test_a_place_that_cannot_be_written_to_is_found_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")  # as to a disk that is not mounted
    for bad, why in (("file/folder", "Not a dir"), ("link/folder", "missing")):
        with pytest.raises(StoreError, match=f"checkpoint.folder = '.*{bad}': cannot be written to.*{why}"):
            _check(tmp_path / bad)
        _check(tmp_path / bad, enable=False)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_disks_of_nodes_are_no_place_for_checkpoints(tmp_path):
    """Each node would hold a part of every checkpoint."""
    for message in run_ranks(2, _start_on_own_disks, str(tmp_path)):
        assert re.search(r"checkpoint.folder = 'own': \S+ does not see what rank 0 writes", message)
    assert not list(tmp_path.rglob(".probe*"))


def _start_on_own_disks(folder):
    os.makedirs(f"{folder}/{dist.get_rank()}")
    os.chdir(f"{folder}/{dist.get_rank()}")
    with pytest.raises(ConfigError) as caught:
        Run("own", sharded=True).checkpoint.load()
    return str(caught.value)


# ---------------------------------------------------------------- leftovers and what cannot be removed


def test_what_killed_saves_left_goes_at_the_next_start_and_nothing_else(tmp_path, monkeypatch):
    """Room for it counts, and so does that of checkpoints which will go, but not of those kept."""
    run = Run(tmp_path, interval=1, keep=3, keep_every=3)
    run.train(0, 4)
    left = [_leave(tmp_path, step) for step in (5, 9)]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_bytes(bytes(10**6))
    going = sum(map(_bytes_in, left)) + sum(_bytes_in(next(tmp_path.glob(f"step-0000000{n}-*"))) for n in (2, 4))
    for free, fits in ((2 * going, True), (2 * going - 1, False)):
        _fake_disk(monkeypatch, lambda free=free: free)
        with nullcontext() if fits else pytest.raises(StoreError, match=r"3 checkpoints of .* must fit"):
            lease.check_room(LocalStore(tmp_path), replace(run.checkpoint.settings, keep=2), going)
    _fake_disk(monkeypatch, lambda: 10**9)
    assert Run(tmp_path, interval=1, keep=2, keep_every=3).checkpoint.load() == 4
    assert not any(folder.exists() for folder in left)
    assert steps_in(tmp_path) == [4, 3], "and more than `keep`, as after a kill before their removal"
    assert (tmp_path / "notes").exists()


def test_what_a_listing_does_not_show_yet_is_no_leftover(tmp_path, monkeypatch):
    Run(tmp_path, interval=1, keep=0).train(0, 2)
    manifest = f"{committed(open_store(tmp_path))[0]}/MANIFEST.json"
    sizes = LocalStore.sizes

    def list_late(store, prefix=""):
        return {name: size for name, size in sizes(store, prefix).items() if name != manifest}

    monkeypatch.setattr(LocalStore, "sizes", list_late)
    assert Run(tmp_path, interval=1, keep=0).checkpoint.load() == 1
    monkeypatch.undo()
    assert Run(tmp_path).checkpoint.load() == 2


def _leave(folder, step):
    """A save that was begun, and killed."""
    left = folder / f"step-{step:08d}-692000000000"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(bytes(30_000))
    return left
