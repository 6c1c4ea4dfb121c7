"""Whole runs of train.py: the same training at any world size, resumed bit for bit, and bad input explained."""

import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import loss
from checkpoint import CheckpointError
from config import ConfigError, load_config
from data.loader import validation_batches
from data.prepare import main as prepare
from data.shards import DataError, open_dataset
from generate import main as generate
from models import MODELS
from tests.harness import run_ranks
from tests.runs import (
    STEPS,
    call,
    column,
    final_weights,
    flat,
    launch,
    rows,
    run,
    same,
    saved_steps,
    validated,
)
from tools.hf import exported_model
from train import train
from validate import main as validate

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]


@pytest.mark.parametrize(
    ("world_size", "words", "stop_after"),
    [
        (1, ["--training.param_dtype=bfloat16", "--parallelism.reshard_after_forward=false"], 5),
        (2, ["--optimizer.state_dtype=bfloat16"], 8),
    ],
    ids=["copies", "FSDP 2"],
)
def test_a_resumed_run_has_the_same_bits(world_size, words, stop_after, small, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch(world_size, whole, [*small, *words])
    launch(world_size, cut, [*small, *words], stop_after)
    launch(world_size, cut, [*small, *words])
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert column(cut, name) == column(whole, name), name
    weights = flat(final_weights(whole, tmp_path))
    moments = {value.dtype for name, value in weights.items() if name.endswith("exp_avg")}
    assert moments == {torch.float32 if world_size == 1 else torch.bfloat16}
    assert same(flat(final_weights(cut, tmp_path)), weights)


def smooth(logits_BSV, labels_BS, z_loss):
    """The terms that CONTRIBUTING.md shows."""
    terms = {"loss": loss.cross_entropy(logits_BSV, labels_BS)}
    log_probs = logits_BSV.float().log_softmax(-1)
    uniform = torch.where(labels_BS != loss.IGNORED, -log_probs.mean(-1), 0.0).sum()
    terms["smoothing"] = 0.1 * (uniform - terms["loss"])
    return terms


def run_smoothed(arguments):
    with mock.patch.object(loss, "loss_terms", smooth):
        run(arguments)


def test_a_term_of_a_fork_is_trained_and_logged_but_not_validated(small, tmp_path):
    words = [*small, "--training.loss_chunks=4", "--training.steps=2", "--validation.interval=1"]
    launch(1, tmp_path / "plain", words)
    launch(1, tmp_path / "smoothed", words, function=run_smoothed)
    plain, smoothed = (rows(tmp_path / name)[1] for name in ("plain", "smoothed"))
    assert smoothed["loss"] == plain["loss"]
    assert smoothed["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    assert 0 < abs(smoothed["smoothing"]) < 0.1
    plain, smoothed = (validated(tmp_path / name)[1] for name in ("plain", "smoothed"))
    assert plain == pytest.approx(smoothed, rel=0.05)  # 0.1 of the uniform part would show


def refusal(arguments, own):
    """What train.py says where this rank has one setting of its own."""
    with pytest.raises(ConfigError) as refused:  # which no restart by torchrun can mend
        train(load_config([*arguments, own[int(os.environ["RANK"])]]))
    assert refused.value.agreed
    return str(refused.value)


def test_ranks_that_would_read_different_data_do_not_start(small, dataset, tmp_path):
    """As where each node has a copy of its own, and one was prepared in another way."""
    other = tmp_path / "set"
    command = [f"--source={dataset.parent / 'text'}", f"--output={other}", f"--tokenizer={dataset}"]
    prepare([*command, "--validation-fraction=0.1", "--block-mb=0.01"])
    own, hashes = [str(dataset), str(other)], [str([open_dataset(str(url)).hash]) for url in (dataset, other)]
    for setting, values, shown in (
        ("data.datasets", own, hashes),
        ("validation.datasets", own, hashes),
        ("parallelism.dp_replicate", ["1", "2"], ["1", "2"]),
    ):
        words = [f"--{setting}={value}" for value in values]
        first, second = launch(2, tmp_path / "run", small, words, function=refusal)
        assert first == second
        assert f": {shown[1]} on rank 1, {shown[0]} on rank 0; every node needs the same data and config" in first
        assert not (tmp_path / "run").exists()


def test_a_model_that_was_added_is_trained_and_used(small, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("models.MODELS", {**MODELS, "toy": dataclasses.replace(MODELS["llama"], hf="")})
    launch(1, folder, [*small, "--model.name=toy", "--training.steps=3"])
    generate([str(folder), "--prompt=ba", "--max-tokens=4"])
    validate([str(folder)])
    with pytest.raises(CheckpointError, match="its ModelSpec has no `hf`"):
        exported_model({"identity": json.loads((folder / "model.json").read_text())})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="model of the checkpoint = 'toy': must be one of llama"):
        generate([str(folder), "--prompt=ba"])


# ---------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def source(dataset):
    """The words by which the text of `dataset` is prepared."""
    return [f"--source={dataset.parent / 'text'}", "--validation-fraction=0.1"]


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_restart_that_does_not_fit_its_jobs_run_writes_nothing_there(source, small, tmp_path, monkeypatch):
    """Its folder is known only once ranks have met: it is named by no setting."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    words, outputs = [*small, "--training.steps=4", f"--run.outputs={tmp_path / 'outputs'}"], tmp_path / "outputs"
    prepare([*source, f"--output={tmp_path / 'other'}", "--vocab-size=511"])
    assert call(tmp_path, *words).returncode == 0
    before = files_in(outputs)
    for changed, said in (
        ([f"--data.datasets={tmp_path / 'other'}", "--model.vocab_size=512"], "this run began with another tokenizer"),
        (["--model.vocab_size=576"], "another model: vocab_size is 512 there and 576"),
        (["--training.steps=3"], "training.steps = 3: this run has reached step 4"),
    ):
        ended = call(tmp_path, *words, *changed)
        assert ended.returncode == 2
        assert ended.stderr.startswith("error: "), "all ranks know it, so none is named"
        assert said in ended.stderr
        assert files_in(outputs) == before


def count_tensors(arguments):
    """How many float tensors there are after each step.

    Tokens do not count: how many batches wait depends on how fast the data's threads are.
    """
    counts = []

    def after_step(step):
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        counts.append(sum(tensor.is_floating_point() for tensor in tensors))

    train(load_config(arguments), after_step)
    return counts


@pytest.mark.parametrize("options", [[], ["--compile.enable", "--compile.backend=aot_eager"]])
def test_no_step_leaves_tensors_behind(options, small, tmp_path):
    """The collector runs once in many steps: what waits for it in a cycle would fill the memory until then."""
    words = [*small, "--validation.enable=false", "--checkpoint.enable=false", *options]
    for counts in launch(2, tmp_path, words, function=count_tensors):
        # A thread of gloo may hold a tensor a moment longer, so the fewest of some steps count.
        assert min(counts[8:]) <= min(counts[4:8])


# ---------------------------------------------------------------- the life of a run


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory):
    """Losses of two processes that nobody stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    launch(2, folder, [*small, "--validation.enable=false", "--checkpoint.interval=1000"])
    return column(folder, "loss")


WAIT = """
import signal, time
def log(row):
    while row["step"] == 6 and not signal.getsignal(signal.SIGTERM).__self__.asked_by:
        time.sleep(0.01)
"""


def start_to_step_6(command, tmp_path):
    """Start torchrun, and return what it has said when rank 0 waits in step 6 for SIGTERM."""
    (tmp_path / "tracker.py").write_text(WAIT)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [*TORCHRUN, *command, "--metrics.hook=tracker:log", "--metrics.log_ranks=0,1"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "[rank 0] step  6/12" in line:
            break
    return process, lines


def test_killed_and_stopped_under_torchrun_and_resumed_with_the_same_bits(uninterrupted, small, tmp_path, capfd):
    """SIGKILL after the first checkpoint, then SIGTERM; the third start is sampled."""
    folder = tmp_path / "run"
    words = [*small, f"--run.folder={folder}", "--validation.enable=false", "--metrics.tensorboard=true"]
    process, _ = start_to_step_6(words, tmp_path)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)
    process.wait()

    process, lines = start_to_step_6(words, tmp_path)
    process.terminate()
    assert process.stderr
    output = "".join([*lines, *process.stderr])
    assert process.wait() == 1
    assert re.search(r"resumed from .*step-00000005", output)
    assert "[rank 0] step  1/12" not in output
    assert "[rank 1] step  6/12" in output
    (stopped,) = {int(step) for step in re.findall(r"\[rank 0\] stopped by SIGTERM: step (\d) of 12", output)}
    assert stopped == saved_steps(folder)[-1] == max(rows(folder)) < 9

    words += ["--validation.sample_prompt=ba", "--validation.sample_tokens=8"]
    run_ranks(2, run, words, start_group=False)
    assert "sample:\nba" in capfd.readouterr().err
    assert column(folder, "loss") == uninterrupted
    assert list((folder / "tensorboard").glob("events*"))


def ask_during_validation(arguments, asked):
    """train.py in this process; the batches validated. `asked`: rank 1 is, by SIGUSR1, while it reads the second."""
    taken = 0

    def batches(*place):
        nonlocal taken
        for batch in validation_batches(*place):
            taken += 1
            if asked and taken == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch

    with mock.patch("validation.validation_batches", batches):
        run(arguments)
    return taken


def test_asked_to_stop_during_a_validation_it_saves_without_awaiting_its_end(uninterrupted, small, tmp_path, capfd):
    words = [*small, "--checkpoint.interval=1000", "--validation.interval=5", "--validation.max_samples=0"]
    first = launch(2, tmp_path, words, True, function=ask_during_validation)
    assert first == [3, 3], "a vote cast at the second batch is read at the third, which is left"
    output = capfd.readouterr().err
    assert "step 5: not validated to the end, since the run is to stop" in output
    assert saved_steps(tmp_path) == [5]
    last = launch(2, tmp_path, words, False, function=ask_during_validation)
    assert last[0] == last[1] > 2 * 3, "two whole validations"
    assert column(tmp_path, "loss") == uninterrupted
    assert list(validated(tmp_path)) == [10, STEPS]


def run_without_held_out_data(arguments):
    gone = DataError("held-out data is gone")
    with mock.patch("validation.validation_batches", side_effect=gone), pytest.raises(DataError, match=str(gone)):
        train(load_config(arguments))


def test_a_validation_that_fails_costs_no_checkpoint(small, tmp_path):
    """Nor that of the last step, after which all is due."""
    words = [*small, "--validation.interval=100", "--checkpoint.interval=100", "--training.steps=2"]
    launch(1, tmp_path, words, function=run_without_held_out_data)
    assert saved_steps(tmp_path) == [2]
