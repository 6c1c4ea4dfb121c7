"""Branches: runs that begin from a checkpoint of another, up to its last bit, and leave that one alone."""

import json
import logging
import random
import shlex
from itertools import islice
from unittest import mock

import pytest
import torch

from config import TitaniteError
from data.loader import DataLoader
from data.shards import open_dataset
from data.tokenizer import train_tokenizer
from tests.corpus import expected_stream, stored_blocks, write_dataset
from tests.harness import run_ranks
from tests.runs import call, column, content, final_weights, flat, rows, run, same
from tools.audit import prove

SEQ_LEN, SAMPLES = 16, 4  # of a step
SMALL = (
    "--model.flavor=tiny",
    f"--training.seq_len={SEQ_LEN}",
    "--training.local_batch_size=2",
    f"--training.global_batch_size={SAMPLES}",
    "--training.param_dtype=float32",
    "--training.steps=8",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
    "--checkpoint.interval=4",
    "--checkpoint.keep=0",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """400 tokens, each only once but the 0 that ends a document."""
    numbers, rest, documents = random.Random(0), list(range(1, 380)), []
    while rest:
        size = numbers.randint(5, 30)
        documents.append([*rest[:size], 0])
        rest = rest[size:]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", [documents], vocab_size=380)


def run_and_tell(arguments, stop_after=0):
    """Train as `run` does, with random numbers drawn; the tokens of this rank's steps, microbatches, samples."""
    given, next_step = [], DataLoader.next_step

    def told(loader):
        torch.rand(1)
        batches = next_step(loader)
        given.append([batch.tokens.tolist() for batch in batches])
        return batches

    with mock.patch.object(DataLoader, "next_step", told):
        run(arguments, stop_after)
    return given


def train_ranks(world_size, folder, dataset, *words, stop_after=0):
    """The tokens of each step, in the order of its samples."""
    arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={folder}", *words]
    given = run_ranks(world_size, run_and_tell, arguments, stop_after, start_group=False)
    turns = [[batch for ranks in zip(*step, strict=True) for batch in ranks] for step in zip(*given, strict=True)]
    return [[token for batch in step for sample in batch for token in sample] for step in turns]


def run_and_log(arguments):
    """Train as `run` does. Returns what optim and run.run logged."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("optim", "run.run"):
        logging.getLogger(name).addHandler(handler)
    run(arguments)
    return said


def expected_steps(dataset, steps):
    """The tokens of each step, by the definition of the order."""
    stream = expected_stream(stored_blocks(dataset), open_dataset(str(dataset)).hash, 0, window_blocks=16)
    tokens = [token for _, token in islice(stream, steps * SAMPLES * SEQ_LEN)]
    return [tokens[at : at + SAMPLES * SEQ_LEN] for at in range(0, len(tokens), SAMPLES * SEQ_LEN)]


@pytest.fixture(scope="module")
def trunk_run(dataset, tmp_path_factory):
    """A run of 8 steps on 2 ranks, never interrupted, and the tokens of its steps."""
    folder = tmp_path_factory.mktemp("trunks") / "trunk"
    return folder, train_ranks(2, folder, dataset)


def test_a_decayed_run_is_trained_on_from_before_its_decay(dataset, tmp_path):
    """By the command that it prints. On a resume a line says that the rate jumps."""
    folder = tmp_path / "a run"
    branch = tmp_path / "branch"
    given = [*SMALL, "--lr_scheduler.decay_fraction=0.25", "--lr_scheduler.warmup_steps=0"]
    given += [f"--data.datasets={dataset}", f"--run.folder={folder}"]
    (said,) = run_ranks(1, run_and_log, given, start_group=False)
    (line,) = [line for line in said if "train on:" in line]
    words = shlex.split(line.partition(":")[2])
    assert words == ["./run_llama_train.sh", f"--checkpoint.branch_from={folder}@4", "--training.steps=16"]
    run_ranks(1, run_and_log, [*words[1:], f"--run.folder={branch}"], start_group=False)
    assert column(branch, "lr")[:8] == [3e-4] * 8  # of steps 5 to 12
    (said,) = run_ranks(1, run_and_log, [*given, "--training.steps=16", "--optimizer.lr=6e-4"], start_group=False)
    assert [line for line in said if "the learning rate goes from 3.0e-05 to 6.0e-04" in line]


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_branch_is_the_run_that_went_on(ranks, trunk_run, dataset, tmp_path):
    """At its world size to the last bit, at another with the same tokens; the trunk is only read."""
    (trunk, trained), branch = trunk_run, tmp_path / "branch"
    before = content(trunk)
    more = train_ranks(ranks, branch, dataset, f"--checkpoint.branch_from={trunk}@4")
    assert content(trunk) == before
    assert trained[:4] + more == trained == expected_steps(dataset, 8)
    assert sum(map(len, trained)) > 400  # goes on into the second epoch
    lines = prove(branch)
    assert lines[0].startswith("8 steps, 512 tokens, without gap or overlap, on ")
    assert lines[1].endswith(f"rebuilt and found equal: {4 * 2 + 4 * ranks}")
    assert lines[-1] == f"the first 4 steps are those of {trunk}, from which it branched"
    assert json.loads((branch / "parent.json").read_text()) == {
        "place": str(trunk),
        "step": 4,
        "run": str(trunk),
        "tokens": 256,
    }
    (saved,) = (branch / "checkpoints").glob("step-00000008-*")
    assert json.loads((saved / "MANIFEST.json").read_text())["manifest"]["parent"]["step"] == 4
    assert list(rows(branch)) == [5, 6, 7, 8]
    if ranks == 1:
        torch.testing.assert_close(column(branch, "loss"), column(trunk, "loss")[4:], rtol=1e-6, atol=0)
        return
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert column(branch, name) == column(trunk, name)[4:], name
    ours = flat(final_weights(branch, tmp_path))
    assert len(ours) > 4 * 38  # weights, two moments, steps; and random states
    assert same(ours, flat(final_weights(trunk, tmp_path)))


def test_a_branch_is_resumed_from_its_own_checkpoints(dataset, tmp_path):
    """Before it has any, from where it began, though its parent has gone on; with some, even if the parent is gone."""
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    trained = train_ranks(1, trunk, dataset, stop_after=4)
    words = [f"--checkpoint.branch_from={trunk / 'checkpoints'}"]
    train_ranks(1, branch, dataset, *words, stop_after=5)
    trained += train_ranks(1, trunk, dataset)
    assert not list(branch.glob("checkpoints/step-*"))
    assert train_ranks(1, branch, dataset, "--checkpoint.interval=3", stop_after=7) == trained[4:7]
    assert prove(branch)[1].startswith("steps made void by a resume, left out: 1;")
    moved = trunk.rename(tmp_path / "moved")
    assert train_ranks(1, branch, dataset) == trained[6:], "its checkpoint of step 6"
    with pytest.raises(TitaniteError, match=rf"its parent is not in {trunk}: put it, or a link to it, back there"):
        prove(branch)
    trunk.symlink_to(moved)
    assert prove(branch)[0].startswith("8 steps, 512 tokens")


def test_mistakes_are_one_line_before_anything_is_written(trunk_run, dataset, tmp_path):
    (trunk, _), branch, new = trunk_run, tmp_path / "branch", tmp_path / "new"
    train_ranks(1, branch, dataset, f"--checkpoint.branch_from={trunk}@4")
    with mock.patch("tests.corpus.word_tokenizer", lambda vocab_size: train_tokenizer(["some text"], vocab_size)):
        other = write_dataset(tmp_path / "other", [[[*range(1, 200), 0]] * 9], vocab_size=380)
    others = [f"--data.datasets={other}", "--model.vocab_size=384"]
    cases = [
        ([new, f"{trunk}@5"], f"checkpoint.branch_from: {trunk}: no checkpoint of step 5, only of 8, 4"),
        ([new, f"{trunk}"], "training.steps = 8: must be above 8, ", f"{trunk}/checkpoints/step-00000008-"),
        ([new, f"{trunk}@4", "--run.seed=1"], "run.seed = 1: the checkpoint was trained with 0"),
        ([new, f"{trunk}@4", *others], f"{trunk}: ", "token ids in the data are other tokens in its tokenizer"),
        ([trunk, f"{trunk}@4"], f"the run in {trunk} is no branch: set another run.folder"),
        ([branch, f"{trunk}@8"], f"the run in {branch} branched from {trunk}@4: set another run.folder"),
    ]
    before = content(tmp_path), content(trunk)
    for (folder, place, *words), *said in cases:
        arguments = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={folder}", *words]
        ended = call(tmp_path, *arguments, f"--checkpoint.branch_from={place}")
        (tmp_path / "stderr.txt").unlink()
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert ended.stderr.startswith("error: ")
        assert all(part in ended.stderr for part in said), (said, ended.stderr)
        assert (content(tmp_path), content(trunk)) == before, "nothing may be written"
    assert not new.exists()
