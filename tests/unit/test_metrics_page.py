"""The page that compares runs: its data against rows written by hand, and nothing in it that leaves the file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint.branch import Parent, record_parent
from checkpoint.owner import new_start
from config import Config, Optimizer, TitaniteError, Training
from metrics import FIELDS
from run.folder import record_config, record_start
from tools import compare
from tools.compare import main, read_charts


def row(step: int, **values: float) -> str:
    return json.dumps(dict.fromkeys(FIELDS) | {"step": step, "tokens": 100 * step} | values)


def write_run(folder: Path, rows: list[str], config: Config, world_size: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    record_start(folder, config, {}, world_size, new_start(folder))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert found
    return json.loads(found[1])


def test_curves_tables_and_settings(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "<b>first",
        [
            row(1, loss=5.0, tps=90.0, step_seconds=36.0, interval_steps=1, grad_norm=1.0, memory_gib=2.5),
            row(10, loss=4.0, tps=110.0, step_seconds=18.0, interval_steps=9, grad_norm=2.0, memory_gib=2.0),
            row(10, **{"validation_loss": 4.5, "validation_loss/code": 3.5}),
            row(20, loss=9.0, tps=1.0, step_seconds=1.0, interval_steps=10, grad_norm=2.0),  # lost in a crash
            row(20, validation_loss=9.5),
            row(11, loss=3.9, tps=100.0, step_seconds=36.0, interval_steps=1, grad_norm=1.5),
        ],
        Config(),
    )
    second = write_run(
        tmp_path / "second",
        [row(5, loss=2.0, tps=50.0, step_seconds=7.2, grad_norm=0.1)],
        Config(training=Training(seq_len=128), optimizer=Optimizer(lr=0.5)),
        world_size=4,
    )
    main([str(first), str(second), "--output", str(tmp_path / "made" / "page.html")])
    page = (tmp_path / "made" / "page.html").read_text()
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["<b>first", "second"]
    charts = data["runs"][0]["charts"]
    assert charts["loss"] == {
        "step": [1, 10, 11],
        "tokens": [100, 1000, 1100],
        "hours": pytest.approx([0.01, 0.055, 0.065]),
        "value": [5.0, 4.0, 3.9],
    }
    assert charts["validation_loss"]["value"] == [4.5]
    assert charts["validation_loss/code"]["hours"] == pytest.approx([0.055])
    losses = ["loss", "validation_loss", "validation_loss/code"]
    assert data["charts"] == [*losses, "grad_norm", "tps", "memory_gib", "step_seconds"]
    settings = {line[0]: line[1:] for line in data["settings"]}
    assert settings == {
        "training.seq_len": ["256", "128"],
        "optimizer.lr": ["0.0003", "0.5"],
        "world_size": ["2", "4"],
    }
    summary = [
        dict(zip(["step", "tokens", "hours", *data["charts"]], run["summary"], strict=True)) for run in data["runs"]
    ]
    assert [(line["step"], line["tokens"]) for line in summary] == [(11, 1100), (5, 500)]
    assert [(line["loss"], line["validation_loss"]) for line in summary] == [(3.9, 4.5), (2.0, None)]
    assert [(line["tps"], line["memory_gib"]) for line in summary] == [(100.0, 2.25), (50.0, None)]
    assert "<b>first" not in page, "names cannot become markup"
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_settings_that_changed_between_the_starts_of_a_run_are_shown(tmp_path: Path) -> None:
    """Also of one run alone; without a start that the checkpoint refused, which never took its settings over."""
    for lr, world_size, accepted in ((0.1, 2, True), (0.2, 4, True), (0.7, 4, False), (0.3, 4, True)):
        config = Config(optimizer=Optimizer(lr=lr))
        run = write_run(tmp_path / "run", [row(5, loss=2.0, step_seconds=1.0)], config, world_size)
        if accepted:
            record_config(run, config)
    main([str(run), "--output", str(tmp_path / "page.html")])
    settings = data_of((tmp_path / "page.html").read_text())["settings"]
    assert settings == [["optimizer.lr", "0.1 → 0.2 → 0.3"], ["world_size", "2 → 4"]]


def test_a_branch_is_drawn_from_its_fork(tmp_path: Path) -> None:
    rows = [row(step, loss=1.0, step_seconds=36.0, interval_steps=1) for step in (21, 22)]
    run = write_run(tmp_path / "branch", rows, Config())
    record_parent(run, Parent("outputs/trunk", 20, "", 0))
    main([str(run), "--output", str(tmp_path / "page.html")])
    (drawn,) = data_of((tmp_path / "page.html").read_text())["runs"]
    assert drawn["name"] == "branch from outputs/trunk@20"
    assert drawn["charts"]["loss"]["step"] == [21, 22]
    assert drawn["charts"]["loss"]["hours"] == pytest.approx([0.01, 0.02])


def test_steps_left_out_after_a_rollback_are_in_no_curve(tmp_path: Path) -> None:
    rows = [row(step, loss=float(step), step_seconds=1.0, interval_steps=1) for step in range(1, 8)]
    rows += [row(6, validation_loss=9.5), row(8, skipped=1)]
    rows += [row(step, skipped=1) for step in (6, 7, 8)]  # back to the checkpoint of step 5
    rows += [row(9, loss=9.0, step_seconds=1.0, interval_steps=1)]
    charts = read_charts(write_run(tmp_path / "run", rows, Config()))
    assert charts["loss"]["step"] == [1, 2, 3, 4, 5, 9]
    assert charts["loss"]["hours"][-1] == pytest.approx(6 / 3600)
    assert "validation_loss" not in charts


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MAX_POINTS", 10)
    rows = [row(i, loss=float(i), tps=1.0, step_seconds=1.0) for i in range(1, 101)]
    run = write_run(tmp_path / "run", rows, Config())
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "lo')  # cut off by a crash
    main([str(run), "--output", str(tmp_path / "page.html")])
    loss = data_of((tmp_path / "page.html").read_text())["runs"][0]["charts"]["loss"]
    assert loss["value"] == [float(i) for i in range(10, 101, 10)]


def test_a_run_that_ended_before_its_first_step_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, [row(5, loss=2.0, step_seconds=1.0)], Config()) for name in "abc"]
    (runs[0] / "metrics.jsonl").unlink()
    (runs[1] / "metrics.jsonl").write_text("")
    words = ["--output", str(tmp_path / "page.html")]
    main([*map(str, runs), *words])
    assert [run["name"] for run in data_of((tmp_path / "page.html").read_text())["runs"]] == ["c"]
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == [f"{run}: left out, no step was logged there" for run in runs[:2]]
    assert "runs compared: 1" in said.out
    with pytest.raises(TitaniteError, match="no run to compare"):
        main([*map(str, runs[:2]), *words])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1, "train_loss": 2}\n', "is not as a run writes it: KeyError"),
        ("config.toml", "=", "is not as a run writes it"),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    run = write_run(tmp_path / "run", [row(2, loss=1.0, step_seconds=1.0)], Config())
    (run / file).write_text(content)
    with pytest.raises(TitaniteError, match=f"^{run}: .*{message}"):
        main([str(run)])


def test_an_output_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = "must be a string that names a folder or file, not a URL"
    for output, message in ((str(tmp_path), "cannot be written: Is a directory"), ("s3://bucket/page.html", urls)):
        with pytest.raises(SystemExit):
            main(["nowhere", "--output", output])
        assert f"argument --output: {output}: {message}" in capsys.readouterr().err
