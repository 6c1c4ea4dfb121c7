"""Whatever moment a rank is killed at, the newest committed checkpoint is whole."""

import pytest

from tests.distributed.checkpoint_kills import KILLS, survive_kills


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_at_random_moments_of_saves(tmp_path, mode):
    amid = survive_kills(str(tmp_path), KILLS // 2, mode)
    assert amid >= KILLS // 8  # kills between saves prove nothing
