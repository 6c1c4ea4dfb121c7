"""The parity report: its parts on known values, and once as a command."""

import json
import sys
from pathlib import Path

import pytest
import torch

from config import Config, ConfigError, Float8
from tests.corpus import write_dataset
from tools.parity import gathered_bytes, judge, main, sqnr


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


def test_bytes_gathered() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    on, off = (Config(float8=Float8(enable=True, fsdp_all_gather=choice)) for choice in ("auto", "off"))
    assert gathered_bytes(model, ["0"], on) == (2 * (512 + 256), 512 + 2 * 256)
    assert gathered_bytes(model, ["0"], off) == gathered_bytes(model, ["0"], on, 3) == (2 * (512 + 256),) * 2


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
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    bf16, float8 = report["runs"]["bf16"], report["runs"]["float8"]
    assert [run["steps"] for run in (*bf16, *float8)] == [[1, 2]] * 4
    for before, after in zip(bf16, float8, strict=True):  # the same weights and data, in other roundings
        assert after["losses"][0] == pytest.approx(before["losses"][0], rel=1e-2)
        assert after["losses"] != before["losses"]
    assert bf16[0]["losses"][0] != pytest.approx(bf16[1]["losses"][0], rel=1e-6)
    assert len(report["layers"]) == len(report["converted"]) == 4 * 7
    for row in report["layers"]:
        assert all(15 < row[key] < 60 for key in ("y dB", "dx dB", "dw dB")), row
    assert 0.5 < report["gathered_bytes"]["float8"] / report["gathered_bytes"]["bf16"] < 0.7
    assert "the spread of bf16 over its seeds" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already holds something"):
        main(words)


def test_the_report_is_written_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output=s3://bucket/report"])
    assert (
        "argument --output: s3://bucket/report: must be a string that names a folder or file, not a URL"
        in capsys.readouterr().err
    )


def test_what_ranks_cannot_gather_is_refused_before_the_first_run(dataset: Path, tmp_path: Path) -> None:
    words = [f"--output={tmp_path / 'out'}", f"--data.datasets={dataset}", "--processes=3", "--float8.filter=all"]
    with pytest.raises(ConfigError, match=r'fsdp_all_gather = "on": .* cannot be shared evenly by 3 ranks'):
        main([*words, "--quick", "--float8.fsdp_all_gather=on"])
    assert not (tmp_path / "out").exists()


def test_without_matplotlib(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"\./setup.sh test, or pip install matplotlib"):
        main([f"--output={tmp_path / 'out'}", f"--data.datasets={dataset}"])
    assert not (tmp_path / "out").exists()


def test_quick_leaves_alone_what_is_given(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the next thing that is asked for
    with pytest.raises(ConfigError, match="matplotlib"):
        main([f"--output={tmp_path / 'out'}", f"--data.datasets={dataset}", "--quick", "--training.steps=5"])


def test_float32_is_not_what_float8_is_compared_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'training\.param_dtype = "float32": must be "bfloat16"'):
        main([f"--output={tmp_path / 'out'}", "--training.param_dtype=float32"])
    assert not (tmp_path / "out").exists()
