"""Whose checkpoints are whose: no run goes on from another's, and each removes only its own."""

import os
import re
import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest

from checkpoint import retention
from checkpoint.checks import check_checkpoints
from checkpoint.names import is_same_run, run_name
from checkpoint.retention import committed
from config import Checkpoint, Config, ConfigError
from storage import LocalStore, StoreError, open_store
from tests.corpus import write_dataset
from tests.distributed.checkpoint_runs import IDENTITY, Run, flip_bit
from tests.harness import run_ranks
from tests.runs import Ended, call

SMALL = (
    "--model.flavor=tiny",
    "--model.vocab_size=128",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.param_dtype=float32",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
    "--checkpoint.interval=5",
)
OLD = "step-00000001-000000010000"  # a save that was begun long ago


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that runs train.py with these arguments, in an empty folder."""
    documents = [[1 + (i * j) % 90 for j in range(60)] + [0] for i in range(60)]
    data = write_dataset(tmp_path / "data", [documents], vocab_size=100)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def call_train(*arguments: str) -> Ended:
        return call(tmp_path, *SMALL, f"--data.datasets={data}", *arguments)

    return call_train


def steps_in(folder: Path | str) -> list[int]:
    return [int(name.split("-")[1]) for name in committed(open_store(folder))]


def content(folder: Path | str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def saved_as(name: str, folder: Path, last: int, keep: int = 0, **settings) -> Run:
    """A run of another name that has saved steps 1 to `last` to the folder."""
    run = Run(folder, interval=1, keep=keep, run_folder=Path(name), **settings)
    run.train(0, last)
    return run


def check(place: Path | str, run_folder: Path) -> None:
    check_checkpoints(Config(checkpoint=Checkpoint(folder=str(place))), IDENTITY, run_folder)


# ---------------------------------------------------------------- whole runs of train.py


def test_a_run_does_not_go_on_from_another_and_remove_its_checkpoints(start):
    assert start("--run.folder=outputs/a", "--training.steps=30", "--checkpoint.keep=0").returncode == 0
    place = "outputs/a/checkpoints"
    assert steps_in(place) == [30, 25, 20, 15, 10, 5]
    before = content("outputs/a")
    again = ("--run.folder=outputs/b", f"--checkpoint.folder={place}", "--training.steps=40")
    refused = start(*again)
    assert content("outputs/a") == before
    assert refused.returncode == 2
    assert os.listdir("outputs") == ["a"]
    other = f"{socket.gethostname()}:{Path('outputs/a').absolute()}"
    newest = committed(open_store(place))[0]
    assert f"error: checkpoint.folder = '{place}': its newest checkpoint, {newest}, was saved by" in refused.stderr
    assert f"another run, {other}: set another checkpoint.folder" in refused.stderr

    unnamed = start(*again[1:])
    assert (unnamed.returncode, os.listdir("outputs")) == (2, ["a"])
    assert re.search(r"into outputs/llama-tiny-\S+/\.run_name and start", unnamed.stderr)

    (advice,) = re.findall(r"checkpoint\.initial_load = '(\S+)'", refused.stderr)
    begun = start("--run.folder=outputs/c", f"--checkpoint.initial_load={advice}", "--training.steps=5")
    assert (begun.returncode, steps_in("outputs/c/checkpoints")) == (0, [5])

    assert f"write {other} into outputs/b/.run_name and start it with --run.folder=outputs/b" in refused.stderr
    Path("outputs/b").mkdir()
    Path("outputs/b/.run_name").write_text(other)
    claimed = start(*again)
    assert claimed.returncode == 0, claimed.stderr
    assert f"resumed from {place}/{newest}" in claimed.stderr
    assert steps_in(place) == [40, 35], "it is that run now: of all that are there `keep` stay"
    assert start("--run.folder=outputs/a", "--training.steps=45").returncode == 0


@pytest.mark.parametrize("key", ["folder", "upload"])
def test_neither_place_may_be_another_runs(start, key):
    assert start("--run.folder=a", "--checkpoint.upload=far", "--training.steps=5").returncode == 0
    before = content(".")
    refused = start("--run.folder=b", f"--checkpoint.{key}=far", "--training.steps=10")
    assert (refused.returncode, content(".")) == (2, before)
    assert f"checkpoint.{key} = 'far': its newest checkpoint" in refused.stderr
    assert f"set another checkpoint.{key}. To start from its weights" in refused.stderr
    for other in ("--checkpoint.enable=false", "--checkpoint.save_model"):  # by the last step
        refused = start("--run.folder=b", "--checkpoint.folder=far", "--training.steps=5", other)
        assert (refused.returncode == 2) == (other == "--checkpoint.save_model")


def test_a_run_folder_that_was_moved_goes_on_without_a_claim(start):
    arguments = ("--checkpoint.folder=saved", "--checkpoint.upload=far")
    assert start("--run.folder=a", *arguments, "--training.steps=5").returncode == 0
    name = Path("a/.run_name").read_text()
    assert name == f"{socket.gethostname()}:{Path('a').absolute()}\n"
    Path("a").rename("moved")
    for steps in (10, 15):
        moved = start("--run.folder=moved", *arguments, f"--training.steps={steps}")
        assert moved.returncode == 0, moved.stderr
        assert f"resumed from saved/step-{steps - 5:08}" in moved.stderr
    assert Path("moved/.run_name").read_text() == name
    assert steps_in("saved") == steps_in("far") == [15, 10], "what it saved by its old path is its own"


def test_a_run_folder_that_was_lost_is_made_again_on_another_machine(start, monkeypatch):
    """As by SkyPilot: the checkpoints are in a bucket, the disk of the machine is gone."""
    arguments = ("--run.folder=outputs/a", "--checkpoint.folder=bucket")
    assert start(*arguments, "--training.steps=10").returncode == 0
    shutil.rmtree("outputs")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    again = start(*arguments, "--training.steps=15")
    assert again.returncode == 0, again.stderr
    assert "resumed from bucket/step-00000010" in again.stderr
    assert steps_in("bucket") == [15, 10]


def test_a_run_of_an_older_version_goes_on_where_it_was_moved(start):
    """It has no `.run_name`, and its checkpoints, in its own folder, name its old place."""
    assert start("--run.folder=a", "--training.steps=10").returncode == 0
    Path("a/.run_name").unlink()
    Path("a").rename("moved")
    for steps in (15, 20):
        moved = start("--run.folder=moved", f"--training.steps={steps}")
        assert moved.returncode == 0, moved.stderr
        assert f"resumed from moved/checkpoints/step-{steps - 5:08}" in moved.stderr
        assert steps_in("moved/checkpoints") == [steps, steps - 5]


# ---------------------------------------------------------------- names


def test_a_run_is_told_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.chdir(tmp_path)
    assert run_name(Path("a")) == f"host:{tmp_path}/a"
    (tmp_path / ".run_name").write_text("")  # cut by a full disk
    assert run_name(tmp_path) == f"host:{tmp_path}"
    (tmp_path / ".run_name").write_text("other:/x y\n")
    assert run_name(tmp_path) == "other:/x y"
    assert is_same_run("host:/x/a", "other:/x/a")
    assert not is_same_run("host:/x/a", "host:/x/b")
    assert is_same_run("mine", "mine")
    assert not is_same_run("mine", "yours")


# ---------------------------------------------------------------- what a start is refused for


def test_the_newest_whose_manifest_can_be_read_tells_whose_a_place_is(tmp_path):
    """As a resume passes over a damaged one. A model alone counts, too."""
    saved_as("other", tmp_path, 2)
    Run(tmp_path, interval=1, keep=0).train(2, 3)
    check(tmp_path, Path("unused"))
    with pytest.raises(ConfigError, match=f"step-00000003-.* by another run, .*{Path('unused').absolute()}: set"):
        check(tmp_path, Path("other"))
    (newest,) = tmp_path.glob("step-00000003-*")
    flip_bit(newest / "MANIFEST.json", 100)
    check(tmp_path, Path("other"))
    with pytest.raises(ConfigError, match=r"step-00000002-.* by another run"):
        check(tmp_path, Path("unused"))
    Run(tmp_path, interval=1, keep=0, steps=4, save_model=True).train(3, 4)
    for folder in tmp_path.glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"model-00000004-.* by another run"):
        check(tmp_path, Path("other"))


# ---------------------------------------------------------------- what is removed


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_run_saved_stays_and_of_its_own_a_run_keeps_as_many_as_it_shall(tmp_path, ranks):
    """Those of the other are between its own, where both were once let save there. Nor are the other's saves ended."""
    run_ranks(ranks, _train, str(tmp_path), ranks, "own", 0, 3)
    run_ranks(ranks, _train, str(tmp_path), ranks, "other", 3, 5)
    (tmp_path / OLD).mkdir()
    (tmp_path / OLD / "__0_0.distcp").write_bytes(b"begun")
    theirs = {path: data for path, data in content(tmp_path).items() if not re.search("step-0000000[123]-6", str(path))}
    for first in (5, 6, 7):
        run_ranks(ranks, _train, str(tmp_path), ranks, "own", first, first + 1, 2)
        expected = {5: [6, 5, 4, 3], 6: [7, 6, 5, 4], 7: [8, 7, 5, 4]}
        assert steps_in(tmp_path) == expected[first]
    assert theirs.items() <= content(tmp_path).items()


def _train(folder, ranks, name, first, last, keep=0):
    run = Run(folder, (ranks,), interval=1, keep=keep, run_folder=Path(name))
    assert run.checkpoint.load() == first
    run.train(first, last)


def test_a_damaged_manifest_of_unknown_owner_stays_unless_a_load_has_passed_it_over(tmp_path, caplog):
    run = Run(tmp_path, interval=1, keep=0)
    run.train(0, 5)
    for step in (1, 5):
        (folder,) = tmp_path.glob(f"step-0000000{step}-*")
        flip_bit(folder / "MANIFEST.json", 100)
    run = Run(tmp_path, interval=1, keep=1)
    assert run.checkpoint.load() == 4
    run.train(4, 6)
    assert steps_in(tmp_path) == [6, 1]
    assert "which run saved step-00000001-" in caplog.text


def test_a_damaged_checkpoint_of_another_run_stays_though_a_load_has_passed_it_over(tmp_path):
    Run(tmp_path, interval=1).train(0, 1)
    saved_as("other", tmp_path, 2)
    for step in (1, 2):
        for folder in tmp_path.glob(f"step-0000000{step}-*"):
            if "other" in (folder / "MANIFEST.json").read_text():
                flip_bit(folder / "__0_0.distcp", 100)
    run = Run(tmp_path, interval=1, keep=1)
    assert run.checkpoint.load() == 1
    run.train(1, 3)
    assert steps_in(tmp_path) == [3, 2, 1]


def test_a_model_alone_is_saved_beside_another_runs_of_the_same_step(tmp_path):
    saved_as("other", tmp_path, 2, steps=2, save_model=True)
    for expected in (2, 2):
        run = Run(tmp_path, interval=1, steps=2, save_model=True)
        run.checkpoint.finish(2)
        run.checkpoint.wait()
        models = [(path / "MANIFEST.json").read_text() for path in tmp_path.glob("model-00000002-*")]
        assert len(models) == expected
        assert sum('/other"' in text for text in models) == 1
    for path in tmp_path.glob("model-*"):
        if "/unused" in (path / "MANIFEST.json").read_text():
            (path / "MANIFEST.json").unlink()  # lost, so that it is saved again, and nothing else goes
    run.checkpoint.finish(2)
    run.checkpoint.wait()
    assert sum('/other"' in path.read_text() for path in tmp_path.glob("model-*/MANIFEST.json")) == 1


def test_manifests_are_read_once(tmp_path, monkeypatch):
    Run(tmp_path, interval=1, keep=3).train(0, 2)
    read, asked = LocalStore.read, []
    monkeypatch.setattr(LocalStore, "read", lambda store, name, *place: asked.append(name) or read(store, name, *place))
    before = {f"{name}/MANIFEST.json" for name in committed(open_store(tmp_path))}
    Run(tmp_path, interval=1, keep=3).train(2, 6)
    assert (len(asked), set(asked)) == (2, before)
    assert steps_in(tmp_path) == [6, 5, 4]


def test_another_runs_checkpoints_are_no_room_and_none_is_made_beside_them(tmp_path, monkeypatch):
    saved_as("other", tmp_path, 3)
    Run(tmp_path, interval=1, keep=0).train(3, 4)
    (tmp_path / OLD).mkdir()
    (tmp_path / OLD / "__0_0.distcp").write_bytes(bytes(100_000))
    (own,) = tmp_path.glob("step-00000004-*")
    own_bytes, before = sum(file.stat().st_size for file in own.iterdir()), content(tmp_path)
    for short, fits in ((0, True), (1, False)):  # its own is room
        run = Run(tmp_path, interval=1, keep=1)
        two_bytes = 2 * 3 * sum(parameter.nbytes for parameter in run.model.parameters())
        free_bytes = two_bytes - own_bytes - short
        monkeypatch.setattr(retention.shutil, "disk_usage", lambda _, free=free_bytes: mock.Mock(free=free))
        if fits:
            assert run.checkpoint.load() == 4
        else:
            with pytest.raises(StoreError, match=r"2 checkpoints of .* must fit"):
                run.checkpoint.load()
        assert content(tmp_path) == before
