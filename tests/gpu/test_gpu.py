"""What only a GPU can show; `benchmarks.gpu` has the speed. All other tests are given none:

TEST_GPU=1 python -m pytest tests/gpu
"""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from config import load_config
from data.prepare import main as prepare
from models.llama.model import attention, causal_mask
from train import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and TEST_GPU=1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    for i in range(60):
        (folder / "text" / f"{i:02}.txt").write_text(" ".join(str(i * j) for j in range(2000)))
    prepare([f"--source={folder / 'text'}", f"--output={folder / 'set'}", "--vocab-size=512"])
    return folder / "set"


def run(dataset: Path, outputs: Path, *options: str) -> list[str]:
    """Ten steps of train.py; the host's waits for the device in steps 4 to 9, in which nothing is due."""
    waits: list[str] = []

    def after_step(step: int) -> None:
        if step == 3:
            torch.cuda.set_sync_debug_mode("warn")
            caught.__enter__()
            warnings.simplefilter("always")
        if step == 9:
            torch.cuda.set_sync_debug_mode("default")
            waits.extend(str(warning.message) for warning in recorded)
            caught.__exit__(None, None, None)

    with warnings.catch_warnings(record=True) as recorded:
        caught = warnings.catch_warnings()
        arguments = [f"--data.datasets={dataset}", f"--run.outputs={outputs}", "--training.steps=10", *options]
        arguments += ["--metrics.log_interval=100", "--validation.enable=false", "--checkpoint.enable=false"]
        train(load_config([*arguments, "--lr_scheduler.warmup_steps=1"]), after_step)
    return [wait for wait in waits if "called a synchronizing" in wait]  # torch also says that the mode is a prototype


COMPILE, FLOAT8 = ["--compile.enable"], ["--float8.enable", "--float8.filter=all"]
LARGE = ["--parallelism.reshard_after_forward=false", "--optimizer.state_dtype=bfloat16"]
LARGE += ["--activation_checkpoint.mode=budget", "--training.loss_chunks=2"]


@pytest.mark.parametrize(
    "options", [[], COMPILE, COMPILE + FLOAT8, COMPILE + LARGE, COMPILE + LARGE + FLOAT8], ids=" ".join
)
def test_no_step_waits_for_the_device(options: list[str], dataset: Path, tmp_path: Path) -> None:
    # Not forked: this process has asked for CUDA, which a fork could then no longer use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(run, dataset, tmp_path, *options).result() == []


def test_attention_within_documents_is_that_of_a_boolean_mask() -> None:
    torch.manual_seed(0)
    B, N, K, S, H = 2, 4, 2, 256, 64
    q, k, v = (torch.randn(B, heads, S, H, device="cuda", requires_grad=True) for heads in (N, K, K))
    positions = torch.cat([torch.arange(n) for n in (100, 28, 128)])[None].expand(B, -1)
    queries = torch.arange(S)
    results = []
    for mask in (causal_mask(positions.cuda(), queries.cuda()), causal_mask(positions, queries).cuda()):
        out = attention(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_attention_without_documents_takes_a_fused_kernel() -> None:
    q, k, v = (torch.randn(1, heads, 512, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    with torch.profiler.profile() as profiler:
        attention(q, k, v, None)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profiler.events() or []).lower()
    assert "cudnn" in names or "flash" in names or "fmha" in names
