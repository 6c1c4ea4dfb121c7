"""What a layout cannot do is refused."""

import dataclasses
from typing import Any

import pytest

from config import ConfigError
from models.llama.parallelize import check_parallelism
from tests.parity import FLAVOR, config_for


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ({"cp": 2, "cp_method": "ring"}, {"windows": (8,)}, 'cp_method = "ring": has no windows'),
        ({"tp": 2}, {"vocab_size": 49_159}, "tp = 2: must divide vocab_size = 49159; without initial weights"),
        ({"tp": 2}, {"qk_norm": "width"}, "tp = 2: no rank has the whole width"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(layout: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallelism(dataclasses.replace(FLAVOR, **options), config_for(1, 1, **layout))
