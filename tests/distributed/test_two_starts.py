"""Whole runs whose folder was copied, and two starts of one run at a time: what goes on, and what it was trained on."""

import os
import socket
import sys
import traceback
from unittest.mock import patch

from config import load_config
from run.run import run_and_leave
from tests.harness import prepare_fork
from tests.runs import content, final_weights, flat, how_it_ended, launch, read, run, same
from tools.audit import prove
from train import train

SETTINGS = ("--checkpoint.interval=3", "--validation.enable=false")


def settled(folder):
    """All but the records of steps, to which a start adds until its end."""
    return {path: text for path, text in content(folder).items() if path.suffix != ".jsonl"}


def run_elsewhere(arguments):
    """A start on another machine, as far as can be told."""
    with patch.object(socket, "gethostname", lambda: "another"):
        run(arguments)


def test_a_start_on_another_machine_takes_over_and_the_first_ends_in_one_line(small, tmp_path):
    """It saves nothing more. What the folder holds afterwards is the second start's: exit, checkpoints, ledger."""
    folder, words = tmp_path / "run", [*small, *SETTINGS, "--training.steps=9"]
    launch(1, tmp_path / "undisturbed", words)
    ready, goes_on = os.pipe(), os.pipe()
    prepare_fork()
    first = os.fork()
    if not first:
        try:
            sys.stderr = (tmp_path / "stderr.txt").open("w")

            def pause(step):
                if step == 4:
                    os.write(ready[1], b"x")
                    os.read(goes_on[0], 1)

            run_and_leave(lambda: train(load_config([*words, f"--run.folder={folder}"]), pause))
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.read(ready[0], 1) == b"x"
    launch(1, folder, words, function=run_elsewhere)
    after = settled(folder)
    os.write(goes_on[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 2
    said = [line for line in (tmp_path / "stderr.txt").read_text().splitlines() if "error" in line]
    assert len(said) == 1
    assert "/.lease: a later start saves there: of " in said[0]
    assert " on another, process " in said[0]
    mark = folder / f".superseded.{socket.gethostname()}"  # launch/node.sh does not start it again
    assert settled(folder) == after | {mark: b""}
    assert how_it_ended(folder)["kind"] == "finished"
    assert same(flat(final_weights(folder, tmp_path)), flat(final_weights(tmp_path / "undisturbed", tmp_path)))
    ids = [start["id"] for start in read(folder, "starts.jsonl")]
    lines = read(folder / "data", "rank-00000.jsonl")
    assert [line["id"] for line in lines].count(ids[0]) == 1 + 6
    assert lines[-1]["id"] == ids[0], "it went on for two steps, beside what the other had trained"
    assert prove(folder)[:2] == [
        prove(tmp_path / "undisturbed")[0],
        "steps made void by a resume, left out: 3; batches rebuilt and found equal: 9",
    ]
