"""The planner: its counts against those by hand and by others; what it takes, and its arithmetic."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import models
import trainer
from config import ConfigError, load_config
from models.llama.model import Llama
from tests.harness import run_ranks
from tools.plan import main, parse, rough_bytes, sweep
from tools.plan_count import Case, count, dry_runs
from tools.plan_tally import Message, Tally
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
    # Masks of documents hide as much as causal ones.
    case(2, f"{LAYERS}=3", FULL, EVERY_SECOND, RESHARD, "--data.mask_documents=true"): {
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
    # Embedding and output are one weight.
    case(4, f"{LAYERS}=2", *FLOAT8, COMPILED, "--model.tie_embeddings=true"): {
        Message("world", "all_gather"): 2 * (WEIGHTS + 2 * DIM * BYTES) + (END + DIM) * BYTES,
        Message("world", "reduce_scatter"): (2 * GROUP + END + DIM) * BYTES,
        "weights": BYTES * (2 * GROUP + END + DIM) / 4,
        "float8": 6 * 2 * WEIGHTS * TOKENS,
    },
    # In four rounds, one for each shape of the 14 matrices, half of each goes to an owner and comes back. Muon has one
    # moment of them. The last batch of a schedule counts, with its two microbatches, and the longest sequences.
    case(
        2, f"{LAYERS}=2", "--optimizer.name=muon", f"{BATCH}=16 @ 0, 32 @ 10k", "--training.seq_len=48 @ 0, 96 @ 10k"
    ): {
        Message("world", "all_to_all"): BYTES * 2 * 2 * WEIGHTS // 2,
        "optimizer": BYTES * (2 * WEIGHTS + 2 * (2 * END + (2 * 2 + 1) * DIM)) / 2,
        "attention": 2 * 2 * 7 * 96 * HEADS * TOKENS,
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


@pytest.mark.parametrize("tried", HAND, ids=lambda tried: f"{tried.dims}, {tried.config.optimizer.name}")
def test_counts_are_those_by_hand(tried, counts):
    found = counts[tried]
    expected = HAND[tried]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert ("float8" in found) == tried.config.float8.enable


def test_few_layers_and_microbatches_count_as_all():
    tried = case(2, f"{LAYERS}=6", COMPILED, f"{BATCH}=80")
    ((whole,),) = run_ranks(1, dry_runs, [tried], 5, start_group=False)
    few = count([tried])[tried]
    assert few == pytest.approx(whole, rel=1e-4)  # the first sum of two gradients moves a little less


def swiglu(x, w1, w2, w3):
    return (F.silu(x @ w1) * (x @ w3)) @ w2


def count_swiglu(compiled):
    """Bytes moved in forward and in backward, and the peak."""
    x, w1, w3 = torch.ones(512, 32), torch.ones(32, 128), torch.ones(32, 128)
    tensors = [x, w1, torch.ones(128, 32), w3]
    tally = Tally()
    function = torch.compile(swiglu, backend=tally.backend()) if compiled else swiglu
    with tally.counting():
        result = function(*(tensor.requires_grad_() for tensor in tensors))
        forward = tally.counts["moved"]
        result.backward(torch.ones_like(result))
    return forward, tally.counts["moved"] - forward, tally.peak


def test_a_compiled_graph_moves_what_its_kernels_read_and_write():
    """Forward: two results of matmuls in, their product out. Backward: those and a gradient in, three tensors out."""
    hidden, small, weight = 512 * 128 * 4, 512 * 32 * 4, 32 * 128 * 4
    ((forward, backward, peak),) = run_ranks(1, count_swiglu, True)
    assert forward == 3 * hidden
    assert 0 <= backward - 6 * hidden <= 4 * small + 10_000  # the sum of two gradients of x, the first gradient
    assert peak == 3 * hidden + 4 * small + 6 * weight  # kept for backward; input, result, weights, their gradients
    ((eager, _, _),) = run_ranks(1, count_swiglu, False)
    assert eager == 5 * hidden  # silu by itself


def track_layers():
    """The peak of forward and backward, by torch's own tracker and by ours. Bytes."""
    model = nn.Sequential(nn.Linear(256, 896), nn.SiLU(), nn.Linear(896, 256))
    x = torch.ones(256, 256)
    tracker, tally = MemTracker(), Tally()
    tracker.track_external(model, x)
    for tensor in (*model.parameters(), x):
        tally.count(tensor)
    with tracker, tally.counting():
        model(x).square().sum().backward()
    theirs = sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return theirs, tally.peak


def test_memory_is_that_of_torch_s_own_tracker():
    ((theirs, ours),) = run_ranks(1, track_layers)
    assert ours == pytest.approx(theirs, rel=0.02)


class Wide(Llama):
    """With a feed-forward twice as wide."""

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, hidden_dim=2 * config.hidden_dim))


def one_moment(parts, *_):
    return torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.1, momentum=0.9)


def test_the_command_plans_a_fork_s_blocks_and_optimizer(monkeypatch, capsys):
    spec = dataclasses.replace(models.MODELS["llama"], model=Wide)
    monkeypatch.setattr(models, "MODELS", {"llama": spec, "other": spec})
    monkeypatch.setattr(trainer, "build_optimizer", one_moment)
    main([*DEBUG, "--world-size=2", f"{BATCH}=0", f"{LAYERS}=3", "--model.name=other"])
    text = capsys.readouterr().out
    parameters = 3 * (GROUP + 3 * DIM * HIDDEN) + 2 * END + DIM
    gib = BYTES * parameters / 2**30
    assert text.startswith(f"{parameters:,} parameters; dp_shard 2; {2 * TOKENS:,} tokens per step\n")
    assert " GiB reserved, fits\n" in text
    assert re.search(rf"weights +{gib / 2:.3f}\n +optimizer +{gib / 2:.3f}\n", text)
    assert f"a checkpoint: {2 * gib:.1f} GiB" in text


WORDS = ["--world-size=64", "--model.flavor=8B", "--training.seq_len=8192", f"{LOCAL}=8"]
# 1e15 operations and 1e12 bytes of memory per second, 1e10 bytes to other ranks; kernels reach all of it.
ROUND = Device(1e15, 2e15, 1, 1e12, 1e10, 1e10, 1.0, 1.0, 1.0, 0.5, 1.0)
WORK = {"bfloat16": 2 * 10**15, "operands": 10**12, "attention": 10**15, "moved": 10**12, "update": 10**12}
SECONDS = 2 + 0.5 + 1 + 1  # of kernels; half of what matmuls read and write shows
# Settings, a message of so many bytes, seconds of a step without the 0.8 % in which it idles. Messages reach 0.75 of
# the rate. Kernels lose half of the time of messages beside them.
STEPS = {
    "alone": ([], {}, SECONDS + 1),
    "float8 slows others by its casts": (["--float8.enable"], {}, SECONDS + 1 + 1 / 0.54 - 1),
    "torch's own attention": (["--data.mask_documents"], {}, SECONDS + 2),
    "hidden by kernels": ([], {Message("dp_shard_cp", "all_gather"): 64 * 10**8}, SECONDS + 0.5 * 0.84 + 1),
    "longer than kernels": ([], {Message("dp_shard_cp", "all_gather"): 64 * 10**9}, 8.4 + 1),
    "between kernels": (["--parallelism.tp=8"], {Message("tp", "all_reduce"): 3 * 10**9}, SECONDS + 0.7 + 1),
    "islands": (
        [REPLICAS, "--parallelism.local_steps=10"],
        {Message("dp_replicate", "all_reduce"): 6 * 10**9},
        SECONDS + 0.5 * 0.08 + 1,
    ),
    "a bubble": (["--parallelism.pp=8", INTERLEAVED], {}, SECONDS * (1 + 7 / 16) + 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_seconds_of_a_step_by_hand(name):
    words, sent, seconds = STEPS[name]
    _, config, _ = parse([*WORDS, *words])
    found = estimate(Counter(WORK | sent), config, Case(config, 64).dims, Cluster(ROUND, 8))
    assert sum(found.values()) == pytest.approx(1.008 * seconds, rel=1e-6)


def test_a_sweep_ranks_what_fits(capsys):
    """With memory for two sequences a rank, the layout that splits least takes two."""
    two = case(2, COMPILED, f"{LOCAL}=2", f"{LAYERS}=4", "--training.param_dtype=bfloat16")
    memory_bytes = rough_bytes(two, 4 * GROUP + 2 * END + DIM)
    plans = sweep(two.config, 2, Cluster(DEVICES["h100"]._replace(memory_bytes=memory_bytes), 8))
    fitting = [found for found in plans if found.fits]
    rates = [found.rate for found in fitting]
    assert rates == sorted(rates, reverse=True)
    (found,) = [found for found in fitting if found.case == two]
    assert found.reserved > 0.5 * memory_bytes
    assert "counting steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size=0"], "--world-size = 0"),
        (["--bandwidth=nan"], "--bandwidth = nan"),
        (["--training.epochs=3"], "training.epochs = 3"),
        (["--float8.enable=true", "--device=a100"], "float8.enable = true: a100"),
        (["--parallelism.cpu_offload=true"], "parallelism.cpu_offload = True"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        parse([*WORDS, *words])
