"""Async saves, the second place, what is kept, and the room that must be there."""

import concurrent.futures
import errno
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint import manager, retention, storage
from checkpoint.retention import committed
from checkpoint.stores import CheckpointError, DamagedError, LocalStore, open_store
from config import PATIENCE, Checkpoint, ConfigError, Optimizer, Parallelism
from run.processes import LaunchEnvironment
from run.watchdog import Watchdog
from tests.distributed.checkpoint_runs import IDENTITY, Run, Tower, flip_bit, load_model, load_run, same, train_run
from tests.harness import run_ranks


def steps_in(folder: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in committed(open_store(folder))]


def test_async_saves_the_state_of_its_step_whatever_training_does_meanwhile(tmp_path):
    """Background writes wait until the run has taken two more steps, and use the default group at the same time."""
    settings = {"interval": 1, "keep": 0, "mode": "async"}
    at_1 = run_ranks(2, train_run, str(tmp_path / "sync"), (2,), 0, 1, {"interval": 1})
    run_ranks(2, _train_past_a_save, str(tmp_path / "async"), settings)
    for (step, loaded), expected in zip(run_ranks(2, load_run, str(tmp_path / "async"), (2,)), at_1, strict=True):
        assert step == 1
        assert same(loaded, expected) == []


def _train_past_a_save(folder, settings):
    run = Run(folder, (2,), **settings)
    gate, write_items = threading.Event(), manager.write_items
    _copy_only_once_waited_for(run.checkpoint.staging)

    def write_when_open(*arguments):
        assert gate.wait(60)
        return write_items(*arguments)

    manager.write_items = write_when_open
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


def test_async_resumes_bit_for_bit_and_reuses_its_host_copies(tmp_path):
    straight = run_ranks(2, train_run, str(tmp_path / "a"), (2,), 0, 6, {"interval": 100})
    settings = {"interval": 1, "keep": 2, "mode": "async"}
    run_ranks(2, train_run, str(tmp_path / "b"), (2,), 0, 3, settings)
    resumed = run_ranks(2, train_run, str(tmp_path / "b"), (2,), 3, 6, settings)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert same(ours, theirs) == []
    run = Run(tmp_path / "c", mode="async")
    run.train(0, 1)
    before = {index: tensor.data_ptr() for index, tensor in run.checkpoint.staging.copies.items()}
    run.step()
    run.checkpoint.save(2)
    run.checkpoint.wait()
    assert {index: tensor.data_ptr() for index, tensor in run.checkpoint.staging.copies.items()} == before


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_background_save_surfaces_on_all_ranks_and_the_one_before_stays(tmp_path, failing_rank):
    for message, safe in run_ranks(2, _fail_in_the_background, str(tmp_path), failing_rank):
        assert "no room, on purpose" in message
        assert safe == [1]
    assert steps_in(tmp_path) == [1]


def _fail_in_the_background(folder, failing_rank):
    run, safe = Run(folder, (2,), interval=1, mode="async"), []
    run.checkpoint.on_commit = safe.append
    run.train(0, 1)

    def fail(*arguments):
        raise CheckpointError("no room, on purpose")

    if dist.get_rank() == failing_rank:
        manager.write_items = fail
    run.step()
    run.checkpoint.save(2)
    with pytest.raises(CheckpointError) as caught:
        run.checkpoint.wait()
    return str(caught.value), safe


@pytest.mark.parametrize("method", ["check", "save", "load", "finish"])
def test_what_comes_next_raises_once_the_background_has_failed(tmp_path, method):
    run = Run(tmp_path, interval=1, mode="async")
    run.checkpoint._start(lambda: (_ for _ in ()).throw(CheckpointError("lost")))
    concurrent.futures.wait([run.checkpoint.under_way])
    with pytest.raises(CheckpointError, match="lost"):
        getattr(run.checkpoint, method)(*([1] if method in ("save", "finish") else []))
    run.checkpoint.wait()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_upload_to_a_second_place_and_resume_from_it_alone(tmp_path, mode):
    disk, far = tmp_path / "disk", tmp_path / "far"
    settings = {"interval": 1, "keep": 2, "mode": mode, "upload": str(far)}
    run_ranks(2, train_run, str(disk), (2,), 0, 3, settings)
    assert steps_in(disk) == steps_in(far) == [3, 2]
    for file in (disk / committed(open_store(disk))[0]).glob("*.distcp"):
        file.write_bytes(b"lost")
    straight = run_ranks(2, train_run, str(tmp_path / "straight"), (2,), 0, 4, {"interval": 100})
    resumed = run_ranks(2, train_run, str(disk), (2,), 3, 4, settings)  # step 3 is damaged on disk, not far away
    assert [same(ours, theirs) for ours, theirs in zip(resumed, straight, strict=True)] == [[], []]
    assert steps_in(disk) == [4, 2]
    assert steps_in(far) == [4, 3]


@pytest.mark.parametrize(("mesh", "size"), [((2,), 2), ((), 1)])
def test_an_upload_that_was_cut_is_made_up_for_by_the_next_start(tmp_path, mesh, size):
    disk, far = tmp_path / "disk", tmp_path / "far"
    expected = run_ranks(2, _train_with_a_cut_upload, str(disk), str(far))[0]
    assert (steps_in(disk), steps_in(far)) == ([2, 1], [1])
    run_ranks(size, train_run, str(disk), mesh, 2, 2, {"upload": str(far)})
    assert steps_in(far) == [2, 1]
    assert same(load_run(str(far), ())[1], expected, but=["random"]) == []


def test_what_an_earlier_start_did_not_upload_removes_no_newer_one_that_is_damaged(tmp_path):
    """Only one that is newer does."""
    places = near, far = tmp_path / "near", tmp_path / "far"
    Run(near, interval=1, upload=str(far)).train(0, 3)
    before, newest = (committed(open_store(near))[number] for number in (1, 0))
    for place in places:
        flip_bit(place / newest / "__0_0.distcp", 100)
    shutil.rmtree(far / before)
    run = Run(near, interval=1, upload=str(far))
    assert run.checkpoint.load() == 2
    run.checkpoint.wait()
    assert committed(open_store(far)) == [newest, before]
    run.train(2, 3)
    assert all(steps_in(place) == [3, 2] and not (place / newest).exists() for place in places)


def test_an_old_checkpoint_that_was_just_uploaded_stays_where_listings_lag(tmp_path, monkeypatch):
    """It was begun long ago, and its manifest in the second place is not listed yet."""
    near, far, sizes = tmp_path / "near", tmp_path / "far", LocalStore.sizes
    Run(near, interval=1).train(0, 1)
    old = (near / committed(open_store(near))[0]).rename(near / "step-00000001-000000010000")

    def late(store, prefix=""):
        return {
            file: size for file, size in sizes(store, prefix).items() if store.folder == near or "MANIFEST" not in file
        }

    monkeypatch.setattr(LocalStore, "sizes", late)
    run = Run(near, upload=str(far))
    assert run.checkpoint.load() == 1
    run.checkpoint.wait()
    monkeypatch.undo()
    assert steps_in(far) == [1]
    assert {file.name for file in (far / old.name).iterdir()} == {file.name for file in old.iterdir()}


def _train_with_a_cut_upload(folder, far):
    run = Run(folder, (2,), interval=1, upload=far)
    run.train(0, 1)
    copy = manager.copy_pieces

    def cut(*arguments):
        copy(*arguments)
        raise CheckpointError("away, on purpose")

    manager.copy_pieces = cut
    with pytest.raises(CheckpointError, match="away, on purpose"):
        run.train(1, 2)
    return run.everything()


def test_a_bit_that_flips_before_the_upload_is_found(tmp_path, monkeypatch):
    """Once it is read again; if it stays wrong nothing is uploaded, and nothing is left of it."""
    run = Run(tmp_path / "near", interval=1, upload=str(tmp_path / "far"))
    read, flips = LocalStore.read_into, iter([True, False, True, True, True, True])

    def flip(store, name, offset, view, alone=False):
        read(store, name, offset, view, alone)
        if name.endswith("__0_0.distcp") and offset == 0 and next(flips):
            view[100] ^= 1

    monkeypatch.setattr(LocalStore, "read_into", flip)
    run.train(0, 1)
    assert steps_in(tmp_path / "far") == [1]
    with pytest.raises(CheckpointError, match=r"near/step-00000002-.*__0_0.distcp: checksum differs"):
        run.train(1, 2)
    assert steps_in(tmp_path / "far") == [1]
    assert not list((tmp_path / "far").glob("step-00000002-*/*"))


def test_an_upload_lists_nothing_of_the_first_place(tmp_path, monkeypatch):
    """Nor does it need the memory for a whole piece."""
    monkeypatch.setattr(storage, "RANGE_BYTES", 500)
    run, sizes = Run(tmp_path / "near", upload=str(tmp_path / "far")), LocalStore.sizes
    monkeypatch.setattr(LocalStore, "sizes", lambda self, prefix="": {} if prefix else sizes(self))
    run.train(0, 1)
    assert steps_in(tmp_path / "far") == [1]


def test_bytes_that_are_written_uploaded_and_read_are_progress(tmp_path):
    run, moved = Run(tmp_path / "near", upload=str(tmp_path / "far")), set()
    run.checkpoint.on_progress = lambda: moved.add(threading.current_thread().name.partition("-")[0])
    run.train(0, 1)
    assert moved == {"ThreadPoolExecutor", "checkpoint"}  # writes, and the upload
    moved.clear()
    run.checkpoint.load()
    assert moved == {"MainThread"}


def test_an_upload_at_the_end_may_last_longer_than_the_watchdog_waits(tmp_path):
    """Each piece takes 1,000 s, by the watchdog's clock."""
    run_ranks(1, upload_for_long, tmp_path)


def upload_for_long(tmp_path):
    run = Run(tmp_path / "near", upload=str(tmp_path / "far"))
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=1), run.checkpoint.config)
    run.checkpoint.on_progress = watchdog.alive
    read, idle_seconds = LocalStore.read_into, []

    def read_for_long(*arguments):
        watchdog._entered -= 1000
        idle_seconds.append(time.monotonic() - watchdog._entered)
        read(*arguments)

    LocalStore.read_into = read_for_long
    watchdog.enter("end")
    run.train(0, 1)
    assert len(idle_seconds) > 1
    assert max(idle_seconds) < PATIENCE * watchdog._limit()


def test_newest_are_kept_and_every_nth_for_ever(tmp_path):
    Run(tmp_path, interval=1, keep=2, keep_every=3).train(0, 8)
    assert steps_in(tmp_path) == [8, 7, 6, 3]


def test_a_save_does_not_wait_for_the_removal_of_older_ones(tmp_path, monkeypatch):
    run = Run(tmp_path, interval=1, keep=1)
    run.train(0, 1)
    gate, remove = threading.Event(), LocalStore.remove

    def remove_when_open(store, names):
        assert gate.wait(20)
        remove(store, names)

    monkeypatch.setattr(LocalStore, "remove", remove_when_open)
    run.step()
    run.checkpoint.save(2)
    assert steps_in(tmp_path) == [2, 1]
    gate.set()
    run.checkpoint.wait()
    assert steps_in(tmp_path) == [2]


def test_old_leftovers_go_and_fresh_ones_stay(tmp_path):
    run = Run(tmp_path, interval=1)
    run.train(0, 1)
    old, fresh = "step-00000001-000000010000", f"step-00000001-{2**32 - 1:08x}0000"
    model = old.replace("step", "model")
    for name in (old, fresh, model):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"begun")
    run.train(1, 2)
    assert not (tmp_path / old).exists()
    assert not (tmp_path / model).exists()
    assert (tmp_path / fresh).exists()


def test_what_was_just_saved_is_never_the_one_that_goes(tmp_path, monkeypatch):
    """A run that could not see step 3 begins anew beside it, and ends with a save of the model alone."""
    Run(tmp_path, interval=1, keep=1).train(0, 3)
    run = Run(tmp_path, interval=1, keep=1, save_model=True, steps=2)
    with monkeypatch.context() as late:
        late.setattr(LocalStore, "sizes", lambda self, prefix="": {})
        assert run.checkpoint.load() == 0
    run.train(0, 1)
    assert steps_in(tmp_path) == [3, 1]
    run.train(1, 2)
    assert steps_in(tmp_path) == [3, 2]
    assert list(tmp_path.glob("model-00000002-*"))


def test_a_run_that_has_saved_never_begins_anew(tmp_path):
    """As where it is started again and the folder that was named for its checkpoints is forgotten."""
    run, saved, other = (tmp_path / name for name in ("run", "saved", "other"))
    run.mkdir()
    assert Run(saved, run_folder=run).checkpoint.load() == 0
    assert Run(other, run_folder=run, interval=1).checkpoint.load() == 0, "nothing was saved yet"
    Run(saved, run_folder=run, interval=1).train(0, 2)
    with pytest.raises(CheckpointError, match=f"{other}: no checkpoint .* has saved {saved}/step-00000002-.*; set"):
        Run(other, run_folder=run, visibility_seconds=0.1).checkpoint.load()
    other.rmdir()
    saved.rename(other)
    assert Run(other, run_folder=run).checkpoint.load() == 2


def test_the_last_that_was_saved_is_named_where_a_run_goes_on_from_an_older_one(tmp_path, caplog):
    """As where its folder was moved, and a later start forgets to name the new one."""
    old, new = tmp_path / "old", tmp_path / "new"
    Run(old, run_folder=tmp_path).train(0, 1)
    shutil.copytree(old, new)
    moved = Run(new, run_folder=tmp_path)
    assert moved.checkpoint.load() == 1
    moved.train(1, 2)
    assert Run(new, run_folder=tmp_path).checkpoint.load() == 2
    assert "skipped: " not in caplog.text
    assert Run(old, run_folder=tmp_path).checkpoint.load() == 1
    (last,) = new.glob("step-00000002-*")
    assert f"skipped: {last}, the last checkpoint that this run saved, is not in {old}" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_runs_never_save_in_one_place(tmp_path, mode):
    """Nor does a run take the other's checkpoint for its own; a start that comes later goes on with it."""
    Run(tmp_path, interval=1).train(0, 1)
    runs = [Run(tmp_path, interval=1, keep=1, run_folder=Path(name), mode=mode) for name in "ab"]
    for run in runs:
        assert run.checkpoint.load() == 1
        run.checkpoint.began -= 60  # names of checkpoints tell whole seconds
    runs[0].train(1, 2)
    with pytest.raises(ConfigError, match=rf"step-00000002-\w+ was saved by \S+{Path('a').absolute()} while this run"):
        runs[1].train(1, 2)
    with pytest.raises(ConfigError, match="while this run was training"):
        runs[1].checkpoint.load()  # as after a bad step
    assert steps_in(tmp_path) == [2, 1], "1 is neither's"
    assert [file for file in tmp_path.glob("*/*") if file.parent.name not in runs[0].checkpoint.known] == []
    runs[0].train(2, 3)
    later = Run(tmp_path, interval=1, keep=1)
    assert later.checkpoint.load() == 3
    later.checkpoint.began -= 60
    later.train(3, 4)
    assert steps_in(tmp_path) == [4, 3], "1 was its own, 3 is not"


def test_two_runs_never_upload_to_one_place(tmp_path):
    runs = [Run(tmp_path / name, interval=1, upload=str(tmp_path / "far"), run_folder=Path(name)) for name in "ab"]
    for run in runs:
        run.checkpoint.began -= 60
    runs[0].train(0, 1)
    with pytest.raises(ConfigError, match=f"{Path('a').absolute()} while this run"):
        runs[1].train(0, 1)
    assert steps_in(tmp_path / "far") == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_save_leaves_none_of_its_pieces(tmp_path, ranks):
    """The rank that fails, the last one, has written one file before, another one both of its own."""
    run_ranks(ranks, _fail_one_file, str(tmp_path), ranks)
    assert [folder.name.split("-")[1] for folder in tmp_path.iterdir()] == ["00000001"]


def _fail_one_file(folder, ranks):
    run = Run(folder, (ranks,), interval=1)
    run.train(0, 1)
    create = LocalStore.create

    def fail(store, name):
        if name.endswith(f"__{ranks - 1}_1.distcp"):
            raise CheckpointError("no room, on purpose")
        return create(store, name)

    LocalStore.create = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="on purpose"):
        run.train(1, 2)


def test_disks_of_nodes_are_tidied_of_what_rank_0_does_not_know(tmp_path):
    """The disk of rank 0 is new: what rank 1 has kept goes once it is old, as it does on a disk of its own."""
    assert run_ranks(2, _train_on_own_disks, str(tmp_path), 0, 2, "") == [[2], [2]]
    (tmp_path / "near1" / "step-00000001-000000010000").mkdir()
    (tmp_path / "near1" / "step-00000001-000000010000" / "__1_0.distcp").touch()
    assert run_ranks(2, _train_on_own_disks, str(tmp_path), 2, 4, "new") == [[4], [2, 4]]  # 2: not yet


def test_disks_of_nodes_keep_what_was_begun_where_another_run_has_saved(tmp_path):
    """It may be the other's, of which rank 0 does not know."""
    assert run_ranks(2, _train_on_own_disks, str(tmp_path), 0, 2, "", "other") == [[2], [2]]
    (tmp_path / "near1" / "step-00000001-000000010000").mkdir()
    (tmp_path / "near1" / "step-00000001-000000010000" / "__1_0.distcp").touch()
    assert run_ranks(2, _train_on_own_disks, str(tmp_path), 2, 4, "") == [[2, 4], [1, 2, 4]]


def _train_on_own_disks(folder, first, last, new, name="unused"):
    rank, init = dist.get_rank(), LocalStore.__init__

    def on_own_disk(store, place):
        init(store, str(place).replace("near", f"near{rank}{new if rank == 0 else ''}"))

    LocalStore.__init__ = on_own_disk  # type: ignore[method-assign]
    run = Run(f"{folder}/near", (2,), interval=1, keep=1, upload=f"{folder}/far", run_folder=Path(name))
    assert run.checkpoint.load() == first
    run.train(first, last)
    return sorted(int(name.split("-")[1]) for name in run.checkpoint.store.folders())


def _start_on_own_disks(folder, order, upload, full=False, first=""):
    """What a start comes to, with a save at its first step whose copy to the second place fails, if it gets there."""
    rank, init, free_bytes = dist.get_rank(), LocalStore.__init__, LocalStore.free_bytes

    def on_own_disk(store, place):
        init(store, str(place).replace("near", f"near{order[rank]}"))

    def fail(*arguments):
        raise CheckpointError("the second place is away")

    LocalStore.__init__ = on_own_disk  # type: ignore[method-assign]
    LocalStore.free_bytes = lambda store: 0 if full and any(store.folders()) else free_bytes(store)
    manager.copy_pieces = fail
    upload = f"{folder}/{upload}" if upload else ""
    size = dist.get_world_size()
    run = Run(first or f"{folder}/near", (size,), interval=1, upload=upload, visibility_seconds=0.1)
    try:
        step = run.checkpoint.load()
        run.train(step, step + 1)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return "trained"


def test_disks_of_nodes_alone_are_no_place_for_checkpoints(tmp_path):
    """Of which each would hold a part: where ranks are numbered anew, none finds all of them."""
    for upload, key, first in (("", "folder", ""), ("near-too", "upload", ""), ("near-too", "upload", "s3://a/b")):
        for message in run_ranks(2, _start_on_own_disks, str(tmp_path), (0, 1), upload, False, first):
            assert message.startswith(f"checkpoint.{key} = '{tmp_path}/")
            assert "have disks of their own there" in message
        assert not list(tmp_path.glob("near*/*"))


@pytest.mark.parametrize("full", [False, True])
def test_a_run_is_not_begun_anew_when_its_only_checkpoint_is_of_another_rank_0(tmp_path, full):
    """Its copy to the second place had failed, and torchrun numbered the machines anew; nor does it go for room."""
    (message, _) = run_ranks(2, _start_on_own_disks, str(tmp_path), (0, 1), "far")
    assert message == "the second place is away"
    before = sorted(tmp_path.rglob("*"))
    for message in run_ranks(2, _start_on_own_disks, str(tmp_path), (1, 0), "far", full):
        assert "not completely uploaded; start with rank 0 on" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("machines", [(0, 1), (0, 0, 1, 1), (0, 1, 1)])
def test_what_disks_of_nodes_hold_in_parts_is_uploaded_before_it_is_loaded(tmp_path, machines):
    """Rank 0 needs of it what rank 1 wrote for both; the upload had failed. Also if machines have fewer ranks now."""
    message, *_ = run_ranks(len(machines), _start_on_own_disks, str(tmp_path), machines, "far")
    assert message == "the second place is away"
    assert run_ranks(2, _train_on_own_disks, str(tmp_path), 1, 2, "") == [[2], [2]]


def test_of_a_disk_that_all_share_only_rank_0_lists_the_files(tmp_path):
    """Thousands of ranks, each of which has its own files there, would ask for millions."""
    assert run_ranks(2, _count_listings, str(tmp_path)) == [[0, 2], [0, 0]]


def _count_listings(folder):
    sizes, listed = LocalStore.sizes, []

    def watch(store, prefix=""):
        listed.append(prefix)
        return sizes(store, prefix)

    LocalStore.sizes = watch
    run = Run(folder, (2,), interval=1, keep=0, keep_every=1)
    run.checkpoint._remove_superfluous = lambda *_: None  # which lists in the background
    run.train(0, 2)
    saving = listed.count("")
    run.checkpoint.load()
    return [saving, listed.count("") - saving]


def test_manifests_that_are_not_there_are_waited_for_together(tmp_path, monkeypatch):
    """In a bucket that keeps all, each save would wait once more for each save that ever failed."""
    names, together = {f"step-0000000{i}-000000010000" for i in range(4)}, threading.Barrier(4, timeout=20)

    def wait(store, name):
        together.wait()
        raise DamagedError(f"{name}: missing")

    monkeypatch.setattr(LocalStore, "read", wait)
    assert retention.never_committed(LocalStore(tmp_path), names) == names


def test_other_disks_keep_their_part_of_what_rank_0_cannot_remove(tmp_path):
    """Its manifest stays, and so must its data; what rank 0 can remove goes everywhere."""
    assert run_ranks(2, _train_beside_a_stuck_file, str(tmp_path)) == [[1, 3], [1, 3]]


def _train_beside_a_stuck_file(folder):
    remove = LocalStore.remove

    def stuck(store, names):
        if dist.get_rank() == 0 and any("step-00000001-" in name for name in names):
            raise CheckpointError("not this one, on purpose")
        remove(store, names)

    LocalStore.remove = stuck  # type: ignore[method-assign]
    return _train_on_own_disks(folder, 0, 3, "")


def test_what_cannot_be_removed_is_said_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, interval=1, keep=1)
    monkeypatch.setattr(LocalStore, "remove", lambda self, names: None)
    run.train(0, 2)
    assert "still listed after their removal" in caplog.text
    assert steps_in(tmp_path) == [2, 1]


def test_a_damaged_one_whose_removal_failed_is_no_checkpoint_that_is_kept(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, interval=1, keep=0)
    run.train(0, 1)
    run.train(1, 9)
    for file in tmp_path.glob("step-0000000[2-9]-*/*.distcp"):
        file.write_bytes(b"lost")
    run = Run(tmp_path, interval=1, keep=2)
    assert run.checkpoint.load() == 1
    with monkeypatch.context() as once:
        once.setattr(LocalStore, "remove", lambda self, names: None)
        run.train(1, 2)
    assert "still listed after their removal" in caplog.text
    run.train(2, 3)
    assert steps_in(tmp_path) == [3, 2]


def test_a_folder_that_may_not_be_changed_is_said_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, interval=1, keep=1)

    def refuse(*arguments, **settings):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    run.train(0, 2)
    assert "old checkpoints could not be removed" in caplog.text
    assert "Permission denied" in caplog.text


def test_uploads_that_may_not_be_listed_keep_nothing_from_being_removed(tmp_path, monkeypatch, caplog):
    def refuse(store, older_than_seconds):
        raise CheckpointError("not allowed: ListMultipartUploads")

    monkeypatch.setattr(LocalStore, "abort_uploads", refuse)
    Run(tmp_path, interval=1, keep=1).train(0, 2)
    assert "not allowed: ListMultipartUploads" in caplog.text
    assert steps_in(tmp_path) == [2]


def test_ranks_of_a_node_may_remove_the_same_checkpoint_at_once(tmp_path):
    names = [f"step-{i:08}-0123456789ab" for i in range(100)]
    for name in names:
        (tmp_path / name).mkdir()
        for file in range(3):
            (tmp_path / name / f"{file}").touch()
    run_ranks(4, _remove_all, str(tmp_path), names)
    assert not list(tmp_path.iterdir())


def _remove_all(folder, names):
    store = open_store(folder)
    for name in names:
        dist.barrier()
        retention.remove_checkpoints(store, [name], store.sizes())


def test_seed_checkpoint_gives_all_runs_the_same_start(tmp_path):
    seeded = run_ranks(1, _weights_after_load, str(tmp_path), (1,), {"save_initial": True}, 5)[0]
    assert steps_in(tmp_path) == [0]
    for weights in run_ranks(2, _weights_after_load, str(tmp_path), (2,), {}, 6):
        assert same(weights, seeded) == []


def _weights_after_load(folder, mesh, settings, seed):
    run = Run(folder, mesh, seed=seed, **settings)
    assert run.checkpoint.load() == 0
    run.checkpoint.wait()
    return {name: value for name, value in run.everything().items() if name not in ("samples", "random")}


def test_model_alone_is_saved_at_the_last_step(tmp_path):
    run = Run(tmp_path, interval=100, save_model=True, steps=3)
    run.train(0, 3)
    (folder,) = tmp_path.glob("model-00000003-*")
    model = Tower()
    assert load_model(folder, model)["identity"] == IDENTITY
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 0.5 * sum(
        file.stat().st_size for file in tmp_path.glob("step-*/*.distcp")
    )
    assert Run(tmp_path).checkpoint.load() == 3
    for saved in tmp_path.glob("step-*"):
        shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match=f"no checkpoint here.*; for the model alone name {folder}$"):
        load_model(tmp_path, model)


def test_a_thread_whose_priority_may_not_be_lowered_does_its_work(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    run = Run(tmp_path, interval=1)
    run.checkpoint._start(lambda: None)
    run.checkpoint.under_way.result(timeout=20)


def test_what_is_done_in_the_background_leaves_the_cores_to_training(tmp_path):
    run, own, seen = Run(tmp_path), os.getpriority(os.PRIO_PROCESS, 0), []
    run.checkpoint._start(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))  # on Linux: this thread's
    run.checkpoint.wait()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("lost", ["near", "far", ""])
def test_model_alone_is_made_up_for_and_uploaded(tmp_path, lost):
    """By a start that finds the run done: not asked for before, or ended before it was written."""
    settings = {"interval": 100, "steps": 2, "upload": str(tmp_path / "far")}
    Run(tmp_path / "near", **settings, save_model=lost != "").train(0, 2)
    assert len(list(tmp_path.glob("*/model-*"))) == (2 if lost else 0)
    for folder in (tmp_path / (lost or "none")).glob("model-*"):
        (folder / "MANIFEST.json").unlink()
    for _ in range(2):
        run = Run(tmp_path / "near", **settings, save_model=True)
        run.checkpoint.finish(run.checkpoint.load())
        run.checkpoint.wait()
    for place in ("near", "far"):
        models = list((tmp_path / place).glob("model-00000002-*/MANIFEST.json"))
        assert len(models) == 1
        assert load_model(models[0].parent, Tower())["step"] == 2


def test_starts_that_only_fail_to_upload_the_model_are_no_progress_and_leave_one_copy(tmp_path, monkeypatch):
    copy, safe = manager.copy_pieces, []

    def refuse_models(source, target, name, *rest):
        if name.startswith("model-"):
            raise CheckpointError("away, on purpose")
        copy(source, target, name, *rest)

    monkeypatch.setattr(manager, "copy_pieces", refuse_models)
    for first in (0, 2, 2):
        run = Run(tmp_path / "near", steps=2, save_model=True, upload=str(tmp_path / "far"))
        run.checkpoint.on_commit = safe.append
        assert run.checkpoint.load() == first
        with pytest.raises(CheckpointError, match="away, on purpose"):
            run.train(first, 2)
    assert safe == [2]
    assert len(list((tmp_path / "near").glob("model-*"))) == 1


@pytest.mark.parametrize("room", [2.9, 3.2])
@pytest.mark.parametrize(
    ("tensors", "changed"),
    [
        (3, {}),
        (2, {"optimizer": Optimizer(state_dtype="bfloat16")}),
        (4, {"parallelism": Parallelism(local_steps=2)}),  # with the outer momentum
    ],
)
def test_a_disk_with_no_room_for_what_is_kept_is_refused_before_the_first_step(
    tmp_path, monkeypatch, tensors, changed, room
):
    """Of each weight a checkpoint holds `tensors` of its size, with its moments."""
    run = Run(tmp_path, keep=2)
    run.checkpoint.config = replace(run.checkpoint.config, **changed)
    one = tensors * sum(parameter.nbytes for parameter in run.model.parameters())
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: int(room * one))
    (tmp_path / ".probe-1").touch()  # of a start that was killed
    if room < 3:
        with pytest.raises(CheckpointError, match="3 checkpoints of"):
            run.checkpoint.load()
    else:
        assert run.checkpoint.load() == 0
    assert os.listdir(tmp_path) == []


def test_a_start_killed_before_the_removal_that_makes_room_does_not_block_the_next(tmp_path, monkeypatch):
    """A disk of just the room that is asked for holds one more than is kept."""
    Run(tmp_path, interval=1, keep=3).train(0, 3)
    one = max(3 * sum(parameter.nbytes for parameter in Tower().parameters()), _bytes_in(tmp_path) // 3)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 3 * one - _bytes_in(tmp_path))
    assert Run(tmp_path, keep=2).checkpoint.load() == 3
    assert steps_in(tmp_path) == [3, 2]


def _bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_a_save_that_failed_or_was_killed_leaves_is_no_folder(tmp_path, monkeypatch):
    run = Run(tmp_path, interval=1, keep=1)
    monkeypatch.setattr("checkpoint.stores._DirectWriter.finish", _raise_full)
    with pytest.raises(CheckpointError, match="No space left"):
        run.train(0, 1)
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "step-00000001-000000010000").mkdir()
    run.train(1, 2)
    assert [name[:13] for name in os.listdir(tmp_path)] == ["step-00000002"]


def _raise_full(writer):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_has_come_further_than_it_is_to_go_is_refused(tmp_path):
    """Its weights are those of another schedule's middle, and what is due at the last step would be left out."""
    Run(tmp_path).train(0, 4)
    with pytest.raises(ConfigError, match=r"training.steps = 3: this run has reached step 4.*set 4 or more"):
        manager.check_steps(Run(tmp_path, steps=3).checkpoint.config, tmp_path)
    longer = Run(tmp_path, steps=4).checkpoint
    manager.check_steps(longer.config, tmp_path)
    assert longer.load() == 4


@pytest.mark.parametrize("key", ["folder", "upload"])
def test_a_place_that_cannot_be_written_to_is_found_before_anything_is_written(tmp_path, key):
    (tmp_path / "file").write_text("")
    places = {"folder": str(tmp_path / "new" / "folder"), key: str(tmp_path / "file" / "folder")}
    with pytest.raises(
        CheckpointError, match=f"checkpoint.{key} = '.*/file/folder': cannot be written to: .*Not a dir"
    ):
        manager.check_places(Checkpoint(**places), tmp_path / "run")
    places[key] = str(tmp_path / ("a" * 300))
    with pytest.raises(CheckpointError, match=f"checkpoint.{key} = '.*': cannot be written to: .*File name too long"):
        manager.check_places(Checkpoint(**places), tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot be written to"):  # by the last step
        manager.check_places(Checkpoint(**places, enable=False, save_model=True), tmp_path / "run")
    manager.check_places(Checkpoint(**places, enable=False), tmp_path / "run")
    (tmp_path / "link").symlink_to("nowhere")  # as to a disk that is not mounted
    places[key] = str(tmp_path / "link" / "folder")
    with pytest.raises(CheckpointError, match=f"checkpoint.{key} = '.*/link/folder': cannot be written to: .*missing"):
        manager.check_places(Checkpoint(**places), tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_room_is_counted_per_disk(tmp_path):
    """Two ranks share a disk: what each of them writes must fit, twice."""
    assert run_ranks(2, _room, str(tmp_path), 240) == [True, True]
    assert run_ranks(2, _room, str(tmp_path), 260) == [False, False]


def test_what_is_kept_for_ever_is_no_room(tmp_path):
    Run(tmp_path, interval=1, keep=1, keep_every=2).train(0, 6)  # 2, 4 and 6, of which none will go
    for step in (2, 4, 6):
        (folder,) = tmp_path.glob(f"step-0000000{step}-*")
        (folder / "ballast").write_bytes(bytes(1000))
    assert run_ranks(1, _room, str(tmp_path), 260) == [True]
    assert run_ranks(1, _room, str(tmp_path), 520, 2) == [False]


def test_only_what_will_go_is_room(tmp_path):
    for name in ("notes", "model-00000003-0123456789ab", f"step-00000003-{2**32 - 1:08x}0000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1000))
    (tmp_path / "model-00000003-0123456789ab" / "MANIFEST.json").touch()
    (tmp_path / "notes" / "MANIFEST.json").touch()
    (tmp_path / "step-00000002-0123456789ab").symlink_to(tmp_path / "notes")
    assert run_ranks(1, _room, str(tmp_path), 500) == [True]
    assert run_ranks(1, _room, str(tmp_path), 501) == [False]


@pytest.mark.parametrize(("disk", "left"), [(2500, []), (3500, [2]), (1900, None)])
def test_what_a_killed_save_left_makes_room_where_it_is_in_the_way(tmp_path, disk, left):
    for step in (1, 2):
        folder = tmp_path / f"step-{step:08d}-{int(time.time()) - 5:08x}0000"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
    (tmp_path / min(os.listdir(tmp_path)) / "MANIFEST.json").touch()
    assert run_ranks(2, _room, str(tmp_path), 500, 0, disk) == [left is not None] * 2
    assert [int(name.split("-")[1]) for name in sorted(os.listdir(tmp_path))] == [1, *(left or [])]


@pytest.mark.parametrize("hidden", ["", "MANIFEST.json", "no answer"])
def test_only_what_is_known_to_be_unfinished_makes_room(tmp_path, hidden):
    """Not what a listing that lags shows without its manifest, nor anything where the disk fails otherwise."""
    for step in (1, 2):
        folder = tmp_path / f"step-{step:08d}-{int(time.time()) - 5:08x}0000"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
    (folder / "MANIFEST.json").touch()
    assert run_ranks(2, _room, str(tmp_path), 500, 0, 2500, hidden) == [hidden == ""] * 2
    assert len(list(tmp_path.glob("step-00000001-*"))) == (1 if hidden == "no answer" else 0)
    assert len(list(folder.iterdir())) == 2


def _room(folder, rank_bytes, keep_every=0, disk=0, hidden=""):
    store = LocalStore(folder)
    store.free_bytes = lambda: disk - sum(store.sizes().values()) if disk else 1000  # type: ignore[method-assign]
    listed, failures = store.sizes, iter([CheckpointError("no answer")] if hidden == "no answer" else [])

    def sizes(prefix=""):
        for error in failures:
            raise error
        return {file: size for file, size in listed(prefix).items() if not (hidden and file.endswith(hidden))}

    store.sizes = sizes  # type: ignore[method-assign]
    try:
        settings = Checkpoint(keep=1, keep_every=keep_every)
        ranks = manager.build_ranks(60)
        machine = retention.meet_neighbours(store, ranks).disk
        retention.check_room(store, ranks, machine, rank_bytes, settings, lambda names: dict.fromkeys(names, True))
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_fails_the_save_on_all_ranks_and_the_one_before_stays(tmp_path, mode):
    """A real disk (a small one, in memory) that fills up in the middle of a save."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        messages = run_ranks(2, _fill_the_disk, str(tmp_path), mode)
        assert messages[0] == messages[1]
        assert "No space left on device; free some space" in messages[0]
        (tmp_path / "ballast").unlink()
        assert steps_in(tmp_path) == [1]
        assert [step for step, _ in run_ranks(2, load_run, str(tmp_path), (2,))] == [1, 1]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _fill_the_disk(folder, mode):
    run = Run(folder, (2,), interval=1, keep=1, mode=mode)
    run.train(0, 1)
    if dist.get_rank() == 0:
        free = LocalStore(folder).free_bytes()
        (Path(folder) / "ballast").write_bytes(bytes(max(0, free - 30_000)))
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        run.train(1, 2)
    return str(caught.value)
