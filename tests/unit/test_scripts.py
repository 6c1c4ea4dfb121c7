"""setup.sh, run_llama_train.sh and launch/, with stand-ins for the programs that they call."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks import gpu, local_steps
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


def command_lines() -> list[str]:
    """The modules of the project that are programs."""
    files = [file for pattern in ("*.py", "*/*.py") for file in ROOT.glob(pattern) if not file.match("tests/*")]
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if '__name__ == "__main__"' in file.read_text()
    )


@pytest.mark.parametrize("module", command_lines())
def test_every_command_says_how_it_is_used(
    module: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    target = partial(runpy.run_module, module, run_name="__main__")
    process = get_context("fork").Process(target=target)  # alone: to be run twice suits no module
    process.start()
    process.join()
    assert process.exitcode == 0
    assert capfd.readouterr().out.startswith("usage: ")


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
    for name in ("setup.sh", "run_llama_train.sh", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, tmp_path)
    write_program(tmp_path / "python", PYTHON)
    return tmp_path


@pytest.fixture
def runner(checkout: Path) -> Path:
    """A checkout that is set up."""
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", RUNNER)
    return checkout


def set_up(folder: Path, *words: str) -> tuple[int, str]:
    return run(folder, "./setup.sh", *words, PYTHON="./python")


def test_setup_installs_what_is_missing(checkout: Path) -> None:
    assert set_up(checkout, "tests") == (2, "error: tests: must be nothing, or test\n")
    assert not (checkout / ".venv").exists()
    (checkout / ".venv" / "bin").mkdir(parents=True)  # half made, by a start that was killed
    assert set_up(checkout) == (0, "setup: making .venv\nsetup: installing requirements.txt\n")
    assert set_up(checkout) == (0, "")
    assert set_up(checkout, "test")[1].count("installing") == 2
    assert set_up(checkout, "test") == (0, "")
    (checkout / "requirements.txt").write_text("torch==3\n")
    assert set_up(checkout) == (0, "setup: installing requirements.txt\n")


@pytest.mark.parametrize("writable", [True, False])
def test_an_environment_that_does_not_work_here_is_named_and_left(checkout: Path, writable: bool) -> None:
    """It may work on other machines that share it, and be in use there."""
    set_up(checkout)
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.9")
    if not writable:
        shutil.rmtree(checkout / ".cache")
        (checkout / ".cache").touch()  # also root cannot take the lock there
    code, said = set_up(checkout)
    cause, _, said = said.partition("\nerror: .venv does not work here")
    assert (code, ".venv/bin/python: No such file" in cause, "rm -rf .venv" in said) == (1, True, True)
    assert (checkout / ".venv" / ".installed-requirements.txt").exists()


def start_two(folder: Path, *command: str, **environment: str) -> list[str]:
    """The log of two starts at once."""
    starts = [start(folder, *command, **environment) for _ in range(2)]
    said = [process.communicate()[0] for process in starts]
    assert [process.returncode for process in starts] == [0, 0], said
    return log_of(folder)


def test_of_two_first_starts_at_once_one_installs(checkout: Path) -> None:
    assert start_two(checkout, "./setup.sh", PYTHON="./python") == ["install requirements.txt"]


def test_of_two_first_runs_at_once_one_prepares_the_data(runner: Path) -> None:
    assert len(start_two(runner, "./run_llama_train.sh", NGPU="1")) == 2


@pytest.mark.parametrize(
    ("words", "default"),
    [
        (["a.toml"], False),
        (["--config", "a b.toml"], False),
        (["--resume=outputs/a"], False),
        (["--compile.enable", "a.toml"], False),
        ([], True),
        (["--run.folder", "outputs/a"], True),
        (["--validation.sample_prompt=try -h now"], True),
    ],
)
def test_a_config_on_the_command_line_takes_the_place_of_the_default_one(
    words: list[str], default: bool, runner: Path
) -> None:
    given = ["--config=train_configs/debug.toml"] * default + ["--metrics.log_ranks=0,1", *words]
    assert run(runner, "./run_llama_train.sh", *words, NGPU="1", LOG_RANK="0,1")[0] == 0
    assert log_of(runner)[-1].endswith(" ".join(["train.py", *given]))


def test_the_script_prints_the_help_of_a_word(runner: Path) -> None:
    program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    write_program(runner / ".venv" / "bin" / "python", program)
    code, said = run(runner, "./run_llama_train.sh", "--help", "nesterov")
    assert (code, said.count("--"), said.count("--parallelism.outer_momentum=")) == (0, 1, 1)


@pytest.mark.parametrize("name", ["setup.sh", "run_llama_train.sh", "run_tests.sh"])
def test_scripts_find_their_folder_through_a_link(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(ROOT / name, folder)
    for program in {"setup.sh", "run_tests.sh"} - {name}:
        write_program(folder / program, "#!/bin/sh\npwd; exit 3\n")
    write_program(folder / ".venv" / "bin" / "python", "#!/bin/sh\npwd; exit 1\n")
    (tmp_path / "link").symlink_to(folder / name)
    for command in (str(tmp_path / "link"), f"folder/{name}"):
        _, said = run(tmp_path, "bash", command, PYTHON=str(folder / ".venv/bin/python"))
        assert set(said.splitlines()[:1]) == {str(folder)}, said


@pytest.mark.parametrize(
    ("before", "ended", "code"),
    [
        ("", {"kind": "finished", "start_again": False}, 0),
        ("", {"kind": "stopped", "start_again": False}, 0),  # by a person
        ("old", {"kind": "hung", "start_again": True}, 75),
        ("", {"kind": "error", "start_again": False}, 100),
        ('{"kind": "stopped", "start_again": true}', None, 100),  # a mistake before the start was recorded
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


def test_benchmarks_name_configs_that_train_takes() -> None:
    for steps in (local_steps.STEPS, local_steps.QUICK_STEPS):
        check_optim(load_config(local_steps.arguments(10, local_steps.AVERAGE, steps, "run")))
    assert not [name for name in gpu.runs() if "," in name], "--rows separates names by commas"
    for row in gpu.runs().values():
        assert gpu.training_config(row, 1, "outputs").compile.enable
        assert gpu.training_config(gpu.rehearsal(row), 1, "outputs").training.seq_len == 64
