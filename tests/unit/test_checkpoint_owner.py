"""Whose checkpoints are whose: neither another run, nor a copy of the run's folder, nor an earlier start uses them."""

import os
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint import CheckpointError, manager
from checkpoint.checks import check_checkpoints
from checkpoint.loading import locate
from checkpoint.manifest import committed, read_manifest
from checkpoint.owner import TakenOverError
from config import Checkpoint, Config, ConfigError
from storage import LocalStore, StoreError, open_store
from tests.distributed.checkpoint_runs import IDENTITY, Run, flip_bit, steps_in
from tests.runs import content


def test_a_start_is_refused_where_another_run_has_saved(tmp_path):
    """Anything, be it older than its own. A damaged manifest, which no resume can take, says nothing."""

    def check(run_folder: str) -> None:
        places = {"folder": str(tmp_path / "saved")}
        check_checkpoints(Config(checkpoint=Checkpoint(**places)), IDENTITY, Path(run_folder))

    Run(tmp_path / "saved", interval=1, keep=0, run_folder=Path("other")).train(0, 2)
    check("other")
    with pytest.raises(
        ConfigError,
        match=r"checkpoint.folder = .* was saved by another run, .*/other: .* write .*/other into \.run_name",
    ):
        check("unused")
    for folder in (tmp_path / "saved").iterdir():
        flip_bit(folder / "MANIFEST.json", 100)
    check("unused")


# ---------------------------------------------------------------- copies, and what only looks like one


class Case:
    """A run with a folder of its own and checkpoints elsewhere, whose starts can be tried."""

    def __init__(self, root: Path) -> None:
        self.root, self.saved, self.folder = root, root / "saved", root / "run"
        self.folder.mkdir()
        (self.folder / ".run_name").write_text(str(self.folder))

    def check(self, folder: Path, job: str = "") -> None:
        check_checkpoints(Config(checkpoint=Checkpoint(folder=str(self.saved))), IDENTITY, folder, job=job)

    def start(self, folder: Path, last: int, job: str = "") -> Run:
        """A start that may begin, and trains to step `last`."""
        self.check(folder, job=job)
        run = Run(self.saved, interval=1, keep=2, run_folder=folder, job=job)
        run.train(run.checkpoint.load(), last)
        return run


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def of_a_run_under_way(case: Case) -> Path:
    """The start that the copy knows has gone on, by a single checkpoint."""
    run = case.start(case.folder, 3)
    copy = Path(shutil.copytree(case.folder, case.root / "copy"))
    run.train(3, 4)
    return copy


def before_any_checkpoint(case: Case) -> Path:
    Run(case.saved, run_folder=case.folder).checkpoint.load()
    copy = Path(shutil.copytree(case.folder, case.root / "copy"))
    case.start(case.folder, 2)
    return copy


def the_original(case: Case) -> Path:
    """The copy went on, even in the same job, as where all runs of a cluster are started with one id."""
    case.start(case.folder, 3)
    copy = Path(shutil.copytree(case.folder, case.root / "copy"))
    case.start(copy, 6, job="job")
    return case.folder


def an_older_state(case: Case) -> Path:
    """A backup in the place of the folder."""
    case.start(case.folder, 3)
    backup = Path(shutil.copytree(case.folder, case.root / "backup"))
    case.start(case.folder, 6)
    shutil.rmtree(case.folder)
    return backup.rename(case.folder)


@pytest.mark.parametrize(
    ("make", "known"),  # the steps of those that are left and that the folder knows
    [
        (of_a_run_under_way, [3]),
        (before_any_checkpoint, []),
        (the_original, []),
        (an_older_state, []),
    ],
)
def test_a_folder_does_not_go_on_with_checkpoints_that_it_does_not_know(
    case: Case, make: Any, known: list[int]
) -> None:
    """Until it is told to. The tools, too, take for its own only what it knows."""
    folder = make(case)
    saved = steps_in(case.saved)
    newest = committed(open_store(case.saved))[0]
    origin = read_manifest(open_store(case.saved), newest)["start"]["folder"]
    said = f"folder = .*{newest} there was saved from {origin} and is unknown to {folder}, .*'{case.saved}@{saved[0]}'"
    with pytest.raises(ConfigError, match=said):
        case.check(folder, job="job")
    (folder / "config.toml").write_text(f'[checkpoint]\nfolder = "{case.saved}"\n')
    if known:
        assert [name.split("-")[1] for _, name in locate(folder)] == [f"{step:08}" for step in known]
    else:
        with pytest.raises(CheckpointError, match=f"{folder}: is a copy of a run, or an older state of it"):
            locate(folder)
    (folder / ".known_saves").unlink()
    case.check(folder)
    assert case.start(folder, saved[0] + 1).checkpoint.newest_step == saved[0] + 1


def killed_after_the_commit(case: Case) -> Path:
    """Before the folder can note anything more of it."""
    commit = manager.commit

    def commit_and_end(*arguments: Any) -> None:
        commit(*arguments)
        raise KeyboardInterrupt

    with patch("checkpoint.manager.commit", commit_and_end), suppress(KeyboardInterrupt):
        case.start(case.folder, 3)
    return case.folder


def moved(case: Case) -> Path:
    case.start(case.folder, 1)
    return case.folder.rename(case.root / "moved")


def made_again(case: Case) -> Path:
    """The folder was lost with its machine, and the start after that was killed before it saved."""
    case.start(case.folder, 1)
    shutil.rmtree(case.folder)
    case.folder.mkdir()
    case.start(case.folder, 1)
    return case.folder


def back_on_its_node(case: Case) -> Path:
    """Of a job on nodes with disks of their own: another node's rank was the first meanwhile."""
    case.start(case.folder, 1, job="job")
    own = case.folder.rename(case.root / "disk of the first node")
    case.folder.mkdir()
    case.start(case.folder, 2, job="job")
    shutil.rmtree(case.folder)
    return own.rename(case.folder)


def on_a_full_disk(case: Case) -> Path:
    """That of the run's folder."""
    case.start(case.folder, 1)
    with patch("checkpoint.manager.record_known", side_effect=OSError):
        case.start(case.folder, 2)
    return case.folder


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (killed_after_the_commit, 1),
        (moved, 1),
        (made_again, 1),
        (back_on_its_node, 2),
        (on_a_full_disk, 2),
    ],
)
def test_what_only_looks_like_a_copy_goes_on(case: Case, make: Any, step: int) -> None:
    folder = make(case)
    assert steps_in(case.saved)[0] == step
    (folder / "config.toml").write_text(f'[checkpoint]\nfolder = "{case.saved}"\n')
    assert case.start(folder, step + 2, job="job").checkpoint.newest_step == step + 2
    case.check(folder)
    assert len(locate(folder)) == 2


def test_one_manifest_is_read_at_most_to_know_whose_a_place_is(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """None by a folder that knows them, the newest by one that was made again; however many there are."""
    run = Run(case.saved, interval=1, keep=0, run_folder=case.folder)
    run.train(run.checkpoint.load(), 9)
    read, manifests = LocalStore.read, []

    def count(store: LocalStore, name: str, *range: int) -> memoryview:
        manifests.extend([name] if name.endswith("MANIFEST.json") else [])
        return read(store, name, *range)

    monkeypatch.setattr(LocalStore, "read", count)
    case.check(case.folder)
    assert manifests == []
    (case.folder / ".known_saves").unlink()
    case.check(case.folder)
    assert manifests == [f"{committed(open_store(case.saved))[0]}/MANIFEST.json"]


# ---------------------------------------------------------------- two starts at a time


def test_the_later_of_two_starts_goes_on_and_the_other_ends(tmp_path: Path) -> None:
    """Here of two runs, in a place where nothing was saved yet. The next start of the one that ended is refused."""

    (tmp_path / "other").mkdir()
    shared = str(tmp_path / "shared")
    first = Run(shared, interval=1, keep=1, run_folder=tmp_path / "other")
    second = Run(shared, interval=1, keep=1)
    assert first.checkpoint.load() == second.checkpoint.load() == 0
    said = rf"shared/.claim: a later start saves there: of \S+ on {socket.gethostname()}, process {os.getpid()}, "
    with pytest.raises(TakenOverError, match=said):
        first.train(0, 2)
    assert steps_in(tmp_path / "shared") == []
    second.train(0, 3)
    before = content(tmp_path / "shared")
    with pytest.raises(TakenOverError, match=said):
        first.train(0, 4)
    assert content(tmp_path / "shared").items() >= before.items()
    assert steps_in(tmp_path / "shared") == [3]
    with pytest.raises(ConfigError, match="was saved by another run, "):
        check_checkpoints(Config(checkpoint=Checkpoint(folder=shared)), IDENTITY, tmp_path / "other")


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_save_under_way_is_not_committed_once_another_start_has_begun(
    case: Case, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its files removed before a commit of the other start, if that is not on its machine."""
    case.start(case.folder, 3)
    first = Run(case.saved, interval=1, keep=2, mode="async", run_folder=case.folder)
    first.checkpoint.load()
    written, goes_on = threading.Event(), threading.Event()
    commit = manager.CheckpointManager._commit

    def wait(*arguments: Any) -> None:
        written.set()
        assert goes_on.wait(60)
        commit(*arguments)

    monkeypatch.setattr(manager.CheckpointManager, "_commit", wait)
    first.step()
    first.checkpoint.save(4)
    first.step()  # its hook waits until the state is copied
    assert written.wait(60)
    monkeypatch.undo()
    (under_way,) = case.saved.glob("step-00000004-*")
    if host == "another":
        monkeypatch.setattr(socket, "gethostname", lambda: host)
    second = Run(case.saved, interval=1, keep=2, run_folder=case.folder)
    assert second.checkpoint.load() == 3
    assert under_way.exists() == (host == "another")
    goes_on.set()
    with pytest.raises(TakenOverError):
        first.checkpoint.wait()
    assert steps_in(case.saved) == [3, 2]
    second.train(3, 5)
    assert steps_in(case.saved) == [5, 4]
    assert not under_way.exists()
    assert case.start(case.folder, 6).checkpoint.newest_step == 6


def test_an_earlier_start_removes_nothing_that_a_later_one_may_need(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it has committed in the moment in which the other one began, and then tidies up."""
    first = case.start(case.folder, 3)
    second = Run(case.saved, interval=1, keep=0, run_folder=case.folder)
    assert second.checkpoint.load() == 3
    second.train(3, 5)
    before = content(case.saved)
    first.checkpoint.retention.tidy(committed(open_store(case.saved))[0])
    assert content(case.saved) == before
    assert "old checkpoints could not be removed: " in caplog.text
    assert ".claim: a later start saves there" in caplog.text


def test_an_error_that_a_later_start_has_caused_is_named_as_that(case: Case) -> None:
    """As where it removes what the earlier one writes. A plain error would make torchrun start it again."""
    first = Run(case.saved, interval=1, run_folder=case.folder)
    first.checkpoint.load()

    def fail(*_: Any) -> None:
        Run(case.saved, run_folder=case.folder).checkpoint.load()
        raise StoreError("gone")

    with patch("checkpoint.files.write_items", fail), pytest.raises(TakenOverError):
        first.train(0, 1)
