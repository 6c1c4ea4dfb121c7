"""TP, CP and PP, alone and together with data parallelism, against a plain loop in one process."""

import fcntl
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from config import Config
from loss import IGNORED, cross_entropy
from models import build_model, find_model
from models.init import init_weights
from parallel.mesh import ParallelDims
from parallel.tensor import vocab_parallel_cross_entropy
from tests.harness import run_ranks
from tests.parity import FLAVOR, GLOBAL_BATCH, close, config_for, our_run, plain_run
from tests.parity_ranks import FULL_STEPS, Case, compare

ROOT = Path(__file__).parents[2]
STEPS = FULL_STEPS
PP = {"local_batch_size": GLOBAL_BATCH, "pp_microbatch_size": 2}
DEEP = 6  # layers where stages are many
NAMED: dict[str, dict[str, Any]] = {
    "TP 2": {"tp": 2},
    "CP 2": {"cp": 2},
    "CP 2, ring": {"cp": 2, "cp_method": "ring"},
    "PP 2": {"pp": 2, **PP},
    "FSDP 2": {"dp_shard": 2},
    "FSDP 2 x TP 2": {"dp_shard": 2, "tp": 2},
    "FSDP 2 x CP 2": {"dp_shard": 2, "cp": 2},
    "FSDP 2 x PP 2": {"dp_shard": 2, "pp": 2, "pp_microbatch_size": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "CP 4, ring": {"cp": 4, "cp_method": "ring"},
    "CP 2, loss in chunks": {"cp": 2, "loss_chunks": 5},
    "CP 2 x TP 2": {"cp": 2, "tp": 2},
    "HSDP 2 x 2 x TP 2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "HSDP 2 x 2 x CP 2, ring": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "cp_method": "ring"},
    "FSDP 2 x TP 2 x PP 2": {"dp_shard": 2, "tp": 2, "pp": 2, "pp_microbatch_size": 2},
}
# Each kind and each mode is compiled, not every pair: to compile takes a rank ten times what the steps take.
COMPILED: dict[str, tuple[str, ...]] = {
    "TP 2": ("selective",),
    "CP 2": (),
    "CP 2, ring": ("selective",),
    "PP 2": ("full",),
    "FSDP 2": (),  # none, and selective on DDP 2: tests/distributed/test_data_parallel.py
    "FSDP 2 x TP 2": ("full",),
    "FSDP 2 x CP 2": ("none",),
    "FSDP 2 x PP 2": ("selective",),
    "HSDP 2 x 2": (),
}


def build_config(dp_replicate: int = 1, dp_shard: int = 1, **options: Any) -> Config:
    return config_for(dp_replicate, dp_shard, **options)


def world_size(config: Config) -> int:
    settings = config.parallelism
    return prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))


CASES = {
    name: Case(build_config(**layout), 2 if name.startswith("HSDP 2 x 2 x") else STEPS)
    for name, layout in (NAMED | OTHERS).items()
} | {
    f"{name}, {compile or 'eager'}, {mode}": Case(build_config(compile=compile, mode=mode, **layout), 2)
    for name, layout in NAMED.items()
    for compile, modes in (("", ("full", "selective")), ("aot_eager", COMPILED[name]))
    for mode in modes
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return plain_run(STEPS)


@pytest.fixture(scope="module")
def outcomes(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank says of each case of a world size, all of them in one start of torchrun for all test workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def run_cases(size: int) -> list[dict[str, Any]]:
        folder = shared / f"ranks{size}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                start_ranks(size, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]

    def start_ranks(size: int, folder: Path) -> None:
        folder.mkdir()
        torch.save({"": plain}, folder / "plain.pt")
        cases = {name: case for name, case in CASES.items() if world_size(case.config) == size}
        (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [*command, "-m", "tests.parity_ranks", str(folder)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-5000:]
        advice = re.findall(
            r"^(?:.*Warning: |(?:\[rank\d+\]:)?W\d{4} ).*", done.stderr, re.MULTILINE
        )  # not C++'s, "[W"
        assert not advice, "what torch would tell its own developers, and every rank repeat"

    return run_cases


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop(name: str, plain: dict[str, Any], outcomes: Callable[[int], list[dict[str, Any]]]) -> None:
    """Through torchrun: every layout, eager with every way of checkpointing activations, and compiled."""
    ranks = [outcome[name] for outcome in outcomes(world_size(CASES[name].config))]
    assert not any(rank["error"] for rank in ranks), "\n".join(rank["error"] for rank in ranks)
    seen = {parameter for rank in ranks for parameter in rank["gradients"]}
    assert seen == plain["grads"].keys(), "every parameter has a gradient on some rank"


def compare_forked(
    config: Config,
    expected: dict[str, Any],
    accumulation: int = 1,
    tolerances: tuple[float, float] = (1e-6, 1e-5),
    **model: Any,
) -> None:
    """The same for a model or a batch of its own, without torchrun. `tolerances`: of losses and of gradients."""
    seen: set[str] = set()
    for result in run_ranks(world_size(config), partial(our_run, **model), config, STEPS, accumulation):
        compare(result, expected, STEPS, *tolerances)
        seen |= result["grads"].keys()
    assert seen == expected["grads"].keys()


@pytest.mark.parametrize("layout", ["TP 2", "CP 2", "CP 2, ring", "FSDP 2 x TP 2", "FSDP 2 x CP 2"])
def test_in_bfloat16(layout: str) -> None:
    """Ranks that share a sequence or a matmul round in other places than a process alone."""
    config = build_config(param_dtype="bfloat16", **NAMED[layout])
    compare_forked(config, plain_run(STEPS, dtype=torch.bfloat16), tolerances=(1.5e-4, 0.02))


def test_a_pipeline_in_bfloat16_sums_the_gradients_of_its_microbatches_in_float32() -> None:
    config = build_config(param_dtype="bfloat16", **NAMED["PP 2"])
    compare_forked(config, plain_run(STEPS, dtype=torch.bfloat16, pieces=8), tolerances=(3e-5, 1e-7))


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_a_schedule_of_many_stages(microbatch_size: int) -> None:
    many = {"pp_schedule": "Interleaved1F1B", "pp_microbatch_size": microbatch_size}
    config = config_for(1, 2, pp=2, local_batch_size=8, **many)
    compare_forked(config, plain_run(STEPS, n_layers=DEEP), n_layers=DEEP)


@pytest.mark.parametrize("axes", [{"pp": 2, "pp_microbatch_size": 2}, {"tp": 2}, {"cp": 2}])
def test_accumulation(axes: dict[str, int], plain: dict[str, Any]) -> None:
    compare_forked(config_for(2, 1, local_batch_size=4, **axes), plain, accumulation=2)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_pipeline_of_shards_accumulates(schedule: str) -> None:
    """Over two batches, after the last of which alone ranks sum; 1F1B keeps the weights gathered to that."""
    config = config_for(1, 2, pp=2, pp_schedule=schedule, local_batch_size=GLOBAL_BATCH // 4)
    compare_forked(config, plain_run(STEPS, n_layers=DEEP), accumulation=2, n_layers=DEEP)


def loss_of_split_logits() -> None:
    """In bfloat16, and so large that exp() overflows, as in a loss that has spiked. No float32 logits are kept."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    logits = (200 * torch.randn(2, 8, 64, generator=generator)).bfloat16()
    labels = torch.randint(0, 64, (2, 8), generator=generator)
    labels[0, :3] = IGNORED
    whole, own = logits.clone().requires_grad_(), logits.chunk(2, dim=-1)[mesh.get_local_rank()].requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        loss = vocab_parallel_cross_entropy(own, labels, mesh, IGNORED)
    assert {x.dtype for x in kept if x.numel() >= own.numel()} == {torch.bfloat16}
    expected = cross_entropy(whole, labels)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, whole.grad.chunk(2, dim=-1)[mesh.get_local_rank()])


def test_the_loss_of_logits_split_by_vocabulary() -> None:
    run_ranks(2, loss_of_split_logits)


def test_tied_embeddings_split_by_vocabulary() -> None:
    compare_forked(config_for(1, 2, tp=2), plain_run(STEPS, tie_embeddings=True), tie_embeddings=True)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "pp_microbatch_size": 2}])
def test_documents(axes: dict[str, int]) -> None:
    """Positions restart and attention ends at documents, wherever the ranks' parts of a sequence begin."""
    config = config_for(1, 1, documents=True, local_batch_size=GLOBAL_BATCH, **axes)
    compare_forked(config, plain_run(STEPS, documents=True))


def test_compiled_by_inductor() -> None:
    expected = plain_run(STEPS)
    config = config_for(1, 1, "inductor", tp=2, local_batch_size=GLOBAL_BATCH)
    for result in run_ranks(2, our_run, config, STEPS, 1):
        close(result, expected, loss_tolerance=1e-5)


def logits_of_shapes(compile: str) -> list[Tensor]:
    """This rank's logits of batches of other shapes than the first."""
    config = config_for(1, 1, compile, tp=2)
    mesh = ParallelDims.from_config(config.parallelism, 2).build_mesh("cpu")
    spec, _ = find_model(config.model, FLAVOR.vocab_size)
    (part,) = spec.apply_parallelism(build_model(spec, FLAVOR), mesh, config)
    init_weights(part, torch.device("cpu"), seed=0)
    shapes = ((8, 32), (3, 32), (5, 16))
    return [part(torch.arange(B * S).view(B, S) % FLAVOR.vocab_size).detach() for B, S in shapes]


def test_a_compiled_model_split_by_tp_takes_batches_of_any_shape() -> None:
    eager, compiled = (run_ranks(2, logits_of_shapes, backend) for backend in ("", "aot_eager_decomp_partition"))
    for found, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(found, expected)


def test_offloaded_to_the_host(plain: dict[str, Any]) -> None:
    compare_forked(config_for(1, 2, cpu_offload=True), plain)


@pytest.mark.skipif(torch.__version__.startswith("2.12."), reason="torch 2.12 cannot: it is refused there")
def test_the_compiler_keeps_to_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DTensors in its graphs; the backend is inductor's partitioner without its kernels."""
    monkeypatch.setattr("models.llama.parallelize.check_activation_checkpoint", lambda config: None)
    backend = "aot_eager_decomp_partition"
    config = config_for(1, 1, backend, mode="budget", tp=2, local_batch_size=GLOBAL_BATCH)
    expected = plain_run(STEPS)
    for result in run_ranks(2, our_run, config, STEPS, 1):
        close(result, expected, loss_tolerance=1e-5)
