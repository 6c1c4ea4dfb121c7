"""The model against Hugging Face transformers' Llama, and against itself: cache, documents, initial weights."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from config import Config, ConfigError, Parallelism
from models import LLAMA, build_model
from models.llama import FLAVORS
from models.llama.model import (
    Llama,
    LlamaConfig,
    RMSNorm,
    apply_rope,
    causal_mask,
    rope_cos_sin,
    rope_frequencies,
)
from models.llama.parallelize import split_stages
from models.weights import init_weights
from tests.unit.test_families import hf_model, ours_from, random_tokens

TINY = dataclasses.replace(FLAVORS["tiny"], vocab_size=64)


def test_in_bfloat16_norms_and_rotations_are_rounded_once():
    """Angles and positions are in float32: bfloat16 would not tell the places of the last tokens apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 600, 8, 64, generator=generator).bfloat16()
    positions = torch.arange(600)[None]
    rotated = apply_rope(x, *rope_cos_sin(FLAVORS["1B"].rope(0), positions))
    frequencies = rope_frequencies(FLAVORS["1B"].rope(0), x.device).double()
    turns = torch.polar(torch.ones(600, 32).double(), positions.T * frequencies)[:, None]
    exact = torch.view_as_real(torch.complex(*x.double().chunk(2, -1)) * turns).transpose(-1, -2).flatten(-2)
    assert in_roundings(rotated, exact) < 1.01
    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data = torch.randn(64, generator=generator).bfloat16().float()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert in_roundings(norm(x), exact) < 1.01


def in_roundings(found, exact):
    """The error, in multiples of that of one rounding to bfloat16."""
    assert found.dtype == torch.bfloat16
    return ((found - exact).norm() / (exact.bfloat16() - exact).norm()).item()


def test_documents_do_not_see_each_other():
    model, tokens = ours_from(hf_model("llama3.1")), random_tokens(1, 30)
    lengths = (7, 1, 22)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = [model(part) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(model(tokens, positions), torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    # A row that continues a document begun before it: positions need not start at 0.
    some = causal_mask(torch.tensor([[3, 4, 0, 1]]), torch.tensor([3, 0]))
    assert some.int().tolist() == [[[[0, 0, 1, 1], [1, 0, 0, 0]]]]


def build(config, seed=0):
    with torch.device("meta"):
        model = Llama(config)
    init_weights(model, torch.device("cpu"), seed)
    return model


def test_initial_weights_follow_the_rule():
    """Norms are ones. Everything else is drawn in float32, and on its own: no two weights begin alike."""
    config = dataclasses.replace(FLAVORS["debug"], vocab_size=512)
    model = build(config)
    other = build(config, seed=1)
    drawn = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.all(parameter == 1), name
            continue
        std = 0.02 / 12**0.5 if name.endswith(("wo.weight", "w2.weight")) else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.02), name
        assert parameter.abs().max() <= 3.001 * std, name
        assert (parameter != parameter.bfloat16()).float().mean() > 0.98, name
        drawn += [parameter, other.get_parameter(name)]
    beginnings = {tuple((weight / weight.abs().max()).flatten()[:4].tolist()) for weight in drawn}
    assert len(beginnings) == len(drawn)


class GatedAtEight(Llama):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.full((4,), 8.0))

    def init_weight(self, name, weight, generator):
        if name == "gate":
            weight.fill_(8.0)
        else:
            super().init_weight(name, weight, generator)


NOT_INITIALIZED = {  # what is said → the edit of a fork
    "gate: has no initial values": lambda model: setattr(model, "gate", nn.Parameter(torch.ones(4))),
    "output.weight: is filled in __init": lambda model: nn.init.zeros_(model.output.weight),
    "buffer table: would stay empty": lambda model: model.register_buffer("table", torch.zeros(2)),
    "again.weight: second name of a weight": lambda model: setattr(model, "again", model.norm),
}


@pytest.mark.parametrize("said", NOT_INITIALIZED)
def test_what_would_not_be_initialized_is_refused(said):
    def build_edited(config):
        model = Llama(config)
        NOT_INITIALIZED[said](model)
        return model

    with pytest.raises(ConfigError, match=said):
        build_model(dataclasses.replace(LLAMA, model=build_edited), TINY)


def test_initial_values_of_a_fork_are_what_it_says():
    tiny = dataclasses.replace(TINY, n_layers=1)
    built = build_model(dataclasses.replace(LLAMA, model=GatedAtEight), tiny)
    init_weights(built, torch.device("cpu"), seed=0)
    assert built.gate.tolist() == [8.0] * 4


def test_a_weight_that_more_than_one_stage_would_train_is_refused():
    model = build(TINY)
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"each stage would train a extra\.weight of its own"):
        split_stages(model, mock.Mock(), Config(parallelism=Parallelism(pp=2)))


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [  # as published with the models
        ("1B", 1_235_814_400),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
        ("llama2_7B", 6_738_415_616),
        ("qwen3_0.6B", 596_049_920),
        ("qwen3_1.7B", 1_720_574_976),
        ("qwen3_4B", 4_022_468_096),
        ("qwen3_8B", 8_190_735_360),
        ("mistral_7B", 7_248_023_552),
        ("granite3.3_2B", 2_533_539_840),
        ("granite3.3_8B", 8_170_864_640),
        ("smollm3_3B", 3_075_098_624),
        ("olmo2_7B", 7_298_617_344),
    ],
)
def test_flavors_have_the_published_number_of_parameters(flavor, parameters):
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_flops_per_token():
    """Counted by torch on the real forward: 3 x its matmuls and attention, the causal half not taken off."""
    from torch.utils.flop_counter import FlopCounterMode

    config = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=128)
    model, seq_len = build(config), 32
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(torch.zeros(1, seq_len, dtype=torch.long))
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert model.flops_per_token(seq_len) * seq_len == 3 * counter.get_total_flops() + 6 * norms * seq_len
    windowed = build(dataclasses.replace(config, windows=(8, 2 * seq_len)))  # the second layer's sees all
    assert windowed.flops_per_token(seq_len) == model.flops_per_token(seq_len) - 12 * config.dim * (seq_len - 8)
