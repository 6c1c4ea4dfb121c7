"""What only a GPU can show; `benchmarks.gpu` has the speed. All other tests are given none:

TEST_GPU=1 python -m pytest tests/gpu
"""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from config import load_config
from models.llama.model import attention, causal_mask
from tests.corpus import write_dataset
from tests.unit.test_checkpoint_staging import check_copies
from train import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and TEST_GPU=1")


def run(folder, *options):
    """Ten steps of train.py; the host's waits for the device in steps 4 to 9, in which nothing is due."""
    dataset = write_dataset(folder / "set", [[[*range(1, 500), 0]] * 200], vocab_size=512, block_tokens=2000)

    def after_step(step):
        if step in (3, 9):
            torch.cuda.set_sync_debug_mode("warn" if step == 3 else "default")

    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        arguments = [f"--data.datasets={dataset}", f"--run.outputs={folder}", "--training.steps=10", *options]
        arguments += ["--metrics.log_interval=100", "--validation.enable=false", "--checkpoint.enable=false"]
        train(load_config([*arguments, "--lr_scheduler.warmup_steps=1"]), after_step)
    waits = [str(warning.message) for warning in recorded]
    return [wait for wait in waits if "called a synchronizing" in wait]  # torch also says that the mode is a prototype


COMPILE, FLOAT8 = ["--compile.enable"], ["--float8.enable", "--float8.filter=all"]
LARGE = ["--parallelism.reshard_after_forward=false", "--optimizer.state_dtype=bfloat16"]
LARGE += ["--activation_checkpoint.mode=budget", "--training.loss_chunks=2"]


@pytest.mark.parametrize(
    "options", [[], COMPILE, COMPILE + FLOAT8, COMPILE + LARGE, COMPILE + LARGE + FLOAT8], ids=" ".join
)
def test_no_step_waits_for_the_device(options, tmp_path):
    # Not forked: this process has asked for CUDA, which a fork could then no longer use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(run, tmp_path, *options).result() == []


NOISE = 2e-2  # of bfloat16; on CPU 0.002 in the result and 0.007 in the gradients of keys and values


def heads(n, tokens, head_dim, dtype=torch.bfloat16):
    """Random values [B, n, S, H] as a block has them: transposed."""
    return torch.randn(2, tokens, n, head_dim, device="cuda", dtype=dtype).transpose(1, 2)


def with_gradients(inputs, mask, grad):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs, mask)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def check(found, expected):
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.cpu().float() - wanted).norm() < NOISE * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_is_that_in_float32(head_dim, dtype):
    """With its gradients, and heads that share keys; without documents, and within them."""
    torch.compiler.reset()  # for shapes that change it would compile other kernels than a run has
    torch.manual_seed(0)
    q, k, v, grad = (heads(n, 512, head_dim, dtype) for n in (8, 2, 2, 8))
    positions = torch.cat([torch.arange(n) for n in (100, 28, 384)])[None].expand(2, -1)
    queries = torch.arange(512)
    on_gpu, on_cpu = causal_mask(positions.cuda(), queries.cuda()), causal_mask(positions, queries)
    plain = [x.cpu().float() for x in (q, k, v)]
    for mask, boolean in ((None, None), (on_gpu, on_cpu)):
        check(with_gradients((q, k, v), mask, grad), with_gradients(plain, boolean, grad.cpu().float()))


@pytest.mark.parametrize("tokens", [1, 37])
def test_attention_to_a_cache_is_that_in_float32(tokens):
    """As `generate` computes it: a boolean mask, rows at positions of their own."""
    torch.manual_seed(0)
    q, k, v = heads(8, tokens, 64), *(heads(2, 256, 64).contiguous() for _ in range(2))
    positions = torch.tensor([[7], [200]]) + torch.arange(tokens)
    mask = torch.arange(256) <= positions[:, None, :, None]
    check([attention(q, k, v, mask.cuda())], [attention(q.cpu().float(), k.cpu().float(), v.cpu().float(), mask)])


def test_an_async_save_copies_what_was_there_before_the_next_step():
    check_copies("cuda")
