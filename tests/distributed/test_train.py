"""Whole runs of train.py: the same training at any world size, resumed bit for bit, and bad input explained."""

import contextlib
import dataclasses
import gc
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import CheckpointError
from config import ConfigError, load_config, to_toml
from data.loader import Batch, validation_batches
from data.prepare import main as prepare
from data.shards import DataError, open_dataset
from generate import main as generate
from models import MODELS
from run.failures import BadSteps
from run.run import run_and_leave
from run.watchdog import Watchdog, _stack_of
from tests.harness import run_ranks
from tools.audit import prove
from tools.hf import exported_model
from train import main, train
from validate import main as validate

ROOT = Path(__file__).parents[2]
STEPS = 20
COPIES = ("--training.param_dtype=bfloat16", "--parallelism.reshard_after_forward=false")  # of weights, by a rank alone
SMALL = (
    "--model.flavor=tiny",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.param_dtype=float32",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=3",
    "--optimizer.lr=1e-3",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.interval=10",
    "--validation.max_samples=8",
    "--checkpoint.interval=5",
    "--checkpoint.keep=0",
)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 documents of a made-up language, with a tokenizer of 512."""
    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    (folder / "text").mkdir()
    for i in range(150):
        text = " ".join("".join(words.choices(syllables, k=words.randint(1, 3))) for _ in range(words.randint(20, 400)))
        (folder / "text" / f"{i:03}.txt").write_text(text)
    prepare(
        [f"--source={folder / 'text'}", f"--output={folder / 'set'}", "--vocab-size=512", "--validation-fraction=0.1"]
    )
    return folder / "set"


class Stop(Exception):
    """Ends a run between two steps."""


def run(arguments: list[str], stop_after: int = 0) -> None:
    """train.py in this process; with `stop_after`, cut off after that step, as a crash would."""

    def after_step(step: int) -> None:
        if step == stop_after:
            raise Stop

    with contextlib.suppress(Stop):
        train(load_config(arguments), after_step)


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    """The last row of each trained step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in lines if row["loss"] is not None}


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for _, row in sorted(rows(folder).items())]


def final_weights(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint, read by torch's own tool."""
    newest = max(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    dcp_to_torch_save(newest, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=True)


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    if not isinstance(tree, dict):
        return {}
    return {key: value for name, part in tree.items() for key, value in flat(part, f"{prefix}/{name}").items()}


LAYOUTS = {
    "DDP 2": (2, STEPS, ["--parallelism.dp_replicate=2"]),
    "FSDP 2, accumulation 1": (2, STEPS, ["--training.local_batch_size=4"]),
    "FSDP 4": (4, STEPS, []),
    "HSDP 2 x 2": (4, STEPS, ["--parallelism.dp_replicate=2"]),
    "FSDP 2, compiled": (2, 12, ["--compile.enable", "--compile.backend=aot_eager"]),
}


@pytest.fixture(scope="module")
def single(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    run_ranks(1, run, [*SMALL, f"--data.datasets={dataset}", f"--run.folder={folder}"], start_group=False)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_world_size_does_not_matter(layout: str, single: Path, dataset: Path, tmp_path: Path) -> None:
    world_size, steps, overrides = LAYOUTS[layout]
    arguments = [*SMALL, *overrides, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(world_size, run, arguments, 0 if steps == STEPS else steps, start_group=False)
    tokens = [256 * step for step in range(1, steps + 1)]
    assert column(tmp_path / "run", "tokens") == column(single, "tokens")[:steps] == tokens
    torch.testing.assert_close(column(tmp_path / "run", "loss"), column(single, "loss")[:steps], rtol=1e-6, atol=0)


def test_masked_documents_change_the_loss_and_not_its_independence(single: Path, dataset: Path, tmp_path: Path) -> None:
    for world_size in (1, 2):
        arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / str(world_size)}"]
        run_ranks(world_size, run, [*arguments, "--data.mask_documents"], start_group=False)
    alone, shared = (column(tmp_path / name, "loss") for name in ("1", "2"))
    torch.testing.assert_close(shared, alone, rtol=1e-6, atol=0)
    assert alone[0] == pytest.approx(column(single, "loss")[0], rel=1e-3)
    assert alone != column(single, "loss")


def test_the_model_learns_and_the_rows_are_whole(single: Path) -> None:
    losses = column(single, "loss")
    assert losses[-1] < losses[0] - 0.5
    lines = [json.loads(line) for line in (single / "metrics.jsonl").read_text().splitlines()]
    validation = {line["step"]: line["validation_loss"] for line in lines if line["validation_loss"] is not None}
    assert list(validation) == [10, 20]
    assert validation[20] < validation[10]
    asked = {
        "step",
        "loss",
        "validation_loss",
        "grad_norm",
        "lr",
        "tokens",
        "tps",
        "mfu",
        "memory_gib",
        "data_wait_pct",
    }
    assert all(asked <= line.keys() for line in lines)
    assert all(line["mfu"] is None for line in lines), "the peak of a CPU is not known"
    assert load_config([f"--config={single / 'config.toml'}"]).training.steps == STEPS
    start = json.loads((single / "starts.jsonl").read_text())
    assert start["world_size"] == 1
    assert start["packages"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("world_size", "state_dtype", "stops"), [(1, "float32", [5]), (2, "float32", [3, 12, 19]), (2, "bfloat16", [12])]
)
def test_a_resumed_run_has_the_same_bits(
    world_size: int, state_dtype: str, stops: list[int], dataset: Path, tmp_path: Path
) -> None:
    small = [*(word for word in SMALL if "param_dtype" not in word), *COPIES] if world_size == 1 else list(SMALL)

    def arguments(name: str) -> list[str]:
        return [
            *small,
            f"--optimizer.state_dtype={state_dtype}",
            f"--data.datasets={dataset}",
            f"--run.folder={tmp_path / name}",
        ]

    run_ranks(world_size, run, arguments("whole"), start_group=False)
    whole = flat(final_weights(tmp_path / "whole", tmp_path))
    assert len(whole) >= 3 * 38
    for stop_after in stops:
        folder = tmp_path / f"cut{stop_after}"
        run_ranks(world_size, run, arguments(folder.name), stop_after, start_group=False)
        run_ranks(world_size, run, arguments(folder.name), start_group=False)
        assert len((folder / "starts.jsonl").read_text().splitlines()) == 2
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert column(folder, name) == column(tmp_path / "whole", name), name
        cut = flat(final_weights(folder, tmp_path))
        assert whole.keys() == cut.keys()
        for name, value in whole.items():
            assert torch.equal(cut[name], value), name
    moments = {value.dtype for name, value in whole.items() if name.endswith("exp_avg")}
    assert moments == {getattr(torch, state_dtype)}


def test_resume_at_another_world_size_sees_the_same_tokens(single: Path, dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(2, run, arguments, 7, start_group=False)
    run_ranks(4, run, arguments, 13, start_group=False)
    run_ranks(1, run, arguments, start_group=False)
    assert column(tmp_path / "run", "tokens") == column(single, "tokens")
    torch.testing.assert_close(column(tmp_path / "run", "loss"), column(single, "loss"), rtol=1e-6, atol=0)


def refusal(arguments: list[str], own: list[str]) -> str:
    """What train.py says where this rank has one setting of its own."""
    with pytest.raises(ConfigError) as refused:  # which no restart by torchrun can mend
        train(load_config([*arguments, own[int(os.environ["RANK"])]]))
    assert refused.value.agreed
    return str(refused.value)


@pytest.mark.parametrize(
    "setting", ["data.datasets", "validation.datasets", "training.seq_len", "parallelism.dp_replicate"]
)
def test_ranks_that_would_read_different_data_do_not_start(setting: str, dataset: Path, tmp_path: Path) -> None:
    """As where each node has a copy of its own, and one was prepared in another way."""
    command = [f"--source={dataset.parent / 'text'}", f"--output={tmp_path / 'set'}", f"--tokenizer={dataset}"]
    prepare([*command, "--validation-fraction=0.1", "--block-mb=0.01"])
    own = {"training.seq_len": ["32", "16"], "parallelism.dp_replicate": ["1", "2"]}.get(
        setting, [str(dataset), str(tmp_path / "set")]
    )
    shown = [value if value.isdigit() else json.dumps(open_dataset(value).hash) for value in own]
    words = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    words = [word for word in words if not word.startswith(f"--{setting}=")]
    said = run_ranks(2, refusal, words, [f"--{setting}={value}" for value in own], start_group=False)
    assert said[0] == said[1]
    assert f": {shown[1]} on rank 1, {shown[0]} on rank 0; every node needs the same copy of the data" in said[0]
    assert not (tmp_path / "run").exists()


def test_steps_may_change_on_resume_and_the_change_is_recorded(dataset: Path, tmp_path: Path) -> None:
    base = [word for word in SMALL if "steps" not in word]
    base += ["--lr_scheduler.warmup_steps=1", f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(1, run, [*base, "--training.steps=4"], start_group=False)
    run_ranks(1, run, [*base, "--training.steps=6"], start_group=False)
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    last = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[-1])
    assert last["changed"] == {"training.steps": [4, 6]}
    files = ("starts.jsonl", "exit.json", "config.toml")
    before = [(tmp_path / "run" / file).read_bytes() for file in files]
    with pytest.raises(AssertionError, match=r"training.steps = 5: this run has reached step 6"):
        run_ranks(1, run, [*base, "--training.steps=5"], start_group=False)
    assert [(tmp_path / "run" / file).read_bytes() for file in files] == before


def test_a_run_of_a_version_with_other_settings_is_used_and_resumed(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    base = [word for word in SMALL if "steps" not in word]
    base += ["--lr_scheduler.warmup_steps=1", f"--data.datasets={dataset}", f"--run.folder={folder}"]
    with monkeypatch.context() as other_version:
        other_version.setattr("config.to_toml", lambda config: to_toml(config) + "[branch]\nidea = 3\n")
        run_ranks(1, run, [*base, "--training.steps=2"], start_group=False)
    generate([str(folder), "--prompt=ba", "--max-tokens=4"])
    validate([str(folder)])
    assert f"{dataset.name}  loss " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"\[branch\]: must be a section"):
        load_config([f"--config={folder / 'config.toml'}"])
    run_ranks(1, run, [*base, "--training.steps=3"], start_group=False)
    last = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    assert last["changed"] == {"training.steps": [2, 3]}


def test_a_model_that_was_added_is_trained_and_used(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr("models.MODELS", {**MODELS, "toy": dataclasses.replace(MODELS["llama"], hf=None)})
    words = [word for word in SMALL if "steps" not in word and "flavor" not in word]
    words += ["--model.name=toy", "--model.flavor=tiny", "--lr_scheduler.warmup_steps=1", "--training.steps=2"]
    run_ranks(1, run, [*words, f"--data.datasets={dataset}", f"--run.folder={folder}"], start_group=False)
    generate([str(folder), "--prompt=ba", "--max-tokens=4"])
    validate([str(folder)])
    assert f"{dataset.name}  loss " in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="its ModelSpec has no `hf`"):
        exported_model({"identity": json.loads((folder / "model.json").read_text())})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="holds a model 'toy': must be one of llama"):
        generate([str(folder), "--prompt=ba"])


# ---------------------------------------------------------------- bad input


class Ended(NamedTuple):
    """A process that ended."""

    returncode: int
    stderr: str


def call(tmp_path: Path, *arguments: str) -> Ended:
    """train.py's main in a process of its own, forked after one import of torch."""
    log = tmp_path / "stderr.txt"
    pid = os.fork()
    if not pid:
        try:
            sys.stderr, sys.argv = log.open("w"), ["train.py", *arguments]  # pytest's own is not this process's
            run_and_leave(main)
        finally:
            traceback.print_exc()
            os._exit(1)
    returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(returncode, log.read_text())


def damaged_copy(dataset: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(dataset, copy)
    shard = next(copy.glob("train*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return copy


def test_bad_input_ends_in_one_line(single: Path, dataset: Path, tmp_path: Path) -> None:
    run_folder, empty = tmp_path / "run", tmp_path / "empty"
    (empty / "text").mkdir(parents=True)
    source = f"--source={dataset.parent / 'text'}"  # a tokenizer of 511, which the same model fits
    prepare([source, f"--output={tmp_path / 'other'}", "--vocab-size=511", "--validation-fraction=0.1"])
    before = {path: path.read_bytes() for path in single.iterdir() if path.is_file()}
    data = f"--data.datasets={dataset}"
    cases = [
        (["--training.stpes=3"], ["training.stpes", "did you mean --training.steps"]),
        (["--training.steps=many"], ["training.steps", "many", "integer"]),
        (["--data.datasets=nowhere"], ["nowhere", "data.prepare"]),
        ([data, "--parallelism.dp_replicate=3"], ["dp_replicate 3", "world size, 1"]),
        ([data, "--training.global_batch_size=7"], ["training.global_batch_size = 7", "8 x 1"]),
        ([data, "--model.vocab_size=64"], ["model.vocab_size = 64", "512"]),
        ([data, "--model.name=lama"], ["model.name", "lama", "llama"]),
        ([data, "--training.seq_len=1000000"], ["training.seq_len", "1000001"]),
        ([data, "--metrics.log_ranks=8,9"], ["metrics.log_ranks: rank 8", "0 to 0"]),
        ([data, f"--run.folder={300 * 'a'}"], [f"{300 * 'a'}/tokenizer.json: File name too long"]),
        ([data, f"--run.folder={empty}"], ["run.folder", "not the folder of a run"]),
        (
            [data, f"--run.folder={single}", "--model.vocab_size=576"],
            ["another model", "vocab_size is 512 there and 576"],
        ),
        (
            [*SMALL, f"--data.datasets={tmp_path / 'other'}", f"--run.folder={single}"],
            [f"{single}: this run began with tokenizer", "--tokenizer"],
        ),
    ]
    for arguments, said in cases:
        if not any("run.folder" in word for word in arguments):
            arguments = [*arguments, f"--run.folder={run_folder}"]
        result = call(tmp_path, *arguments)
        assert result.returncode == 2, (arguments, result.stderr)
        assert result.stderr.startswith("error: "), (arguments, result.stderr)
        assert result.stderr.count("\n") == 1, (arguments, result.stderr)
        for part in said:
            assert part in result.stderr, (arguments, result.stderr)
        assert not run_folder.exists(), "nothing may be written"
    assert {path: path.read_bytes() for path in single.iterdir() if path.is_file()} == before


def test_a_corrupt_shard_stops_the_run_and_is_named(dataset: Path, tmp_path: Path) -> None:
    bad = damaged_copy(dataset, tmp_path)
    result = call(tmp_path, *SMALL, f"--data.datasets={bad}", f"--run.folder={tmp_path / 'run'}")
    assert result.returncode == 2, result.stderr
    assert "train-00000.arrow" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_loss_that_is_not_finite_stops_before_a_checkpoint(dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command += [word for word in SMALL if "log_interval" not in word and "optimizer.lr" not in word]
    command += [f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}", "--optimizer.lr=1e30"]
    result = subprocess.run([*command, "--metrics.log_interval=4"], cwd=ROOT, capture_output=True, text=True)
    said = result.stderr[: result.stderr.index("torch/distributed/")]  # torchrun's own summary follows
    assert said.count("error: ") == 1
    assert "error: step 2: " in said or "error: step 3: " in said
    assert "not finite" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def run_and_watch(arguments: list[str]) -> list[str]:
    """The sections that a run enters, in their order."""
    entered = []
    enter = Watchdog.enter

    def note(self: Watchdog, section: str, step: int | None = None) -> None:
        entered.append(section)
        enter(self, section, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Watchdog, "enter", note)
        run(arguments)
    return entered


def test_each_token_of_the_sample_is_progress_to_the_watchdog(dataset: Path, tmp_path: Path) -> None:
    """Otherwise it would take a run that writes a long sample for one that hangs."""
    arguments = [word for word in SMALL if "training.steps" not in word] + ["--training.steps=4"]
    arguments += [f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    arguments += ["--validation.sample_prompt=ba", "--validation.sample_tokens=8"]
    for entered in run_ranks(2, run_and_watch, arguments, start_group=False):
        assert entered.count("end") >= 8


def count_tensors(arguments: list[str]) -> list[int]:
    """How many tensors there are after each step, while a thread looks at the stack as the watchdog's does."""
    main, ended, counts = threading.get_ident(), threading.Event(), []

    def watch() -> None:
        while not ended.wait(0.001):
            _stack_of(main)

    def after_step(step: int) -> None:
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        train(load_config(arguments), after_step)
    finally:
        ended.set()
        thread.join()
    return counts


@pytest.mark.parametrize("options", [[], ["--compile.enable", "--compile.backend=aot_eager"]])
def test_no_step_leaves_tensors_behind(options: list[str], dataset: Path, tmp_path: Path) -> None:
    """The collector runs once in many steps: what waits for it in a cycle would fill the memory until then."""
    arguments = [*SMALL, "--validation.enable=false", "--checkpoint.enable=false", *options]
    arguments += [f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    for counts in run_ranks(2, count_tensors, arguments, start_group=False):
        assert counts[-1] < 2 * counts[4]  # the other thread may hold a few just now


def run_without_the_last_step(arguments: list[str]) -> None:
    judge, judged = BadSteps.judge, list[torch.Tensor]()

    def judge_last(self: BadSteps, loss: torch.Tensor, grad_norm: torch.Tensor) -> str:
        judged.append(loss)
        return "made up" if len(judged) == STEPS else judge(self, loss, grad_norm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BadSteps, "judge", judge_last)
        run(arguments)


def test_a_run_whose_last_step_is_left_out_is_measured_at_its_end(dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(2, run_without_the_last_step, [*arguments, "--failures.on_bad_step=skip"], start_group=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if row["skipped"]] == [STEPS]
    assert [row["step"] for row in lines if row["validation_loss"]] == [10, STEPS]


# ---------------------------------------------------------------- the life of a run under torchrun


def test_a_crash_does_not_wait_for_threads_that_wait(dataset: Path, tmp_path: Path) -> None:
    """As those do that ask of a store that is away."""
    (tmp_path / "tracker.py").write_text(
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def log(row):\n"
        "    ThreadPoolExecutor().submit(threading.Event().wait)\n"
        "    raise RuntimeError('the tracker is broken')\n"
    )
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}", "--metrics.hook=tracker:log"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, ROOT / "train.py", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "RuntimeError: the tracker is broken" in result.stderr
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["cause"] == "RuntimeError: the tracker is broken"


def test_killed_and_resumed_under_torchrun(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, SIGKILL after the first checkpoint; resumed, profiled, sampled; then text from generate.py."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *SMALL]
    command += [f"--data.datasets={dataset}", f"--run.folder={folder}", "--metrics.log_ranks=0,1"]
    command += ["--validation.sample_prompt=ba", "--validation.sample_tokens=8", "--profiling.trace"]
    command += ["--profiling.trace_start=14", "--profiling.trace_steps=2"]
    command.remove("--metrics.tensorboard=false")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    for line in process.stderr:
        if "[rank 0] step  7/20" in line:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
            break
    process.wait()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (found,) = set(re.findall(r"resumed from .*step-(\d+)", result.stderr))
    resumed = int(found)
    assert resumed in (5, 10)
    assert "[rank 0] step  1/20" not in result.stderr
    assert "[rank 1] step 20/20" in result.stderr
    assert "sample:\nba" in result.stderr
    assert sorted(rows(folder)) == list(range(1, 21))
    assert list((folder / "tensorboard").glob("events*"))
    for rank in range(2):
        with gzip.open(folder / "profile" / f"trace-step14-rank{rank}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        # Counted from this start, which resumed after step 5 or 10.
        expected = {f"ProfilerStep#{step - resumed}" for step in (14, 15)}
        assert {name for name in names if name.startswith("ProfilerStep")} == expected

    texts = []
    for _ in range(2):
        generate([str(folder), "--prompt=ba", "--max-tokens=12"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("ba")
    assert len(texts[0]) > 10


def test_layouts_change_from_start_to_start(
    single: Path, dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """FSDP 2 x TP 2 x PP 2, then CP 2 x TP 2, then one process: the same tokens and losses.

    Each start ends with a validation loss that validate.py confirms.
    """
    folder, prompt = tmp_path / "run", " ".join(["ba"] * 27)  # 27 tokens, which leave room for 5

    def start(world_size: int, *arguments: str) -> str:
        words = [word for word in SMALL if "training.steps" not in word]
        words += [f"--data.datasets={dataset}", f"--run.folder={folder}", *arguments]
        words += [f"--validation.sample_prompt={prompt}", "--validation.sample_tokens=99"]
        run_ranks(world_size, run, words, start_group=False)
        said = capfd.readouterr().err
        validate([str(folder)])
        (measured,) = re.findall(r"  loss ([\d.]+)  ", capfd.readouterr().out)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        *_, reported = (line["validation_loss"] for line in lines if line["validation_loss"])
        assert float(measured) == pytest.approx(reported, abs=1e-4)
        return said.split("sample:\n")[-1].split("\n")[0]

    def steps(last: int) -> list[str]:
        # The schedule is that of the whole run, which ends after 20 steps.
        return [f"--training.steps={last}", f"--lr_scheduler.decay_fraction={0.0 if last < STEPS else 0.2}"]

    assert start(8, *steps(4), "--parallelism.tp=2", "--parallelism.pp=2").startswith("none, since tp, cp or pp")
    start(4, *steps(8), "--parallelism.tp=2", "--parallelism.cp=2")
    assert start(1, *steps(STEPS)).startswith(prompt), "a sample ends where seq_len is full"
    assert column(folder, "tokens") == column(single, "tokens")
    torch.testing.assert_close(column(folder, "loss"), column(single, "loss"), rtol=1e-6, atol=0)
    assert prove(folder)[0].startswith(f"{STEPS} steps")


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two processes that nobody stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    words = [word for word in SMALL if "checkpoint.interval" not in word]
    words += ["--validation.enable=false", "--checkpoint.interval=1000"]
    run_ranks(2, run, [*words, f"--data.datasets={dataset}", f"--run.folder={folder}"], start_group=False)
    return column(folder, "loss")


@pytest.mark.parametrize("how", ["SIGTERM to torchrun", "SIGUSR1 to a rank", "stop file, async saves"])
def test_asked_to_stop_it_saves_between_two_steps_and_resumes_with_the_same_bits(
    how: str, uninterrupted: list[float], dataset: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    words = [word for word in SMALL if "checkpoint.interval" not in word]
    saving = (
        ["--checkpoint.interval=1", "--checkpoint.mode=async"] if "async" in how else ["--checkpoint.interval=1000"]
    )
    words += [f"--data.datasets={dataset}", *saving, "--validation.enable=false"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command += [*words, f"--run.folder={folder}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "step  4/20" in line:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if how == "SIGTERM to torchrun":
                process.terminate()
            elif how == "SIGUSR1 to a rank":
                os.kill(int(children[1]), signal.SIGUSR1)
            else:
                (folder / "stop").touch()
    assert process.wait() == (1 if how == "SIGTERM to torchrun" else 0)
    output = "".join(lines)
    assert how == "SIGTERM to torchrun" or "Traceback" not in output  # torchrun's own, of the signal
    assert "stopped after step" in output
    stopped = max(rows(folder))
    assert 4 <= stopped < 20
    saved = sorted(int(path.parent.name.split("-")[1]) for path in (folder / "checkpoints").glob("*/MANIFEST.json"))
    assert saved == (list(range(1, stopped + 1)) if "async" in how else [stopped])
    assert not (folder / "stop").exists()
    run_ranks(2, run, [*words, f"--run.folder={folder}"], start_group=False)
    assert column(folder, "loss") == uninterrupted


def asked_during_validation(arguments: list[str], asked: bool) -> int:
    """train.py in this process; the batches validated. `asked`: rank 1 is, by SIGUSR1, while it reads the second."""
    taken = 0

    def batches(*place: Any) -> Iterator[Batch]:
        nonlocal taken
        for batch in validation_batches(*place):
            taken += 1
            if asked and taken == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("validate.validation_batches", batches)
        run(arguments)
    return taken


def train_each(runs: list[list[str]]) -> list[tuple[Path, float, bool]]:
    """Several runs in this process: the folder and the last validation loss that `train` returns of each."""
    returned = [train(load_config(arguments)) for arguments in runs]
    return [(folder, row["validation_loss"], dist.is_initialized()) for folder, row in returned]


def test_two_runs_in_a_process_have_the_bits_of_two_processes(dataset: Path, tmp_path: Path) -> None:
    words = [*SMALL, f"--data.datasets={dataset}", "--training.param_dtype=bfloat16"]
    words = [word for word in words if word != "--training.param_dtype=float32"]
    runs = [[*words, f"--run.folder={tmp_path / name}"] for name in ("a", "b", "alone")]
    (together,) = run_ranks(1, train_each, runs[:2], start_group=False)
    (alone,) = run_ranks(1, train_each, runs[2:], start_group=False)
    assert [folder for folder, *_ in together] == [tmp_path / "a", tmp_path / "b"]
    assert [rest for _, *rest in together] == [rest for _, *rest in alone] * 2
    for name in ("a", "b"):
        for key in ("loss", "grad_norm"):
            assert column(tmp_path / name, key) == column(tmp_path / "alone", key)


def run_without_held_out_data(arguments: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("validate.validation_batches", mock.Mock(side_effect=DataError("held-out data is gone")))
        try:
            train(load_config(arguments))
        except DataError as error:
            return str(error)
    return ""


def test_a_validation_that_fails_costs_no_checkpoint(dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    assert run_ranks(1, run_without_held_out_data, arguments, start_group=False) == ["held-out data is gone"]
    saved = sorted(path.name.split("-")[1] for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["00000005", "00000010"]


def test_asked_to_stop_during_a_validation_it_saves_without_awaiting_its_end(
    uninterrupted: list[float], dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith(("--checkpoint.interval", "--validation."))]
    words += [f"--data.datasets={dataset}", f"--run.folder={folder}", "--checkpoint.interval=1000"]
    words += ["--validation.interval=8", "--validation.max_samples=0"]
    first = run_ranks(2, asked_during_validation, words, True, start_group=False)
    assert first == [3, 3], "a vote cast at the second batch is read at the third, which is left"
    output = capfd.readouterr().err
    assert "step 8: not validated to the end, since the run is to stop" in output
    assert "stopped after step 8" in output
    assert [path.name.split("-")[1] for path in (folder / "checkpoints").iterdir()] == ["00000008"]
    last = run_ranks(2, asked_during_validation, words, False, start_group=False)
    assert last[0] == last[1] > 2 * 3, "two whole validations"
    assert column(folder, "loss") == uninterrupted
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in lines if row["validation_loss"] is not None] == [16, STEPS]
