"""The folder of a run: its name, its locks and its records of starts."""

import errno
import io
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint.branch import read_parent
from checkpoint.lease import new_start
from config import Config, ConfigError, Run, TitaniteError, Training, load_config
from run.folder import (
    STARTS,
    check_run_folder,
    choose_run_folder,
    read_exit,
    record_config,
    record_exit,
    record_start,
    start_run,
)
from run.processes import LaunchEnvironment
from storage.records import append_record, read_records

ROOT = Path(__file__).parents[2]


def start(
    config,
    job="",
    identity=None,
    check=lambda _: "its id",
    restarts=0,
):
    environment = LaunchEnvironment(0, 0, 2, job, restarts)
    return start_run(config, identity or {}, environment, check, lambda folder: None)[0]


def record(folder, config, identity, world_size, job=""):
    return record_start(folder, config, identity, world_size, new_start(folder, job))


def starts_of(folder):
    return read_records(folder / STARTS)


def test_new_runs_get_names_of_their_own(tmp_path):
    config = Config(run=Run(outputs=str(tmp_path)))
    with ThreadPoolExecutor(8) as threads:  # as of an array of jobs, in the same second
        folders = list(threads.map(lambda _: choose_run_folder(config), range(32)))
    assert len(set(folders)) == 32
    assert {folder.parent for folder in folders} == {tmp_path}
    named = tmp_path / "of mine" / "run"
    assert start(Config(run=Run(folder=str(named)))) == named


def test_a_folder_of_something_else_is_refused(tmp_path):
    """Not what ranks leave on a node with its own disk, where rank 0's files are missing."""
    config = Config(run=Run(folder=str(tmp_path)))
    for name in ("data", "profile", "checkpoints", "exit.json", ".running"):
        (tmp_path / name).mkdir()
    check_run_folder(config, {})
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is not the folder of a run, it holds thesis\.tex"):
        check_run_folder(config, {})


def test_another_models_run_is_not_resumed(tmp_path):
    config = Config(run=Run(folder=str(tmp_path)))
    record(tmp_path, config, {"dim": 4, "n_layers": 2}, world_size=1)
    check_run_folder(config, {"dim": 4, "n_layers": 2, "a_field_added_since": False})
    for refuses in (check_run_folder, lambda config, identity: start(config, identity=identity)):
        with pytest.raises(ConfigError, match="another model: n_layers is 2 there and 3 here"):
            refuses(config, {"dim": 4, "n_layers": 3})


def test_starts_are_recorded_with_what_changed(tmp_path):
    assert record(tmp_path, Config(), {"dim": 4}, world_size=2) == {}
    changed = record(tmp_path, Config(training=Training(steps=9)), {"dim": 4}, world_size=4)
    assert changed == {"training.steps": (Training().steps, 9)}
    assert load_config([f"--config={tmp_path / 'config.toml'}"]) == Config(), "the checkpoint may refuse what changed"
    record_config(tmp_path, Config(training=Training(steps=9)))
    assert record(tmp_path, Config(training=Training(steps=9)), {"dim": 4}, world_size=4) == {}
    first, *_, last = starts_of(tmp_path)
    assert (first["world_size"], last["world_size"]) == (2, 4)
    assert first["packages"]["torch"] == torch.__version__
    assert first["packages"]["pyarrow"]
    assert first["git_commit"]


def test_code_that_changed_between_two_starts_is_kept_and_named(tmp_path, monkeypatch):
    """What is kept makes of the commit the code as it was."""
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    run.mkdir()

    def git(*words):
        command = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (code / "model.py").write_text("dim = 4\n")
    (code / ".gitignore").write_text("ignored.py\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr("run.code.CODE", code)
    assert record(run, Config(), {}, 1) == record(run, Config(), {}, 1) == {}
    assert not list(run.glob("*.patch"))

    new = {"model.py": "dim = 8\n", "läuft neu.py": "x = 1"}
    for name, text in (new | {"ignored.py": "x", "notes.md": "x"}).items():
        (code / name).write_text(text)
    changed = record(run, Config(), {}, 1)
    (patch,) = run.glob("*.patch")
    commit = git("rev-parse", "HEAD")
    assert changed == {"code": (commit, f"{commit}-dirty {patch.name}")}
    git("add", ".")
    git("reset", "-q", "--hard")
    git("apply", str(patch))
    assert {str(file.relative_to(code)): file.read_text() for file in code.rglob("[!i]*.py")} == new


def test_a_line_cut_by_a_kill_spoils_no_later_one(tmp_path):
    (tmp_path / "run").mkdir()
    for _ in range(3):
        record(tmp_path / "run", Config(), {}, world_size=2, job="job 1")
        file = tmp_path / "run" / STARTS
        file.write_text(file.read_text() + '{"time": "cut')
    assert [start["world_size"] for start in starts_of(tmp_path / "run")] == [2, 2, 2]


def test_a_line_is_written_once_where_the_file_system_is_away_for_a_moment(tmp_path):
    errors = iter([OSError(errno.EIO, "away"), OSError(errno.ESTALE, "away")])

    class Away(io.FileIO):
        def write(self, data):
            error = next(errors, None)
            if error:
                raise error
            return super().write(data)

    file = tmp_path / "records.jsonl"
    with io.TextIOWrapper(io.BufferedWriter(Away(str(file), "a"))) as records:
        append_record(records, {"a": 1})
        append_record(records, {"a": 2})
    assert file.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_damaged_record_stops_no_start(tmp_path, caplog):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STARTS).write_bytes(b"{\n")
    config = Config(run=Run(outputs=str(tmp_path)))
    folder = start(config, "job 1")
    assert f"{tmp_path / 'other' / STARTS}: " in caplog.text
    (folder / "exit.json").write_bytes(b'{"kind": "fini')
    assert start(config, "job 1") == folder
    assert "exit.json is damaged" in starts_of(folder)[-1]["after"]["cause"]


def test_a_damaged_file_of_a_run_is_named_in_one_line(tmp_path):
    config = Config(run=Run(folder=str(tmp_path)))
    start(config)
    for name, read in (("model.json", start), ("parent.json", lambda _: read_parent(tmp_path))):
        for content in (b"[\xff", b"[1]", b'{"dim": '):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match=f"{tmp_path / name}: is damaged"):
                read(config)
        (tmp_path / name).write_text("{}")


def test_a_finished_run_stays_finished_where_a_resume_is_refused(tmp_path):
    config = Config(run=Run(folder=str(tmp_path)))
    end = {"kind": "finished", "step": 14, "last_checkpoint": 14}
    start(config)
    record_exit(tmp_path, end)
    start(config)
    record_exit(tmp_path, {"kind": "error", "step": 0, "last_checkpoint": None}, is_refused=True)
    ended = read_exit(tmp_path) or {}
    assert {key: ended[key] for key in end} == end
    start(config)
    record_exit(tmp_path, {"kind": "error", "step": 15})
    assert (read_exit(tmp_path) or {})["kind"] == "error"


def test_a_request_to_stop_from_before_a_start_is_taken_away(tmp_path, caplog):
    """Unless torchrun starts the run again: then a person may have asked meanwhile."""
    caplog.set_level("INFO")
    config = Config(run=Run(folder=str(tmp_path)))
    start(config)
    (tmp_path / "stop").touch()
    start(config, restarts=1)
    assert (tmp_path / "stop").exists()
    start(config)
    assert not (tmp_path / "stop").exists()
    assert str(tmp_path / "stop") in caplog.text
    (tmp_path / "stop").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path / 'stop'}: cannot be removed"):
        start(config)
    assert len(starts_of(tmp_path)) == 3


def test_a_folder_that_is_refused_is_left_as_it_is(tmp_path):
    config = Config(run=Run(outputs=str(tmp_path)))
    folder = start(config, "job 1")
    for job in ("job 1", "job 2"):
        with pytest.raises(ConfigError, match="refused"):
            start(config, job, check=mock.Mock(side_effect=ConfigError("refused")))
    assert len(starts_of(folder)) == 1
    assert list(tmp_path.iterdir()) == [folder], "a new one is not left behind"


def test_a_folder_is_of_one_start_at_a_time(tmp_path, monkeypatch):
    config = Config(run=Run(folder=str(tmp_path / "run")))
    code = (
        "import sys; from pathlib import Path; from run.folder import _lock\n"
        "Path(sys.argv[1]).mkdir(); _lock(Path(sys.argv[1])); print('holds', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, config.run.folder]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "holds\n"
        with pytest.raises(TitaniteError, match=rf"run: a start .* still running here, process {other.pid}: .*stop"):
            start(config)
        assert not (tmp_path / "run" / STARTS).exists()
        with monkeypatch.context() as elsewhere:  # the lock of a machine that was lost, as far as can be told
            elsewhere.setattr(socket, "gethostname", lambda: "another")
            start(config)
        other.kill()
        other.wait()
        start(config)
    assert len(starts_of(tmp_path / "run")) == 2


def test_restarts_of_a_job_share_a_folder_the_original_not_a_copy(tmp_path, monkeypatch):
    """The records of copies name the same job, and one is found before the original, one after it."""
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *words: sorted(glob(*words)))
    config = Config(run=Run(outputs=str(tmp_path)))
    folder = start(config, "job 1")
    assert len({folder, start(config, "job 2"), start(config), start(config)}) == 4
    copies = [tmp_path / f"{letter} copy" for letter in "abcdwxyz"]
    for copy in copies:
        shutil.copytree(folder, copy)
    assert start(config, "job 1") == folder
    moved = folder.rename(tmp_path / "moved")
    for copy in copies:
        shutil.rmtree(copy)
    assert start(config, "job 1") == moved


def test_the_end_of_a_start_that_was_taken_for_lost_is_not_recorded(tmp_path):
    """How the later one ends counts, for schedulers too."""
    config = Config(run=Run(folder=str(tmp_path)))
    ids = []
    for _ in range(2):
        record(tmp_path, config, {}, 1)
        ids.append(starts_of(tmp_path)[-1]["id"])
    assert not record_exit(tmp_path, {"kind": "error"}, ids[0])
    assert not (tmp_path / "exit.json").exists()
    assert record_exit(tmp_path, {"kind": "finished"}, ids[1])


def test_restarts_without_progress_are_refused(tmp_path):
    config = Config(run=Run(folder=str(tmp_path)))

    def start_and_end(job, *kinds):
        for kind in kinds:
            record(tmp_path, config, {}, 2, job)
            record_exit(tmp_path, {"kind": kind, "cause": f"it {kind}"})

    start_and_end("job 1", "lost", "lost", "lost", "lost")
    (tmp_path / ".saved").write_text("a checkpoint")
    start_and_end("job 1", "lost", "stopped", "lost", "rolled back", "finished", "lost")
    record(tmp_path, config, {}, 2, "job 1")  # killed: nobody says why
    with pytest.raises(ConfigError, match=r"starts of this job in a row .*: 4, .* the last one: unknown, it was"):
        record(tmp_path, config, {}, 2, "job 1")
    start_and_end("job 2", "lost")  # a person's, who has mended it
