"""Conversion to float8: which layers, real float8 arithmetic, and refusal where nothing can be converted."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput

from config import Config, ConfigError, Float8, Parallelism, Training, load_config
from float8.convert import build_linear_config, check_float8, convert_to_float8, summarize
from float8.fsdp import precomputes_scales
from float8.tensor import float8_plan
from models import build_model, find_model
from models.init import init_weights
from models.llama import FLAVORS
from models.llama.model import Llama, LlamaConfig
from models.llama.parallelize import BLOCK_PLAN

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FLAVOR = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=96)


def build(flavor: LlamaConfig = FLAVOR) -> Llama:
    with torch.device("meta"):
        return Llama(flavor)


def test_torchao_has_nothing_to_say() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHAO")}
    program = """
import os, float8.convert, metrics
metrics.configure_logging((0,), 0, 2)
import torchao.float8.float8_linear
os._exit(0)  # as train.py ends
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=TRAIN_CONFIGS.parent, env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("recipe", RECIPES)
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


def test_weights_whose_rows_ranks_cannot_share_evenly_are_gathered_as_without_float8() -> None:
    """The hidden 192 rows are shared by 3 ranks, the model's 64 are not, and 2 ranks of tp halve those of w1 and w3."""
    settings = Float8(enable=True, filter="all")
    for tp, shards, even in ((1, 3, {"w1", "w3"}), (2, 3, {"w1", "w3"}), (1, 12, {"w1", "w3"}), (2, 64, set())):
        model = build(dataclasses.replace(FLAVOR, hidden_dim=192))
        names, _ = convert_to_float8(model, settings, tp, shards)
        assert len(names) == 2 * 7
        in_float8 = {name for name in names if hasattr(model.get_submodule(name).weight, "_precomputed_scale")}
        assert {name.split(".")[-1] for name in in_float8} == even, (tp, shards)
    with pytest.raises(ConfigError, match=r'fsdp_all_gather = "on": the rows of attention.wq \(64\), attention.wk'):
        convert_to_float8(build(), dataclasses.replace(settings, fsdp_all_gather="on"), 1, 3)


class Whole(ColwiseParallel):
    """A model's own style."""


class Router(ParallelStyle):
    """A model's own style, of no kind that torchao has."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return module


class Prepare(PrepareModuleInput):
    """Likewise, of a layer's input."""


@pytest.mark.parametrize(
    "own",
    [Whole(), ColwiseParallel(output_layouts=Replicate()), ColwiseParallel(use_local_output=False)],
    ids=["style", "layout", "no local output"],
)
def test_a_layer_that_is_split_in_its_own_way_stays_so(own: ColwiseParallel) -> None:
    """As the scores of experts, which each rank is to have whole: torchao's style would leave it a part of them."""
    model = Llama(LlamaConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64))
    convert_to_float8(model, Float8(enable=True, filter="all"), tp=2)
    plan = float8_plan(model.layers["0"], BLOCK_PLAN | {"feed_forward.w3": own}, "cpu")
    for what in ("output_layouts", "use_local_output"):
        assert getattr(plan["feed_forward.w3"], what) == getattr(own, what)
    assert isinstance(plan["feed_forward.w3"], type(own))
    assert type(plan["attention.wq"]) is not ColwiseParallel, "the others are gathered in float8"
    kept = {
        "feed_forward.w3": Router(),
        "attention": Prepare(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    }
    plan = float8_plan(model.layers["0"], BLOCK_PLAN | kept, "cpu")
    for name in (*kept, "feed_forward", "attention.wq"):
        assert plan[name] is (BLOCK_PLAN | kept)[name], "its readers would have float8, which not all of them know"


def test_a_layer_that_is_not_converted_is_split_as_without_float8() -> None:
    """Neither wq and wv, which read what wk does, nor w2 would know what to do with float8."""
    model = Llama(LlamaConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64))
    convert_to_float8(model, Float8(enable=True, filter="all", skip=("output", "wk", "w2")), tp=2)
    plan = float8_plan(model.layers["0"], BLOCK_PLAN, "cpu")
    changed = {name for name, style in plan.items() if style is not BLOCK_PLAN[name]}
    assert changed == {"attention.wo", "feed_forward", "feed_forward.w1", "feed_forward.w3"}


def test_nothing_to_convert_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no linear layer can be converted"):
        convert_to_float8(build(), Float8(enable=True, skip=("layers", "output")))


def test_the_auto_filter_keeps_small_layers_in_high_precision() -> None:
    with torch.device("meta"):
        model = Llama(dataclasses.replace(FLAVORS["1.8B"], vocab_size=96, n_layers=1))
    converted, skipped = convert_to_float8(model, Float8(enable=True))
    assert [name.split(".")[-1] for name in converted] == ["wq", "wo", "w1", "w2", "w3"]
    assert skipped["layers.0.attention.wk"] == "1024 x 2048 is too small to gain"
    assert summarize(converted, skipped) == (
        "5 linear layers (attention.wq, attention.wo, feed_forward.w1, feed_forward.w2, feed_forward.w3); not: "
        "attention.wk (1024 x 2048 is too small to gain), attention.wv (1024 x 2048 is too small to gain), "
        "output (float8.skip names 'output')"
    )


@pytest.mark.parametrize("file", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_one_line_suffices_for_every_config(file: Path) -> None:
    config = load_config([f"--config={file}", "--float8.enable"])
    check_float8(config)
    spec, flavor = find_model(config.model, 32_000)
    model = build_model(spec, dataclasses.replace(flavor, n_layers=1))
    if config.model.flavor == "debug":
        with pytest.raises(ConfigError, match=r'too small to gain.*set float8.filter = "all"'):
            convert_to_float8(model, config.float8)
    else:
        assert len(convert_to_float8(model, config.float8)[0]) >= 5


@pytest.mark.parametrize(
    ("float8", "message"),
    [
        (
            {"recipe": "rowwise", "fsdp_all_gather": "on"},
            r'float8.fsdp_all_gather = "on" with float8.recipe = "rowwise": only "tensorwise"',
        ),
        (
            {"recipe": "rowwise_with_gw_hp", "precompute_scale": "on"},
            r'float8.precompute_scale = "on" with float8.recipe = "rowwise_with_gw_hp"',
        ),
        (
            {"fsdp_all_gather": "off", "precompute_scale": "on"},
            r'float8.fsdp_all_gather = "off": only weights gathered in float8',
        ),
    ],
)
def test_contradictions_are_refused(float8: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_float8(Config(float8=Float8(enable=True, **float8)))
    check_float8(Config(float8=Float8(**float8)))  # not enabled
    check_float8(Config(float8=Float8(enable=True, fsdp_all_gather="on", tp_all_gather="on", precompute_scale="on")))


def test_scales_are_not_computed_ahead_of_weights_on_the_host() -> None:
    """On their way to the device they would lose them, and each gather find its own all the same."""
    config = Config(float8=Float8(enable=True))
    assert precomputes_scales(config)
    config = dataclasses.replace(config, parallelism=Parallelism(cpu_offload=True))
    assert not precomputes_scales(config)
    with pytest.raises(ConfigError, match=r'precompute_scale = "on" with parallelism.cpu_offload'):
        check_float8(dataclasses.replace(config, float8=Float8(enable=True, precompute_scale="on")))


def test_the_tokens_of_a_microbatch_must_fit_the_weight_gradients_matmul() -> None:
    training = Training(seq_len=20, local_batch_size=2)
    with pytest.raises(ConfigError, match="2 x 20 / 1 = 40 tokens must be a multiple of 16"):
        check_float8(Config(training=training, float8=Float8(enable=True)))
    check_float8(Config(training=training, float8=Float8(enable=True, recipe="rowwise_with_gw_hp")))
    training = dataclasses.replace(training, seq_len=264)
    check_float8(Config(training=training, float8=Float8(enable=True)))
    for shared in (Parallelism(cp=2), Parallelism(pp=2)):
        with pytest.raises(ConfigError, match="= 264 tokens must be"):
            check_float8(Config(training=training, float8=Float8(enable=True), parallelism=shared))
    check_float8(Config(training=training, float8=Float8(enable=True, emulate=True)))
    check_float8(Config(training=training, float8=Float8(enable=True, recipe="rowwise_with_gw_hp")))


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="NVIDIA A100-SXM4-80GB has no float8 matmul"):
        check_float8(Config(float8=Float8(enable=True)))
    check_float8(Config(float8=Float8(enable=True, emulate=True)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_float8(Config(float8=Float8(enable=True)))


@pytest.mark.parametrize(("part", "hint"), [("w4", "did you mean w"), ("xyz", "known are attention.wq")])
def test_a_skip_that_names_nothing_is_refused(part: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"float8.skip names '{part}'.*{hint}"):
        convert_to_float8(build(), Float8(enable=True, filter="all", skip=("output", part)))
    tied = build(dataclasses.replace(FLAVOR, tie_embeddings=True))
    assert "output" not in convert_to_float8(tied, Float8(enable=True, filter="all"))[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fsdp_all_gather", ["auto", "off"])
def test_power_of_two_scales_never_meet_the_all_gather(recipe: str, fsdp_all_gather: str) -> None:
    """torchao ignores `round_scales_to_power_of_2` for weights that FSDP2 gathers."""
    float8 = Float8(enable=True, recipe=recipe, fsdp_all_gather=fsdp_all_gather)
    linear = build_linear_config(float8)
    assert linear.enable_fsdp_float8_all_gather == (recipe == "tensorwise" and fsdp_all_gather == "auto")
    assert linear.round_scales_to_power_of_2 == (recipe == "rowwise" or recipe == "rowwise_with_gw_hp")
    assert not (linear.round_scales_to_power_of_2 and linear.enable_fsdp_float8_all_gather)
