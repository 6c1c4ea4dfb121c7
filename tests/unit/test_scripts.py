"""setup.sh, run_llama_train.sh and launch/, with stand-ins for the programs that they call."""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

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
  tools.processes) if [[ "$*" == *unshared* ]]; then exit 2; fi ;;
  data.prepare)
    mkdir -p datasets; sleep 0.3; mkdir datasets/stdlib || exit 1
    sleep 0.3; touch datasets/stdlib/manifest.json ;;
  run.torchrun) [ -e datasets/stdlib/manifest.json ] && echo "$@" >> log ;;
esac
"""


def command_lines():
    """The modules of the project that are programs."""
    files = [file for pattern in ("*.py", "*/*.py") for file in ROOT.glob(pattern) if not file.match("tests/*")]
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if '__name__ == "__main__"' in file.read_text()
    )


@pytest.mark.parametrize("module", command_lines())
def test_every_command_says_how_it_is_used(module, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    target = partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    process = get_context("fork").Process(target=target)  # alone: to be run twice suits no module
    process.start()
    process.join()
    assert process.exitcode == 0
    assert capfd.readouterr().out.startswith("usage: ")


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start(folder, *command, **environment):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | environment
    return subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(folder, *command, **environment):
    process = start(folder, *command, **environment)
    said, _ = process.communicate()
    return process.returncode, said


def log_of(folder):
    file = folder / "log"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def checkout(tmp_path):
    for name in ("setup.sh", "run_llama_train.sh", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, tmp_path)
    write_program(tmp_path / "python", PYTHON)
    return tmp_path


@pytest.fixture
def runner(checkout):
    """A checkout that is set up."""
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / ".venv" / "bin" / "python", RUNNER)
    return checkout


def set_up(folder, *words):
    return run(folder, "./setup.sh", *words, PYTHON="./python")


def test_setup_installs_what_is_missing(checkout):
    assert set_up(checkout, "tests") == (2, "error: tests: must be nothing, or test\n")
    assert not (checkout / ".venv").exists()
    (checkout / ".venv" / "bin").mkdir(parents=True)  # half made, by a start that was killed
    assert set_up(checkout) == (0, "setup: making .venv\nsetup: installing requirements.txt\n")
    assert set_up(checkout) == (0, "")
    assert set_up(checkout, "test")[1].count("installing") == 5
    assert set_up(checkout, "test") == (0, "")
    (checkout / "requirements.txt").write_text("torch==3\n")
    assert set_up(checkout) == (0, "setup: installing requirements.txt\n")


RUN, BRANCH = "--run.folder=outputs/a", "--checkpoint.branch_from=outputs/a@5"
OWN = "--config=own.toml"


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ([], [OWN]),
        ([RUN], [OWN, RUN]),
        (["--validation.sample_prompt=try -h now"], [OWN, "--validation.sample_prompt=try -h now"]),
        ([BRANCH], [OWN, BRANCH]),
        (["a.toml"], ["a.toml"]),
        (["--config", "a b.toml"], ["--config", "a b.toml"]),
        (["--resume=outputs/a"], ["--resume=outputs/a"]),
        (["here.toml"], ["{here}/here.toml"]),
        (["--config", "here.toml"], ["--config", "{here}/here.toml"]),
        (["--resume=here.toml"], ["--resume={here}/here.toml"]),
    ],
)
def test_the_run_script_passes_words_on_and_adds_a_config_where_none_is_named(words, passed_on, runner):
    """Paths mean the place where one stands, or the project's folder if nothing is there."""
    here = runner / "my place"
    here.mkdir()
    (here / "here.toml").touch()
    assert run(here, "../run_llama_train.sh", *words, NGPU="1", LOG_RANK="0,1", CONFIG_FILE="own.toml")[0] == 0
    given = [word.format(here=here) for word in passed_on]
    given.insert(given[:1].count(OWN), "--metrics.log_ranks=0,1")
    assert log_of(runner)[-1].endswith(" ".join(["train.py", *given]))


def test_a_branch_has_no_default_config_and_two_sets_of_data_are_refused(runner):
    assert run(runner, "./run_llama_train.sh", BRANCH, NGPU="1")[0] == 0
    assert log_of(runner)[-1].endswith(f"train.py {BRANCH}")
    code, said = run(runner, "./run_llama_train.sh", "--data", "x", "--data.datasets=y")
    assert (code, said.count("\n")) == (2, 1)
    assert "--data and --data.datasets" in said


def test_a_config_py_elsewhere_is_not_the_projects(tmp_path):
    (tmp_path / "config.py").write_text("raise SystemExit('another project')")
    for command in ("./run_llama_train.sh", "launch/node.sh"):
        words = [str(tmp_path / "run"), "train.py"] * (command == "launch/node.sh") + ["--training.stepz=1"]
        code, said = run(ROOT, command, *words, PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
        assert code in (2, 100)
        assert said.splitlines()[-1].startswith("error: training.stepz"), said


def test_a_machine_without_a_compiler_ends_before_a_byte_is_written(tmp_path):
    words = ["train.py", "train_configs/debug.toml", "--data.datasets=tests/golden/dataset", "--compile.enable"]
    code, said = run(ROOT, sys.executable, *words, f"--run.outputs={tmp_path / 'outputs'}", CXX="no-compiler")
    assert code == 2
    assert "no-compiler" in said.splitlines()[0]
    assert not (tmp_path / "outputs").exists()


def test_a_batch_that_cannot_be_shared_is_found_before_data_is_prepared(runner):
    for data in ([], ["--data", "mine"]):
        assert run(runner, "./run_llama_train.sh", "--unshared", *data)[0] == 2
        assert not (runner / "datasets").exists()
    words = ["-m", "tools.processes", "--training.global_batch_size=3", "--training.local_batch_size=2"]
    code, said = run(ROOT, sys.executable, *words, NGPU="1")
    assert (code, said.count("\n")) == (2, 1)
    assert "training.global_batch_size = 3" in said


def test_a_mistake_that_ranks_find_ends_in_one_line():
    """Torchrun starts the ranks no second time."""
    code, said = run(ROOT, "./run_llama_train.sh", "--data.datasets=/nowhere", NGPU="2", MAX_RESTARTS="1")
    starting, error = said.splitlines()
    assert "processes 2" in starting
    assert error.startswith("error: /nowhere")
    assert code == 2


SAY_TIME = "import os\nprint('to save:', os.environ.get('TORCH_ELASTIC_SHUTDOWN_TIMEOUT'), flush=True)\n"
STOP_TORCHRUN = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(9)\n"


@pytest.mark.parametrize(
    ("rank", "code", "shown", "not_shown"),
    [("exit(2)\n", 1, "exitcode  : 2", "no such line"), (STOP_TORCHRUN, 143, "death signal", "Traceback")],
)
def test_a_crash_of_a_rank_shows_all_that_torchrun_says_and_a_stop_no_traceback(rank, code, shown, not_shown, checkout):
    """A crash also with the exit code of a mistake, where no rank has explained it.

    A signal that comes while torchrun (2.13) is still starting the rank is not passed on.
    """
    write_program(checkout / "setup.sh", "#!/bin/sh\n")
    write_program(checkout / "train.py", SAY_TIME + rank)
    for path in ROOT.iterdir():
        if not (checkout / path.name).exists():
            (checkout / path.name).symlink_to(path)
    ended, said = run(checkout, "./run_llama_train.sh", "--data.datasets=/nowhere", NGPU="1")
    assert ended == code
    assert shown in said
    assert "to save: 100\n" in said, "seconds from a stop to SIGKILL"
    assert ("train.py FAILED" in said) == (code == 1)
    assert not_shown not in said


NODE = str(ROOT / "launch" / "node.sh")
STARTED = "echo 2 > run/.started\n"


def write_end(kind, start_again):
    record = json.dumps({"kind": kind, "start_again": start_again}, indent=2)
    return f"{STARTED}echo '{record}' > run/exit.json\n"


@pytest.mark.parametrize(
    ("torchrun", "code"),
    [
        (write_end("finished", False), 0),
        (write_end("stopped", False), 0),
        (write_end("hung", True), 75),
        (write_end("error", False), 100),
        (f"{STARTED}rm run/exit.json\n", 75),  # all ranks were killed
        (f"{STARTED}: > run/exit.json\n", 75),  # while one of them wrote it
        ("", 75),  # torchrun itself failed
        ("exit 2\n", 100),  # a mistake
    ],
)
def test_how_a_run_ended_decides_whether_a_node_asks_for_another_start(torchrun, code, tmp_path):
    """Whatever an earlier start has left."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".started").write_text("1\n")
    (tmp_path / "run" / "exit.json").write_text('{"kind": "error", "start_again": false}')
    write_program(tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\necho "$@" > log\n{torchrun}exit 1\n')
    assert run(tmp_path, NODE, "run", "--nnodes=2", "train.py", "--training.steps=9") == (code, "")
    assert log_of(tmp_path)[0].endswith("--nnodes=2 train.py --training.steps=9 --run.folder=run")


def test_a_node_passes_a_request_to_stop_on_and_waits(tmp_path):
    """As the first process of a container, which alone gets the signal."""
    python = "#!/bin/bash\ntrap 'echo asked > log; exit 1' TERM\necho begun > begun\nwhile :; do sleep 0.1; done\n"
    write_program(tmp_path / ".venv" / "bin" / "python", python)
    process = start(tmp_path, NODE, "run", "train.py")
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 75, "the job starts again elsewhere"
    assert log_of(tmp_path) == ["asked"]


def test_a_node_gives_up_after_starts_that_led_nowhere(tmp_path):
    """Where no start is recorded: nodes that did not meet are started again, but not for ever."""
    python = tmp_path / ".venv" / "bin" / "python"
    for ends_well in (True, False):
        write_program(python, "#!/bin/sh\nexit 1\n")
        assert [run(tmp_path, NODE, "run", "train.py")[0] for _ in range(3)] == [75] * 3
        if ends_well:  # a start that is recorded ends the row
            write_program(python, f"#!/bin/sh\n{write_end('stopped', False)}")
            assert run(tmp_path, NODE, "run", "train.py") == (0, "")
    code, said = run(tmp_path, NODE, "run", "train.py")
    assert (code, said.count("\n")) == (100, 1)
    assert f"run/.unrecorded.{socket.gethostname()}" in said


@pytest.mark.parametrize("conf", ["is_host=true", ""])
def test_a_port_that_something_else_holds_is_named(conf, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={conf}"]
        code, said = run(ROOT, "launch/node.sh", str(tmp_path / "run"), *words, "train.py")
    assert code == 75
    assert said.startswith(f"error: port {port} ")
    assert said.count("\n") == 1
