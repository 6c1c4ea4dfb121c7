"""Conversion to float8: which layers, real float8 arithmetic, and refusal where nothing can be converted."""

import dataclasses

import pytest
import torch

from config import ConfigError, Float8
from float8.convert import convert_to_float8
from models.init import init_weights
from models.llama.model import Llama, LlamaConfig

FLAVOR = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=96)


def build(flavor: LlamaConfig = FLAVOR) -> Llama:
    with torch.device("meta"):
        return Llama(flavor)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_step_in_float8_is_near_the_step_in_high_precision(recipe: str) -> None:
    exact, rounded = build(), build()
    names, skipped = convert_to_float8(rounded, Float8(enable=True, recipe=recipe, filter="all", fsdp_all_gather="off"))
    assert len(names) == 2 * 7
    assert list(skipped) == ["output"]
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
    grads = []
    for model in (exact, rounded):
        init_weights(model, torch.device("cpu"), seed=0)
        with torch.no_grad():  # large enough that rounding shows beside the residual stream
            for name in names:
                model.get_parameter(f"{name}.weight").mul_(5)
        model = model.bfloat16()
        model(tokens).float().square().mean().backward()
        grads.append({n: p.grad.float() for n, p in model.named_parameters()})
    for name, grad in grads[0].items():
        relative = (grads[1][name] - grad).norm() / grad.norm()
        assert relative < 0.25, (name, relative)
    assert any(not torch.equal(grads[0][f"{n}.weight"], grads[1][f"{n}.weight"]) for n in names), "nothing was rounded"


def test_layers_are_skipped_by_name_and_by_shape() -> None:
    model = build(dataclasses.replace(FLAVOR, hidden_dim=120))
    names, skipped = convert_to_float8(model, Float8(enable=True, filter="all", skip=("output", "wk")))
    assert "layers.0.attention.wq" in names
    assert skipped["layers.1.attention.wk"] == "float8.skip names 'wk'"
    assert skipped["layers.0.feed_forward.w1"] == "120 x 64 is not divisible by 16"


def test_nothing_to_convert_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no linear layer can be converted"):
        convert_to_float8(build(), Float8(enable=True, skip=("layers", "output")))
