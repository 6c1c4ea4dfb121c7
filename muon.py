"""AdamW and Muon by groups of weights, as one optimizer. Muon's matrices may be spread over ranks in any way.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest matrix with orthogonal rows or columns. That needs
the whole matrix. So one of the ranks that share it, its owner, receives all parts, computes, and sends the parts of the
result back: in a step each element of a matrix goes to its owner once and back to each rank that holds it. Matrices of
one shape are computed together.

Letters of shapes: B matrices, R rows, C columns.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from config import Compile
from parallel.gradients import compile_each_shape

# a x + b x^3 + c x^5 of singular values that are at most 1, five times: between about 0.7 and 1.2 at the end, also from
# 0.005 (Jordan et al. 2024).
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
STEPS = 5
BATCH_NUMBERS = 2**24  # most numbers in matrices that a rank computes together: a larger one fills a GPU alone
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # running means of each kind of group
ADAMW_RMS = 0.2  # of the elements of AdamW's updates, which Muon's match (Liu et al. 2025, "Muon is scalable")
Group = dict[str, Any]  # of weights, with what `optim._group_fields` says of them
Part = tuple[slice, slice]  # of a matrix: rows, columns
Pieces = defaultdict[int, list[Tensor]]  # rank → tensors for it or from it


class GroupedOptimizer(torch.optim.Optimizer):
    """Each group has a `kind`: "adamw" or "muon". Running means are stored as `state_dtype` and updated in float32.

    Rounded to bfloat16, an AdamW mean with beta2 0.95 follows its input to within 8 %: any closer, an update is less
    than half of the last bit and rounds away. States have the names of torch's AdamW and Muon. Matrices are sent and
    orthogonalized as `dtype`. `group`: the ranks that compute an update together.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state_dtype: torch.dtype,
        dtype: torch.dtype,
        compile: Compile,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__(groups, {})
        self.state_dtype = state_dtype
        self.dtype = dtype
        self.group = group
        self.fuses = state_dtype == torch.float32 and fused_is_adamw()
        self.update_adamw = compile_each_shape(_adamw_update, compile)
        self.plans: dict[tuple[int, ...], Plan] = {}  # by the matrices that have a gradient

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for kind, update in UPDATES.items():
            update(self, [group for group in self.param_groups if group["kind"] == kind])

    def allocate_state(self) -> None:
        """Give every weight the state that its first step would begin with, for a load to fill."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter, group["kind"])

    def _state_of(self, parameter: Tensor, kind: str) -> dict[str, Tensor]:
        """The state of a weight in a group of a `kind`; zeros at first."""
        state = self.state[parameter]
        for name in STATES[kind]:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)
        if kind == "adamw" and "step" not in state:
            state["step"] = torch.zeros((), device=local(parameter).device if self.fuses else None)
        return state

    def _step_muon(self, groups: Sequence[Group]) -> None:
        matrices = [(matrix, group) for group in groups for matrix in _trained(group)]
        updates = [self._momentum(matrix, group["betas"][0]) for matrix, group in matrices]
        key = tuple(id(matrix) for matrix, _ in matrices)
        if key not in self.plans:
            self.plans[key] = plan_muon([matrix for matrix, _ in matrices], self.group)
        orthogonalize_all(updates, self.plans[key], self.group)
        for (matrix, group), update in zip(matrices, updates, strict=True):
            scale = ADAMW_RMS * math.sqrt(max(matrix.shape))
            weights = local(matrix)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """This rank's part of a matrix's gradient with Nesterov momentum, which goes into its state."""
        grad = local(parameter.grad)  # type: ignore[arg-type]
        mean = local(self._state_of(parameter, "muon")["momentum_buffer"])
        new = mean.to(grad.dtype).lerp(grad, 1 - momentum)
        mean.copy_(new)
        return grad.lerp(new, momentum).to(self.dtype)

    def _step_adamw(self, groups: Sequence[Group]) -> None:
        """By torch's kernel, where that computes what `_adamw_update` says. It takes float32 states only."""
        for group in groups:
            tensors = [self._adamw_tensors(weight) for weight in _trained(group)]
            if self.fuses:
                _step_fused(tensors, group)
                continue
            for of_weight in tensors:
                _step_alone(of_weight, group, self.update_adamw)

    def _adamw_tensors(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """What an AdamW step takes of a weight: this rank's part, its gradient, running means, and the step."""
        state = self._state_of(parameter, "adamw")
        grad: Any = parameter.grad
        return local(parameter), local(grad), local(state["exp_avg"]), local(state["exp_avg_sq"]), state["step"]


# What updates the weights of each kind of group. Another kind is a line here and one in STATES.
UPDATES: dict[str, Callable[[GroupedOptimizer, Sequence[Group]], None]] = {
    "adamw": GroupedOptimizer._step_adamw,
    "muon": GroupedOptimizer._step_muon,
}


def _trained(group: Group) -> list[Tensor]:
    return [weight for weight in group["params"] if weight.grad is not None]


def _step_fused(tensors: Sequence[tuple[Tensor, ...]], group: Group) -> None:
    if not tensors:
        return
    weights, grads, means, squares, steps = map(list, zip(*tensors, strict=True))
    beta1, beta2 = group["betas"]
    adamw(
        weights, grads, means, squares, [], steps, fused=True, amsgrad=False, maximize=False, lr=group["lr"],
        beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip


def _step_alone(tensors: tuple[Tensor, ...], group: Group, update: Callable[..., None]) -> None:
    *of_weight, step = tensors
    beta1, beta2 = group["betas"]
    step.add_(1)
    # What changes with the step is computed on the host, as tensors: a Python number that changes would cause another
    # compilation.
    shrink = torch.tensor(1 - group["lr"] * group["weight_decay"], dtype=torch.float32)
    rate = group["lr"] / (1 - beta1**step)
    correction = 1 - beta2**step
    update(*of_weight, shrink, rate, correction, beta1, beta2, group["eps"])


@torch.no_grad()
def fused_is_adamw() -> bool:
    """Whether torch's kernel still computes what `_adamw_update` says: tried on a few numbers, on CPU."""
    group = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.5, "eps": 0.1}
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(6, 4, generator=generator)
        alone, fused = ((weight.clone(), *torch.zeros(3, 6, 4), torch.zeros(())) for _ in range(2))
        for scale in (1.0, 1e-3, 10.0):
            gradient = scale * torch.randn(6, 4, generator=generator)
            alone[1].copy_(gradient)
            fused[1].copy_(gradient)
            _step_alone(alone, group, _adamw_update)
            _step_fused([fused], group)
        return torch.allclose(alone[0], fused[0], rtol=1e-5, atol=1e-6)


def local(x: Tensor) -> Tensor:
    """This rank's values as a plain tensor that shares memory: no DTensor, no float8 wrapper."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if is_traceable_wrapper_subclass(x):
        return x._tensor  # __tensor_flatten__ would wait for the device, to see whether the scale is 0
    return x


def _adamw_update(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    shrink: Tensor,
    rate: Tensor,
    correction: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW step, in place (Loshchilov and Hutter 2019, algorithm 2).

    Numbers on the host: `shrink` is the factor of weight decay, `rate` the learning rate with the mean's bias
    correction, `correction` that of the mean square.
    """
    mean = torch.lerp(exp_avg.float(), grad.float(), 1 - beta1)
    square = torch.lerp(exp_avg_sq.float(), grad.float().square(), 1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    update = rate * mean / ((square / correction).sqrt() + eps)
    parameter.mul_(shrink).sub_(update)


def orthogonalize(matrices: Tensor) -> Tensor:
    """U S V^T with singular values S about 1, of matrices U X V^T [B, R, C]; of their type (Jordan et al. 2024).

    Newton-Schulz steps: each applies a polynomial to all singular values, by matmuls alone.
    """
    a, b, c = POLYNOMIAL
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Share(NamedTuple):
    """A matrix that ranks share, and the one of them that computes it: its owner. Ranks are those of the group."""

    number: int  # of the matrix
    owner: int
    shape: torch.Size
    parts: dict[int, Part]  # rank → what it holds
    senders: list[int]  # that hold one copy of the matrix between them, the owner's own part included


class Plan(NamedTuple):
    """Who computes which matrices, by their numbers. Those of a batch have one shape."""

    batches: list[list[int]]  # of matrices that each rank holds whole
    rounds: list[list[Share]]  # of spread matrices: in a round each owner computes one batch


def plan_muon(matrices: Sequence[Tensor], group: dist.ProcessGroup | None) -> Plan:
    """Form batches. Each spread matrix has an owner, so that all ranks compute about the same."""
    whole = [number for number, matrix in enumerate(matrices) if not isinstance(matrix, DTensor)]
    shares = {}
    owned: dict[int, list[int]] = defaultdict(list)  # rank → matrices
    load = Counter[int]()  # rank → work
    shapes = [matrix.shape for matrix in matrices]
    work = [shape.numel() * min(shape) for shape in shapes]
    for number in sorted(range(len(matrices)), key=lambda number: -work[number]):
        matrix = matrices[number]
        if isinstance(matrix, DTensor):
            parts, copies = _spread_of(matrix.shape, matrix.device_mesh, matrix.placements, group)
            owner = min(parts, key=lambda rank: load[rank])
            senders = [rank for rank in parts if copies[rank] == copies[owner]]
            shares[number] = Share(number, owner, matrix.shape, parts, senders)
            owned[owner].append(number)
            load[owner] += work[number]
    rounds = []
    for batches in itertools.zip_longest(*(_form_batches(numbers, shapes) for numbers in owned.values()), fillvalue=[]):
        rounds.append([shares[number] for number in itertools.chain(*batches)])
    return Plan(_form_batches(whole, shapes), rounds)


def _form_batches(numbers: Sequence[int], shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Batches of matrices of one shape, each of at most BATCH_NUMBERS numbers or of a single matrix."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for number in numbers:
        alike[shapes[number]].append(number)
    batches = []
    for shape, members in alike.items():
        size = max(1, BATCH_NUMBERS // shape.numel())
        batches += [members[first : first + size] for first in range(0, len(members), size)]
    return batches


@lru_cache
def _spread_of(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], group: dist.ProcessGroup | None
) -> tuple[dict[int, Part], dict[int, list[int]]]:
    """Rank of the group → the part of a matrix that it holds, and → which copy of the matrix that belongs to.

    A matrix is cut into parts of equal size, but for the last. FSDP2 cuts what tp has cut: its cuts, which have a
    `split_factor` then, come last. All of this without tensors, which have no values where the planner counts.
    """
    parts: dict[int, Part] = {}
    copies: dict[int, list[int]] = {}
    axis_ranks = [dist.get_process_group_ranks(axis) for axis in mesh.get_all_groups()]
    own = mesh.get_coordinate()
    assert own is not None
    order = sorted(range(mesh.ndim), key=lambda axis: hasattr(placements[axis], "split_factor"))
    for at in itertools.product(*map(range, mesh.shape)):
        rank = dist.get_rank()
        for ranks, there, here in zip(axis_ranks, at, own, strict=True):
            rank += ranks[there] - ranks[here]
        if group is not None:
            rank = dist.get_group_rank(group, rank)
        held = [range(size) for size in shape]  # rows and columns
        copies[rank] = []
        for axis in order:
            dim: int | None = getattr(placements[axis], "dim", None)
            if dim is None:
                copies[rank].append(at[axis])
            else:
                size = -(-len(held[dim]) // mesh.shape[axis])  # rounded up
                held[dim] = held[dim][at[axis] * size :][:size]
        rows, columns = held
        parts[rank] = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    return parts, copies


def orthogonalize_all(updates: Sequence[Tensor], plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Make matrices orthogonal, in place. `updates` are this rank's parts of them. Collective in `group`.

    The parts of the next round are on their way while one is computed.
    """
    for numbers in plan.batches:
        batch = torch.stack([updates[number] for number in numbers])
        for number, result in zip(numbers, orthogonalize(batch), strict=True):
            updates[number].copy_(result)
    gathers = (_gather(shares, updates, group) for shares in plan.rounds)
    arriving = next(gathers, None)
    for shares in plan.rounds:
        assert arriving is not None
        matrices, wait = arriving
        arriving = next(gathers, None)
        wait()
        _compute_and_scatter(shares, matrices, updates, group)


def _gather(
    shares: Sequence[Share], updates: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[Tensor, Callable[[], None]]:
    """Send this rank's parts to their owners. Returns the batch that it owns itself, and what waits for its parts."""
    me = dist.get_rank(group)
    own = [share for share in shares if share.owner == me]
    matrices = updates[0].new_empty(0)
    if own:
        matrices = updates[0].new_empty(len(own), *own[0].shape)
    outgoing: Pieces = defaultdict(list)
    incoming: Pieces = defaultdict(list)
    for share in shares:
        if me in share.senders:
            outgoing[share.owner].append(updates[share.number])
    for share, matrix in zip(own, matrices, strict=True):
        for rank in share.senders:
            incoming[rank].append(matrix[share.parts[rank]])
    return matrices, _exchange(outgoing, incoming, updates[0], group)


def _compute_and_scatter(
    shares: Sequence[Share], matrices: Tensor, updates: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Orthogonalize the batch of this rank, send its parts to all that hold one, and receive those of others."""
    me = dist.get_rank(group)
    own = [share for share in shares if share.owner == me]
    outgoing: Pieces = defaultdict(list)
    incoming: Pieces = defaultdict(list)
    for share in shares:
        if me in share.parts:
            incoming[share.owner].append(updates[share.number])
    if own:
        matrices = orthogonalize(matrices)
    for share, matrix in zip(own, matrices, strict=True):
        for rank, part in share.parts.items():
            outgoing[rank].append(matrix[part])
    wait = _exchange(outgoing, incoming, updates[0], group)
    wait()


def _exchange(outgoing: Pieces, incoming: Pieces, like: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Send tensors to other ranks. Returns what waits for theirs and fills the tensors of `incoming`.

    Between two ranks both list them in one order. All are of the type and on the device of `like`.
    """
    ranks = range(dist.get_world_size(group))
    sent_sizes = [sum(x.numel() for x in outgoing[rank]) for rank in ranks]
    sizes = [sum(x.numel() for x in incoming[rank]) for rank in ranks]
    sent = [x.flatten() for x in itertools.chain(*(outgoing[rank] for rank in ranks))]
    targets = list(itertools.chain(*(incoming[rank] for rank in ranks)))
    received = like.new_empty(sum(sizes))
    data = torch.cat([like.new_empty(0), *sent])
    work: Any = dist.all_to_all_single(received, data, sizes, sent_sizes, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        pieces = received.split([x.numel() for x in targets])
        for target, piece in zip(targets, pieces, strict=True):
            target.copy_(piece.view(target.shape))

    return wait
