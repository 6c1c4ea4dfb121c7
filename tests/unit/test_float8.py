"""Conversion to float8: which layers, real float8 arithmetic, and refusal where nothing can be converted."""

import dataclasses
from pathlib import Path

import pytest
import torch

from config import ConfigError, Float8, load_config
from float8.convert import check_float8, convert_to_float8, summarize
from float8.tensor import float8_plan
from models import build_model, find_model
from models.llama import FLAVORS
from models.llama.model import Llama, LlamaConfig
from models.llama.parallelize import BLOCK_PLAN

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"
FLAVOR = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=96)


def build(flavor=FLAVOR):
    with torch.device("meta"):
        return Llama(flavor)


def last_words(names):
    return {name.split(".")[-1] for name in names}


def test_layers_are_skipped_by_name_and_by_shape():
    model = build(dataclasses.replace(FLAVOR, hidden_dim=120))
    names, skipped = convert_to_float8(model, Float8(enable=True, filter="all", skip=("output", "wk")))
    assert (len(names), last_words(names)) == (2 * 3, {"wq", "wv", "wo"})
    assert skipped["output"] == "float8.skip names 'output'"
    assert skipped["layers.1.attention.wk"] == "float8.skip names 'wk'"
    assert skipped["layers.0.feed_forward.w1"] == "120 x 64 is not divisible by 16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("output", "w4")}, "float8.skip names 'w4'"),
        ({"always": ("w4",)}, "float8.always names 'w4'"),
        ({"skip": ("layers", "output")}, "no linear layer can be converted"),
    ],
)
def test_what_names_no_layer_or_leaves_none_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        convert_to_float8(build(), Float8(enable=True, filter="all", **options))


def test_weights_whose_rows_ranks_cannot_share_evenly_are_gathered_as_without_float8():
    """The hidden 192 rows are shared by 3 ranks, the model's 64 are not, and 2 ranks of tp halve those of w1 and w3."""
    settings = Float8(enable=True, filter="all")
    for tp, shards, even in ((1, 3, {"w1", "w3"}), (2, 64, set())):
        model = build(dataclasses.replace(FLAVOR, hidden_dim=192))
        names, _ = convert_to_float8(model, settings, tp, shards)
        assert len(names) == 2 * 7
        in_float8 = [name for name in names if hasattr(model.get_submodule(name).weight, "_precomputed_scale")]
        assert last_words(in_float8) == even, (tp, shards)


@pytest.mark.parametrize(
    ("skip", "changed"),
    [
        ((), {"attention", "wq", "wk", "wv", "wo", "feed_forward", "w1", "w2", "w3"}),
        (("wk", "w2"), {"wo", "feed_forward", "w1", "w3"}),  # wq and wv read what wk does
    ],
)
def test_only_what_all_its_readers_take_is_gathered_in_float8(skip, changed):
    model = Llama(dataclasses.replace(FLAVOR, n_layers=1))
    convert_to_float8(model, Float8(enable=True, filter="all", skip=("output", *skip)), tp=2)
    plan = float8_plan(model.layers["0"], BLOCK_PLAN, "cpu")
    assert last_words(name for name, style in plan.items() if style is not BLOCK_PLAN[name]) == changed


def test_the_auto_filter_keeps_small_layers_in_high_precision():
    flavor = dataclasses.replace(FLAVORS["1.8B"], n_layers=1)
    converted, skipped = convert_to_float8(build(flavor), Float8(enable=True))
    assert last_words(converted) == {"wq", "wo", "w1", "w2", "w3"}
    line = summarize(converted, skipped)
    assert line.startswith("5 linear layers (attention.wq, attention.wo, feed_forward.w1, ")
    assert line.endswith("attention.wv (1024 x 2048 is too small to gain), output (float8.skip names 'output')")
    converted, skipped = convert_to_float8(build(flavor), Float8(enable=True, always=("wk", "wv", "output")))
    assert (len(converted), skipped) == (8, {})


@pytest.mark.parametrize("file", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_one_line_suffices_for_every_config(file):
    config = load_config([f"--config={file}", "--float8.enable"])
    check_float8(config)
    spec, flavor = find_model(config.model, 32_000)
    model = build_model(spec, dataclasses.replace(flavor, n_layers=1))
    if config.model.flavor in ("debug", "2M"):
        with pytest.raises(ConfigError, match=r'too small to gain.*set float8.filter = "all"'):
            convert_to_float8(model, config.float8)
    else:
        narrow = {"qwen3_0.6B": 3, "124M": 2, "350M": 2}  # many of their layers are too small to gain
        assert len(convert_to_float8(model, config.float8)[0]) >= narrow.get(config.model.flavor, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.local_batch_size=2 --training.seq_len=20", "2 x 20 / 1 = 40 tokens must be a multiple of 16"),
        ("--training.local_batch_size=2 --training.seq_len=264 --parallelism.cp=2", "= 264 tokens must be"),
        ("--parallelism.reshard_group_size=2", "no float8 weights from"),
        ("--float8.kernels=own --float8.recipe=rowwise_with_gw_hp", '"own": cannot be used with f'),
    ],
)
def test_contradictions_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        check_float8(load_config(["--float8.enable", *words.split()]))


def test_a_gpu_that_cannot_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    config = load_config(["--float8.enable"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_float8(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="a GPU has no float8 matmul"):
        check_float8(config)


def test_only_the_forward_is_summed_fast(monkeypatch):
    asked = []
    real = torch._scaled_mm

    def watch(*args, use_fast_accum=False, **named):
        asked.append(use_fast_accum)
        return real(*args, use_fast_accum=use_fast_accum, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", watch)
    for kernels in ("own", "compiler"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
        options = {"kernels": kernels, "fsdp_all_gather": "off"}
        convert_to_float8(model, Float8(enable=True, filter="all", **options))
        model(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        assert asked[-3:] == [True, False, False], kernels
