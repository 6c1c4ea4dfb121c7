"""Whole float8 runs of train.py: on by one line, resumed bit for bit, to and from bfloat16."""

from pathlib import Path

import pytest
import torchao.float8  # noqa: F401  (once, not in every forked rank)

from config import ConfigError, load_config
from tests.runs import column, launch
from train import train

BF16 = ("--training.steps=4", "--training.param_dtype=bfloat16", "--checkpoint.interval=2", "--validation.enable=false")
FLOAT8 = (*BF16, "--float8.enable", "--float8.filter=all")


def losses(small: tuple[str, ...], folder: Path, words: tuple[str, ...], stop_after: int = 0) -> list[float]:
    launch(2, folder, [*small, *words], stop_after)
    return column(folder, "loss")


@pytest.fixture(scope="module")
def straight(small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(small, tmp_path_factory.mktemp("straight"), FLOAT8)


def test_resumed_bit_for_bit(straight: list[float], small: tuple[str, ...], tmp_path: Path) -> None:
    """With the scales of the weights that were loaded, computed ahead."""
    losses(small, tmp_path, FLOAT8, 3)
    assert losses(small, tmp_path, FLOAT8) == straight


def test_from_bf16_to_float8_and_back(
    straight: list[float], small: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = losses(small, tmp_path / "plain", BF16)
    assert "float8: " not in capfd.readouterr().err
    for name, before, after in (("to float8", BF16, FLOAT8), ("to bf16", FLOAT8, BF16)):
        losses(small, tmp_path / name, before, 2)
        assert ("float8: 14 linear layers" in capfd.readouterr().err) == (before == FLOAT8)
        first, second = (plain, straight) if before == BF16 else (straight, plain)
        mixed = losses(small, tmp_path / name, after)
        assert mixed[:2] == first[:2]
        assert mixed[2:] == pytest.approx(second[2:], rel=2e-3)
        assert mixed[2:] not in (first[2:], second[2:])


def test_refused_before_a_folder_is_made(small: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'set float8.filter = "all"'):
        train(load_config([*small, f"--run.folder={tmp_path / 'run'}", "--float8.enable"]))
    assert not (tmp_path / "run").exists()
