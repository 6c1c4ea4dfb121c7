"""AdamW and Muon by groups of weights, as one optimizer. Muon's matrices may be spread over ranks in any way.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest matrix with orthogonal rows or columns. That needs
the whole matrix. So one of the ranks that share it, its owner, receives all parts, computes, and sends the parts of the
result back: in a step each element of a matrix goes to its owner once and back to each rank that holds it.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from config import Compile
from parallel.gradients import compile_each_shape

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: all singular values come between about 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # running means of each kind of group
ADAMW_RMS = 0.2  # of the elements of AdamW's updates, which Muon's match (Liu et al. 2025, "Muon is scalable")
Part = tuple[int, int, int, int]  # of a matrix: rows from, to; columns from, to


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
        self.update_adamw = compile_each_shape(_adamw_update, compile)
        self.rounds: dict[tuple[int, ...], list[list[Share]]] = {}  # plans, by the matrices that have a gradient

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        matrices = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == "muon":
                matrices += [(parameter, group) for parameter in trained]
            elif self.state_dtype == torch.float32:
                self._step_fused_adamw(trained, group)
            else:
                for parameter in trained:
                    self._step_adamw(parameter, group)
        self._step_muon(matrices)

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
            is_fused = self.state_dtype == torch.float32
            state["step"] = torch.zeros((), device=local(parameter).device if is_fused else None)
        return state

    def _step_muon(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update `matrices`, each given with its group."""
        updates = [self._momentum(matrix, group["betas"][0]) for matrix, group in matrices]
        key = tuple(id(matrix) for matrix, _ in matrices)
        if key not in self.rounds:
            self.rounds[key] = plan_rounds([matrix for matrix, _ in matrices], self.group)
        for number, update in orthogonalize_all(updates, self.rounds[key], self.group):
            matrix, group = matrices[number]
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

    def _step_fused_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """By torch's kernel, which takes float32 states only."""
        states = [self._state_of(parameter, "adamw") for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _step_adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self._state_of(parameter, "adamw")
        state["step"].add_(1)
        # What changes with the step is computed on the host, as tensors: a Python number that changes would cause
        # another compilation.
        shrink = torch.tensor(1 - group["lr"] * group["weight_decay"], dtype=torch.float32)
        rate = group["lr"] / (1 - beta1 ** state["step"])
        correction = 1 - beta2 ** state["step"]
        self.update_adamw(
            local(parameter),
            local(parameter.grad),  # type: ignore[arg-type]
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            shrink,
            rate,
            correction,
            beta1,
            beta2,
            group["eps"],
        )


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
    parameter.mul_(shrink).sub_(rate * mean / ((square / correction).sqrt() + eps))


def orthogonalize(matrix: Tensor) -> Tensor:
    """U S V^T with singular values S between about 0.7 and 1.2, of a matrix U X V^T; of its type (Jordan et al. 2024).

    Five Newton-Schulz steps in which all singular values approach 1 and then scatter around it.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Share(NamedTuple):
    """A matrix on its way to its owner and back. Ranks are those of the group."""

    number: int  # of the matrix
    owner: int
    shape: torch.Size
    parts: dict[int, Part]  # rank → what it holds
    senders: dict[int, Part]  # of the ranks that hold a part, the nearest to the owner


def plan_rounds(matrices: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[list[Share]]:
    """Give each spread matrix an owner, so that all ranks compute about the same. In a round each owns at most one."""
    spread = {}  # number → matrix
    for number, matrix in enumerate(matrices):
        if isinstance(matrix, DTensor):
            spread[number] = matrix
    rounds: list[list[Share]] = []
    load = Counter[int]()  # rank → multiplications
    owned = Counter[int]()  # rank → matrices
    for number in sorted(spread, key=lambda number: -_work(spread[number])):
        matrix = spread[number]
        coordinates, parts = _spread_of(matrix.shape, matrix.device_mesh, matrix.placements, group)
        owner = min(parts, key=lambda rank: load[rank])
        senders = _nearest_holders(owner, coordinates, parts)
        if owned[owner] == len(rounds):
            rounds.append([])
        rounds[owned[owner]].append(Share(number, owner, matrix.shape, parts, senders))
        owned[owner] += 1
        load[owner] += _work(matrix)
    return rounds


def _work(matrix: Tensor) -> int:
    return matrix.numel() * min(matrix.shape)


def _nearest_holders(owner: int, coordinates: dict[int, tuple[int, ...]], parts: dict[int, Part]) -> dict[int, Part]:
    """Rank → part, once for each part: of its holders the one that differs from `owner` along the fewest axes."""

    def distance(rank: int) -> int:
        pairs = zip(coordinates[rank], coordinates[owner], strict=True)
        return sum(one != other for one, other in pairs)

    holders: dict[Part, int] = {}
    for rank in sorted(parts, key=distance):
        holders.setdefault(parts[rank], rank)
    return {rank: part for part, rank in holders.items()}


@lru_cache
def _spread_of(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], group: dist.ProcessGroup | None
) -> tuple[dict[int, tuple[int, ...]], dict[int, Part]]:
    """Rank of the group → its coordinates in the mesh, and → the part of a matrix that it holds.

    A matrix is cut into parts of equal size, but for the last. FSDP2 cuts what tp has cut: its cuts, which have a
    `split_factor` then, come last. All of this without tensors, which have no values where the planner counts.
    """
    coordinates = {}
    parts = {}
    axis_ranks = [dist.get_process_group_ranks(axis) for axis in mesh.get_all_groups()]
    own = mesh.get_coordinate()
    assert own is not None
    cut_order = sorted(range(mesh.ndim), key=lambda axis: hasattr(placements[axis], "split_factor"))
    for at in itertools.product(*map(range, mesh.shape)):
        rank = dist.get_rank()
        for ranks, there, here in zip(axis_ranks, at, own, strict=True):
            rank += ranks[there] - ranks[here]
        if group is not None:
            rank = dist.get_group_rank(group, rank)
        bounds = [(0, shape[0]), (0, shape[1])]
        for axis in cut_order:
            dim: int | None = getattr(placements[axis], "dim", None)
            if dim is not None:
                bounds[dim] = _cut(*bounds[dim], at[axis], mesh.shape[axis])
        coordinates[rank] = at
        parts[rank] = (*bounds[0], *bounds[1])
    return coordinates, parts


def _cut(first: int, last: int, number: int, pieces: int) -> tuple[int, int]:
    """The bounds of one of the `pieces` from `first` to `last`."""
    size = -((first - last) // pieces)  # rounded up
    start = min(first + number * size, last)
    return start, min(start + size, last)


def orthogonalize_all(
    updates: Sequence[Tensor], rounds: Sequence[Sequence[Share]], group: dist.ProcessGroup | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, this rank's part of the result) for each matrix of whose update this rank has `updates[index]`.

    The parts of the next round are on their way while one is computed. Collective in `group`.
    """
    spread = {share.number for shares in rounds for share in shares}
    for number, update in enumerate(updates):
        if number not in spread:
            yield number, orthogonalize(update)
    arriving = deque[Callable[[], Tensor | None]]()
    for number in range(len(rounds) + 1):
        if number < len(rounds):
            arriving.append(_gather(rounds[number], updates, group))
        if number > 0:
            yield from _scatter(rounds[number - 1], arriving.popleft(), updates, group)


def _owned(shares: Sequence[Share], group: dist.ProcessGroup | None) -> Share | None:
    """The matrix of a round that this rank owns, if any."""
    for share in shares:
        if share.owner == dist.get_rank(group):
            return share
    return None


def _gather(
    shares: Sequence[Share], updates: Sequence[Tensor], group: dist.ProcessGroup | None
) -> Callable[[], Tensor | None]:
    """Send this rank's parts to their owners. Returns a function that waits for the matrix of this rank."""
    me = dist.get_rank(group)
    own = _owned(shares, group)
    outgoing = {share.owner: updates[share.number] for share in shares if me in share.senders}
    incoming = {}
    if own is not None:
        for rank, (top, bottom, left, right) in own.senders.items():
            incoming[rank] = (bottom - top) * (right - left)
    wait = _exchange(outgoing, incoming, updates[0].new_empty(0), group)

    def assemble() -> Tensor | None:
        received = wait()
        if own is None:
            return None
        matrix = updates[0].new_empty(own.shape)
        for rank, (top, bottom, left, right) in own.senders.items():
            matrix[top:bottom, left:right] = received[rank].view(bottom - top, right - left)
        return matrix

    return assemble


def _scatter(
    shares: Sequence[Share],
    assemble: Callable[[], Tensor | None],
    updates: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[int, Tensor]]:
    """Orthogonalize the matrix of this rank, send its parts to all that hold one, and yield what others send."""
    me = dist.get_rank(group)
    own = _owned(shares, group)
    matrix = assemble()
    outgoing = {}
    if own is not None and matrix is not None:
        result = orthogonalize(matrix)
        for rank, (top, bottom, left, right) in own.parts.items():
            outgoing[rank] = result[top:bottom, left:right]
    wanted = {share.owner: share.number for share in shares if me in share.parts}
    incoming = {owner: updates[number].numel() for owner, number in wanted.items()}
    received = _exchange(outgoing, incoming, updates[0].new_empty(0), group)()
    for owner, number in wanted.items():
        yield number, received[owner].view(updates[number].shape)


def _exchange(
    outgoing: dict[int, Tensor], incoming: dict[int, int], nothing: Tensor, group: dist.ProcessGroup | None
) -> Callable[[], Sequence[Tensor]]:
    """Send a tensor to each rank of `outgoing`, and receive as many numbers as `incoming` says, by rank.

    Returns a function that waits for what each rank sent, flat.
    """
    ranks = range(dist.get_world_size(group))
    outputs = [outgoing.get(rank, nothing).flatten() for rank in ranks]
    sizes = [incoming.get(rank, 0) for rank in ranks]
    received = nothing.new_empty(sum(sizes))
    sent_sizes = [output.numel() for output in outputs]
    work: Any = dist.all_to_all_single(received, torch.cat(outputs), sizes, sent_sizes, group=group, async_op=True)

    def wait() -> Sequence[Tensor]:
        work.wait()
        return received.split(sizes)

    return wait
