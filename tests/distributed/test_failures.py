"""Bad steps left out, results that differ between two computations, slow ranks; and a short chaos under torchrun."""

import contextlib
import gzip
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.chaos import Job, judge_job, prepare_data, schedule, suffer, weights
from checkpoint.manager import CheckpointManager
from config import Failures, TitaniteError, load_config
from run.failures import SPIKE_WINDOW, BadSteps, RolledBackError, check_replay
from run.folder import record_exit
from run.processes import AGAIN, shut_down
from run.stop import StopRequest
from run.watchdog import Watchdog
from tests.corpus import write_dataset
from tests.harness import run_ranks
from tools.audit import prove
from tools.compare import read_charts
from train import train

SMALL = (
    "--model.flavor=tiny",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.param_dtype=float32",
    "--training.steps=12",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
    "--checkpoint.interval=5",
    "--checkpoint.keep=0",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    documents = [[[rng.randrange(1, 90) for _ in range(rng.randrange(5, 60))] + [0] for _ in range(300)]]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", documents, documents[0][:20], vocab_size=100)


def run(
    arguments: list[str],
    bad_steps: tuple[int, ...] = (),
    stop_after: int = 0,
    ask_after: int = 0,
    damage_after: int = 0,
) -> str:
    """Train; rank 1's n-th forward is NaN for n in `bad_steps`; the error that ended it, or "crash" if cut off.

    After step `ask_after` the run is asked to stop: it does so after one more. The checkpoint of step `damage_after` is
    damaged once it is saved.
    """
    config, forwards = load_config(arguments), [0]

    def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(module, nn.Embedding):
            return output
        forwards[0] += 1
        with torch.profiler.record_function(f"forward {forwards[0]}"):  # for a trace
            pass
        return output * float("nan") if dist.get_rank() == 1 and forwards[0] in bad_steps else output

    def after_step(step: int) -> None:
        if step == stop_after:
            raise KeyboardInterrupt
        if step == ask_after:
            (Path(config.run.folder) / "stop").touch()
        if step == damage_after and dist.get_rank() == 0:
            (file,) = Path(config.run.folder).glob(f"checkpoints/step-{step:08}-*/__0_0.distcp")
            file.write_bytes(bytes(file.stat().st_size))

    nn.modules.module.register_module_forward_hook(spoil)
    try:
        train(config, after_step)
    except RolledBackError:
        return "rolled back"
    except (TitaniteError, KeyboardInterrupt) as error:
        return str(error) or "crash"
    return ""


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def traced(folder: Path, first: int) -> list[str]:
    """The forwards in the trace of rank 0 that begins with step `first`."""
    with gzip.open(folder / "profile" / f"trace-step{first}-rank0.json.gz") as file:
        return sorted(
            {event["name"] for event in json.load(file)["traceEvents"] if event["name"].startswith("forward ")}
        )


def same_weights(left: Path, right: Path, scratch: Path) -> bool:
    a, b = weights(left, scratch), weights(right, scratch)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_bad_step_is_skipped_on_all_ranks_and_again_after_a_crash(
    dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def arguments(name: str) -> list[str]:
        return [
            *SMALL,
            "--failures.on_bad_step=skip",
            f"--data.datasets={dataset}",
            f"--run.folder={tmp_path / name}",
        ]

    trace = ["--profiling.trace=true", "--profiling.trace_start=9", "--profiling.trace_steps=2"]
    assert run_ranks(2, run, [*arguments("whole"), *trace], (7,), start_group=False) == ["", ""]
    assert traced(tmp_path / "whole", 9) == ["forward 10", "forward 9"]
    (record,) = read(tmp_path / "whole", "skipped.jsonl")
    assert (record["first"], record["last"]) == (7, 7)
    rows = {row["step"]: row for row in read(tmp_path / "whole", "metrics.jsonl")}
    assert list(rows) == list(range(1, 13))
    assert [step for step, row in rows.items() if row["skipped"]] == [7]
    assert rows[7]["loss"] is None
    assert prove(tmp_path / "whole")[0].startswith("12 steps")

    run_ranks(2, run, arguments("cut"), (7,), 8, start_group=False)
    run_ranks(2, run, arguments("cut"), start_group=False)  # step 7 would be sound now, and is left out all the same
    assert "steps left out again: 7 to 7 (1)" in capfd.readouterr().err
    assert same_weights(tmp_path / "cut", tmp_path / "whole", tmp_path)
    assert prove(tmp_path / "cut")[0].startswith("12 steps")

    run_ranks(2, run, arguments("sound"), start_group=False)
    assert not same_weights(tmp_path / "sound", tmp_path / "whole", tmp_path), "the step matters"


def test_a_bad_step_rolls_back_to_the_checkpoint_and_leaves_out_all_since(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(name: str) -> list[str]:
        folder = tmp_path / name
        return [*SMALL, "--failures.on_bad_step=rollback", f"--data.datasets={dataset}", f"--run.folder={folder}"]

    for said in run_ranks(2, run_refused, arguments("refused"), start_group=False):
        assert said.startswith('failures.on_bad_step = "rollback": needs checkpoint.enable = true and a torchrun')
    assert not (tmp_path / "refused").exists()

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert run_ranks(2, run, arguments("rolled"), (10,), start_group=False) == ["rolled back"] * 2
    ended = json.loads((tmp_path / "rolled" / "exit.json").read_text())
    assert (ended["kind"], ended["step"], ended["last_checkpoint"]) == ("rolled back", 10, 5)
    assert run_ranks(2, run, arguments("rolled"), start_group=False) == ["", ""]
    (record,) = read(tmp_path / "rolled", "skipped.jsonl")
    assert (record["first"], record["last"]) == (6, 10)
    rows = {row["step"]: row for row in read(tmp_path / "rolled", "metrics.jsonl")}
    assert [step for step, row in rows.items() if row["skipped"]] == [6, 7, 8, 9, 10]
    assert read_charts(tmp_path / "rolled")["loss"]["step"] == [1, 2, 3, 4, 5, 11, 12]
    saved = sorted(path.name.split("-")[1] for path in (tmp_path / "rolled" / "checkpoints").glob("step-*"))
    assert saved == ["00000005", "00000010", "00000012"], "what is due at a step comes at it"
    # The same, known beforehand: a run whose record has those steps from its first crash on.
    run_ranks(2, run, arguments("told"), (), 5, start_group=False)
    (tmp_path / "told" / "skipped.jsonl").write_text(json.dumps(record) + "\n")
    run_ranks(2, run, arguments("told"), start_group=False)
    assert same_weights(tmp_path / "told", tmp_path / "rolled", tmp_path)
    proof = prove(tmp_path / "rolled")
    assert proof[0].startswith("12 steps")
    assert proof[-1].startswith(f"{tmp_path}/rolled/skipped.jsonl lists steps")


def run_refused(arguments: list[str]) -> str:
    os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)
    return run(arguments)


def test_a_rollback_past_a_damaged_checkpoint_goes_on_with_the_one_before(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    arguments = [*SMALL, "--failures.on_bad_step=rollback", "--failures.bad_step_budget=1"]
    arguments += [f"--data.datasets={dataset}", f"--run.folder={tmp_path}"]
    # Step 11 is bad. The next start passes step 10's checkpoint over for step 5's; its step 7 spends the budget.
    assert run_ranks(2, run, arguments, (11,), 0, 0, 10, start_group=False) == ["rolled back"] * 2
    run_ranks(2, run, arguments, (2,), start_group=False)
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["step"], record["last_checkpoint"], record["steps_repeated"]) == (7, 5, 2)
    assert prove(tmp_path)[0].startswith("7 steps")


def test_what_is_due_at_a_step_left_out_comes_at_it(dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--failures.on_bad_step=skip", f"--data.datasets={dataset}", f"--run.folder={tmp_path}"]
    arguments.remove("--validation.enable=false")
    arguments += ["--validation.interval=5", "--validation.max_samples=4"]
    assert run_ranks(2, run, arguments, (10,), start_group=False) == ["", ""]
    saved = sorted(path.name.split("-")[1] for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["00000005", "00000010", "00000012"]
    rows = [row for row in read(tmp_path, "metrics.jsonl") if row["validation_loss"] is not None]
    assert [row["step"] for row in rows] == [5, 10, 12]


def test_a_loss_that_is_not_finite_names_its_step_also_behind_one_left_out(dataset: Path, tmp_path: Path) -> None:
    seldom = [word.replace("log_interval=1", "log_interval=10") for word in SMALL]
    arguments = [*seldom, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}"]
    run_ranks(2, run, arguments, (), 5, start_group=False)
    (tmp_path / "run" / "skipped.jsonl").write_text(json.dumps({"first": 8, "last": 8, "cause": ""}) + "\n")
    for said in run_ranks(2, run, arguments, (2,), start_group=False):
        assert said.startswith("step 7: loss nan")


def test_the_budget_ends_the_run_on_all_ranks(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL, "--failures.on_bad_step=skip", "--failures.bad_step_budget=2"]
    arguments += [f"--data.datasets={dataset}", f"--run.folder={folder}"]
    for said in run_ranks(2, run, arguments, (3, 6, 7), start_group=False):
        assert said.startswith("step 7: loss nan")
        assert "failures.bad_step_budget = 2 is spent" in said
    record = json.loads((folder / "exit.json").read_text())
    assert (record["kind"], record["step"], record["last_checkpoint"]) == ("error", 7, 5)

    # Back to step 5: 6 is left out again, 7 is sound now.
    assert run_ranks(2, run, arguments, start_group=False) == ["", ""]
    assert prove(folder)[-1].startswith(f"{folder}/skipped.jsonl lists steps")

    # A start without checkpoints, from step 0, is bound by nothing, and nothing of it is left.
    assert run_ranks(2, run, [*arguments, "--checkpoint.enable=false"], (2, 4), start_group=False) == ["", ""]
    assert [record["last"] for record in read(folder, "skipped.jsonl")] == [3, 6]


def judge_losses(folder: Path) -> list[str]:
    bad_steps = BadSteps(Failures(on_bad_step="skip", spike_factor=1.5), folder, 0, True, lambda: None)
    losses = [2.0, 3.1] + [2.0] * (SPIKE_WINDOW - 3) + [2.9, 3.1, 2.9, 3.1]
    return [bad_steps.judge(torch.tensor(loss), torch.tensor(1.0)) for loss in losses]


def test_spikes_are_measured_by_the_steps_before(tmp_path: Path) -> None:
    (verdicts,) = run_ranks(1, judge_losses, tmp_path)
    assert [bool(verdict) for verdict in verdicts[-4:]] == [False, True, False, True]
    assert not any(verdicts[:-4])
    assert verdicts[-1].startswith("loss 3.1000 is above 3.0000")


# ---------------------------------------------------------------- replay


def replay(wrong: str) -> str:
    """Two computations of a gradient; on rank 1 the second one has a wrong bit in the loss or a gradient."""
    other, weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.arange(8.0))

    def compute() -> list[Tensor]:
        loss = (weight * torch.arange(8.0)).square().sum() + other.sum()
        loss.backward()
        return [loss.detach()]

    def again() -> list[Tensor]:
        losses = compute()
        if dist.get_rank() == 1 and wrong:
            tensor = losses[0] if wrong == "loss" else weight.grad
            assert tensor is not None
            tensor.view(torch.int32).view(-1)[-1:] ^= 1
        return losses

    try:
        check_replay(10, [other, weight], compute(), again)
    except TitaniteError as error:
        return str(error)
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * torch.arange(8.0) ** 3), "one computation's gradients are left in place"
    return ""


def test_a_wrong_bit_is_found_by_replay() -> None:
    assert run_ranks(2, replay, "") == ["", ""]
    for said in run_ranks(2, replay, "loss"):
        assert "step 10: computed twice, the loss differs on rank [1]" in said
    for said in run_ranks(2, replay, "gradient"):
        assert "no loss differs but gradients do on rank [1]" in said


def test_replayed_steps_train_the_same(dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--run.deterministic", f"--data.datasets={dataset}"]
    run_ranks(2, run, [*arguments, f"--run.folder={tmp_path / 'once'}"], start_group=False)
    twice = [*arguments, f"--run.folder={tmp_path / 'twice'}", "--failures.replay_interval=3"]
    assert run_ranks(2, run, twice, start_group=False) == ["", ""]
    assert same_weights(tmp_path / "once", tmp_path / "twice", tmp_path)


def timeouts(arguments: list[str]) -> list[set[float]]:
    """The longest waits of all groups of this rank: before the first step, in which another comes, and after it."""
    found: list[set[float]] = []

    def look(stop: StopRequest) -> bool:
        groups = dist.distributed_c10d._world.pg_map
        found.append({group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups})
        return len(found) > 1

    new_group = dist.new_group
    with mock.patch.object(StopRequest, "agreed", look), mock.patch.object(dist, "new_group", wraps=new_group) as made:
        train(load_config(arguments))
    return [*found, {call.kwargs["timeout"].total_seconds() for call in made.call_args_list}]


def test_timeouts_are_those_of_the_settings(dataset: Path, tmp_path: Path) -> None:
    """Of all groups but the checkpoints', FSDP2's included."""
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path}"]
    arguments += ["--parallelism.reshard_group_size=2", "--comm.store_retry_seconds=10"]
    arguments += [
        "--comm.init_timeout_seconds=111",
        "--comm.train_timeout_seconds=222",
        "--checkpoint.timeout_seconds=2400",
    ]
    for before, after, made in run_ranks(4, timeouts, arguments, start_group=False):
        assert before == made == {111, 2400}
        assert after == {222, 2400}


def progress(arguments: list[str]) -> Counter[str]:
    """How often anything but a new section told the watchdog that the rank is alive, by section."""
    told: Counter[str] = Counter()
    with mock.patch.object(Watchdog, "alive", lambda watchdog: told.update([watchdog.section])):
        train(load_config(arguments))
    return told


def test_initial_weights_are_progress(dataset: Path, tmp_path: Path) -> None:
    """With cpu_offload the host draws them all, which takes minutes for a large model."""
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path}"]
    (told,) = run_ranks(1, progress, arguments, start_group=False)
    assert told["init"] == 3 + 4 * 9  # the weights of the tiny model


def exit_code(arguments: list[str], steps: int, *signals: signal.Signals) -> Any:
    """Of a rank alone on its node; rank 1 gets the signals after step 2. None leaves before rank 0 has said why."""
    os.environ["LOCAL_RANK"] = "0"
    folder = Path(next(word for word in arguments if "run.folder" in word).partition("=")[2])

    def say_slowly(*ended: Any) -> bool:
        time.sleep(1)
        return record_exit(*ended)

    def after_step(step: int) -> None:
        for number in signals if dist.get_rank() == 1 and step == 2 else ():
            os.kill(os.getpid(), number)

    code: Any = 0
    with mock.patch("run.watchdog.record_exit", say_slowly):
        try:
            train(load_config([*arguments, f"--training.steps={steps}"]), after_step)
        except SystemExit as ended:
            code = ended.code
            shut_down()  # as the end of the process would
    assert steps == 2 or (folder / "exit.json").exists()
    return code


def test_a_node_that_is_taken_does_not_end_the_run_on_the_others(dataset: Path, tmp_path: Path) -> None:
    arguments = [*(word for word in SMALL if "training.steps" not in word), f"--data.datasets={dataset}"]
    taken, asked = (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)  # as torchrun sends of a Ctrl-C that comes twice
    for steps, signals, expected in ((12, taken, [AGAIN, 0]), (2, taken, [0, 0]), (13, asked, [0, 0])):
        words = [*arguments, f"--run.folder={tmp_path / str(steps)}"]
        assert run_ranks(2, exit_code, words, steps, *signals, start_group=False) == expected
    saved = sorted(path.name.split("-")[1] for path in (tmp_path / "12" / "checkpoints").glob("step-*"))
    assert saved == ["00000003"], "the vote cast after step 2 was read after step 3"


# ---------------------------------------------------------------- chaos

CHAOS_STEPS = "--training.steps=60"


def test_jobs_survive_faults_with_the_same_weights_and_the_right_verdicts(tmp_path: Path) -> None:
    dataset = prepare_data(tmp_path / "data")
    with contextlib.closing(Job(tmp_path / "undisturbed", dataset, CHAOS_STEPS)) as job:
        job.wait(lambda: job.process.poll() == 0, "the end")
        reference = weights(job.run, tmp_path)
    steps = int(CHAOS_STEPS.partition("=")[2])
    random_faults = random.Random(int(os.environ.get("SEED", "0")))
    ((*faults,),) = schedule(random_faults, {"SIGKILL": 2, "SIGSTOP": 1, "stall": 1}, per_job=9, steps=steps)
    with contextlib.closing(Job(tmp_path / "struck", dataset, CHAOS_STEPS)) as job:
        rows: list[dict[str, Any]] = []
        suffer(job, faults, None, rows)
    assert len(rows) == len(faults)
    row = judge_job(job, reference, tmp_path)
    assert (row["ledger"], row["bit_equal"], row["wrong_verdicts"]) == ("exact", True, 0)
    ends = [start["after"] for start in read(job.run, "starts.jsonl")[1:]]
    assert len(ends) == len(faults)
    for fault, end in zip(faults, ends, strict=True):
        assert end["kind"] == ("lost" if fault.kind == "SIGKILL" else "hung")
        assert end["rank"] == fault.rank
    assert json.loads((job.run / "exit.json").read_text())["kind"] == "finished"


def stop_before_training(arguments: list[str]) -> Any:
    def load(self: CheckpointManager) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with mock.patch.object(CheckpointManager, "load", load):
        try:
            train(load_config(arguments))
        except SystemExit as ended:
            return ended.code


def test_a_request_to_stop_before_the_first_step_ends_at_once_and_is_no_crash(dataset: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path}"]
    assert run_ranks(1, stop_before_training, arguments, start_group=False) == [128 + signal.SIGTERM]
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert (ended["kind"], ended["cause"], ended["start_again"]) == (
        "stopped",
        "stopped by SIGTERM, before any step",
        True,
    )
