"""Whose checkpoints are whose: neither another run, nor a copy of the run's folder, nor an earlier start uses them."""

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from checkpoint import manager
from checkpoint.branch import Parent, find_fork, split_place
from checkpoint.checks import check_checkpoints, check_settings
from checkpoint.lease import TakenOverError
from checkpoint.loading import locate
from checkpoint.manifest import committed
from config import Checkpoint, Config, ConfigError, Validation
from run.folder import record_start
from storage import open_store
from tests.distributed.checkpoint_runs import IDENTITY, Run, flip_bit, steps_in
from tests.runs import content


class Case:
    """A place of checkpoints outside of any run's folder, and starts of runs that save there."""

    def __init__(self, root):
        self.root = root
        self.saved = root / "saved"
        self.folder = root / "run"

    def begin(self, folder, **settings):
        """A start of the run in `folder` that may begin, and has recorded itself there."""
        settings = {"interval": 1, "keep": 2} | settings
        config = Config(checkpoint=Checkpoint(folder=str(self.saved), **settings))
        folder.mkdir(exist_ok=True)
        run = Run(self.saved, run_folder=folder, run_id=check_checkpoints(config, IDENTITY, folder), **settings)
        record_start(folder, config, IDENTITY, 1, run.checkpoint.start)
        return run

    def train(self, folder, last, **settings):
        run = self.begin(folder, **settings)
        run.train(run.checkpoint.load(), last)
        return run


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def of_a_run_under_way(case):
    case.train(case.folder, 3)
    return Path(shutil.copytree(case.folder, case.root / "copy"))


def before_any_checkpoint(case):
    case.begin(case.folder).checkpoint.load()
    copy = Path(shutil.copytree(case.folder, case.root / "copy"))
    case.train(case.folder, 2)
    return copy


def of_a_run_that_has_moved(case):
    case.train(case.folder, 2)
    case.train(case.folder.rename(case.root / "moved"), 3)
    return Path(shutil.copytree(case.root / "moved", case.folder))


@pytest.mark.parametrize("copy", [of_a_run_under_way, before_any_checkpoint, of_a_run_that_has_moved])
def test_a_copy_does_not_go_on_with_the_runs_checkpoints(case, copy):
    """It is told how to begin a branch. Commands that only read take what the run has."""
    folder = copy(case)
    before = content(case.saved)
    with pytest.raises(ConfigError) as refused:
        case.begin(folder)
    assert f"{folder} is a copy" in str(refused.value)
    assert f"--checkpoint.branch_from={case.saved}@{steps_in(case.saved)[0]}" in str(refused.value)
    assert content(case.saved) == before
    (folder / "config.toml").write_text(f'[checkpoint]\nfolder = "{case.saved}"\n')
    assert locate(folder)[0][1] == committed(open_store(case.saved))[0]


def moved(case):
    case.train(case.folder, 1)
    return case.folder.rename(case.root / "moved")


def moved_there_and_back(case):
    case.train(case.folder, 1)
    there = case.folder.rename(case.root / "moved")
    case.begin(there).checkpoint.load()
    return there.rename(case.folder)


def made_again(case):
    """The folder was lost with its machine, or is on a node's own disk; the next start was killed before it saved."""
    case.train(case.folder, 1)
    shutil.rmtree(case.folder)
    case.begin(case.folder)
    return case.folder


def restored(case):
    """An older state of the folder, from a backup."""
    case.begin(case.folder)
    backup = Path(shutil.copytree(case.folder, case.root / "backup"))
    case.train(case.folder, 1)
    shutil.rmtree(case.folder)
    return backup.rename(case.folder)


@pytest.mark.parametrize("make", [moved, moved_there_and_back, made_again, restored])
def test_what_only_looks_like_a_copy_goes_on(case, make):
    folder = make(case)
    assert case.train(folder, 3).checkpoint.newest_step == 3
    assert steps_in(case.saved) == [3, 2]
    case.begin(folder)


def test_another_runs_place_is_refused(case):
    """Be what is there older than its own. A damaged manifest, which no resume can take, says nothing."""
    case.train(case.folder, 2)
    other = case.root / "other"
    with pytest.raises(ConfigError) as refused:
        case.begin(other)
    assert f"checkpoint.folder = '{case.saved}'" in str(refused.value)
    assert str(case.folder) in str(refused.value)
    (other / ".run_id").write_bytes(b"\xff\x00")  # damaged
    with pytest.raises(ConfigError):
        case.begin(other)
    (other / ".run_id").unlink()
    for folder in case.saved.iterdir():
        if folder.is_dir():
            flip_bit(folder / "MANIFEST.json", 100)
    case.begin(other)


# ---------------------------------------------------------------- two starts at a time


def test_the_later_of_two_starts_goes_on_and_the_other_ends(case):
    """Here of two runs, in a place where nothing was saved yet. The next start of the one that ended is refused."""
    first = case.begin(case.root / "other")
    second = case.begin(case.folder)
    assert first.checkpoint.load() == second.checkpoint.load() == 0
    first.step()
    with pytest.raises(TakenOverError) as refused:
        first.checkpoint.save(1)
    assert socket.gethostname() in str(refused.value)
    assert str(os.getpid()) in str(refused.value)
    assert steps_in(case.saved) == []
    second.train(0, 3)
    before = content(case.saved)
    with pytest.raises(TakenOverError):
        first.checkpoint.save(4)
    assert content(case.saved) == before
    with pytest.raises(ConfigError, match="another run"):
        case.begin(case.root / "other")


def test_a_run_that_another_one_overtakes_before_its_load_does_not_take_its_checkpoints(case):
    second = case.begin(case.root / "other")
    case.train(case.folder, 1)
    with pytest.raises(ConfigError, match="another run"):
        second.checkpoint.load()


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_save_under_way_is_not_committed_once_another_start_has_begun(case, host, monkeypatch):
    """Nor its files removed before a commit of the other start, if that is not on its machine."""
    case.train(case.folder, 3)
    first = case.begin(case.folder, mode="async")
    first.checkpoint.load()
    written, goes_on = threading.Event(), threading.Event()
    commit = manager.CheckpointManager._commit

    def wait(*arguments):
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
    second = case.begin(case.folder)
    assert second.checkpoint.load() == 3
    assert under_way.exists() == (host == "another")
    goes_on.set()
    with pytest.raises(TakenOverError):
        first.checkpoint.wait()
    assert steps_in(case.saved) == [3, 2]
    second.train(3, 5)
    assert steps_in(case.saved) == [5, 4]
    assert not under_way.exists()


def test_an_earlier_start_removes_nothing_that_a_later_one_may_need(case, caplog):
    """As where it has committed in the moment in which the other one began, and then tidies up."""
    first = case.train(case.folder, 3)
    case.train(case.folder, 5, keep=0)
    before = content(case.saved)
    first.checkpoint._tidy(committed(open_store(case.saved))[0])
    assert content(case.saved) == before
    assert "a later start saves there" in caplog.text


def test_a_place_that_is_moved_or_removed_is_not_made_again(case):
    """What is saved in a new folder of the old name would be lost to the run that is moved."""
    run = case.train(case.folder, 1)
    case.saved.rename(case.root / "elsewhere")
    with pytest.raises(ConfigError, match=r"\.lease: is gone"):
        run.checkpoint.save(2)
    assert not case.saved.exists()
    (case.root / "elsewhere").rename(case.saved)
    assert json.loads((case.saved / ".lease").read_text())["manifest"]["folder"] == str(case.folder)
    assert case.train(case.folder, 2).checkpoint.newest_step == 2


def test_where_a_branch_begins(tmp_path, monkeypatch):
    """Where it began before, if it did, whatever the setting says now. A folder may be called like a step."""
    assert find_fork("trunk", None) == "trunk"
    assert find_fork("trunk", Parent("trunk", 4, "/runs/trunk", 64)) == "trunk@4"
    monkeypatch.chdir(tmp_path)
    assert split_place("x@5") == ("x", "5")
    (tmp_path / "x@5").mkdir()
    assert split_place("x@5") == ("x@5", "")
    assert split_place("x@5@7") == ("x@5", "7")


def test_averages_of_all_checkpoints_that_a_run_keeps():
    for keep in (0, 3):
        check_settings(Config(checkpoint=Checkpoint(keep=keep), validation=Validation(average=3)))
    with pytest.raises(ConfigError, match=r"validation\.average = 3"):
        check_settings(Config(checkpoint=Checkpoint(keep=2), validation=Validation(average=3)))
