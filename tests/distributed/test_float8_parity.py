"""The parity report: its parts on known values, and once as a command."""

import json
from pathlib import Path

import pytest
import torch

from config import ConfigError
from records import read_records
from tests.corpus import write_dataset
from tools.parity import judge, main, sqnr


def test_noise_in_decibels() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    assert sqnr(exact, exact * 1.1) == pytest.approx(20)
    assert sqnr(exact, exact) == float("inf")


@pytest.mark.parametrize(("float8", "within"), [((3.02, 3.09), True), ((3.2, 3.4), False)])
def test_the_verdict_compares_with_the_spread_of_seeds(float8: tuple[float, float], within: bool) -> None:
    runs = {
        name: [{"validation_loss": loss} for loss in pair] for name, pair in (("bf16", (3.0, 3.1)), ("float8", float8))
    }
    verdict = judge(runs)
    assert verdict["seed_spread"] == pytest.approx(0.1)
    assert verdict["difference"] == pytest.approx(sum(float8) / 2 - 3.05)
    assert verdict["within"] == within


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (i * j) % 90 for j in range(60)] + [0] for i in range(30)]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", [documents], documents[1:5], vocab_size=100)


def test_the_command(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds=2", f"--output={tmp_path / 'out'}", "--float8.filter=all", f"--data.datasets={dataset}"]
    words += ["--model.flavor=tiny", "--training.steps=2", "--training.seq_len=16", "--training.local_batch_size=1"]
    words += ["--lr_scheduler.warmup_steps=1", "--validation.max_samples=4"]
    words += [f"--validation.datasets={dataset}"]  # a run's own, by name: not what is compared
    main(words)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert '"bf16-seed' in (tmp_path / "out" / "compare.html").read_text()
    bf16, float8 = (
        [
            [row["loss"] for row in read_records(Path(run["folder"], "metrics.jsonl"))][:2]
            for run in report["runs"][name]
        ]
        for name in ("bf16", "float8")
    )
    for before, after in zip(bf16, float8, strict=True):  # the same weights and data, in other roundings
        assert after[0] == pytest.approx(before[0], rel=1e-2)
        assert after != before
    assert bf16[0][0] != pytest.approx(bf16[1][0], rel=1e-6)
    assert len(report["layers"]) == 4 * 7
    for row in report["layers"]:
        assert all(15 < row[key] < 60 for key in ("y dB", "dx dB", "dw dB")), row
    assert "the spread of bf16 over its seeds" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists; name a new folder"):
        main(words)


def test_a_mistake_is_named_before_the_first_run(dataset: Path, tmp_path: Path) -> None:
    words = [f"--output={tmp_path / 'out'}", f"--data.datasets={dataset}", "--training.param_dtype=float32"]
    with pytest.raises(ConfigError, match=r'training\.param_dtype = "float32": must be "bfloat16"'):
        main(words)
    assert not (tmp_path / "out").exists()
