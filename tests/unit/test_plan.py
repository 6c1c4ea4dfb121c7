"""The planner: its counts against those by hand and by others; what it takes, and its arithmetic."""

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

import models
import trainer
from benchmarks import plan as published
from config import ConfigError, load_config
from models.llama.model import Block, Llama, LlamaConfig, rope_cos_sin
from tests.harness import run_ranks
from tools.plan import count_modes, parse, plan, split, sweep
from tools.plan_count import Case, check, count, dry_runs
from tools.plan_tally import Matmul, Message, Tally
from tools.plan_time import DEVICES, Cluster, Device, estimate

DEBUG = ["--config=train_configs/debug.toml", "--training.loss_chunks=1", "--training.seq_len=96"]
BATCH, LAYERS, LOCAL = "--training.global_batch_size", "--model.n_layers", "--training.local_batch_size"
FLOAT8 = ["--float8.enable=true", "--float8.filter=all"]
FULL, COMPILED = "--activation_checkpoint.mode=full", "--compile.enable=true"
EVERY_SECOND = "--activation_checkpoint.every_n_layers=2"
REPLICAS, TP, PP = "--parallelism.dp_replicate=2", "--parallelism.tp=2", "--parallelism.pp=2"
RESHARD = "--parallelism.reshard_after_forward=true"
INTERLEAVED = "--parallelism.pp_schedule=Interleaved1F1B"
# By hand, for the debug flavor in float32, 8 sequences of 96 tokens on a data-parallel rank.
DIM, HIDDEN, HEADS, KEYS, VOCABULARY, BYTES = 256, 768, 8 * 32, 4 * 32, 4096, 4
WEIGHTS = 2 * DIM * HEADS + 2 * DIM * KEYS + 3 * DIM * HIDDEN  # of the matmuls of a block
GROUP, END = WEIGHTS + 2 * DIM, VOCABULARY * DIM  # numbers of a block; of embedding or output
TOKENS = 8 * 96


def case(world_size, *words):
    return Case(load_config([*DEBUG, f"{BATCH}=0", *words]), world_size)


# Run → what it counts. Of matmuls there are 6 operations per weight and token, of attention 7 halves of S x S x heads,
# two in forward. Mode `full` repeats attention, and every matmul but w2, whose result no backward reads.
HAND = {
    # All are gathered in forward, and in backward all but the last, which stays. All are summed once.
    case(2, f"{LAYERS}=3", FULL, EVERY_SECOND, RESHARD): {
        Message("world", "all_gather"): BYTES * (2 * (3 * GROUP + 2 * END + DIM) - (END + DIM)),
        Message("world", "reduce_scatter"): BYTES * (3 * GROUP + 2 * END + DIM),
        "float32": (6 * (3 * WEIGHTS + END) + 2 * 2 * (WEIGHTS - DIM * HIDDEN)) * TOKENS,
        "attention": (3 * 7 + 2 * 2) * 96 * HEADS * TOKENS,
        "weights": BYTES * (3 * GROUP + 2 * END + DIM) // 2,
        "optimizer": BYTES * (3 * GROUP + 2 * END + DIM),
    },
    case(4, f"{LAYERS}=4", REPLICAS, "--optimizer.state_dtype=bfloat16"): {
        Message("dp_shard_cp", "all_gather"): BYTES * (4 * GROUP + 2 * END + DIM),  # kept to the backward
        Message("dp_replicate", "all_reduce"): BYTES * (4 * GROUP + 2 * END + DIM) // 2,
        "optimizer": BYTES * (4 * GROUP + 2 * END + DIM) / 2,
    },
    # Attention and feed-forward each gather and scatter in forward and backward; recomputed without the last scatter.
    case(4, f"{LAYERS}=3", TP, FULL): {
        Message("tp", "all_gather"): (3 * 6 + 2) * TOKENS * DIM * BYTES,
        Message("tp", "reduce_scatter"): (3 * 5 + 2) * TOKENS * DIM * BYTES,
    },
    # Keys and values together, again where recomputed; their gradients.
    case(4, f"{LAYERS}=3", "--parallelism.cp=2", "--activation_checkpoint.mode=selective"): {
        Message("cp", "all_gather"): 6 * 2 * TOKENS * KEYS * BYTES,
        Message("cp", "reduce_scatter"): 3 * 2 * TOKENS * KEYS * BYTES,
    },
    case(4, f"{LAYERS}=2", *FLOAT8, COMPILED): {
        Message("world", "all_gather"): 2 * (WEIGHTS + 2 * DIM * BYTES) + (2 * END + DIM) * BYTES,
        Message("world", "reduce_scatter"): (2 * GROUP + 2 * END + DIM) * BYTES,
        "float8": 6 * 2 * WEIGHTS * TOKENS,
    },
    # In four rounds, one for each shape of the 14 matrices, half of each goes to an owner and comes back. Muon has one
    # moment of them.
    case(2, f"{LAYERS}=2", "--optimizer.name=muon"): {
        Message("world", "all_to_all"): BYTES * 2 * 2 * WEIGHTS // 2,
        "optimizer": BYTES * (2 * WEIGHTS + 2 * (2 * END + (2 * 2 + 1) * DIM)) / 2,
    },
    # A stage has two of four layers and both ends. One microbatch of each of 8 sequences goes there and back.
    case(2, f"{LAYERS}=4", PP, f"{LOCAL}=8"): {
        Message("pp", "send"): 2 * TOKENS * DIM * 2,
        "float32": 6 * (2 * WEIGHTS + END) * TOKENS,
        "weights": BYTES * (2 * GROUP + 2 * END + DIM),
    },
}


@pytest.fixture(scope="module")
def counts():
    return count(list(HAND))


def operations(counts):
    found = Counter()
    for key, calls in counts.items():
        if isinstance(key, Matmul):
            found[key.kind] += calls * key.flops
    return found


@pytest.mark.parametrize("tried", HAND, ids=lambda tried: f"{tried.dims}, {tried.config.optimizer.name}")
def test_counts_are_those_by_hand(tried, counts):
    found = {**counts[tried], **operations(counts[tried])}
    expected = HAND[tried]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert ("float8" in found) == tried.config.float8.enable


FEW = {
    "five microbatches": case(1, f"{LAYERS}=2", COMPILED, f"{BATCH}=40", "--training.loss_chunks=2"),
    "TP 2, eight layers": case(2, f"{LAYERS}=8", COMPILED, TP),
}


@pytest.mark.parametrize("name", FEW)
def test_few_layers_and_microbatches_count_as_all(name):
    tried = FEW[name]
    ((whole,),) = run_ranks(1, dry_runs, [tried], tried.microbatches, start_group=False)
    few = count([tried])[tried]
    assert few == pytest.approx(whole, rel=1e-4)  # the first sum of two gradients moves a little less


def swiglu(x, w1, w2, w3):
    return (F.silu(x @ w1) * (x @ w3)) @ w2


def count_swiglu(compiled):
    """Bytes moved in forward and backward, and the peak above weights and input."""
    x, w1, w3 = torch.ones(512, 32), torch.ones(32, 128), torch.ones(32, 128)
    tensors = [x, w1, torch.ones(128, 32), w3]
    tally = Tally()
    function = torch.compile(swiglu, backend=tally.backend) if compiled else swiglu
    with tally.counting():
        result = function(*(tensor.requires_grad_() for tensor in tensors))
        forward = tally.counts["moved"]
        result.backward(torch.ones_like(result))
    return forward, tally.counts["moved"] - forward, tally.peak


def count_residual():
    """Bytes moved."""
    x, w = torch.ones(512, 128), torch.ones(128, 128)
    tally = Tally()
    with tally.counting():
        torch.compile(lambda x, w: x + F.silu(x) @ w, backend=tally.backend)(x, w)
    return tally.counts["moved"]


def test_a_compiled_graph_moves_what_its_kernels_read_and_write():
    """Forward: two results of matmuls in, their product out. Backward: those and a gradient in, three tensors out."""
    hidden, small = 512 * 128 * 4, 512 * 32 * 4
    ((forward, backward, peak),) = run_ranks(1, count_swiglu, True)
    assert forward == 3 * hidden
    assert 0 <= backward - 6 * hidden <= 4 * small + 10_000  # the sum of two gradients of x, the first gradient
    # Both results, the product's gradient and theirs. What is computed inside a kernel is never in memory.
    assert 5 * hidden <= peak < 6 * hidden
    ((eager, _, _),) = run_ranks(1, count_swiglu, False)
    assert eager == 5 * hidden  # silu by itself
    # The kernel before the matmul reads x and writes silu; the one after it reads x again, and the matmul's result.
    assert run_ranks(1, count_residual) == [5 * hidden]


def track_a_block():
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


def test_memory_is_that_of_torch_s_own_tracker():
    ((theirs, ours),) = run_ranks(1, track_a_block)
    assert ours == pytest.approx(theirs, rel=0.02)


class Wide(Llama):
    """With a feed-forward twice as wide."""

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, hidden_dim=2 * config.hidden_dim))


def one_moment(parts, *_):
    return torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.1, momentum=0.9)


def test_a_fork_s_blocks_and_optimizer_are_planned(monkeypatch):
    spec = dataclasses.replace(models.MODELS["llama"], model=Wide)
    monkeypatch.setattr(models, "MODELS", {"llama": spec, "other": spec})
    monkeypatch.setattr(trainer, "build_optimizer", one_moment)
    tried = case(2, f"{LAYERS}=3", "--model.name=other")
    (found,) = plan([tried.config], 2, Cluster(DEVICES["h100"], 8))
    assert found["parameters"] == 3 * (GROUP + 3 * DIM * HIDDEN) + 2 * END + DIM
    assert found["memory_gib"]["weights"] == BYTES * found["parameters"] / 2 / 2**30
    assert found["memory_gib"]["optimizer"] == found["memory_gib"]["weights"]
    assert found["checkpoint_bytes"] == 8 * found["parameters"]
    assert found["days"] == pytest.approx(found["tokens"] / found["speed"]["tokens_per_second"] / 2 / 86400)


WORDS = ["--world-size=64", "--model.flavor=8B", "--training.seq_len=8192", f"{LOCAL}=8"]
# 1e15 operations and 1e12 bytes of memory per second, 1e10 bytes to other ranks; kernels reach all of it.
ROUND = Device(1e15, 2e15, 1, 1e12, 1e10, 1e10, 1.0, 1.0, 1.0, 0.5, 1.0)
WORK = {Matmul("bfloat16", 10**5, 10**5, 10**5): 1, "attention": 10**15, "moved": 10**12, "update": 10**12}
SECONDS = 2 + 0.5 * 6 * 10**10 / 10**12 + 1 + 1  # of kernels; half of what the matmul reads and writes shows
# Settings, a message of so many bytes, seconds of a step without the 0.8 % in which it idles. Messages reach 0.75 of
# the rate. Kernels lose half of the time of messages beside them.
STEPS = {
    "alone": ([], {}, SECONDS + 1),
    "float8 slows others by its casts": (["--float8.enable"], {}, SECONDS + 1 + 1 / 0.85 - 1),
    "torch's own attention": (["--data.mask_documents"], {}, SECONDS + 2),
    "hidden by kernels": ([], {Message("dp_shard_cp", "all_gather"): 64 * 10**8}, SECONDS + 0.5 * 0.84 + 1),
    "longer than kernels": ([], {Message("dp_shard_cp", "all_gather"): 64 * 10**9}, 8.4 + 1),
    "between kernels": (["--parallelism.tp=8"], {Message("tp", "all_reduce"): 3 * 10**9}, SECONDS + 0.7 + 1),
    "islands": (
        [REPLICAS, "--parallelism.local_steps=10"],
        {Message("dp_replicate", "all_reduce"): 6 * 10**9},
        SECONDS + 0.5 * 0.08 + 1,
    ),
    "a bubble": (["--parallelism.pp=8"], {}, SECONDS * (1 + 7 / 8) + 1),
    "half a bubble": (["--parallelism.pp=8", INTERLEAVED], {}, SECONDS * (1 + 7 / 16) + 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_seconds_of_a_step_by_hand(name):
    words, sent, seconds = STEPS[name]
    _, config, _ = parse([*WORDS, *words])
    found = estimate(Counter(WORK | sent), config, Case(config, 64).dims, Cluster(ROUND, 8))
    assert found["step_seconds"] == pytest.approx(1.008 * seconds, rel=1e-6)
    tokens = 8 * 8192 * Case(config, 64).dims.dp
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"] / 64)


# The sweep and the command.


def test_a_schedule_is_planned_by_its_last_batch_and_longest_sequences(capsys):
    words = [*DEBUG, "--world-size=2", f"{LAYERS}=1", f"{LOCAL}=4"]
    _, config, _ = parse([*words, f"{BATCH}=16 @ 0, 32 @ 10k", "--training.seq_len=48 @ 0, 96 @ 10k"])
    assert "as if all steps had the last batch" in capsys.readouterr().err
    assert config == parse([*words, f"{BATCH}=32", "--training.seq_len=96"])[1]
    assert capsys.readouterr().err == ""


def test_rough_counts_are_near_those_of_the_step():
    config = case(8, f"{LAYERS}=4", f"{LOCAL}=2").config
    shared = count_modes(config, 8)["none"]
    tried = [case(8, f"{LAYERS}=4", f"{LOCAL}=2", TP), case(8, f"{LAYERS}=4", f"{LOCAL}=4", PP)]
    for one, exact in count(tried).items():
        rough = split(shared, one)
        assert operations(rough)["float32"] == pytest.approx(operations(exact)["float32"], rel=0.25), one.dims
        for name, error in (("attention", 0.01), ("moved", 0.5), ("weights", 0.5), ("peak", 0.5)):
            assert rough[name] == pytest.approx(exact[name], rel=error), (name, one.dims)


def test_a_sweep_ranks_what_fits(capsys):
    """Two sequences at once are faster than one. On a device with little memory some layouts are left out."""
    words = [*DEBUG, "--model.flavor=tiny", f"{BATCH}=0", "--world-size=2", "--sweep"]
    options, config, cluster = parse(words)
    plans = sweep(config, options.world_size, cluster)
    rates = [found["speed"]["tokens_per_second"] for found in plans]
    assert rates == sorted(rates, reverse=True)
    assert plans[0]["local_batch_size"] > 1
    assert "counting steps" in capsys.readouterr().err
    needed = max(found["memory_gib"]["reserved"] for found in plans) * 2**30
    small = cluster._replace(device=cluster.device._replace(memory_bytes=0.9 * needed))
    fewer = sweep(config, options.world_size, small)
    assert fewer
    assert all(found["fits"] for found in fewer)


def test_the_command():
    """Any flavor can be planned: its fields are options."""
    command = [sys.executable, "-m", "tools.plan", *DEBUG]
    mistake = subprocess.run([*command, "--world-size=0"], capture_output=True, text=True)
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr == "error: --world-size = 0: must be above 0\n"
    shape = {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "hidden_dim": 128, "n_layers": 2}
    words = [f"--model.{name}={value}" for name, value in shape.items()] + [f"{BATCH}=0", "--world-size=2"]
    text = subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * VOCABULARY * 64 + 64
    assert text.startswith(f"{parameters:,} parameters; dp_shard 2; ")
    assert "(unfitted), from " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallelism.tp=3"], "world size, 64; try NGPU=3"),
        (["--parallelism.tp=16"], "parallelism.tp = 16: .*n_kv_heads = 8"),
        ([f"{BATCH}=65"], "training.global_batch_size = 65"),
        (["--gpus-per-node=0"], "--gpus-per-node = 0"),
        (["--bandwidth=nan"], "--bandwidth = nan"),
        (["--training.epochs=3"], "training.epochs = 3: "),
        (["--float8.enable=true", "--device=a100"], "float8.enable = true: a100"),
        (["--parallelism.cpu_offload=true"], "parallelism.cpu_offload = True"),
    ],
)
def test_mistakes_are_named(words, message):
    def refuse():
        options, config, _ = parse([*WORDS, *words])
        check(config, options.world_size)

    with pytest.raises(ConfigError, match=message):
        refuse()


def test_every_published_row_is_a_run_that_train_takes():
    for row in published.all_rows():
        check(row.config, row.gpus)
