"""The page that compares runs: its data against rows written by hand, and nothing in it that leaves the file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import metrics_page
from config import Config, Optimizer, TitaniteError, Training
from metrics import FIELDS, main
from metrics_page import read_charts
from run_folder import record_start


def row(step: int, **values: float) -> str:
    return json.dumps(dict.fromkeys(FIELDS) | {"step": step, "tokens": 100 * step} | values)


def write_run(folder: Path, rows: list[str], config: Config, world_size: int = 2) -> Path:
    record_start(folder, config, {}, world_size)
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
            row(1, loss=5.0, tps=90.0, step_seconds=36.0, grad_norm=1.0),
            row(10, loss=4.0, tps=110.0, step_seconds=18.0, grad_norm=2.0),
            row(10, **{"validation_loss": 4.5, "validation_loss/code": 3.5}),
            row(20, loss=9.0, tps=1.0, step_seconds=1.0, grad_norm=2.0),  # lost in a crash
            row(20, validation_loss=9.5),
            row(11, loss=3.9, tps=100.0, step_seconds=36.0, grad_norm=1.5),
        ],
        Config(),
    )
    second = write_run(
        tmp_path / "second",
        [row(5, loss=2.0, tps=50.0, step_seconds=7.2, grad_norm=0.1)],
        Config(training=Training(seq_len=128), optimizer=Optimizer(lr=0.5)),
        world_size=4,
    )
    main(["compare", str(first), str(second), "--output", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
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
    assert data["charts"] == ["loss", "validation_loss", "validation_loss/code", "tps", "grad_norm"]
    settings = {line[0]: line[1:] for line in data["settings"]}
    assert settings == {
        "training.seq_len": ["256", "128"],
        "optimizer.lr": ["0.0003", "0.5"],
        "world_size": ["2", "4"],
    }
    summary = [dict(zip(["run", *data["summary"]["columns"]], line, strict=True)) for line in data["summary"]["rows"]]
    assert (summary[0]["loss"], summary[0]["validation loss"], summary[0]["tokens/s"]) == (3.9, 4.5, 200.0)
    assert (summary[1]["devices"], summary[1]["tokens/s"], summary[1]["MFU"]) == (4, 200.0, None)
    assert "<b>first" not in page, "names cannot become markup"
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "MAX_POINTS", 10)
    rows = [row(i, loss=float(i), tps=1.0, step_seconds=1.0) for i in range(1, 101)]
    run = write_run(tmp_path / "run", [*rows, '{"step": 101, "lo'], Config())  # cut off by a crash
    main(["compare", str(run), "--output", str(tmp_path / "page.html")])
    loss = data_of((tmp_path / "page.html").read_text())["runs"][0]["charts"]["loss"]
    assert loss["value"] == [float(i) for i in range(10, 101, 10)]


def test_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(TitaniteError, match=r"nowhere/metrics.jsonl: cannot be read"):
        main(["compare", str(tmp_path / "nowhere")])
    run = write_run(tmp_path / "run", ["{", row(2, loss=1.0)], Config())
    with pytest.raises(TitaniteError, match="line 1: not JSON"):
        read_charts(run)
    with pytest.raises(TitaniteError, match="named twice"):
        main(["compare", str(run), f"{run}/."])
