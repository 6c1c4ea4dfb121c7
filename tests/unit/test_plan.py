"""The planner: its counts against those by hand and by others; what it takes, and its arithmetic."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torchao.float8 import convert_to_float8_training

import models
import trainer
from benchmarks import plan as published
from config import Config, ConfigError, load_config
from models import ModelSpec
from models.llama.model import Block, Llama, LlamaConfig, rope_cos_sin
from tests.harness import run_ranks
from tools.plan import parse, plan, plan_run, plan_text, sweep
from tools.plan_count import Case, DryRun, check, count, dry_run
from tools.plan_sweep import count_modes, transform
from tools.plan_tally import Matmul, Tally
from tools.plan_time import (
    CAST_SHARES,
    CONTENTION,
    DEVICES,
    IDLE,
    MATMUL_SHOWS,
    NETWORK_SHARE,
    Cluster,
    estimate,
    matmul_seconds,
    sent_bytes,
)

DEBUG = ["--config=train_configs/debug.toml", "--training.loss_chunks=1", "--training.seq_len=96"]
BATCH, LAYERS, LOCAL = "--training.global_batch_size", "--model.n_layers", "--training.local_batch_size"
FLOAT8 = ["--float8.enable=true", "--float8.filter=all"]
SELECTIVE, FULL = "--activation_checkpoint.mode=selective", "--activation_checkpoint.mode=full"
EVERY_SECOND, COMPILED = "--activation_checkpoint.every_n_layers=2", "--compile.enable=true"
REPLICAS, PIPELINE = "--parallelism.dp_replicate=2", "--parallelism.pp=2"
RESHARD, INTERLEAVED = "--parallelism.reshard_after_forward=true", "--parallelism.pp_schedule=Interleaved1F1B"


def case(world_size: int, *words: str, stage: int = 0) -> Case:
    return Case(load_config([*DEBUG, f"{BATCH}=0", *words]), world_size, stage)


CASES = {
    "compiled, selective, chunks, microbatches": case(
        1, f"{LAYERS}=2", COMPILED, SELECTIVE, f"{BATCH}=40", "--training.loss_chunks=2"
    ),
    "FSDP 2, every second": case(2, f"{LAYERS}=3", FULL, EVERY_SECOND, RESHARD),
    "offloaded": case(2, f"{LAYERS}=3", FULL, EVERY_SECOND, RESHARD, "--parallelism.cpu_offload=true"),
    "HSDP 2 x 2": case(4, f"{LAYERS}=4", REPLICAS, "--optimizer.state_dtype=bfloat16"),
    "TP 2, full": case(4, f"{LAYERS}=3", "--parallelism.tp=2", FULL),
    "CP 2": case(4, f"{LAYERS}=3", "--parallelism.cp=2", SELECTIVE),
    "CP 4, ring": case(4, f"{LAYERS}=3", "--parallelism.cp=4", "--parallelism.cp_method=ring"),
    "float8, compiled": case(4, f"{LAYERS}=2", *FLOAT8, COMPILED),
    "float8, TP 2, rowwise": case(2, f"{LAYERS}=2", *FLOAT8, "--parallelism.tp=2", "--float8.recipe=rowwise"),
    "PP 2, uneven": case(2, f"{LAYERS}=5", PIPELINE, f"{LOCAL}=2", stage=1),
    "PP 2, interleaved": case(2, f"{LAYERS}=6", PIPELINE, INTERLEAVED, f"{LOCAL}=2", FULL),
    "Muon": case(2, f"{LAYERS}=2", "--optimizer.name=muon"),
    "windows": case(1, f"{LAYERS}=2", "--model.windows=[32, 0]"),
}


# By hand, for the debug flavor in float32, 8 sequences of 96 tokens on a data-parallel rank unless said otherwise.
DIM, HIDDEN, HEADS, KEYS, VOCABULARY, BYTES = 256, 768, 8 * 32, 4 * 32, 4096, 4
WEIGHTS = 2 * DIM * HEADS + 2 * DIM * KEYS + 3 * DIM * HIDDEN  # of the matmuls of a block
GROUP, END = WEIGHTS + 2 * DIM, VOCABULARY * DIM  # numbers of a block; of embedding or output
TOKENS = 8 * 96
HAND: dict[str, dict[tuple[str, str], list[int]]] = {
    # All are gathered in forward, and in backward all but the last, which stays. All are summed once.
    "FSDP 2, every second": {
        ("world", "all_gather"): [5 + 4, BYTES * (2 * (3 * GROUP + 2 * END + DIM) - (END + DIM))],
        ("world", "reduce_scatter"): [5, BYTES * (3 * GROUP + 2 * END + DIM)],
    },
    "HSDP 2 x 2": {
        ("dp_shard_cp", "all_gather"): [6, BYTES * (4 * GROUP + 2 * END + DIM)],  # kept to the backward
        ("dp_replicate", "all_reduce"): [6, BYTES * (4 * GROUP + 2 * END + DIM) // 2],
    },
    # Attention and feed-forward each gather and scatter in forward and backward; recomputed without the last scatter.
    "TP 2, full": {
        ("tp", "all_gather"): [3 * (4 + 2) + 2, (3 * 6 + 2) * TOKENS * DIM * BYTES],
        ("tp", "reduce_scatter"): [3 * (4 + 1) + 2, (3 * 5 + 2) * TOKENS * DIM * BYTES],
    },
    # Keys and values together, again where recomputed; their gradients.
    "CP 2": {
        ("cp", "all_gather"): [3 * 2, 6 * 2 * TOKENS * KEYS * BYTES],
        ("cp", "reduce_scatter"): [3, 3 * 2 * TOKENS * KEYS * BYTES],
    },
    # In forward and backward all but a rank's own go round; in backward their gradients, a full turn.
    "CP 4, ring": {("world", "send"): [3 * (3 + 3 + 4), 3 * 10 * 2 * (TOKENS // 4) * KEYS * BYTES]},
    "float8, compiled": {
        ("world", "all_gather"): [4, 2 * (WEIGHTS + 2 * DIM * BYTES) + (2 * END + DIM) * BYTES],
        ("world", "reduce_scatter"): [4, (2 * GROUP + 2 * END + DIM) * BYTES],
    },
    # One microbatch of each sequence: hidden states to the last stage, their gradients from it.
    "PP 2, uneven": {("world", "send"): [2, 2 * 96 * DIM * BYTES]},
    "PP 2, interleaved": {("world", "send"): [2 * (2 * 2 - 1), 6 * 96 * DIM * BYTES]},
    # In four rounds, one for each shape of the 14 matrices, half of each goes to an owner and comes back.
    "Muon": {("world", "all_to_all"): [2 * 4, BYTES * 2 * 2 * WEIGHTS // 2]},
}


# Of matmuls 6 per weight and token; of attention 7 halves of S x S x heads, two in forward. Mode `full` repeats
# attention, and every matmul but w2, whose result no backward reads.
FIGURES: dict[str, dict[str, int]] = {
    "CP 4, ring": {"float32": 6 * (3 * WEIGHTS + END) * TOKENS // 4},
    "FSDP 2, every second": {
        "float32": (6 * (3 * WEIGHTS + END) + 2 * 2 * (WEIGHTS - DIM * HIDDEN)) * TOKENS,
        "attention": (3 * 7 + 2 * 2) * 96 * HEADS * TOKENS,
        "weights": BYTES * (3 * GROUP + 2 * END + DIM) // 2,
    },
    # The first 32 tokens see 1 to 32, the other 64 see 32; without a window they see 1 to 96.
    "windows": {"attention": 7 * 96 * HEADS * TOKENS * (4656 + 528 + 64 * 32) // 4656},
}
OPTIMIZERS = {"Muon": BYTES * (2 * WEIGHTS + 2 * (2 * END + (2 * 2 + 1) * DIM)) / 2}  # one moment of its matrices


@pytest.fixture(scope="module")
def counts() -> dict[Case, DryRun]:
    return count(list(CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_by_hand(name: str, counts: dict[Case, DryRun]) -> None:
    tried = CASES[name]
    counted = counts[tried]
    for key, expected in HAND.get(name, {}).items():
        assert counted.sent[key] == expected, key
    found = {**counted.flops, "weights": counted.weights}
    for figure, number in FIGURES.get(name, {}).items():
        assert found[figure] == number, figure
    moments = 1 if tried.config.optimizer.state_dtype == "bfloat16" else 2  # of AdamW, in sizes of a weight
    assert counted.optimizer == pytest.approx(OPTIMIZERS.get(name, moments * counted.weights), rel=1e-3)
    assert ("float8" in counted.flops) == tried.config.float8.enable


def test_what_the_host_holds_is_not_in_the_peak(counts: dict[Case, DryRun]) -> None:
    whole = counts[CASES["FSDP 2, every second"]]
    assert whole.peak - counts[CASES["offloaded"]].peak == whole.weights + whole.optimizer


# Five microbatches, stages of a pipeline, and stages that have not the same number of layers.
FEW = {
    "microbatches": CASES["compiled, selective, chunks, microbatches"],
    "TP 2, eight layers": case(2, f"{LAYERS}=8", COMPILED, "--parallelism.tp=2"),
    "PP 2, eight layers": case(2, f"{LAYERS}=8", PIPELINE, "--parallelism.pp_microbatch_size=1"),
    "PP 2, eight layers, last": case(2, f"{LAYERS}=8", PIPELINE, "--parallelism.pp_microbatch_size=1", stage=1),
    "PP 2, nine layers": case(2, f"{LAYERS}=9", PIPELINE, "--parallelism.pp_microbatch_size=1"),
}


@pytest.mark.parametrize("name", FEW)
def test_few_layers_and_microbatches_count_as_all(name: str) -> None:
    tried = FEW[name]
    (whole,) = run_ranks(1, dry_run, tried, tried.microbatches, start_group=False)
    few = count([tried])[tried]
    assert few.peak == pytest.approx(whole.peak, rel=1e-6)  # each microbatch leaves its loss
    assert few.moved == pytest.approx(whole.moved, rel=1e-4)  # the first sum of two gradients moves a little less
    assert few == whole._replace(peak=few.peak, moved=few.moved)


def test_a_process_that_compiled_other_sizes_counts_the_same() -> None:
    """Dynamo would make sizes of float8 weights dynamic, so the number of heads too, and attention refuses that."""
    for dim in (64, 128):
        config = LlamaConfig(dim=dim, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=dim, vocab_size=16)
        block = torch.compile(convert_to_float8_training(Block(config)), backend="eager")
        block(torch.zeros(2, 16, dim), *rope_cos_sin(config.rope(0), torch.arange(16)[None]))
    assert count([case(4, f"{LAYERS}=2", *FLOAT8, COMPILED)])


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (F.silu(x @ w1) * (x @ w3)) @ w2


def count_swiglu(compiled: bool) -> tuple[int, int, int]:
    """Bytes moved in forward and backward, and the peak above weights and input."""
    x, w1, w3 = torch.ones(512, 32), torch.ones(32, 128), torch.ones(32, 128)
    tensors = [x, w1, torch.ones(128, 32), w3]
    tally = Tally()
    function = torch.compile(swiglu, backend=tally.backend) if compiled else swiglu
    with tally.counting():
        result = function(*(tensor.requires_grad_() for tensor in tensors))
        forward = tally.moved["step"]
        result.backward(torch.ones_like(result))
    return forward, tally.moved["step"] - forward, tally.peak


def test_a_compiled_graph_moves_what_its_kernels_read_and_write() -> None:
    """Forward: two results of matmuls in, their product out. Backward: those and a gradient in, three tensors out."""
    hidden, small = 512 * 128 * 4, 512 * 32 * 4
    ((forward, backward, peak),) = run_ranks(1, count_swiglu, True)
    assert forward == 3 * hidden
    assert (
        hidden * 6 <= backward <= hidden * 6 + 4 * small + 10_000
    )  # the sum of two gradients of x, the first gradient
    # Both results, the product's gradient and theirs. What is computed inside a kernel is never in memory.
    assert 5 * hidden <= peak < 6 * hidden
    ((eager, _, _),) = run_ranks(1, count_swiglu, False)
    assert eager == 5 * hidden  # silu by itself


def track_a_block() -> tuple[int, int]:
    """The peak of a small block's forward and backward, by torch's own tracker and by ours. Bytes."""
    shape = LlamaConfig(dim=256, n_layers=1, n_heads=8, n_kv_heads=2, hidden_dim=896, vocab_size=64)
    block, x = Block(shape), torch.randn(2, 128, 256, requires_grad=True)
    cos, sin = rope_cos_sin(shape.rope(0), torch.arange(128)[None])
    tracker, tally = MemTracker(), Tally()
    tracker.track_external(block, x, cos, sin)
    for counter in (tracker, tally.counting()):
        if counter is not tracker:
            for tensor in (*block.parameters(), x, cos, sin):
                tally.count(tensor)
        block.zero_grad()
        with counter:
            block(x, cos, sin).sum().backward()
    theirs = sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return theirs, tally.peak


def test_memory_is_that_of_torch_s_own_tracker() -> None:
    ((theirs, ours),) = run_ranks(1, track_a_block)
    assert ours == pytest.approx(theirs, rel=0.02)


# What a fork adds.


class Wide(Llama):
    """With a feed-forward twice as wide."""

    def __init__(self, config: LlamaConfig):
        super().__init__(dataclasses.replace(config, hidden_dim=2 * config.hidden_dim))


def fork(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Give the family another model, for this test and the processes that it forks."""
    spec: ModelSpec = dataclasses.replace(models.MODELS["llama"], **changes)
    monkeypatch.setattr(models, "MODELS", {"llama": spec, "other": spec})


def test_a_fork_s_blocks_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    fork(monkeypatch, model=Wide)
    tried = case(2, f"{LAYERS}=3", "--model.name=other", FULL)
    numbers = 3 * (GROUP + 3 * DIM * HIDDEN) + 2 * END + DIM
    assert count([tried])[tried].weights == BYTES * numbers // 2


class OneMoment(torch.optim.SGD):
    """An optimizer with one moment per weight."""


def test_a_fork_s_optimizer_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(parts: list[nn.Module], *_: Any) -> torch.optim.Optimizer:
        return OneMoment([weight for part in parts for weight in part.parameters()], lr=0.1, momentum=0.9)

    monkeypatch.setattr(trainer, "build_optimizer", build)
    tried = case(2, f"{LAYERS}=3")
    (found,) = plan([tried.config], 2, Cluster(DEVICES["h100"], 8, 50e9))
    assert found["memory_gib"]["optimizer"] == found["memory_gib"]["weights"]
    assert found["checkpoint_bytes"] == 8 * found["parameters"]


# The time model, on counts made up.

WORDS = ["--world-size=64", "--model.flavor=8B", "--training.seq_len=8192", f"{LOCAL}=8"]
WIDE = Matmul("bfloat16", 2**16, 2**14, 2**14)


def estimated(config: Config, cluster: Cluster, **sent: list[int]) -> dict[str, float]:
    keys: Any = {tuple(name.split("__")): value for name, value in sent.items()}
    counted = DryRun(keys, {WIDE: 30}, 10**14, {"step": 10**12, "update": 10**11}, 1, 1, 0)
    return estimate(counted, config, Case(config, 64).dims, cluster)


@pytest.mark.parametrize("recipe", ["", "rowwise_with_gw_hp"])
def test_a_step_takes_as_long_as_its_parts(recipe: str) -> None:
    """Casts to float8 slow other kernels."""
    words = ["--float8.enable", f"--float8.recipe={recipe}"] if recipe else []
    _, config, cluster = parse([*WORDS, *words])
    found = estimated(config, cluster)
    parts = found["matmul"] + found["attention"] + found["pointwise"] + found["optimizer"] + found["idle"]
    assert found["step_seconds"] == pytest.approx(parts)
    assert found["tokens_per_second"] == pytest.approx(8 * 8192 / found["step_seconds"])
    assert found["low"] < found["tokens_per_second"] < found["high"]
    device = cluster.device
    memory = device.memory_bandwidth * device.memory_share
    assert found["attention"] == pytest.approx(1e14 / (device.flops * device.attention_share))
    assert found["pointwise"] == pytest.approx(1e12 / memory / CAST_SHARES.get(recipe, 1.0))
    operations, moved = 2 * 2**16 * 2**28, 2 * (2 * 2**30 + 2**28)
    each = operations / (device.flops * device.matmul_share) + MATMUL_SHOWS * moved / memory
    assert found["matmul"] == pytest.approx(30 * each)
    operations, moved = 2 * 2**16 * 2**14, 2**30 + 2**14 + 2 * 2**16  # float8 is read, bfloat16 written
    each = operations / (1979e12 * device.float8_share) + MATMUL_SHOWS * moved / memory
    assert matmul_seconds(Matmul("float8", 2**16, 2**14, 1), device) == pytest.approx(each)


def test_messages_beside_kernels_slow_them() -> None:
    _, config, cluster = parse(WORDS)
    alone = estimated(config, cluster)
    found = estimated(config, cluster, dp_shard_cp__all_gather=[1, 10**11])
    wait = sent_bytes("all_gather", 1e11, 64) / (8 * cluster.bandwidth * NETWORK_SHARE)
    kernels = alone["matmul"] + alone["attention"] + alone["pointwise"]
    assert found["matmul"] == pytest.approx(alone["matmul"] * (1 + CONTENTION * wait / kernels))
    assert found["inter_node"] == found["intra_node"] == 0, "hidden"
    _, config, cluster = parse([*WORDS, REPLICAS, "--parallelism.local_steps=10"])
    found = estimated(config, cluster, dp_replicate__all_reduce=[1, 10**11])
    wait = sent_bytes("all_reduce", 1e11, 2) / (cluster.bandwidth * NETWORK_SHARE) / 10  # of a step
    assert found["matmul"] == pytest.approx(alone["matmul"] * (1 + CONTENTION * wait / kernels))


def test_on_a_slow_network_a_step_takes_as_long_as_its_traffic() -> None:
    """What FSDP2 sends is hidden but for what takes longer than the kernels; what tensor parallelism sends is not."""
    _, config, cluster = parse([*WORDS, "--bandwidth=0.001"])
    found = estimated(config, cluster, dp_shard_cp__all_gather=[1, 10**11])
    wait = sent_bytes("all_gather", 1e11, 64) / (8 * 0.001e9 * NETWORK_SHARE)
    assert found["step_seconds"] == pytest.approx((wait + found["optimizer"]) * (1 + IDLE), rel=1e-3)
    _, config, cluster = parse([*WORDS, "--parallelism.tp=8"])
    found = estimated(config, cluster, tp__all_reduce=[0, 10**11])
    assert found["intra_node"] == pytest.approx(2 * 1e11 * 7 / 8 / (450e9 * NETWORK_SHARE))


@pytest.mark.parametrize(("more", "bubble"), [([], 7 / 8), ([INTERLEAVED], 7 / 16)])
def test_a_pipeline_s_bubble(more: list[str], bubble: float) -> None:
    _, config, cluster = parse([*WORDS, "--parallelism.pp=8", *more])
    found = estimated(config, cluster)
    kernels = found["matmul"] + found["attention"] + found["pointwise"]
    assert found["bubble"] == pytest.approx(bubble * kernels)


def test_a_device_without_fitted_runs_has_a_wide_range() -> None:
    """And where the known runs are at half of what h200's shares give, the range has both."""
    for name, device in DEVICES.items():
        assert device.high / device.low >= (1.3 if device.fitted_to else 1.7), name
    h200 = DEVICES["h200"]
    for name in ("b200", "mi300x"):
        device = DEVICES[name]
        as_h200 = device._replace(matmul_share=h200.matmul_share, memory_share=h200.memory_share)
        assert matmul_seconds(WIDE, device) < device.high * matmul_seconds(WIDE, as_h200), name


def test_checkpoints_and_failures_by_hand() -> None:
    """100 GB at 10 GB/s take 10 s. 8 nodes of 20,000 h fail each 9e6 s. Young: sqrt(2 x 10 x 9e6) s."""
    options, *_ = parse([*WORDS, "--tokens=64e12"])
    found = plan_run({"checkpoint_bytes": 100e9, "speed": {"tokens_per_second": 1e5}}, 1, options)
    assert (found["write_seconds"], found["days"]) == (10, pytest.approx(1e7 / 86400))
    assert found["failures"] == pytest.approx(1e7 / 9e6)
    assert found["interval_seconds"] == pytest.approx(math.sqrt(2 * 10 * 9e6))


# The command.


def test_a_schedule_is_planned_by_its_last_batch_and_longest_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DEBUG, "--world-size=2", f"{LAYERS}=1", f"{LOCAL}=4"]
    _, config, _ = parse([*words, f"{BATCH}=16 @ 0, 32 @ 10k", "--training.seq_len=48 @ 0, 96 @ 10k"])
    assert "as if all steps had the last batch" in capsys.readouterr().err
    assert config == parse([*words, f"{BATCH}=32", "--training.seq_len=96"])[1]
    assert capsys.readouterr().err == ""


# Layouts of the formulas in which work and states are split exactly as counted.
FORMULAS = {
    "FSDP 8, two sequences": case(8, f"{LAYERS}=4", f"{LOCAL}=2"),
    "HSDP 2 x 4": case(8, f"{LAYERS}=4", f"{LOCAL}=2", REPLICAS),
}


def test_formulas_split_operations_and_states_as_counted() -> None:
    config = FORMULAS["FSDP 8, two sequences"].config
    base = count_modes(config, 8)["none"]
    counts = count(list(FORMULAS.values()))
    for name, tried in FORMULAS.items():
        exact = counts[tried]
        found = transform(base, tried)
        assert found.flops["float32"] == pytest.approx(exact.flops["float32"], rel=0.01), name
        assert found.attention == exact.attention, name
        assert found.weights == pytest.approx(exact.weights, rel=0.02), name
        assert found.optimizer == pytest.approx(exact.optimizer, rel=0.02), name


def test_a_sweep_ranks_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Two sequences at once are faster than one. On a device with little memory some layouts are left out."""
    words = [*DEBUG, "--model.flavor=tiny", f"{BATCH}=0", "--world-size=2", "--sweep"]
    options, config, cluster = parse(words)
    plans = sweep(config, options.world_size, cluster)
    rates = [found["speed"]["tokens_per_second"] for found in plans]
    assert rates == sorted(rates, reverse=True)
    assert plans[0]["local_batch_size"] > 1
    run = {"run": plan_run(plans[0], 10, options)}
    text = plan_text(plans[0] | run)
    assert "(unfitted), from " in text
    assert "unfitted: no run of today's software" in text
    assert "[modelled on the counts; fitted to these]" in plan_text(plans[0] | run | {"fitted_to": "these"})
    assert "counting a step" in capsys.readouterr().err
    small = cluster._replace(device=cluster.device._replace(memory_bytes=0.9 * max(
        found["memory_gib"]["reserved"] for found in plans) * 2**30))  # fmt: skip
    fewer = sweep(config, options.world_size, small)
    assert all(found["fits"] for found in fewer)
    assert fewer != plans


def test_the_command() -> None:
    """Any flavor can be planned: its fields are options."""
    command = [sys.executable, "-m", "tools.plan", *DEBUG, "--json"]
    mistake = subprocess.run([*command, "--world-size=0"], capture_output=True, text=True)
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr == "error: --world-size = 0: must be above 0\n"
    shape = {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "hidden_dim": 128, "n_layers": 2}
    words = [f"--model.{name}={value}" for name, value in shape.items()] + [f"{BATCH}=0", "--world-size=2"]
    found = json.loads(subprocess.run([*command, *words], check=True, capture_output=True).stdout)
    assert found["parameters"] == 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * VOCABULARY * 64 + 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallelism.tp=3"], "must multiply to the world size, 64; try NGPU=3 ./run_llama_train.sh"),
        (["--parallelism.tp=16"], "parallelism.tp = 16: must divide n_kv_heads = 8"),
        ([f"{BATCH}=65"], "training.global_batch_size = 65"),
        (["--gpus-per-node=0"], "--gpus-per-node = 0: must be above 0"),
        (["--tokens=-5"], "--tokens = -5"),
        (["--tokens=nan"], "--tokens = nan"),
        (["--training.epochs=3"], "training.epochs = 3: .* --tokens"),
        (["--float8.enable=true", "--device=a100"], "a100 has no float8 matmul"),
        (["--training.seqlen=1"], "did you mean --training.seq_len"),
        (["--model.dimm=1"], "model.dimm: unknown key; did you mean --model.dim"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    def refuse() -> None:
        options, config, _ = parse([*WORDS, *words])
        check(config, options.world_size)

    with pytest.raises(ConfigError, match=message):
        refuse()


def test_every_published_row_is_a_run_that_train_takes() -> None:
    for row in published.all_rows():
        check(row.config, row.gpus)
