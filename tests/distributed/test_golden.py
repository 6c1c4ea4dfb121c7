"""A run that an earlier commit began goes on as if it had never stopped, and as a run of today."""

import shutil

import pytest

from tests.golden.make import ARGUMENTS, FOLDER
from tests.runs import column, launch, validated


def test_a_run_of_an_earlier_commit_is_resumed(tmp_path):
    """Today's run differs by roundings alone, which CPUs order in their own ways."""
    resumed, today = tmp_path / "resumed", tmp_path / "today"
    shutil.copytree(FOLDER, resumed)
    for folder in (resumed, today):
        launch(2, folder, ARGUMENTS)
    for name in ("loss", "grad_norm"):
        assert column(resumed, name)[:6] == column(FOLDER, name)
    for name in ("tokens", "lr"):
        assert column(resumed, name) == column(today, name)
    assert column(resumed, "loss") == pytest.approx(column(today, "loss"), rel=1e-6)
    assert column(resumed, "grad_norm") == pytest.approx(column(today, "grad_norm"), rel=1e-5)
    assert validated(resumed) == pytest.approx(validated(today), rel=1e-6)
