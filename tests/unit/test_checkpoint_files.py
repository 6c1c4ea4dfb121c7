"""One checkpoint in one process: layout, commit, checks, what is refused."""

import errno
import os
import pickle
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import storage
from checkpoint import CheckpointError, files
from checkpoint.checks import check_checkpoints
from checkpoint.files import plan_save, read_state, resolver, write_items
from checkpoint.manifest import (
    commit,
    committed,
    encode_manifest,
    open_checkpoint,
    read_manifest,
    unpickle_metadata,
)
from checkpoint.state import model_tensors
from config import Checkpoint, Config
from parallel.ranks import Ranks
from storage import DamagedError, LocalStore, StoreError, open_store
from tests.distributed.checkpoint_runs import IDENTITY, Run, Tower, flip_bit, load_model, same, steps_in


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has saved step 1 and 2; its folder is only read."""
    run = Run(tmp_path_factory.mktemp("trained"), interval=1, keep=0)
    run.train(0, 2)
    return run


@pytest.fixture
def run(tmp_path, trained):
    """That run, with a copy of its checkpoints in `tmp_path`."""
    shutil.copytree(trained.checkpoint.store.url, tmp_path, dirs_exist_ok=True)
    return trained


def newest(folder):
    return folder / committed(open_store(folder))[0]


def assert_same(left, right):
    assert same(left, right) == []


def test_resume_falls_back_as_a_whole_and_removes_the_damaged_one_after_the_next_commit(tmp_path, run, caplog):
    before = newest(tmp_path)
    for file in newest(tmp_path).glob("*.distcp"):
        flip_bit(file, -400)
    again = Run(tmp_path, interval=1, keep=2)
    assert again.checkpoint.load() == 1
    assert re.search(r"__0_[01].distcp: checksum of \S+ differs", caplog.text), "file and tensor are named"
    assert all(weight.grad is None for weight in again.model.parameters()), "one of zeros would decay a weight"
    reference = Run(tmp_path / "reference", interval=100)
    reference.train(0, 1)
    assert_same(again.model.state_dict(), reference.model.state_dict())
    assert before.exists()
    again.train(1, 2)
    assert not before.exists()
    assert steps_in(tmp_path) == [2, 1]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__0_1.distcp"])
def test_every_damage_is_found_and_named_and_the_one_before_is_used(tmp_path, run, caplog, name):
    """A bit, the end or all of a file; loaded by one run again and again."""
    again = Run(tmp_path, interval=1)
    file = newest(tmp_path) / name
    intact = file.read_bytes()
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    for damaged in (flipped, intact[: len(intact) // 3], b""):
        file.write_bytes(damaged)
        caplog.clear()
        assert again.checkpoint.load() == 1
        assert name in caplog.text
    file.unlink()
    assert again.checkpoint.load() == 1
    file.write_bytes(intact)
    assert again.checkpoint.load() == 2


def test_a_store_that_is_away_for_one_rank_makes_the_damage_that_another_finds_no_reason(monkeypatch):
    """By which all would pass over a checkpoint that may be whole."""
    damage, away = DamagedError("missing"), StoreError("away")
    for own, other in ((damage, away), (away, damage)):
        monkeypatch.setattr(Ranks, "all_gather_object", lambda _, value, other=other: [value, other])
        with pytest.raises(StoreError) as caught:
            Ranks().together(mock.Mock(side_effect=own))
        assert caught.value is away


def test_nothing_intact_is_an_error_never_a_fresh_start(tmp_path, run):
    for name in committed(open_store(tmp_path)):
        (tmp_path / name / ".metadata").unlink()
    for run in (Run(tmp_path), Run(tmp_path / "fresh", initial_load=str(tmp_path))):
        with pytest.raises(CheckpointError, match=r"no checkpoint is intact \(2 tried\): .*\.metadata: missing$"):
            run.checkpoint.load()


def test_another_model_and_a_later_format_are_refused_not_passed_over(tmp_path, run):
    other = Run(tmp_path)
    other.checkpoint.identity = {**IDENTITY, "dim": 16}
    with pytest.raises(CheckpointError, match="holds another model: dim is 12 there and 16 here"):
        other.checkpoint.load()
    other.checkpoint.identity = {**IDENTITY, "a_field_added_since": False}
    assert other.checkpoint.load() == 2
    manifest = read_manifest(open_store(tmp_path), newest(tmp_path).name)
    (newest(tmp_path) / "MANIFEST.json").write_bytes(encode_manifest(manifest | {"format": 2}))
    with pytest.raises(CheckpointError, match="format 2; this version reads 1"):
        other.checkpoint.load()


def test_initial_load_is_checked_before_anything_is_written(tmp_path, run):
    def check(place, identity=IDENTITY, **settings):
        settings = {"folder": str(tmp_path / "to"), "initial_load": str(place)} | settings
        check_checkpoints(Config(checkpoint=Checkpoint(**settings)), identity, Path("unused"))

    check(tmp_path)
    with pytest.raises(CheckpointError, match="holds another model: dim"):
        check(tmp_path, {**IDENTITY, "dim": 16})
    with pytest.raises(CheckpointError, match=r"checkpoint\.initial_load: .*typo"):
        check(tmp_path / "typo")
    check(tmp_path / "gone", folder=str(tmp_path))  # this run resumes
    newest = committed(open_store(tmp_path))[0]
    (tmp_path / newest / "MANIFEST.json").write_text("{")
    check(tmp_path)  # the one before will do
    assert not (tmp_path / "to").exists()


def test_initial_load_takes_weights_only(tmp_path, run):
    fresh = Run(tmp_path / "fine-tune", seed=7, initial_load=str(tmp_path))
    assert fresh.checkpoint.load() == 0
    assert_same(fresh.model.state_dict(), run.model.state_dict())
    assert not fresh.optimizer.state
    assert fresh.data.samples == 0


def test_a_linked_checkpoint_is_loaded_and_only_the_link_is_ever_removed(tmp_path, run):
    linked = newest(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / linked.name).symlink_to(linked)
    other = Run(tmp_path / "other", interval=1, keep=1)
    assert other.checkpoint.load() == 2
    other.train(2, 3)
    assert steps_in(tmp_path / "other") == [3]
    assert load_model(linked, Tower())["step"] == 2


class Payload:
    """Runs a command when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_payload_in_the_index_never_runs(tmp_path, run):
    marker = tmp_path / "ran"
    (newest(tmp_path) / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    assert load_model(tmp_path, Tower())["step"] == 1
    with pytest.raises(DamagedError, match="refused"):
        unpickle_metadata(pickle.dumps(Payload(marker)))
    assert not marker.exists()
    with pytest.raises(DamagedError, match=r"refused, .* to this\.float32, "):  # a name of torch's, elsewhere
        unpickle_metadata(b"cthis\nfloat32\n.")
    for pickled in (b"cut", pickle.dumps([])):
        with pytest.raises(DamagedError, match="not a readable index"):
            unpickle_metadata(pickled)


def test_payload_in_the_place_of_a_tensor_never_runs(tmp_path, monkeypatch):
    """By somebody who can write everything: index, checksums and manifest agree with it. Stock's have no checksums."""
    marker, store = tmp_path / "ran", LocalStore(tmp_path)
    monkeypatch.setattr(files, "_save_tensor", lambda tensor, stream: torch.save(Payload(marker), stream))
    state = {"x": torch.ones(3)}
    opened = written_alone(store, state)
    (info,) = opened.metadata.storage_data.values()
    for _ in ("ours", "stock"):
        with pytest.raises(DamagedError, match="x is not a readable tensor"):
            read_state(opened, {"model": state})
        vars(info).pop("crc32", None)
    assert not marker.exists()
    torch.load(tmp_path / "one" / info.relative_path, weights_only=False)
    assert marker.exists()  # the payload is a real one


def test_a_commit_outlasts_a_power_cut(tmp_path, monkeypatch):
    """What the manifest vouches for is on the disk before it has its name, and the names of all before it is told."""
    done, fsync, replace = [], os.fsync, os.replace

    def watch_fsync(descriptor):
        done.append(("durable", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def watch_replace(source, target):
        done.append(("named", target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    Run(tmp_path).train(0, 1)
    folder = newest(tmp_path)
    *before, named, in_folder, folder_itself = done
    written = {file.name for file in folder.glob("*.distcp")} | {"..metadata.tmp", ".MANIFEST.json.tmp"}
    assert {("durable", folder / name) for name in written} < set(before)
    assert named == ("named", folder / "MANIFEST.json")
    assert [in_folder, folder_itself] == [("durable", folder), ("durable", tmp_path)]


def test_a_read_that_fails_is_no_damage(tmp_path, monkeypatch, run):
    """But a disk that is away: the checkpoint may be whole."""
    monkeypatch.setattr(storage.local.np, "fromfile", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StoreError, match="Input/output error") as caught:
        Run(tmp_path, retry_seconds=0).checkpoint.load()
    assert not isinstance(caught.value, DamagedError)


def test_trouble_of_a_file_system_that_passes_is_waited_for(tmp_path, monkeypatch):
    """As of an NFS server that restarts: in a write, an fsync, a rename and a read.

    After a failed write torch ends its archive all the same, and then complains of that end alone.
    """
    failing = {"write": files._ChecksummedStream, "fsync": os, "replace": Path, "fromfile": storage.local.np}
    for number, (name, owner) in enumerate(failing.items()):
        errors = iter([OSError(code, "away") for code in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)])
        real = getattr(owner, name)

        def fail_first(*arguments, errors=errors, real=real, **named):
            error = next(errors, None)
            if error:
                raise error
            return real(*arguments, **named)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail_first)
            run = Run(tmp_path, interval=1, keep=1)
            assert run.checkpoint.load() == number
            run.train(number, number + 1)
        assert next(errors, None) is None
    assert load_model(tmp_path, Tower())["step"] == len(failing)


def test_a_full_disk_leaves_nothing_of_a_save(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.checkpoint.load()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(files._ChecksummedStream, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        run.checkpoint.save(1)
    assert os.listdir(tmp_path) == [".lease"]


def test_a_weight_of_two_tensors_is_refused(tmp_path):
    """It would come back as one of them."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(CheckpointError, match="weight is a TwoTensor of 2 tensors: it cannot be saved"):
        model_tensors([model])


def written_alone(store, values):
    """A checkpoint of tensors, by this process."""
    plan = plan_save({"model": values}, Ranks())
    commit(store, "one", plan.metadata, [write_items(store, "one", 0, plan.files, resolver({"model": values}))], {})
    return open_checkpoint(store, "one")
