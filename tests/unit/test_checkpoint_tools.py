"""The command line that lists and verifies checkpoints."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint import CheckpointError
from checkpoint.loading import locate
from checkpoint.retention import committed
from config import from_dict, to_toml
from storage import LocalStore, open_store
from tests.distributed.checkpoint_runs import Run, Tower, flip_bit, load_run
from tools import verify


@pytest.fixture
def tool(capsys):
    """A function that calls a command on a place and returns its exit code and what it printed."""

    def call(command, place):
        code = 0
        try:
            verify.main([str(place), *(["--list"] if command == "list" else [])])
        except SystemExit as ended:
            code = ended.code
        printed, said = capsys.readouterr(), code if isinstance(code, str) else ""
        return 1 if said else code, printed.out + printed.err + said

    return call


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of step 1 and 2, and one that was begun and never committed."""
    Run(tmp_path, interval=1).train(0, 2)
    begun = tmp_path / "step-00000003-692000000000"
    begun.mkdir()
    (begun / "__0_0.distcp").write_bytes(b"begun")
    return tmp_path


def test_list_shows_each_and_what_is_wrong(folder, tool):
    code, text = tool("list", folder)
    assert code == 0
    assert text.count(": committed, step ") == 2
    assert "never committed" in text
    file = next((folder / committed(open_store(folder))[0]).glob("__0_0*"))
    file.write_bytes(file.read_bytes()[:-1])
    code, text = tool("list", folder)
    assert code == 1
    assert "DAMAGED" in text
    assert f"__0_0.distcp has {file.stat().st_size} bytes, not {file.stat().st_size + 1}" in text


def test_what_only_begins_like_a_checkpoint_is_none(tmp_path, tool):
    Run(tmp_path).train(0, 1)
    (tmp_path / "model-notes").mkdir()
    (tmp_path / "model-notes" / "ideas.txt").touch()
    code, text = tool("list", tmp_path)
    assert (code, "notes" in text) == (0, False)


def test_verify_reads_every_byte(folder, tool):
    code, text = tool("verify", folder)
    assert code == 0
    assert text.count("intact") == 2
    newest = folder / committed(open_store(folder))[0]
    file = newest / "__0_1.distcp"
    flip_bit(file, file.stat().st_size // 2)
    code, text = tool("verify", folder)
    assert code == 1
    assert "__0_1.distcp: checksum of" in text
    assert tool("verify", newest)[0] == 1


def test_what_a_run_removes_while_it_is_verified_is_not_damaged(folder, tool, monkeypatch):
    oldest, verify_items = folder / committed(open_store(folder))[-1], verify.verify_items

    def remove_first(opened, on_progress):
        if opened.name == oldest.name:
            shutil.rmtree(oldest)
        verify_items(opened, on_progress)

    monkeypatch.setattr("tools.verify.verify_items", remove_first)
    code, text = tool("verify", folder)
    assert code == 0
    assert f"{oldest.name}: removed during this check" in text
    assert text.count("intact") == 1


def test_a_manifest_that_is_listed_and_cannot_be_read_is_damage(folder, tool, monkeypatch):
    name, sizes = committed(open_store(folder))[0], LocalStore.sizes
    manifest = folder / name / "MANIFEST.json"
    listed = {f"{name}/MANIFEST.json": manifest.stat().st_size}
    manifest.unlink()
    monkeypatch.setattr(
        LocalStore, "sizes", lambda store, *at: sizes(store, *at) | (listed if store.folder == folder else {})
    )
    code, text = tool("verify", folder)
    assert (code, text.count("DAMAGED")) == (1, 1)


def test_stock_dcp_is_neither_damaged_nor_vouched_for(tmp_path, tool):
    dcp.save({"model": Tower().state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    code, text = tool("verify", tmp_path)
    assert (code, "can be loaded, but not verified" in text) == (1, True)
    assert "DAMAGED" not in text


def test_one_of_ours_without_its_manifest_was_never_committed(folder, tool):
    newest = folder / committed(open_store(folder))[0]
    (newest / "MANIFEST.json").unlink()
    assert tool("verify", newest) == (1, f"{newest}: never committed, nothing will use it\nfaults: 1")
    with pytest.raises(CheckpointError, match=f"{newest}: was never committed, it has no MANIFEST.json"):
        Run(folder / "fresh", initial_load=str(newest)).checkpoint.load()


def test_a_run_that_keeps_its_checkpoints_elsewhere(folder, tool, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": {"folder": str(folder)}})))
    assert tool("list", run)[1].count("step-") == 3
    assert tool("verify", run)[1].count("intact") == 2
    fresh = Run(run / "checkpoints", seed=7, initial_load=str(run))
    fresh.checkpoint.load()
    assert torch.equal(fresh.model.head.weight, load_run(folder, ())[1]["head.weight"])
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": {"folder": str(run / "nothing")}})))
    assert f"{run}: no checkpoint in {run / 'nothing'}, its checkpoint.folder" in tool("list", run)[1]


def test_a_run_may_lose_its_first_place_or_have_newer_ones_in_the_second(folder, tool, tmp_path_factory):
    run, (newest, older) = tmp_path_factory.mktemp("run"), committed(open_store(folder))
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": {"upload": str(folder)}})))
    assert tool("list", run)[1].count("step-") == 3
    first = run / "checkpoints"
    for name, place in ((older, folder), (newest, first)):
        shutil.copytree(folder / name, first / name)
        (store, found), *_ = locate(run)
        assert (store.url, found) == (str(place), newest)
    assert [(store.url, name) for store, name in locate(run)] == [
        (str(place), name) for name in (newest, older) for place in (first, folder)
    ], "of a damaged one, as in a resume, the other copy"
    settings = {"folder": str(run / "lost"), "upload": str(run / "nothing")}
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": settings})))
    wanted = f"in {run / 'lost'}, its checkpoint.folder, nor in {run / 'nothing'}, its checkpoint.upload"
    assert wanted in tool("list", run)[1]


def test_both_places_of_a_run_are_looked_at(folder, tool, tmp_path_factory):
    run, older = tmp_path_factory.mktemp("run"), committed(open_store(folder))[-1]
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": {"upload": str(folder)}})))
    first = run / "checkpoints"
    shutil.copytree(folder / older, first / older)
    file = first / older / "__0_1.distcp"
    flip_bit(file, file.stat().st_size // 2)
    _, text = tool("list", run)
    _, here, there = text.split(":\n")
    assert text.startswith(f"{first}:\n")
    assert (here.count("committed"), there.count("committed")) == (1, 3)
    assert here.endswith(str(folder))
    code, text = tool("verify", run)
    assert (code, text.count("DAMAGED"), text.count("intact")) == (1, 1, 2)
    assert tool("verify", folder)[0] == 0


def test_nothing_there_is_an_error_in_one_line(tmp_path):
    command = [sys.executable, "-m", "tools.verify", tmp_path / "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_may_not_be_looked_into_is_an_error_in_one_line(tmp_path, tool, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    code, text = tool("list", tmp_path)
    assert code == 1
    assert text.startswith(f"error: {tmp_path}/config.toml: cannot be read: ")


@pytest.mark.parametrize("foreign", ["checkpoint = 3", "[checkpoint]\nfolder = 3"])
def test_a_config_of_another_project_says_nothing_of_where_checkpoints_are(folder, tool, foreign):
    (folder / "config.toml").write_text(foreign)
    assert tool("verify", folder)[1].count("intact") == 2
