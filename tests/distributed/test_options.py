"""A model with all options of LlamaConfig on, in every layout, against a plain loop in one process."""

import dataclasses
from typing import Any

import pytest

from config import Config, ConfigError
from models.llama.model import RopeScaling
from models.llama.parallelize import check_parallelism
from tests.distributed.test_parallel import LAYOUTS, compare_forked
from tests.parity import FLAVOR, STEPS, config_for, plain_run

ALL: dict[str, Any] = {
    "n_layers": 4,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": "head",
    "norm_after": True,
    "windows": (8, 0),
    "rope_thetas": (500.0, 0.0, 1e4),
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, full_layers_only=True),
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_divisor": 3.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "one process": {"loss_chunks": 3},
    "compiled": {"compile": "aot_eager", "mode": "selective"},
    "documents": {"documents": True},
    "Muon, HSDP 2 x 2": {"optimizer": "muon", "dp_replicate": 2, "dp_shard": 2},
    "FSDP 2 x TP 2, compiled": {"dp_shard": 2, "tp": 2, "compile": "aot_eager", "mode": "full"},
    "CP 2, documents": {"cp": 2, "documents": True},
    **{name: LAYOUTS[name] for name in ("TP 2", "FSDP 2 x CP 2", "PP 2", "FSDP 2 x TP 2 x PP 2")},
}


def build_config(options: dict[str, Any]) -> Config:
    return config_for(**({"dp_replicate": 1, "dp_shard": 1} | options))


@pytest.mark.parametrize("name", RUNS)
def test_equals_a_plain_loop(name: str) -> None:
    options = RUNS[name]
    expected = plain_run(STEPS, documents="documents" in options, muon="optimizer" in options, **ALL)
    compare_forked(build_config(options), expected, **ALL)


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ({"cp": 2, "cp_method": "ring"}, {"windows": (8,)}, 'cp_method = "ring": has no windows'),
        ({"tp": 2}, {"qk_norm": "width"}, "tp = 2: no rank has the whole width"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(layout: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallelism(dataclasses.replace(FLAVOR, **options), build_config(layout))
