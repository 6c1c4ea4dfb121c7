"""AdamW and Muon by groups of weights, as one optimizer. Muon's matrices may be spread over ranks in any way.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest matrix with orthogonal rows or columns. That needs
the whole matrix. So one of the ranks that share it, its owner, receives all parts, computes, and sends the parts of the
result back: in a step each element of a matrix goes to its owner once and back to each rank that holds it.
"""

import itertools
import math
from collections import Counter
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from config import Compile
from parallel.gradients import compile_each_shape

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: all singular values come between about 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # running means of each kind of group
ADAMW_RMS = 0.2  # of the elements of AdamW's updates, which Muon's match (Liu et al. 2025, "Muon is scalable")
Part = tuple[slice, slice]  # of a matrix: rows, columns


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
        orthogonalize_all(updates, self.rounds[key], self.group)
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

    def _tensors_of(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """What an AdamW step takes of a weight: this rank's part, its gradient, running means, and the step."""
        state = self._state_of(parameter, "adamw")
        grad: Any = parameter.grad
        return local(parameter), local(grad), local(state["exp_avg"]), local(state["exp_avg_sq"]), state["step"]

    def _step_fused_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """By torch's kernel, which takes float32 states only."""
        if not parameters:
            return
        tensors = map(self._tensors_of, parameters)
        weights, grads, means, squares, steps = map(list, zip(*tensors, strict=True))
        beta1, beta2 = group["betas"]
        adamw(
            weights, grads, means, squares, [], steps, fused=True, amsgrad=False, maximize=False, lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip

    def _step_adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        *tensors, step = self._tensors_of(parameter)
        step.add_(1)
        # What changes with the step is computed on the host, as tensors: a Python number that changes would cause
        # another compilation.
        shrink = torch.tensor(1 - group["lr"] * group["weight_decay"], dtype=torch.float32)
        rate = group["lr"] / (1 - beta1**step)
        correction = 1 - beta2**step
        self.update_adamw(*tensors, shrink, rate, correction, beta1, beta2, group["eps"])


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
    """A matrix that ranks share, and the one of them that computes it: its owner. Ranks are those of the group."""

    number: int  # of the matrix
    owner: int
    shape: torch.Size
    parts: dict[int, Part]  # rank → what it holds
    senders: list[int]  # that hold one copy of the matrix between them, the owner's own part included


def plan_rounds(matrices: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[list[Share]]:
    """Give each spread matrix an owner, so that all ranks compute about the same. In a round each owns at most one."""
    spread = {number: matrix for number, matrix in enumerate(matrices) if isinstance(matrix, DTensor)}
    work = {number: matrix.numel() * min(matrix.shape) for number, matrix in spread.items()}
    rounds: list[list[Share]] = []
    load = Counter[int]()  # rank → work
    owned = Counter[int]()  # rank → matrices
    for number in sorted(work, key=lambda number: -work[number]):
        matrix = spread[number]
        parts, copies = _spread_of(matrix.shape, matrix.device_mesh, matrix.placements, group)
        owner = min(parts, key=lambda rank: load[rank])
        senders = [rank for rank in parts if copies[rank] == copies[owner]]
        if owned[owner] == len(rounds):
            rounds.append([])
        rounds[owned[owner]].append(Share(number, owner, matrix.shape, parts, senders))
        owned[owner] += 1
        load[owner] += work[number]
    return rounds


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


def orthogonalize_all(
    updates: Sequence[Tensor], rounds: Sequence[Sequence[Share]], group: dist.ProcessGroup | None
) -> None:
    """Make matrices orthogonal, in place. `updates` are this rank's parts of them. Collective in `group`.

    The parts of the next round are on their way while one is computed.
    """
    spread = {share.number for shares in rounds for share in shares}
    for number, update in enumerate(updates):
        if number not in spread:
            update.copy_(orthogonalize(update))
    gathers = (_gather(shares, updates, group) for shares in rounds)
    arriving = next(gathers, None)
    for shares in rounds:
        assert arriving is not None
        matrix, wait = arriving
        arriving = next(gathers, None)
        wait()
        _compute_and_scatter(shares, matrix, updates, group)


def _gather(
    shares: Sequence[Share], updates: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[Tensor, Callable[[], None]]:
    """Send this rank's parts to their owners. Returns the matrix that it owns itself, and what waits for its parts."""
    me = dist.get_rank(group)
    matrix = updates[0].new_empty(0)
    outgoing = {}
    incoming = {}
    for share in shares:
        if me in share.senders:
            outgoing[share.owner] = updates[share.number]
        if me == share.owner:
            matrix = updates[0].new_empty(share.shape)
            incoming = {rank: matrix[share.parts[rank]] for rank in share.senders}
    return matrix, _exchange(outgoing, incoming, updates[0], group)


def _compute_and_scatter(
    shares: Sequence[Share], matrix: Tensor, updates: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Orthogonalize the matrix of this rank, send its parts to all that hold one, and receive those of others."""
    me = dist.get_rank(group)
    outgoing = {}
    incoming = {}
    for share in shares:
        if me in share.parts:
            incoming[share.owner] = updates[share.number]
        if me == share.owner:
            result = orthogonalize(matrix)
            outgoing = {rank: result[part] for rank, part in share.parts.items()}
    wait = _exchange(outgoing, incoming, updates[0], group)
    wait()


def _exchange(
    outgoing: dict[int, Tensor], incoming: dict[int, Tensor], like: Tensor, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Send a tensor to each rank of `outgoing`. Returns what waits for others' and fills the tensors of `incoming`.

    All are of the type and on the device of `like`.
    """
    nothing = like.new_empty(0)
    ranks = range(dist.get_world_size(group))
    sent = [outgoing.get(rank, nothing).flatten() for rank in ranks]
    sent_sizes = [len(x) for x in sent]
    sizes = [incoming.get(rank, nothing).numel() for rank in ranks]
    received = like.new_empty(sum(sizes))
    work: Any = dist.all_to_all_single(received, torch.cat(sent), sizes, sent_sizes, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        pieces = received.split(sizes)
        for rank, target in incoming.items():
            target.copy_(pieces[rank].view(target.shape))

    return wait
