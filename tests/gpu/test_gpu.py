"""What only a GPU can show; `benchmarks.gpu` has the speed. All other tests are given none:

TEST_GPU=1 python -m pytest tests/gpu
"""

import multiprocessing
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from config import load_config
from data.prepare import main as prepare
from models.llama.model import attention, causal_mask
from parallel.context import _flash, _flash_backward
from tests.unit.test_checkpoint_staging import check_copies
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


NOISE = 2e-2  # of bfloat16; on CPU 0.002 in the result and 0.007 in the gradients of keys and values


def heads(n: int, tokens: int, head_dim: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random values [B, n, S, H] as a block has them: transposed."""
    return torch.randn(2, tokens, n, head_dim, device=device, dtype=dtype).transpose(1, 2)


def with_gradients(inputs: Sequence[Tensor], mask: Tensor | BlockMask | None, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs, mask)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.cpu().float() - wanted).norm() < NOISE * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_is_that_in_float32(head_dim: int, dtype: torch.dtype) -> None:
    check_attention("cuda", head_dim, dtype)


def check_attention(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """With its gradients, and heads that share keys; without documents, and within them."""
    torch.compiler.reset()  # for shapes that change it would compile other kernels than a run has
    torch.manual_seed(0)
    q, k, v, grad = (heads(n, 512, head_dim, device, dtype) for n in (8, 2, 2, 8))
    positions = torch.cat([torch.arange(n) for n in (100, 28, 384)])[None].expand(2, -1)
    queries = torch.arange(512)
    of_device, of_cpu = causal_mask(positions.to(device), queries.to(device)), causal_mask(positions, queries)
    plain = [x.cpu().float() for x in (q, k, v)]
    for mask, boolean in ((None, None), (of_device, of_cpu)):
        check(with_gradients((q, k, v), mask, grad), with_gradients(plain, boolean, grad.cpu().float()))


@pytest.mark.parametrize("tokens", [1, 37])
def test_attention_to_a_cache_is_that_in_float32(tokens: int) -> None:
    check_cache("cuda", tokens)


def check_cache(device: str, tokens: int) -> None:
    """As `generate` computes it: a boolean mask, rows at positions of their own."""
    torch.manual_seed(0)
    q, k, v = heads(8, tokens, 64, device), *(heads(2, 256, 64, device).contiguous() for _ in range(2))
    positions = torch.tensor([[7], [200]]) + torch.arange(tokens)
    mask = torch.arange(256) <= positions[:, None, :, None]
    out = attention(q, k, v, mask.to(device))
    check([out], [attention(q.cpu().float(), k.cpu().float(), v.cpu().float(), mask)])


def test_attention_without_documents_takes_a_fused_kernel() -> None:
    q, k, v = (torch.randn(1, heads, 512, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    with torch.profiler.profile() as profiler:
        attention(q, k, v, None)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profiler.events() or []).lower()
    assert "cudnn" in names or "flash" in names or "fmha" in names


def test_an_async_save_copies_what_was_there_before_the_next_step() -> None:
    check_copies("cuda")


def test_the_rings_kernels_put_together_are_attention() -> None:
    """The second half of a sequence, as a rank sees it: the keys before it, then its own; and the gradients of both."""
    check_ring_kernels("cuda")


def check_ring_kernels(device: str) -> None:
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 4, 512, 64, device=device).bfloat16()
    half, parts = q[:, :, 256:], [(slice(0, 256), False), (slice(256, 512), True)]
    outs, lses = zip(
        *(_flash(half, k[:, :, keys], v[:, :, keys], causal=causal) for keys, causal in parts), strict=True
    )
    lse = torch.logaddexp(*lses)
    out = sum(out.float() * (own - lse).exp()[..., None] for out, own in zip(outs, lses, strict=True)).bfloat16()
    of_queries = [x.contiguous() for x in (grad[:, :, 256:], half, out, lse)]
    found = [_flash_backward(of_queries, torch.stack((k, v))[:, :, :, keys], causal=causal) for keys, causal in parts]
    (dq, *first), (dq_own, *own) = found
    ours = out, dq + dq_own, *(torch.cat(both, dim=2) for both in zip(first, own, strict=True))

    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)[:, :, 256:]
    dq, *rest = torch.autograd.grad(expected, inputs, grad[:, :, 256:].float())
    for found_tensor, wanted in zip(ours, (expected, dq[:, :, 256:], *rest), strict=True):
        torch.testing.assert_close(found_tensor.float(), wanted, rtol=2e-2, atol=2e-2)
