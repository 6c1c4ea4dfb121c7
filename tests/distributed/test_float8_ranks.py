"""Float8 among ranks: bytes gathered, scales, torchao's own bits, whole runs. Layouts: test_layouts."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from config import Float8
from float8.convert import convert_to_float8
from models.weights import build_refresh
from parallel.fsdp import apply_fsdp
from parallel.mesh import ParallelDims
from tests import parity
from tests.harness import run_ranks
from tests.parity import losses_of
from tests.runs import column, launch

LAYERS = 2


class Traffic(TorchDispatchMode):
    """Counts what goes over the network: bytes of each all-gather, in order, and the all-reduces of maxima."""

    def __init__(self):
        super().__init__()
        self.gathered_bytes = []  # by FSDP2
        self.gathered_activations = []  # by tensor parallelism
        self.max_reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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


def config_for(shards, float8=None, tp=1):
    settings = Float8(**{"enable": True, "filter": "all", **(float8 or {})})
    return parity.config_for(1, shards, param_dtype="bfloat16", float8=settings, tp=tp)


BFLOAT16 = {"enable": False}


def losses(config, steps):
    return losses_of(config, steps, hidden_dim=128, n_layers=LAYERS)


def traffic(config):
    """Of a step: the bytes of every all-gather by FSDP2 and by tp, and the all-reduces of maxima."""
    with Traffic() as counted:
        losses(config, 1)
    return counted.gathered_bytes, counted.gathered_activations, counted.max_reductions


def test_fsdp_gathers_half_the_bytes_and_reduces_all_maxima_at_once():
    bf16 = run_ranks(2, traffic, config_for(2, BFLOAT16))
    float8 = run_ranks(2, traffic, config_for(2))
    for (before, _, _), (after, _, _) in zip(bf16, float8, strict=True):
        assert len(before) == len(after)
        # In order: embedding, blocks, norm and output; the blocks once more for backward.
        ((block_bytes, count),) = Counter(before).most_common(1)
        assert count == 2 * LAYERS
        for i, nbytes in enumerate(before):
            assert after[i] <= 0.505 * nbytes if nbytes == block_bytes else after[i] == nbytes
    assert {reductions for *_, reductions in float8} == {2}  # at the start and after the step


def test_tp_gathers_half_the_bytes_in_each_block():
    before, after = (run_ranks(2, traffic, config_for(1, how, tp=2))[0][1] for how in (BFLOAT16, {}))
    assert len(before) == len(after)
    halved = [i for i in range(len(before)) if after[i] <= 0.505 * before[i]]
    # Per block: the inputs of attention and feed-forward, and in backward the gradients of their outputs.
    assert len(halved) == 4 * LAYERS
    assert all(after[i] == before[i] for i in range(len(before)) if i not in halved)


def test_rows_that_three_ranks_cannot_share_evenly():
    """Gathered in float8, these weights would let the rank that has fewer rows run other collectives than the rest."""
    chosen = run_ranks(3, losses, config_for(3), 2)
    assert chosen == run_ranks(3, losses, config_for(3, {"fsdp_all_gather": "off"}), 2)


def bits_beside_torchao(ranks, recipe, gradient_scale, kernels):
    """Whether y, dx, dw of our layer have the bits of torchao's own module, alone with the whole weight.

    Ours is under FSDP2, or on a rank alone.
    """
    config = config_for(ranks, {"recipe": recipe, "kernels": kernels})
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
    own_config = Float8LinearConfig.from_recipe_name(recipe)
    # What is gathered in float8 is cast from the float32 weight; what is gathered in bfloat16 from that.
    own_weight = weight if recipe == "tensorwise" else weight.bfloat16()
    own = Float8Linear.from_float(nn.Linear(64, 96, bias=False, dtype=own_weight.dtype), own_config)
    own.weight = nn.Parameter(own_weight)

    given, own_given = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, own_y = model(given), own(own_given)
    y.backward(dy)
    own_y.backward(dy)
    dw = master.grad.full_tensor() if ranks > 1 else master.grad  # the sum of all ranks'
    pairs = ((y, own_y), (given.grad, own_given.grad), (dw, ranks * own.weight.grad))
    return [torch.equal(*pair) for pair in pairs]


def all_bits_beside_torchao(ranks):
    found = {}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise"):
        name = recipe.removeprefix("own ")
        kernels = "own" if recipe != name else "compiler"
        for scale in (1.0, 1e-4, 1e-9):
            found[recipe, scale] = bits_beside_torchao(ranks, name, scale, kernels)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bits_of_torchaos_own_module(ranks):
    for found in run_ranks(ranks, all_bits_beside_torchao, ranks):
        assert {case: same for case, same in found.items() if not all(same)} == {}


FLOAT8 = ("--training.steps=4", "--training.param_dtype=bfloat16", "--float8.enable", "--float8.filter=all")


def test_a_run_is_resumed_bit_for_bit(small, tmp_path):
    """With the scales of the weights that were loaded, computed ahead."""
    words = [*small, *FLOAT8, "--checkpoint.interval=1", "--validation.enable=false"]
    launch(2, tmp_path / "straight", words)
    launch(2, tmp_path / "cut", words, 2)
    launch(2, tmp_path / "cut", words)
    assert column(tmp_path / "cut", "loss") == column(tmp_path / "straight", "loss")
