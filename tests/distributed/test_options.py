"""A model with all options of LlamaConfig on, and one of a fork, in every layout, against a plain loop."""

import dataclasses
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import models
import tests.parity
from config import ConfigError, Model
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
        ({"tp": 2}, {"vocab_size": 49_159}, "tp = 2: must divide vocab_size = 49159; without initial weights"),
        ({"tp": 2}, {"qk_norm": "width"}, "tp = 2: no rank has the whole width"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(layout: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallelism(dataclasses.replace(FLAVOR, **options), config_for(1, 1, **layout))


@pytest.fixture
def palm(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of docs/model.md's example, which `model.name = "palm"` trains."""
    page = Path(__file__).parents[2] / "docs" / "model.md"
    of_model, of_models = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    written = ModuleType("models.palm")
    monkeypatch.setitem(sys.modules, "models.palm", written)
    exec(of_model, written.__dict__)
    names = vars(models) | {"partial": partial}
    exec(of_models, names)
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "palm": names["PALM"]})
    return written.Palm  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layout",
    [{"compile": "aot_eager"}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"pp": 2, "pp_microbatch_size": 2}],
    ids=str,
)
def test_a_model_of_a_fork(layout: dict[str, Any], palm: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.parity, "Llama", palm)
    tests.parity.plain_run.cache_clear()
    config, plain, tolerances, batches = case({}, **layout)
    compare(dataclasses.replace(config, model=Model(name="palm")), plain, tolerances, batches)
    tests.parity.plain_run.cache_clear()
