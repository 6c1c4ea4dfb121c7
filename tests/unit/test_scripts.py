"""setup.sh, run_llama_train.sh and launch/, with stand-ins for the programs that they call."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks import local_steps
from benchmarks.report import build_parser
from config import load_config
from optim import check_optim

ROOT = Path(__file__).parents[2]
# Makes environments of itself, and installs nothing in them.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; sleep 0.3; cp "$0" .venv/bin/python ;;
  "-m pip install "*) sleep 0.3; echo "install ${@: -1}" >> log ;;
esac
"""
# The Python of an environment in which a run would prepare its data and start.
RUNNER = """#!/bin/bash
case "$2" in
  config) echo 'datasets = ["datasets/stdlib"]' ;;
  data.prepare)
    mkdir -p datasets; sleep 0.3; mkdir datasets/stdlib || exit 1
    sleep 0.3; touch datasets/stdlib/manifest.json ;;
  torch.distributed.run) [ -e datasets/stdlib/manifest.json ] && echo "$@" >> log ;;
esac
"""


# Starts a task on each of two nodes, and returns the highest exit code.


MOVED = "error: moved: python -m "


def command_lines() -> list[str]:
    """The modules of the project that are programs."""
    files = [file for pattern in ("*.py", "*/*.py") for file in ROOT.glob(pattern) if not file.match("tests/*")]
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if '__name__ == "__main__"' in (text := file.read_text()) and MOVED not in text
    )


def test_an_old_name_of_a_command_says_the_new_one() -> None:
    migration = (ROOT / "docs" / "migration.md").read_text()
    files = [file for pattern in ("*.py", "*/*.py") for file in ROOT.glob(pattern) if not file.match("tests/*")]
    moved = {file: file.read_text().split(MOVED)[1] for file in files if MOVED in file.read_text()}
    assert len(moved) == 11
    for file, rest in moved.items():
        new, old = rest.split(",")[0].split(" ")[0], ".".join(file.relative_to(ROOT).with_suffix("").parts)
        assert (ROOT / f"{new.replace('.', '/')}.py").is_file()
        assert re.search(rf"^\| .*`python -m {old}\b.*\| `python -m {new}\b", migration, re.MULTILINE), old


@pytest.mark.parametrize("module", command_lines())
def test_every_command_says_how_it_is_used(
    module: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "tools.evaluate":
        pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    target = partial(runpy.run_module, module, run_name="__main__")
    process = get_context("fork").Process(target=target)  # alone: to be run twice suits no module
    process.start()
    process.join()
    assert process.exitcode == 0
    assert capfd.readouterr().out.startswith("usage: ")


def test_a_benchmarks_help_keeps_the_lines_of_its_text() -> None:
    text = "What it measures.\n\n    python -m benchmarks.data [PART ...]\n\nParts: loaders."
    assert text in build_parser(text).format_help()


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | environment
    return subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(folder: Path, *command: str, **environment: str) -> tuple[int, str]:
    process = start(folder, *command, **environment)
    said, _ = process.communicate()
    return process.returncode, said


def log_of(folder: Path) -> list[str]:
    file = folder / "log"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (
        "setup.sh",
        "run_llama_train.sh",
        "requirements.txt",
        "requirements-eval.txt",
        "requirements-test.txt",
    ):
        shutil.copy(ROOT / name, tmp_path)
    write_program(tmp_path / "python", PYTHON)
    return tmp_path


def set_up(folder: Path, *words: str) -> tuple[int, str]:
    return run(folder, "./setup.sh", *words, PYTHON="./python")


def test_what_is_set_up_is_left_as_it_is(checkout: Path) -> None:
    assert set_up(checkout) == (0, "setup: making .venv\nsetup: installing requirements.txt\n")
    assert set_up(checkout) == (0, "")
    assert set_up(checkout, "test")[1].count("installing") == 2
    assert set_up(checkout, "test") == (0, "")
    (checkout / "requirements.txt").write_text("torch==3\n")
    assert set_up(checkout) == (0, "setup: installing requirements.txt\n")


def test_a_word_that_setup_does_not_know_is_refused(checkout: Path) -> None:
    assert set_up(checkout, "tests") == (2, "error: tests: must be nothing, or test\n")
    assert not (checkout / ".venv").exists()


def test_a_half_made_environment_is_made_again(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    assert set_up(checkout) == (0, "setup: making .venv\nsetup: installing requirements.txt\n")
    assert set_up(checkout) == (0, "")


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("fault", ["its Python is gone", "another Python has come in its place"])
def test_an_environment_that_does_not_work_here_is_named_and_left(checkout: Path, fault: str, writable: bool) -> None:
    """It may work on other machines that share it, and be in use there."""
    set_up(checkout)
    python = checkout / ".venv" / "bin" / "python"
    if fault == "its Python is gone":
        python.unlink()
        python.symlink_to("/nowhere/python3.9")
    else:
        write_program(python, "#!/bin/sh\necho no pip >&2\nexit 1\n")
    if not writable:
        shutil.rmtree(checkout / ".cache")
        (checkout / ".cache").touch()  # also root cannot take the lock there
    code, said = set_up(checkout)
    assert code == 1
    cause, _, said = said.partition("\nerror: .venv does not work here")
    assert ("no pip" if "another" in fault else ".venv/bin/python: No such file") in cause
    assert "rm -rf .venv" in said
    assert (checkout / ".venv" / ".installed-requirements.txt").exists()


def test_of_two_first_starts_at_once_one_installs(checkout: Path) -> None:
    starts = [start(checkout, "./setup.sh", PYTHON="./python") for _ in range(2)]
    said = [process.communicate()[0] for process in starts]
    assert [process.returncode for process in starts] == [0, 0], said
    assert log_of(checkout) == ["install requirements.txt"]


def test_of_two_first_runs_at_once_one_prepares_the_data(checkout: Path) -> None:
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", RUNNER)
    starts = [start(checkout, "./run_llama_train.sh", NGPU="1") for _ in range(2)]
    said = [process.communicate()[0] for process in starts]
    assert [process.returncode for process in starts] == [0, 0], said
    assert len(log_of(checkout)) == 2


def test_a_prompt_may_speak_of_help(checkout: Path) -> None:
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", RUNNER)
    assert run(checkout, "./run_llama_train.sh", "--validation.sample_prompt=try -h now", NGPU="1")[0] == 0
    assert len(log_of(checkout)) == 1
    assert run(checkout, "./run_llama_train.sh", "--help", NGPU="1") == (0, 'datasets = ["datasets/stdlib"]\n')
    assert len(log_of(checkout)) == 1


def test_a_config_on_the_command_line_takes_the_place_of_the_default_one(checkout: Path) -> None:
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", RUNNER)
    ranks, default = "--metrics.log_ranks=0,1", "--config=train_configs/debug.toml"
    configs = (["--config=a.toml"], ["--config", "a b.toml"], ["--config=a.toml", "--config=b.toml"], ["a.toml"])
    for words in (*configs, ["--resume", "outputs/a"], ["--resume=outputs/a"], ["--compile.enable", "a.toml"]):
        assert run(checkout, "./run_llama_train.sh", *words, NGPU="1", LOG_RANK="0,1")[0] == 0
        assert log_of(checkout)[-1].endswith(" ".join(["train.py", ranks, *words]))
    for words in ([], ["--run.folder=a.toml"], ["--run.folder", "outputs/a"]):
        assert run(checkout, "./run_llama_train.sh", *words, NGPU="1", LOG_RANK="0,1")[0] == 0
        assert log_of(checkout)[-1].endswith(" ".join(["train.py", default, ranks, *words]))


def test_the_script_prints_the_help_of_a_word(checkout: Path) -> None:
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    code, said = run(checkout, "./run_llama_train.sh", "--help", "nesterov")
    assert (code, said.count("--"), said.count("--parallelism.outer_momentum=")) == (0, 1, 1)
    code, said = run(checkout, "./run_llama_train.sh", "-h", "learning_rate")
    assert (code, said.count("\n")) == (2, 1)
    assert said.endswith("did you mean --optimizer.lr?\n")


@pytest.mark.parametrize("name", ["setup.sh", "run_llama_train.sh", "run_tests.sh"])
def test_scripts_find_their_folder_through_a_link_and_whatever_cd_searches(tmp_path: Path, name: str) -> None:
    place = "folder" if name == "run_tests.sh" else "a folder"
    folder = tmp_path / place
    folder.mkdir()
    shutil.copy(ROOT / name, folder)
    for program in {"setup.sh", "run_tests.sh"} - {name}:
        write_program(folder / program, "#!/bin/sh\npwd; exit 3\n")
    write_program(folder / ".venv" / "bin" / "python", "#!/bin/sh\npwd; exit 1\n")
    (tmp_path / "elsewhere" / place).mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder / name)
    for command in (str(tmp_path / "link"), f"{place}/{name}"):
        _, said = run(
            tmp_path, "bash", command, CDPATH=str(tmp_path / "elsewhere"), PYTHON=str(folder / ".venv/bin/python")
        )
        assert set(said.splitlines()[:1]) == {str(folder)}, said


def test_tests_where_torch_cannot_compile_end_at_once(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    shutil.copy(ROOT / "run_tests.sh", tmp_path / "a folder")
    code, said = run(tmp_path, "bash", "a folder/run_tests.sh")
    assert code == 2
    assert said.startswith(f"error: {tmp_path / 'a folder'}: has a space in it")


@pytest.mark.parametrize(
    ("before", "ended", "code"),
    [
        ("", {"kind": "finished", "start_again": False}, 0),
        ("", {"kind": "stopped", "start_again": False}, 0),  # by a person
        ("", {"kind": "stopped", "start_again": True}, 75),  # preempted
        ("old", {"kind": "hung", "start_again": True}, 75),
        ("", {"kind": "error", "start_again": False}, 100),
        ("", {"kind": "failed", "start_again": False}, 100),
        ('{"kind": "stopped", "start_again": true}', None, 100),  # a mistake before the start was recorded
        ("", None, 100),
    ],
)
def test_exit_json_decides_whether_a_node_asks_for_another_start(
    tmp_path: Path, before: str, ended: dict[str, object] | None, code: int
) -> None:
    record = json.dumps(ended, indent=2) if ended else ""
    python = '#!/bin/sh\necho "$@" > log\n' + (f"cat > run/exit.json <<'EOF'\n{record}\nEOF\n" if record else "")
    write_program(tmp_path / ".venv" / "bin" / "python", python + "exit 1\n")
    (tmp_path / "run").mkdir()
    if before:
        (tmp_path / "run" / "exit.json").write_text(before)
    node = str(ROOT / "launch" / "node.sh")
    assert run(tmp_path, node, "run", "--nnodes=2", "train.py", "--training.steps=9") == (code, "")
    assert log_of(tmp_path)[0].endswith("--nnodes=2 train.py --training.steps=9 --run.folder=run")


def test_a_node_passes_a_request_to_stop_on_and_waits(tmp_path: Path) -> None:
    """As the first process of a container, which alone gets the signal."""
    python = "#!/bin/bash\ntrap 'echo asked > log; exit 1' TERM\necho begun > begun\nwhile :; do sleep 0.1; done\n"
    write_program(tmp_path / ".venv" / "bin" / "python", python)
    process = start(tmp_path, str(ROOT / "launch" / "node.sh"), "run", "train.py")
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 100
    assert log_of(tmp_path) == ["asked"]


@pytest.mark.parametrize("steps", [local_steps.STEPS, local_steps.QUICK_STEPS])
def test_the_steps_of_local_steps_have_room_for_its_schedule(steps: int) -> None:
    check_optim(load_config(local_steps.arguments(10, local_steps.AVERAGE, steps, "run")))
