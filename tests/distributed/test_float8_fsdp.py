"""Float8 under FSDP2 on gloo: bytes gathered, scales by one all-reduce, the same bits with and without, every mesh."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from checkpoint.state import _plain, model_tensors, optimizer_tensors
from config import ActivationCheckpoint, Compile, Config, Float8, Optimizer, Parallelism, Training
from float8.convert import convert_to_float8
from loss import build_loss
from models import build_model, find_model
from models.init import init_weights
from models.llama.model import LlamaConfig
from models.weights import build_refresh
from optim import _local as local_values
from optim import build_optimizer, clip_grad_norm_
from parallel.fsdp import apply_fsdp, set_last_microbatch
from parallel.mesh import ParallelDims
from tests.harness import run_ranks

VOCAB, SEQ_LEN, GLOBAL_BATCH, LAYERS = 256, 16, 8, 2
FLAVOR = LlamaConfig(dim=64, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=VOCAB)


class Traffic(TorchDispatchMode):
    """Counts what goes over the network: bytes of each all-gather, in order, and the all-reduces of maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes: list[int] = []
        self.max_reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first DTensor's own dispatch, which then does the communication
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered_bytes.append(args[0].nbytes)
        if func is torch.ops._c10d_functional.all_reduce.default and args[1] == "max":
            self.max_reductions += 1
        return func(*args, **(kwargs or {}))


def step_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    stream = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    return stream[:, :-1], stream[:, 1:]


def config_for(mesh: tuple[int, int], compile: str = "", mode: str = "none", **float8: Any) -> Config:
    return Config(
        training=Training(seq_len=SEQ_LEN, local_batch_size=1),
        optimizer=Optimizer(lr=1e-3),
        parallelism=Parallelism(dp_replicate=mesh[0], dp_shard=mesh[1]),
        compile=Compile(enable=bool(compile), backend=compile or "inductor"),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        float8=Float8(**{"enable": True, "filter": "all", **float8}),
    )


class Run:
    """The step of train.py, on this rank."""

    def __init__(self, config: Config):
        self.config = config
        dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        spec, _ = find_model(config.model, VOCAB)
        self.model = build_model(spec, FLAVOR)
        if config.float8.enable:
            convert_to_float8(self.model, config.float8, dims.tp, dims.shards)
        self.mesh = dims.build_mesh("cpu")
        spec.apply_parallelism(self.model, self.mesh, config)
        init_weights(self.model, torch.device("cpu"), seed=0)
        self.optimizer, self.loss_fn = build_optimizer([self.model], config.optimizer), build_loss(config.compile)
        self.refresh_weights = build_refresh([self.model], config)
        self.refresh_weights(0)

    def step(self, step: int, accumulation: int = 1) -> float:
        """One optimizer step; the loss before it."""
        tokens, labels = step_data(step)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local = GLOBAL_BATCH // accumulation // world_size
        total = torch.zeros(())
        for i in range(accumulation):
            set_last_microbatch(self.model, i == accumulation - 1, self.mesh.fsdp, self.config.parallelism)
            mine = slice((i * world_size + rank) * local, (i * world_size + rank + 1) * local)
            loss = self.loss_fn(self.model(tokens[mine]), labels[mine]) / labels.numel()
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        clip_grad_norm_(list(self.model.parameters()), 1.0)
        self.optimizer.step()
        self.refresh_weights(0)
        self.optimizer.zero_grad()
        return total.item()

    def tensors(self) -> list[torch.Tensor]:
        state = model_tensors([self.model]) | optimizer_tensors([self.model], self.optimizer)
        return [state[name] for name in sorted(state)]


def losses(config: Config, steps: int = 4, accumulation: int = 1) -> list[float]:
    run = Run(config)
    return [run.step(step, accumulation) for step in range(steps)]


def traffic(config: Config) -> tuple[list[int], int]:
    """Of the second step: the bytes of every all-gather, and the all-reduces of maxima."""
    run = Run(config)
    run.step(0)
    with Traffic() as counted:
        run.step(1)
    return counted.gathered_bytes, counted.max_reductions


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
def test_half_the_bytes_and_one_all_reduce_a_step(mesh: tuple[int, int]) -> None:
    world_size = mesh[0] * mesh[1]
    bf16, float8, apart = (
        run_ranks(world_size, traffic, config_for(mesh, **settings))
        for settings in ({"enable": False}, {}, {"precompute_scale": "off"})
    )
    for (before, _), (after, _) in zip(bf16, float8, strict=True):
        assert len(before) == len(after)
        # In order: embedding, blocks, norm and output, and the blocks once more for backward.
        ((block_bytes, count),) = Counter(before).most_common(1)
        assert count == 2 * LAYERS
        for i, nbytes in enumerate(before):
            assert after[i] <= 0.505 * nbytes if nbytes == block_bytes else after[i] == nbytes
    assert {reductions for _, reductions in float8} == {1}
    assert {reductions for _, reductions in apart} == {2 * LAYERS * 7}  # each weight, in forward and in backward


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (2, 1)])
def test_the_same_bits_with_and_without_precomputed_scales(mesh: tuple[int, int]) -> None:
    world_size = mesh[0] * mesh[1]
    ahead = run_ranks(world_size, losses, config_for(mesh))
    assert ahead == run_ranks(world_size, losses, config_for(mesh, precompute_scale="off"))


def test_rows_that_three_ranks_cannot_share_evenly() -> None:
    """Gathered in float8, these weights would let the rank that has fewer rows run other collectives than the rest."""
    chosen = run_ranks(3, losses, config_for((1, 3)), 2)
    assert chosen == run_ranks(3, losses, config_for((1, 3), fsdp_all_gather="off"), 2)


def losses_around_a_load(config: Config, refresh_after_load: bool) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3, and again after the state before step 2 was loaded in place, as checkpoints are."""
    run = Run(config)
    run.step(0)
    run.step(1)
    saved = [tensor.clone() for tensor in run.tensors()]
    first = [run.step(2), run.step(3)]
    with torch.no_grad():
        for tensor, value in zip(run.tensors(), saved, strict=True):
            tensor.copy_(value)
    if refresh_after_load:
        run.refresh_weights(0)
    return first, [run.step(2), run.step(3)]


def test_scales_are_those_of_the_weights_that_were_loaded() -> None:
    for ranks in (1, 2):
        for first, again in run_ranks(ranks, losses_around_a_load, config_for((1, ranks)), True):
            assert first == again
        # What the call after the load is for:
        for first, again in run_ranks(ranks, losses_around_a_load, config_for((1, ranks)), False):
            assert first != again


def plain_weights(config: Config) -> tuple[bool, bool, bool]:
    run = Run(config)
    run.step(0)
    weight = next(x for name, x in run.model.named_parameters() if name.endswith("attention.wq.weight"))
    sharded = isinstance(weight, DTensor)
    wrapped = weight._local_tensor if sharded else weight  # in torch 2.11 `to_local` returns it with its scale
    plain, saved = local_values(wrapped), model_tensors([run.model])["layers.0.attention.wq.weight"]
    same, saved = _plain("wq", wrapped), saved.to_local() if sharded else saved
    return wrapped._precomputed_scale is not None, plain is wrapped._tensor is same, type(saved) is Tensor


def test_a_precomputed_scale_does_not_hide_the_weights_from_optimizer_and_checkpoint() -> None:
    assert run_ranks(2, plain_weights, config_for((1, 2))) == [(True, True, True)] * 2
    assert run_ranks(1, plain_weights, config_for((1, 1))) == [
        (False, True, True)
    ]  # nor does the copy, of a rank alone


CASES: dict[str, tuple[Config, int]] = {
    "one process": (config_for((1, 1)), 1),
    "DDP 2": (config_for((2, 1)), 2),
    "FSDP 2, accumulation": (config_for((1, 2)), 4),
    "FSDP 2, selective": (config_for((1, 2), mode="selective"), 1),
    "FSDP 2, full, compiled": (config_for((1, 2), mode="full", compile="aot_eager"), 2),
    "HSDP 2 x 2, selective": (config_for((2, 2), mode="selective"), 1),
    "FSDP 2, output too": (config_for((1, 2), skip=()), 1),
    "FSDP 2, emulated": (config_for((1, 2), emulate=True), 1),
    "FSDP 2, rowwise": (config_for((1, 2), recipe="rowwise"), 1),
    "HSDP 2 x 2, rowwise_with_gw_hp, full": (config_for((2, 2), recipe="rowwise_with_gw_hp", mode="full"), 1),
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


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_change_nothing(mode: str) -> None:
    assert run_ranks(2, losses, config_for((1, 2), mode=mode), 2) == run_ranks(2, losses, config_for((1, 2)), 2)


def kept_weights(mode: str) -> set[tuple[int, ...]]:
    """Shapes of whole float8 weights of compiled blocks that a forward leaves in memory for the backward."""
    run = Run(config_for((1, 2), mode=mode, compile="aot_eager"))
    shapes = {tuple(weight.shape) for weight in run.model.parameters() if weight.ndim == 2}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float8_e4m3fn and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & shapes:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.model(step_data(0)[0][:1])  # fewer tokens than any weight has rows
    assert len(kept) >= LAYERS * 3  # nearly all of them FSDP2's own, which it has freed
    return {tuple(tensor.shape) for tensor in kept if tensor.untyped_storage().nbytes()}


def test_no_whole_weight_waits_for_the_backward() -> None:
    assert run_ranks(2, kept_weights, "full") == [set()] * 2


def gather_a_lone_weight() -> str:
    """What becomes of an FSDP2 group that is one float8 weight and nothing else.

    On a process group of its own: the barrier that ends a rank waits for the unfinished work of its
    group, and raises its error again.
    """
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    linear = nn.Sequential(nn.Linear(32, 32, bias=False))
    convert_to_float8(linear, Float8(enable=True, filter="all"))
    fully_shard(linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        linear(torch.ones(16, 32, dtype=torch.bfloat16))
    except RuntimeError as error:
        return str(error)
    return ""


def test_gloo_needs_another_type_in_every_group() -> None:
    """Why the output layer shares its group with the last norm, and why "output too" above works on gloo."""
    assert run_ranks(2, gather_a_lone_weight) == ["Invalid scalar type"] * 2


def bits_beside_torchao(ranks: int, recipe: str, gradient_scale: float, shrink: float) -> list[bool]:
    """Whether y, dx, dw of our layer have the bits of torchao's own module, alone with the whole weight.

    Ours is under FSDP2, or on a rank alone. Its weight is multiplied by `shrink` after its scale was computed.
    """
    config = config_for((1, ranks), recipe=recipe)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * 0.02
    x = torch.randn(32, 64, generator=generator).bfloat16()
    dy = (torch.randn(32, 96, generator=generator) * gradient_scale).bfloat16()

    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    model.register_parameter("other", nn.Parameter(torch.ones(2)))  # gloo needs another type in the group
    convert_to_float8(model, config.float8)
    ours: Any = model[0]
    if ranks > 1:
        apply_fsdp(model, [], ParallelDims.from_config(config.parallelism, ranks).build_mesh("cpu").fsdp, config)
        weight = distribute_tensor(weight, ours.weight.device_mesh, ours.weight.placements)
    (master, *_) = model[0].parameters()
    with torch.no_grad():
        master.copy_(weight)
        build_refresh([model], config)(0)
        master.mul_(shrink)
    weight = weight.full_tensor() if ranks > 1 else weight
    own_config = Float8LinearConfig.from_recipe_name(recipe)
    # What is gathered in float8 is cast from the float32 weight; what is gathered in bfloat16 from that.
    own_weight = (weight * shrink) if recipe == "tensorwise" else (weight * shrink).bfloat16()
    own = Float8Linear.from_float(nn.Linear(64, 96, bias=False, dtype=own_weight.dtype), own_config)
    own.weight = nn.Parameter(own_weight)

    results = []
    for module in (model, own):
        given = x.clone().requires_grad_()
        y = module(given)
        y.backward(dy)
        results.append((y.detach(), given.grad))
    (y, dx), (own_y, own_dx) = results
    dw = master.grad.full_tensor() if ranks > 1 else master.grad  # the sum of all ranks'
    return [torch.equal(y, own_y), torch.equal(dx, own_dx), torch.equal(dw, ranks * own.weight.grad)]


@pytest.mark.parametrize("gradient_scale", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_bits_of_torchaos_own_module(recipe: str, gradient_scale: float) -> None:
    for ranks in (1, 2):
        assert run_ranks(ranks, bits_beside_torchao, ranks, recipe, gradient_scale, 1.0) == [[True] * 3] * ranks


def test_a_stale_scale_is_caught_by_its_bits() -> None:
    for same in run_ranks(2, bits_beside_torchao, 2, "tensorwise", 1.0, 0.9):
        assert same == [False, False, True]  # the weight's gradient does not involve the weight
