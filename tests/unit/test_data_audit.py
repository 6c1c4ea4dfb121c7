"""The audit finds what was trained, proves sound runs and refuses others; verify finds every fault."""

import json
import random
import re
import secrets
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from checkpoint.branch import Parent, record_parent
from config import TitaniteError, to_toml
from data.loader import DataLoader
from data.shards import open_dataset
from tests.corpus import data_config, stored_blocks, unique_documents, word_tokenizer, write_dataset
from tools import audit, verify
from tools.audit import prove


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two datasets whose tokens all differ but the 0 that ends a document."""
    rng, root = random.Random(1), tmp_path_factory.mktemp("datasets")
    shards = [unique_documents(rng, range(first, first + 400), 30) for first in (1, 500)]
    return [write_dataset(root / name, own, validation=own[0][:2]) for name, own in zip("ab", shards, strict=True)]


def run_phase(run, folders, state, steps, dp_size=1, **overrides):
    """One start of a run of `dp_size` ranks; returns its state and all samples in the global order."""
    overrides = {"training__local_batch_size": 2, "training__seq_len": 8, "data__window_blocks": 3, **overrides}
    overrides["training__global_batch_size"] = 2 * dp_size * overrides["training__local_batch_size"]
    config = data_config(*folders, **overrides)
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(to_toml(config))
    loaders = [DataLoader(config, rank, dp_size) for rank in range(dp_size)]
    start_id = secrets.token_hex(4)
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
        loader.open_ledger(run, start_id)
    batches = []
    for _ in range(steps):
        ranks = [loader.next_step() for loader in loaders]
        batches.append([row for turn in zip(*ranks, strict=True) for batch in turn for row in batch.tokens.tolist()])
    for loader in loaders:
        loader.close()
    return loaders[0].state_dict(), batches


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """A run with a crash, three world sizes, a change of mixture and of seq_len; and its batches."""
    folder = tmp_path_factory.mktemp("run")
    state, batches = run_phase(folder, folders[:1], None, 3, dp_size=4)
    _, lost = run_phase(folder, folders[:1], state, 2, dp_size=2)
    assert lost
    state, more = run_phase(folder, folders, state, 4, dp_size=3)
    batches += more
    state, more = run_phase(folder, folders, state, 5, dp_size=2, training__seq_len=20)
    return folder, batches + more


def test_a_run_with_restarts_and_changes_is_proven(run, folders, tmp_path):
    """Whatever order its config names, which a start may have left that was refused."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("seed = 0", "seed = 5"))
    lines = prove(folder)
    inputs = Counter(token for batch in run[1] for row in batch for token in row)
    assert lines[0] == f"12 steps, {inputs.total():,} tokens, without gap or overlap, on [2, 3, 4] data-parallel ranks"
    rebuilt = 3 * 4 + 4 * 3 + 5 * 2
    assert lines[1] == f"steps made void by a resume, left out: 2; batches rebuilt and found equal: {rebuilt}"
    for dataset, line in zip(folders, lines[2:], strict=True):
        stored = [token for block in stored_blocks(dataset) for document in block for token in document]
        size, epochs = re.search(r"each of its ([\d,]+) tokens x (\d+), and", line).groups()
        assert int(size.replace(",", "")) == len(stored)
        assert {inputs[token] - int(epochs) for token in {*stored} - {0}} <= {0, 1}


def rewrite(run, rank, change):
    """Change the lines of a rank's ledger."""
    file = run / "data" / f"rank-{rank:05}.jsonl"
    file.write_text("".join(line + "\n" for line in change(file.read_text().splitlines())))


def replaced(old, new):
    return lambda lines: [re.sub(old, new, line) for line in lines]


NO_RECORD = "rank 1 has no record of step 1 that fits rank 0's"


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, lambda lines: lines[:2] + lines[3:], "rank-00000.*: a step from token 256 on, where the one from 128 on"),
        (1, lambda lines: lines[:3] + lines[2:], "rank-00001.*: a step from token 128 on, where the one from 256 on"),
        (0, lambda lines: lines[:1] + lines[4:], "a start continues at token 384, where no step before it ended"),
        (3, replaced(r'"crc32": \d+', '"crc32": 1'), "step 1: rank 3 was given other tokens than"),
        (1, replaced('"seed": 0', '"seed": 1'), NO_RECORD),
        (1, replaced('_size": 2, "accumulation": 2', '_size": 4, "accumulation": 1'), NO_RECORD),
        (1, replaced(r'"datasets": \[\["\w+"', '"datasets": [["another"'), NO_RECORD),
        (1, lambda lines: lines[:1], NO_RECORD),
        (1, lambda lines: ["not json", *lines], "not a ledger: JSONDecodeError"),
        (0, lambda lines: lines[1:], "not a ledger: KeyError"),
    ],
)
def test_a_run_that_is_not_as_recorded_is_refused(run, tmp_path, rank, change, message):
    folder = shutil.copytree(run[0], tmp_path / "run")
    rewrite(folder, rank, change)
    with pytest.raises(TitaniteError, match=message):
        prove(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"samples": 0, "datasets": (16, 48)}, r"token 64, .*'{a}': 16, '{b}': 48}.* not .*'{a}': 32, '{b}': 32}"),
        ({"samples": 11}, "token 88, .* not .*'{a}': 48"),
        ({"seed": 5}, r"token 96, .* \(\(5, 3\), .* not \(\(0, 3\), "),
    ],
)
def test_a_start_that_continues_where_no_step_ended_is_refused(folders, tmp_path, change, found):
    """Tokens of one dataset or of both come again or never, or in another order, while the weights go on."""
    run, mixture = tmp_path / "run", {"data__weights": [0.5, 0.5]}
    state, _ = run_phase(run, folders, None, 3, **mixture)
    a, b = [open_dataset(str(folder)).hash for folder in folders]
    if "datasets" in change:
        change |= {"datasets": [[name, start, 0.5] for name, start in zip((a, b), change["datasets"], strict=True)]}
    run_phase(run, folders, state | change, 4, **mixture, run__seed=change.get("seed", 0))
    with pytest.raises(TitaniteError, match=found.replace("{a}", a).replace("{b}", b)):
        prove(run)


def test_a_run_that_passed_over_its_newest_checkpoint_and_later_found_it_is_proven(folders, tmp_path):
    """As on a store whose listing is late: twice in a row it went on from an older one."""
    run = tmp_path / "run"
    older, _ = run_phase(run, folders, None, 3, dp_size=2)
    newest, _ = run_phase(run, folders, older, 2, dp_size=2)
    for _ in range(2):
        run_phase(run, folders, older, 1, dp_size=2)
    run_phase(run, folders, newest, 2, dp_size=2)
    lines = prove(run)
    assert lines[0].startswith("7 steps, ")
    assert lines[1].startswith("steps made void by a resume, left out: 2;")


def test_a_run_that_was_killed_in_a_step_is_proven_up_to_it(folders, tmp_path):
    """As when a rank finds a bad block and stops: only the others have recorded that step."""
    run = tmp_path / "run"
    before, _ = run_phase(run, folders, None, 3, dp_size=3)
    run_phase(run, folders, before, 2, dp_size=3)
    rewrite(run, 1, lambda lines: lines[:-1])
    with (run / "data" / "rank-00001.jsonl").open("a") as file:
        file.write('{"tokens": 9')  # a line cut by a kill counts as never written
    lines = prove(run)
    assert lines[0].startswith("4 steps, ")
    assert lines[1].startswith("steps made void by a resume, left out: 0;")
    assert lines[-1] == "step 5 left out: some ranks had not begun it when the run ended"
    run_phase(run, folders, before, 0, dp_size=2)  # a start that came to no step: the weights are its checkpoint's
    lines = prove(run)
    assert lines[0].startswith("3 steps, ")
    assert lines[1].startswith("steps made void by a resume, left out: 2;")


@pytest.mark.parametrize(
    ("ended", "ranks", "said"),
    [
        ('{"kind": "finished", "step": 3, "last_checkpoint": null}', [0, 1], "step 3 .* ledger ends with step 2"),
        ('{"kind": "stopped", "step": 3, "last_checkpoint": 3}', [1], "rank 1 has no record of step 3"),
        ('{"kind": "lost", "step": 4, "last_checkpoint": 3}', [0], "step 3 .* ledger ends with step 2"),
        ('{"kind": "failed", "step": 4, "last_checkpoint": 2}', [0, 1], None),
        ('{"kind": "fini', [0, 1], None),  # a record that was cut
    ],
    ids=str,
)
def test_steps_that_are_missing_at_the_end_are_found(folders, tmp_path, ended, ranks, said):
    run = tmp_path / "run"
    run_phase(run, folders, None, 3, dp_size=2)
    (run / "exit.json").write_text(ended)
    assert prove(run)[0].startswith("3 steps")
    for rank in ranks:
        rewrite(run, rank, lambda found: found[:-1])
    if said:
        with pytest.raises(TitaniteError, match=said):
            prove(run)
    else:  # no record says that the third was trained
        assert prove(run)[0].startswith("2 steps")


def test_a_dataset_that_was_moved_is_read_by_a_link_and_another_in_its_place_is_named(folders, tmp_path):
    """Also one that the run has left."""
    run, left = tmp_path / "run", shutil.copytree(folders[0], tmp_path / "left")
    state, _ = run_phase(run, [left, folders[1]], None, 3)
    run_phase(run, folders[1:], state, 3)
    moved = left.rename(tmp_path / "moved")
    write_dataset(left, [[[1, 2, 3, 0]] * 50])
    with pytest.raises(TitaniteError, match=rf"{left}: .*{open_dataset(str(moved)).hash}"):
        prove(run)
    shutil.rmtree(left)
    left.symlink_to(moved)
    prove(run)


@pytest.fixture
def branch(folders, tmp_path):
    """A run that began after 3 of a run's 6 steps, with one mixture and world size more; and its batches."""
    trunk, folder = tmp_path / "trunk", tmp_path / "branch"
    fork, batches = run_phase(trunk, folders[:1], None, 3, dp_size=2)
    later, _ = run_phase(trunk, folders[:1], fork, 3, dp_size=2)  # goes on otherwise
    run_phase(trunk, folders[:1], later, 1)
    _, more = run_phase(folder, folders, fork, 4, dp_size=3)
    record_parent(folder, Parent(str(trunk), 3, "", tokens=3 * 2 * 2 * 2 * 8))
    return folder, batches + more


def test_a_branch_is_proven_with_its_parent_up_to_the_fork(branch, capsys):
    folder, batches = branch
    tokens = sum(len(row) for batch in batches for row in batch)
    lines = prove(folder)
    assert lines[0] == f"7 steps, {tokens} tokens, without gap or overlap, on [2, 3] data-parallel ranks"
    assert lines[1] == "steps made void by a resume, left out: 0; batches rebuilt and found equal: 18"
    for run, first, last in ((folder.parent / "trunk", 2, 5), (folder.parent / "trunk", 1, 1), (folder, 6, 6)):
        with (run / "skipped.jsonl").open("a") as file:
            file.write(json.dumps({"first": first, "last": last, "cause": ""}) + "\n")
    told = [line.partition(" ")[0] for line in prove(folder)[-2:]]
    assert told == [f"{run}/skipped.jsonl" for run in (folder, folder.parent / "trunk")]
    audit.main(["--run", str(folder), "--steps", "3:5"])
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()} == {"3", "4"}
    rewrite(folder.parent / "trunk", 1, lambda lines: lines[:3])
    with pytest.raises(TitaniteError, match="rank 1 has no record of step 3"):
        prove(folder)


def test_the_documents_of_a_step_are_those_of_its_batch(run, capsys):
    folder, batches = run
    audit.main(["--run", str(folder), "--steps", "1:13"])
    listed = {}
    pattern = r"step (\d+) sample (\d+): (\S+) block (\d+) row (\d+) tokens (\d+):(\d+): \"(.*)\""
    for line in capsys.readouterr().out.splitlines():
        step, _, file, block, row, first, stop, text = re.fullmatch(pattern, line).groups()
        column = pa.ipc.open_file(Path(file).read_bytes()).get_batch(int(block)).column(0)
        tokens = column[int(row)].as_py()[int(first) : int(stop)]
        assert text.split() == [f"w{token}" for token in tokens if token]
        listed.setdefault(int(step), []).extend(tokens)
    assert list(listed.values()) == [[t for row in batch for t in row] for batch in batches]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps=99"], "--steps 99:100: the run has steps 1 to 12"),
        (["--steps=0"], "--steps: 0: must be N or FIRST:STOP, counted from 1"),
        (["--prove", "--run=nothing"], "is it a run folder?"),
    ],
)
def test_mistakes_are_one_line(run, capsys, words, said):
    with pytest.raises(SystemExit):
        audit.main([f"--run={run[0]}", *words])
    assert said in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- verify


def test_verify_names_every_fault(folders, tmp_path, capsys):
    """Each bad block, a file that is gone, and a tokenizer that is another."""
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    split = open_dataset(str(folder)).splits["train"]
    content = bytearray((folder / "train-00000.arrow").read_bytes())
    for block in (1, 3):
        content[int(split.offset[block] + split.size[block]) - 20] ^= 1
    (folder / "train-00000.arrow").write_bytes(content)
    (folder / "validation-00000.arrow").unlink()
    word_tokenizer(999).save(folder)
    with pytest.raises(SystemExit, match="faults: 4"):
        verify.main([str(folder)])
    found = capsys.readouterr().out.splitlines()[:4]
    expected = [
        r"tokenizer\.json",
        r"train-00000.*block 1",
        r"train-00000.*block 3",
        r"validation-00000\.arrow: missing",
    ]
    assert all(map(re.search, expected, found))
