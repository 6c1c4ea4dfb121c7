"""A model with all options of LlamaConfig on, in every layout, against a plain loop in one process."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from config import ConfigError
from models.llama.model import RopeScaling
from models.llama.parallelize import check_parallelism
from tests.parity import FLAVOR, GLOBAL_BATCH, case, compare, config_for

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
with_all = partial(case, ALL)
CASES = {
    "one process": with_all(loss_chunks=3),
    "compiled": with_all(compile="aot_eager", mode="selective"),
    "documents": case(ALL | {"documents": True}, documents=True),
    "Muon, HSDP 2 x 2": case(ALL | {"muon": True}, optimizer="muon", dp_replicate=2, dp_shard=2),
    "TP 2": with_all(tp=2),
    "FSDP 2 x TP 2, compiled": with_all(dp_shard=2, tp=2, compile="aot_eager", mode="full"),
    "FSDP 2 x CP 2": with_all(dp_shard=2, cp=2),
    "CP 2, documents": case(ALL | {"documents": True}, documents=True, cp=2),
    "PP 2": with_all(pp=2, pp_microbatch_size=2, local_batch_size=GLOBAL_BATCH),
    "FSDP 2 x TP 2 x PP 2": with_all(dp_shard=2, tp=2, pp=2, pp_microbatch_size=2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop(name: str) -> None:
    compare(*CASES[name])


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ({"cp": 2, "cp_method": "ring"}, {"windows": (8,)}, 'cp_method = "ring": has no windows'),
        ({"tp": 2}, {"qk_norm": "width"}, "tp = 2: no rank has the whole width"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(layout: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallelism(dataclasses.replace(FLAVOR, **options), config_for(1, 1, **layout))
