"""The parity report, once as a command."""

import json
from pathlib import Path

import pytest

from config import ConfigError
from storage.records import read_records
from tests.corpus import write_dataset
from tools.parity import main


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (i * j) % 90 for j in range(60)] + [0] for i in range(30)]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", [documents], documents[1:5], vocab_size=100)


def test_the_command(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "--float8.filter=all --model.flavor=tiny --training.steps=2 --training.seq_len=16 "
        "--training.local_batch_size=1 --lr_scheduler.warmup_steps=1 --validation.max_samples=4"
    )
    words = [*settings.split(), f"--output={tmp_path / 'out'}", f"--data.datasets={dataset}"]
    words += [f"--validation.datasets={dataset}"]  # a run's own, by name: not what is compared
    main(words)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert '"bf16-seed' in (tmp_path / "out" / "compare.html").read_text()
    names = ["bf16-seed0", "float8-seed0", "bf16-seed1"]
    rows = [read_records(tmp_path / "out" / name / "metrics.jsonl") for name in names]
    bf16, float8, other = (run[0]["loss"] for run in rows)
    assert float8 == pytest.approx(bf16, rel=1e-2)  # the same weights and data, in other roundings
    assert float8 != bf16
    assert other != pytest.approx(bf16, rel=1e-6)
    bf16, float8, other = (next(row["validation_loss"] for row in run if row["validation_loss"]) for run in rows)
    within = abs(float8 - bf16) < abs(other - bf16)
    assert report["verdict"] == {
        "difference": pytest.approx(float8 - bf16), "seeds_differ": pytest.approx(abs(other - bf16)), "within": within,
    }  # fmt: skip
    assert len(report["layers"]) == 4 * 7
    assert all(15 < value < 60 for noise in report["layers"].values() for value in noise.values())
    said = "within" if within else "BEYOND"
    assert f"{said} what another seed changes" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists; name a new folder"):
        main(words)
