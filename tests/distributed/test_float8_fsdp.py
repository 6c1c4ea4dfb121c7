"""Float8 under FSDP2 on gloo: bytes gathered, scales by one all-reduce, the same bits with and without, every mesh."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from config import Config, Float8
from float8.convert import convert_to_float8
from models.weights import build_refresh
from parallel.fsdp import apply_fsdp
from parallel.mesh import ParallelDims
from tests import parity
from tests.harness import run_ranks
from tests.parity import losses_of

LAYERS = 2


class Traffic(TorchDispatchMode):
    """Counts what goes over the network: bytes of each all-gather, in order, and the all-reduces of maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes: list[int] = []  # by FSDP2
        self.gathered_activations: list[int] = []  # by tensor parallelism
        self.max_reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, Float8TrainingTensor)) for kind in types):
            return NotImplemented  # first their own dispatch, which then does the communication
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered_bytes.append(args[0].nbytes)
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.gathered_activations.append(result.nbytes)
        if func is torch.ops._c10d_functional.all_reduce.default and args[1] == "max":
            self.max_reductions += 1
        return result


def config_for(mesh: tuple[int, int], compile: str = "", mode: str = "none", **float8: Any) -> Config:
    settings = Float8(**{"enable": True, "filter": "all", **float8})
    return parity.config_for(*mesh, compile, mode, param_dtype="bfloat16", float8=settings)


def losses(config: Config, steps: int = 4, accumulation: int = 1) -> list[float]:
    return losses_of(config, steps, accumulation, hidden_dim=128, n_layers=LAYERS)


def traffic(config: Config) -> tuple[list[int], int]:
    """Of a step: the bytes of every all-gather, and the all-reduces of maxima."""
    with Traffic() as counted:
        losses(config, 1)
    return counted.gathered_bytes, counted.max_reductions


def test_half_the_bytes_and_one_all_reduce_for_all_scales() -> None:
    bf16 = run_ranks(2, traffic, config_for((1, 2), enable=False))
    float8 = run_ranks(2, traffic, config_for((1, 2)))
    apart = run_ranks(2, traffic, config_for((1, 2), precompute_scale="off"))
    for (before, _), (after, _) in zip(bf16, float8, strict=True):
        assert len(before) == len(after)
        # In order: embedding, blocks, norm and output; the blocks once more for backward.
        ((block_bytes, count),) = Counter(before).most_common(1)
        assert count == 2 * LAYERS
        for i, nbytes in enumerate(before):
            assert after[i] <= 0.505 * nbytes if nbytes == block_bytes else after[i] == nbytes
    assert {reductions for _, reductions in float8} == {2}  # at the start and after the step
    assert {reductions for _, reductions in apart} == {2 * LAYERS * 7}  # each weight, whenever it is gathered


def test_the_same_bits_with_and_without_precomputed_scales() -> None:
    ahead = run_ranks(4, losses, config_for((2, 2)))
    assert ahead == run_ranks(4, losses, config_for((2, 2), precompute_scale="off"))


def test_rows_that_three_ranks_cannot_share_evenly() -> None:
    """Gathered in float8, these weights would let the rank that has fewer rows run other collectives than the rest."""
    chosen = run_ranks(3, losses, config_for((1, 3)), 2)
    assert chosen == run_ranks(3, losses, config_for((1, 3), fsdp_all_gather="off"), 2)


CASES: dict[str, tuple[Config, int]] = {
    "DDP 2": (config_for((2, 1)), 2),
    "FSDP 2, full, compiled": (config_for((1, 2), mode="full", compile="aot_eager"), 2),
    "HSDP 2 x 2, selective": (config_for((2, 2), mode="selective"), 1),
    "FSDP 2, output too": (config_for((1, 2), skip=()), 1),
    "FSDP 2, emulated": (config_for((1, 2), emulate=True), 1),
    "FSDP 2, own kernels, selective": (config_for((1, 2), kernels="own", mode="selective"), 1),
    "FSDP 2, own kernels, rowwise, full, compiled": (
        config_for((1, 2), kernels="own", recipe="rowwise", mode="full", compile="aot_eager"),
        2,
    ),
}


@pytest.fixture(scope="module")
def bf16() -> list[float]:
    return run_ranks(1, losses, config_for((1, 1), enable=False))[0]


@pytest.mark.parametrize("name", CASES)
def test_trains_as_bf16_does(name: str, bf16: list[float]) -> None:
    config, accumulation = CASES[name]
    world_size = config.parallelism.dp_replicate * config.parallelism.dp_shard
    first, *others = run_ranks(world_size, losses, config, 4, accumulation)
    assert first == pytest.approx(bf16, rel=5e-4)
    assert first != bf16, "nothing was rounded"
    assert all(other == first for other in others)


def bits_beside_torchao(
    ranks: int, recipe: str, gradient_scale: float, shrink: float, kernels: str = "compiler"
) -> list[bool]:
    """Whether y, dx, dw of our layer have the bits of torchao's own module, alone with the whole weight.

    Ours is under FSDP2, or on a rank alone. Its weight is multiplied by `shrink` after its scale was computed.
    """
    config = config_for((1, ranks), recipe=recipe, kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * 0.02
    x = torch.randn(32, 64, generator=generator).bfloat16()
    dy = (torch.randn(32, 96, generator=generator) * gradient_scale).bfloat16()

    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    model.register_parameter("other", nn.Parameter(torch.ones(2)))  # gloo needs another type in the group
    convert_to_float8(model, config.float8)
    share = weight
    if ranks > 1:
        mesh = ParallelDims.from_config(config.parallelism, ranks).build_mesh("cpu").fsdp
        apply_fsdp(model, [], mesh, config)
        share = distribute_tensor(weight, mesh)
    (master,) = model[0].parameters()
    with torch.no_grad():
        master.copy_(share)
        build_refresh([model], config)()
        master.mul_(shrink)
    own_config = Float8LinearConfig.from_recipe_name(recipe)
    # What is gathered in float8 is cast from the float32 weight; what is gathered in bfloat16 from that.
    own_weight = (weight * shrink) if recipe == "tensorwise" else (weight * shrink).bfloat16()
    own = Float8Linear.from_float(nn.Linear(64, 96, bias=False, dtype=own_weight.dtype), own_config)
    own.weight = nn.Parameter(own_weight)

    given, own_given = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, own_y = model(given), own(own_given)
    y.backward(dy)
    own_y.backward(dy)
    dw = master.grad.full_tensor() if ranks > 1 else master.grad  # the sum of all ranks'
    pairs = ((y, own_y), (given.grad, own_given.grad), (dw, ranks * own.weight.grad))
    return [torch.equal(*pair) for pair in pairs]


@pytest.mark.parametrize("gradient_scale", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise"])
def test_the_bits_of_torchaos_own_module(recipe: str, gradient_scale: float) -> None:
    kernels = "own" if recipe.startswith("own ") else "compiler"
    for ranks in (1, 2):
        same = run_ranks(ranks, bits_beside_torchao, ranks, recipe.removeprefix("own "), gradient_scale, 1.0, kernels)
        assert same == [[True] * 3] * ranks


def test_a_stale_scale_is_caught_by_its_bits() -> None:
    for same in run_ranks(2, bits_beside_torchao, 2, "tensorwise", 1.0, 0.9):
        assert same == [False, False, True]  # the weight's gradient does not involve the weight
