"""The command line that lists and verifies checkpoints."""

import re
import shutil
from pathlib import Path

import pytest

from checkpoint import CheckpointError
from checkpoint.loading import locate
from checkpoint.manifest import committed, encode_manifest, read_manifest, sha256
from storage import open_store
from tests.distributed.checkpoint_runs import Run, flip_bit
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
    for name in ("step-00000003-692000000000", "model-notes"):  # the latter only begins like one
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"begun")
    return tmp_path


def flip(file):
    flip_bit(file, file.stat().st_size // 2)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "said", "listed"),
    [
        ("MANIFEST.json", flip, "MANIFEST.json: its checksum differs", True),
        (".metadata", flip, ".metadata: its checksum differs", False),
        ("__0_1.distcp", flip, r"__0_1.distcp: checksum of \S+ differs, at byte \d+", False),
        ("__0_0.distcp", cut, r"__0_0.distcp has \d+ bytes, not \d+", True),
        ("__0_0.distcp", Path.unlink, r"__0_0.distcp has no bytes, not \d+", True),
        ("tokenizer.json", flip, "tokenizer.json: its checksum differs", False),
    ],
)
def test_each_damage_is_named(folder, tool, name, damage, said, listed):
    """`listed`: manifests and sizes alone tell it."""
    store = open_store(folder)
    newest = folder / committed(store)[0]
    (newest / "tokenizer.json").write_bytes(b"{}")
    manifest = read_manifest(store, newest.name) | {"companions": {"tokenizer.json": sha256(b"{}")}}
    (newest / "MANIFEST.json").write_bytes(encode_manifest(manifest))
    assert tool("verify", folder)[0] == 0
    damage(newest / name)
    for command, is_found in (("verify", True), ("list", listed)):
        code, text = tool(command, folder)
        assert bool(re.search(f"{newest.name}: DAMAGED: .*{said}", text)) == is_found
        assert (code, "faults: 1" in text) == (is_found, is_found)
        assert text.count(": committed, " if command == "list" else ": intact, ") == 2 - is_found
    assert tool("verify", newest)[0] == 1


def test_of_a_run_only_its_place_of_checkpoints_is_read(folder, tmp_path_factory):
    """Beside it there may be anything, such as links to a folder that holds the run."""
    run = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(folder, run / "checkpoints")
    (run / "config.toml").touch()
    for link in ("up", "up again"):
        (run / link).symlink_to("..")
    assert {store.url for store, _ in locate(run)} == {str(run / "checkpoints")}
    with pytest.raises(CheckpointError, match=rf"ru: does not exist; did you mean {run}\?"):
        locate(run.parent / "ru")


def test_one_without_a_manifest_was_never_committed(folder, tool):
    """It may be stock DCP's."""
    newest = folder / committed(open_store(folder))[0]
    (newest / "MANIFEST.json").unlink()
    assert tool("verify", newest) == (1, f"{newest}: never committed, nothing will use it\nfaults: 1")
    with pytest.raises(CheckpointError, match=f"{newest}: was never committed"):
        Run(folder / "fresh", initial_load=str(newest)).checkpoint.load()
