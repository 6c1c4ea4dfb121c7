"""Whose checkpoints are whose: a place is one run's, and no other run goes on from them or removes them."""

from pathlib import Path

import pytest

from checkpoint.checks import check_checkpoints
from checkpoint.retention import committed
from config import Checkpoint, Config, ConfigError
from storage import open_store
from tests.corpus import write_dataset
from tests.distributed.checkpoint_runs import IDENTITY, Run, flip_bit
from tests.runs import call

SMALL = (
    "--model.flavor=tiny",
    "--model.vocab_size=128",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.param_dtype=float32",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
)


def steps_in(folder: Path | str) -> list[int]:
    return [int(name.split("-")[1]) for name in committed(open_store(folder))]


def content(folder: Path | str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_place_is_one_runs_also_if_its_folder_is_moved(tmp_path, monkeypatch):
    """Whole runs of train.py. Without its `.run_name`, a moved run needs its name back."""
    data = write_dataset(tmp_path / "data", [[[1 + i % 90] * 60 + [0] for i in range(60)]], vocab_size=100)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    arguments = (*SMALL, f"--data.datasets={data}", "--checkpoint.folder=saved")
    assert call(tmp_path, *arguments, "--run.folder=a", "--training.steps=2").returncode == 0
    before = content(".")
    refused = call(tmp_path, *arguments, "--run.folder=b", "--training.steps=3")
    assert (refused.returncode, content("."), Path("b").exists()) == (2, before, False)
    (newest,) = committed(open_store("saved"))
    name = Path("a/.run_name").read_text().strip()
    assert name == str(Path("a").absolute())
    assert f"error: checkpoint.folder = 'saved': {newest} there was saved by another run, {name}: set" in refused.stderr
    for hint in ("checkpoint.initial_load = 'saved'", f"write {name} into .run_name in its run.folder"):
        assert hint in refused.stderr
    Path("a").rename("moved")
    moved = call(tmp_path, *arguments, "--run.folder=moved", "--training.steps=3")
    assert (moved.returncode, steps_in("saved")) == (0, [3, 2]), moved.stderr
    assert f"resumed from saved/{newest}" in moved.stderr


@pytest.mark.parametrize("key", ["folder", "upload"])
def test_a_start_is_refused_where_another_run_has_saved(tmp_path, key):
    """Anything, be it older than its own. A damaged manifest, which no resume can take, says nothing."""

    def check(run_folder: str) -> None:
        places = {"folder": str(tmp_path / "empty"), key: str(tmp_path / "saved")}
        check_checkpoints(Config(checkpoint=Checkpoint(**places)), IDENTITY, Path(run_folder))

    Run(tmp_path / "saved", interval=1, keep=0, run_folder=Path("other")).train(0, 2)
    check("other")
    with pytest.raises(ConfigError, match=rf"checkpoint.{key} = .* was saved by another run, .*/other: set another"):
        check("unused")
    for folder in (tmp_path / "saved").iterdir():
        flip_bit(folder / "MANIFEST.json", 100)
    check("unused")


@pytest.mark.parametrize("key", ["folder", "upload"])
def test_a_run_removes_nothing_of_another(tmp_path, key):
    """Two that were started at the same time, where nothing was saved yet. The next start is refused."""

    def places(own: str) -> dict[str, str]:
        return {"folder": str(tmp_path / own), key: str(tmp_path / "shared")}

    first = Run(**places("a"), interval=1, keep=1, run_folder=Path("other"))
    second = Run(**places("b"), interval=1, keep=1)
    assert first.checkpoint.load() == second.checkpoint.load() == 0
    first.train(0, 2)
    before = content(tmp_path / "shared")
    second.train(0, 9)
    assert before.items() <= content(tmp_path / "shared").items()
    assert steps_in(tmp_path / "shared") == [9, 2]
