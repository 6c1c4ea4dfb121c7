"""Bad steps left out, timeouts, nodes that are taken, ranks that are lost."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from config import ConfigError, Failures, TitaniteError, load_config
from run.exits import AGAIN
from run.failures import SIGMA_WINDOW, BadSteps, RolledBackError
from run.folder import record_exit
from run.processes import shut_down
from tests.harness import run_ranks
from tests.runs import final_weights, flat, how_it_ended, launch, read, rows, same, saved_steps
from tools.audit import prove
from tools.compare import read_charts
from train import train

ROOT = Path(__file__).parents[2]
SKIP, ROLLBACK = "--failures.on_bad_step=skip", "--failures.on_bad_step=rollback"


@pytest.fixture(scope="session")
def small(small):
    """Each rank of two has one forward a step."""
    return (*small, "--training.local_batch_size=4", "--validation.enable=false")


def run(
    arguments,
    bad_steps=(),
    stop_after=0,
    spoils_gradients=False,
):
    """Train; rank 1's n-th forward is NaN for n in `bad_steps`; the error that ended it, or "crash" if cut off.

    `spoils_gradients`: not the forward is NaN, but its gradients.
    """
    config, forwards = load_config(arguments), [0]

    def spoil(module, inputs, output):
        if not isinstance(module, nn.Embedding) or not torch.is_grad_enabled():
            return output
        forwards[0] += 1
        if dist.get_rank() != 1 or forwards[0] not in bad_steps:
            return output
        if not spoils_gradients:
            return output * float("nan")
        output.register_hook(lambda gradient: gradient * float("nan"))
        return output

    def after_step(step):
        if step == stop_after:
            raise KeyboardInterrupt

    nn.modules.module.register_module_forward_hook(spoil)
    try:
        train(config, after_step)
    except RolledBackError:
        return "rolled back"
    except (TitaniteError, KeyboardInterrupt) as error:
        return str(error) or "crash"
    return ""


def left_out(folder):
    """The first and last step of each record."""
    return [(record["first"], record["last"]) for record in read(folder, "skipped.jsonl")]


def same_weights(left, right, scratch):
    return same(*(flat(final_weights(folder, scratch)) for folder in (left, right)))


def test_a_bad_step_is_skipped_on_all_ranks_and_again_after_a_crash(small, tmp_path, capfd):
    words = [*small, SKIP]
    assert launch(2, tmp_path / "whole", words, (7,), function=run) == ["", ""]
    assert left_out(tmp_path / "whole") == [(7, 7)]
    assert list(rows(tmp_path / "whole")) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]

    launch(2, tmp_path / "cut", words, (7,), 8, function=run)
    # Step 7 would be sound now, and is left out all the same. It is not computed, so there is no seventh forward.
    launch(2, tmp_path / "cut", words, (7,), function=run)
    assert "steps left out again: 7 to 7 (1)" in capfd.readouterr().err
    assert same_weights(tmp_path / "cut", tmp_path / "whole", tmp_path)
    assert prove(tmp_path / "cut")[0].startswith("12 steps")


def test_a_bad_step_rolls_back_to_the_checkpoint_and_leaves_out_all_since(small, tmp_path, monkeypatch):
    words, rolled, told = [*small, ROLLBACK], tmp_path / "rolled", tmp_path / "told"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert launch(2, rolled, words, (10,), 0, True, function=run) == ["rolled back"] * 2
    ended = how_it_ended(rolled)
    assert (ended["kind"], ended["step"], ended["last_checkpoint"]) == ("rolled back", 10, 5)
    assert launch(2, rolled, words, function=run) == ["", ""]
    assert left_out(rolled) == [(6, 10)]
    assert [step for step, *_ in read_charts(rolled)["loss"]] == [1, 2, 3, 4, 5, 11, 12]
    assert saved_steps(rolled) == [5, 10, 12], "what is due at a step comes at it"
    # The same, known beforehand: a run whose record has those steps from its first crash on.
    launch(2, told, words, (), 5, function=run)
    shutil.copy(rolled / "skipped.jsonl", told)
    launch(2, told, words, function=run)
    assert same_weights(told, rolled, tmp_path)
    assert prove(rolled)[-1].startswith(f"{rolled}/skipped.jsonl lists steps")


def test_the_budget_ends_the_run_on_all_ranks(small, tmp_path):
    words = [*small, SKIP, "--failures.bad_step_budget=2"]
    for said in launch(2, tmp_path, words, (3, 6, 7), function=run):
        assert said.startswith("step 7: loss nan")
        assert "failures.bad_step_budget = 2 is spent" in said
    assert how_it_ended(tmp_path)["kind"] == "error"
    assert left_out(tmp_path) == [(3, 3), (6, 6)]


def judge_all(folder, failures, pairs):
    """The verdict on each loss with its gradient norm."""
    guard = BadSteps(failures, folder)
    return [guard.find_trouble(torch.tensor(loss), torch.tensor(norm)) for loss, norm in pairs]


def test_a_restart_judges_by_the_steps_before_it(small, tmp_path):
    """Each checkpoint holds the figures of the good steps so far, whichever start computed them."""
    words = [*small, SKIP, "--failures.spike_sigmas=6"]
    launch(1, tmp_path, words, (), 5, function=run)
    launch(1, tmp_path, words, function=run)
    (saved,) = tmp_path.glob("checkpoints/step-00000012-*/MANIFEST.json")
    good = json.loads(saved.read_text())["manifest"]["bad_steps"]["good"]
    assert good == [[row["loss"], row["grad_norm"]] for _, row in sorted(rows(tmp_path).items())]


def test_skipped_steps_that_a_person_has_edited(tmp_path):
    """A blank line is none, and a last one without an end counts. A mistake is named with its file."""
    file = tmp_path / "skipped.jsonl"
    file.write_text('{"first": 3, "last": 4}\n\n{"first": 7, "last": 7, "cause": "by hand"}')
    guard = BadSteps(Failures(), tmp_path)
    guard.start(0, lambda: None)
    assert guard.skipped == {3, 4, 7}
    for line in ('{"first": 10}', "x", '{"first": 1, "last": null}', "[]"):
        file.write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=str(file)):
            guard.start(0, lambda: None)


def test_spikes_are_measured_by_deviations(tmp_path):
    """Of 128 good steps: their losses' mean is 2, the deviation of a sample of them 0.1004; the norms' are twice that.

    Among fewer, 9 would be a spike. A step of which nothing was trained is none of them.
    """
    assert SIGMA_WINDOW == 128
    usual = [1.9, 2.1] * 64
    pairs = [(loss, 2 * loss) for loss in (*usual[:100], 9.0, *usual)]
    pairs += [(0.0, 0.0), (2.604, 4.0), (2.0, 5.21), (2.601, 4.0)]
    (verdicts,) = run_ranks(1, judge_all, tmp_path, Failures(on_bad_step="skip", spike_sigmas=6), pairs)
    assert not any(verdicts[:-3])
    kinds = [verdict.partition(" is above")[0] for verdict in verdicts[-3:]]
    assert kinds == ["loss 2.6040", "gradient norm 5.2100", ""]


def exit_code(arguments, *signals):
    """Of a rank alone on its node; rank 1 gets the signals after step 2. None leaves before rank 0 has said why."""
    os.environ["LOCAL_RANK"] = "0"
    config = load_config(arguments)

    def say_slowly(*ended):
        time.sleep(1)
        return record_exit(*ended)

    def after_step(step):
        if dist.get_rank() == 1 and step == 2:
            for number in signals:
                os.kill(os.getpid(), number)

    code = 0
    with mock.patch("run.watchdog.record_exit", say_slowly):
        try:
            train(config, after_step)
        except SystemExit as ended:
            code = ended.code
            shut_down()  # as the end of the process would
    assert config.training.steps == 2 or Path(config.run.folder, "exit.json").exists()
    return code


@pytest.mark.parametrize(
    ("steps", "signals", "codes", "saved"),
    [
        (12, [signal.SIGTERM], [AGAIN, 0], 3),  # the vote cast after step 2 is read after step 3
        (2, [signal.SIGTERM], [0, 0], 2),
    ],
)
def test_a_node_that_is_taken_does_not_end_the_run_on_the_others(steps, signals, codes, saved, small, tmp_path):
    words = [*small, f"--training.steps={steps}"]
    assert launch(2, tmp_path, words, *signals, function=exit_code) == codes
    assert saved_steps(tmp_path) == [saved]


def test_a_second_ctrl_c_is_a_persons_wish_and_starts_nothing_again(small, tmp_path):
    launch(1, tmp_path, small, function=interrupt_twice)
    ended = how_it_ended(tmp_path)
    assert (ended["kind"], ended["cause"], ended["start_again"]) == ("stopped", "stopped by SIGINT, at once", False)


def interrupt_twice(arguments):
    def after_step(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit, match="130"):
        train(load_config(arguments), after_step)


def test_a_full_disk_of_the_run_folder_ends_the_run(small, tmp_path):
    """The file is named. Once there is room, the run goes on."""
    launch(1, tmp_path, small, (), 5, function=run)
    metrics = tmp_path / "metrics.jsonl"
    kept = metrics.rename(tmp_path / "kept")
    metrics.symlink_to("/dev/full")
    (said,) = launch(1, tmp_path, small, function=run)
    assert f"{metrics}: cannot be written: No space left" in said
    metrics.unlink()
    kept.rename(metrics)
    assert launch(1, tmp_path, small, function=run) == [""]
    assert prove(tmp_path)[0].startswith("12 steps")


# ---------------------------------------------------------------- launch/node.sh

RANK = """
import ctypes, itertools, os, signal
from torch import nn
import train
from config import TitaniteError
from run.run import run_and_leave

forwards = itertools.count(1)

def misbehave(module, *rest):
    if not isinstance(module, nn.Embedding) or next(forwards) < 2:
        return
    if os.environ["RANK"] != os.environ["BAD_RANK"]:  # as in a driver, where no exception and no signal comes through
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    if os.environ["HOW"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["HOW"] == "slow":  # a step that lasts longer than torchrun waits after a person's Ctrl-C
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            signal.pause()
    raise TitaniteError("a mistake of rank 1")

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    nn.modules.module.register_module_forward_hook(misbehave)
run_and_leave(train.main)
"""


def start_node(folder, ranks, how, *words, restarts=0, shutdown=30):
    """What launch/node.sh ends with and prints, for a run in folder/run whose last rank ends as `how` says."""
    (folder / "rank.py").write_text(RANK)
    torchrun = ("--nnodes=1", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    command = ["launch/node.sh", folder / "run", *torchrun, f"--max-restarts={restarts}", folder / "rank.py", *words]
    bad = {"HOW": how, "BAD_RANK": str(ranks - 1)}
    environment = os.environ | bad | {"PYTHONPATH": ".", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(shutdown)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE)
    return ended.returncode, ended.stderr


def test_a_rank_that_waits_in_a_driver_notices_that_another_is_lost_and_torchrun_starts_the_job_again(small, tmp_path):
    code, printed = start_node(tmp_path, 2, "killed", *small, "--training.steps=3", restarts=1)
    assert code == 0
    assert "exit: rank 1 was lost" in printed
    assert "Unable to shutdown process" not in printed, "torchrun had to kill the rank that waits"
    first, second = read(tmp_path / "run", "starts.jsonl")
    assert first["job"] == second["job"] == "run", "the folder names the job"
    after = second["after"]
    assert (after["kind"], after["rank"], after["start_again"]) == ("lost", 1, True)
    assert how_it_ended(tmp_path / "run")["kind"] == "finished"


@pytest.mark.long
def test_a_rank_that_waits_in_a_driver_leaves_the_last_word_to_another(small, tmp_path):
    code, printed = start_node(tmp_path, 2, "mistaken", *small)
    record = how_it_ended(tmp_path / "run")
    assert (code, record["kind"], record["rank"], record["start_again"]) == (100, "error", 1, False)
    assert "error (rank 1): a mistake of rank 1\n" in printed
    assert "was lost" not in printed
    assert "Unable to shutdown process" not in printed


def test_a_stop_that_comes_too_late_to_save_is_recorded_as_a_persons(small, tmp_path):
    code, printed = start_node(tmp_path, 1, "slow", *small, shutdown=6)
    record = how_it_ended(tmp_path / "run")
    assert (code, record["kind"], record["start_again"]) == (0, "stopped", False)
    assert "SIGINT" in record["cause"]
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in printed


def test_slow_steps_are_a_warning_where_torchrun_does_not_wait_so_long(small, tmp_path, monkeypatch, capfd):
    """Here it waits not at all."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    launch(1, tmp_path, [*small, "--training.steps=4"])
    assert capfd.readouterr().err.count("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=") == 1


@pytest.mark.long
def test_a_node_whose_ranks_are_all_killed_starts_again_until_that_leads_nowhere(small, tmp_path):
    words = [*small, "--failures.restarts_without_progress=0", "--training.steps=1"]
    (first, _), (second, printed) = [start_node(tmp_path, 1, "killed", *words) for _ in range(2)]
    assert (first, second) == (75, 100)
    assert "in a row that ended without a new checkpoint: 1" in printed
    assert not (tmp_path / "run" / "exit.json").exists()


# ---------------------------------------------------------------- starts
