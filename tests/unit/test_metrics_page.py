"""The page that compares runs: its data against rows written by hand, and nothing in it that leaves the file."""

import json
import re

import pytest

from checkpoint.lease import new_start
from config import Config, Optimizer, TitaniteError, Training
from metrics import FIELDS
from run.folder import record_start
from tools import compare
from tools.compare import main


def row(step, **values):
    return json.dumps(dict.fromkeys(FIELDS) | {"step": step, "tokens": 100 * step} | values)


def write_run(folder, rows, config, world_size=2):
    folder.mkdir(parents=True, exist_ok=True)
    record_start(folder, config, {}, world_size, new_start(folder))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n" * rows[-1].endswith("}"))
    return folder


def compared(runs, folder):
    """The data of the page of these runs."""
    main([*map(str, runs), f"--output={folder / 'made' / 'page.html'}"])
    found = re.search(r"^const data = (.*);$", (folder / "made" / "page.html").read_text(), re.MULTILINE)
    assert found
    return json.loads(found[1])


def test_curves_tables_and_settings(tmp_path, capsys):
    first = write_run(
        tmp_path / "<b>first",
        [
            row(1, loss=5.0, tps=90.0, step_seconds=36.0, interval_steps=1, memory_gib=2.5),
            row(10, loss=4.0, tps=110.0, step_seconds=18.0, interval_steps=9, memory_gib=2.0),
            row(10, **{"validation_loss": 4.5, "validation_loss/code": 3.5}),
            row(20, loss=9.0, tps=1.0, step_seconds=1.0, interval_steps=10),  # lost in a crash
            row(20, validation_loss=9.5),
            row(11, loss=3.9, tps=100.0, step_seconds=36.0, interval_steps=1),
        ],
        Config(),
    )
    second = write_run(
        tmp_path / "second",
        [row(5, loss=2.0, tps=50.0, step_seconds=7.2)],
        Config(training=Training(seq_len=128), optimizer=Optimizer(lr=0.5)),
        world_size=4,
    )
    config = second / "config.toml"
    config.write_text(config.read_text().replace("seq_len = 128", "seq_len = -128"))  # another version's, refused now
    unlogged = write_run(tmp_path / "unlogged", [""], Config())
    data = compared([first, unlogged, tmp_path / "nowhere", second], tmp_path)
    said = capsys.readouterr().out
    assert re.search(f"left out.*: {unlogged}, .*nowhere", said)
    with pytest.raises(TitaniteError, match="no run to compare"):
        compared([unlogged], tmp_path)
    with pytest.raises(TitaniteError, match=f"{tmp_path}: cannot be written"):
        main([str(first), f"--output={tmp_path}"])
    assert [run["name"] for run in data["runs"]] == [str(first), str(second)]
    charts = data["runs"][0]["charts"]
    expected = [[1, 100, 0.01, 5.0], [10, 1000, 0.055, 4.0], [11, 1100, 0.065, 3.9]]
    assert charts["loss"] == [pytest.approx(point) for point in expected]
    assert charts["validation_loss"] == [pytest.approx([10, 1000, 0.055, 4.5])]
    assert charts["validation_loss/code"] == [pytest.approx([10, 1000, 0.055, 3.5])]
    losses = ["loss", "validation_loss", "validation_loss/code"]
    assert data["charts"] == [*losses, "tps", "memory_gib", "step_seconds"]
    assert data["settings"] == [
        ["world_size", "2", "4"],
        ["training.seq_len", "256", "-128"],
        ["optimizer.lr", "0.0003", "0.5"],
    ]
    first_summary = {"step": 11, "tokens": 1100, "hours": pytest.approx(0.065), "loss": 3.9, "validation_loss": 4.5}
    first_summary |= {"validation_loss/code": 3.5, "tps": 100.0, "memory_gib": 2.25, "step_seconds": 36.0}
    second_summary = {"step": 5, "tokens": 500, "hours": 0, "loss": 2.0, "tps": 50.0, "step_seconds": 7.2}
    assert [run["summary"] for run in data["runs"]] == [first_summary, second_summary]
    page = (tmp_path / "made" / "page.html").read_text()
    assert "<b>first" not in page, "names cannot become markup"
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "MAX_POINTS", 10)
    rows = [row(i, loss=float(i), tps=1.0, step_seconds=1.0) for i in range(1, 101)]
    run = write_run(tmp_path / "run", [*rows, '{"step": 101, "lo'], Config())  # cut off by a crash
    (drawn,) = compared([run], tmp_path)["runs"]
    assert [value for *_, value in drawn["charts"]["loss"]] == list(range(10, 101, 10))


@pytest.mark.parametrize(
    ("file", "content"), [("metrics.jsonl", '{"step": 1, "train_loss": 2}\n'), ("config.toml", "=")]
)
def test_a_damaged_run_is_named(tmp_path, file, content):
    run = write_run(tmp_path / "run", [row(2, loss=1.0, step_seconds=1.0)], Config())
    (run / file).write_text(content)
    with pytest.raises(TitaniteError, match=f"^{run}.*{file}"):
        main([str(run)])
