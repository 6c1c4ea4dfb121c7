"""The optimizer, the learning rate and gradient clipping."""

import dataclasses
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import config as settings
from config import Config, ConfigError, ParameterGroup
from muon import GroupedOptimizer, local

logger = logging.getLogger(__name__)

WRAPPER_PREFIXES = r"_orig_mod\.|_checkpoint_wrapped_module\."
PIECE = 1024  # numbers whose squares are added up in float32
SLOWEST_BFLOAT16 = 0.98  # decay of a bfloat16 mean: it comes within 24 % of its input; at 0.999 it may never move


def check_optim(config: Config, run_folder: Path | None = None) -> None:
    """Raises ConfigError for means and islands that would not move and, in a run under way, too long a schedule."""
    optimizer, schedule, steps = config.optimizer, config.lr_scheduler, config.training.steps
    if run_folder and (fitted := fit_schedule(schedule, steps)) != schedule:
        both = f"warmup_steps = {schedule.warmup_steps} and a decay of {decay_length(steps, schedule)} steps"
        asked = f"lr_scheduler.{both} do not fit in training.steps = {steps}"
        began = settings.recorded_config(run_folder) or config
        if config.checkpoint.branch_from or (began.lr_scheduler, began.training.steps) != (schedule, steps):
            raise ConfigError(f"{asked}, and only a new run may shrink them")
        logger.info(f"{asked}: in this run they are {fitted.warmup_steps} and {decay_length(steps, fitted)}")
    if optimizer.state_dtype == "bfloat16":
        _check_decays(optimizer)
    if config.parallelism.cpu_offload and "muon" in (optimizer.name, *(group.kind for group in optimizer.groups)):
        raise ConfigError("parallelism.cpu_offload = true: Muon's matrices are not sent from host to host")
    for name in ("checkpoint", "validation"):
        section, local_steps = getattr(config, name), config.parallelism.local_steps
        if local_steps and section.enable and section.interval % local_steps:
            needed = f"a multiple of parallelism.local_steps = {local_steps}"
            raise ConfigError(f"{name}.interval = {section.interval}: must be {needed}")


def _check_decays(optimizer: settings.Optimizer) -> None:
    """Refuse running means that would hardly move in bfloat16, of any group. Raises ConfigError."""
    decays: dict[str, float] = {}
    for group in (*optimizer.groups, ParameterGroup()):  # the last one is for weights that no other pattern matches
        own = f"optimizer.groups: betas of {group.pattern!r}"
        decays |= {f"{own}[{i}]": beta for i, beta in enumerate(group.betas)}
        kind = group.kind or optimizer.name
        if kind == "muon" and not group.betas:
            decays["optimizer.momentum"] = optimizer.momentum
        if group.kind != "muon" and not group.betas:  # Muon leaves to AdamW what is no matrix of a layer
            decays |= {"optimizer.beta1": optimizer.beta1, "optimizer.beta2": optimizer.beta2}
        if group.pattern == "*":
            break  # later groups get no weights
    for name, decay in decays.items():
        if decay > SLOWEST_BFLOAT16:
            limit = f'must be at most {SLOWEST_BFLOAT16} with optimizer.state_dtype = "bfloat16"'
            raise ConfigError(f"{name} = {decay}: {limit}")


def build_groups(
    weights: Iterable[tuple[str, Tensor]], settings: settings.Optimizer, whole: bool = False
) -> list[dict[str, Any]]:
    """Groups of weights for an optimizer. The first of `optimizer.groups` whose pattern matches a name counts.

    Without one, weights of less than two dimensions have no decay and, if the optimizer is Muon, it gets the matrices
    of the layers and AdamW the rest. Raises ConfigError for Muon of what is no matrix and, if these are all weights of
    the `whole` model, for a pattern without a match.
    """
    groups: dict[tuple[int, str, float], dict[str, Any]] = {}
    for name, weight in weights:
        name = re.sub(WRAPPER_PREFIXES, "", name)
        matches = (i for i, group in enumerate(settings.groups) if fnmatchcase(name, group.pattern))
        number = next(matches, len(settings.groups))
        group = [*settings.groups, ParameterGroup()][number]
        is_inner = weight.ndim == 2 and name.startswith("layers.")
        kind = group.kind or (settings.name if is_inner else "adamw")
        if kind == "muon" and weight.ndim != 2:
            raise ConfigError(f'optimizer.groups: {group.pattern!r} has kind = "muon", but {name} is no matrix')
        if group.betas and len(group.betas) != (needed := 1 if kind == "muon" else 2):
            raise ConfigError(
                f"optimizer.groups: betas = {list(group.betas)} of {group.pattern!r}: {kind} has {needed}"
            )
        decay = group.weight_decay if group.weight_decay >= 0 else settings.weight_decay if weight.ndim >= 2 else 0.0
        first = settings.momentum if kind == "muon" else settings.beta1
        shared = {
            "kind": kind, "pattern": group.pattern, "lr": settings.lr * group.lr, "factor": group.lr,
            "weight_decay": decay, "betas": tuple(group.betas) or (first, settings.beta2), "eps": settings.eps,
        }  # fmt: skip
        groups.setdefault((number, kind, decay), {"params": [], **shared})["params"].append(weight)
    for number, group in enumerate(settings.groups):
        if whole and not any(number == key[0] for key in groups):
            raise ConfigError(f"optimizer.groups: {group.pattern!r} matches no weight that an earlier pattern leaves")
    return list(groups.values())


def summarize_groups(model: nn.Module, optimizer: settings.Optimizer) -> list[str]:
    """A line for each group of the whole model's weights, none if all have the usual AdamW. Raises ConfigError."""
    names = {id(weight): re.sub(r"\.\d+\.", ".*.", name) for name, weight in model.named_parameters()}
    lines = []
    for group in build_groups(model.named_parameters(), optimizer, whole=True):
        kinds = sorted({names[id(weight)] for weight in group["params"]})
        which = ", ".join(kinds[:2]) + (f" and {len(kinds) - 2} more" if len(kinds) > 2 else "")
        numbers, rate = sum(weight.numel() for weight in group["params"]), f"lr {group['lr']:g}"
        kind, decay = group["kind"], f"decay {group['weight_decay']:g}"
        lines.append(
            f"optimizer: {kind}, {rate}, {decay}: {len(group['params'])} weights, {numbers:,} numbers: {which}"
        )
    return lines if optimizer.groups or optimizer.name != "adamw" else []


class AdamW(torch.optim.AdamW):
    """torch's, with a state that can be allocated before the first step."""

    def allocate_state(self) -> None:
        """Give every weight the state that its first step would begin with, for a load to fill."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.requires_grad and not self.state[weight]:
                    state = self.state[weight]
                    state["step"] = torch.zeros((), device=weight.device if group["fused"] else None)
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)


def build_optimizer(
    parts: list[nn.Module],
    optimizer: settings.Optimizer,
    compile: settings.Compile | None = None,
    group: dist.ProcessGroup | None = None,
    param_dtype: str = "float32",
) -> AdamW | GroupedOptimizer:
    """AdamW (Loshchilov and Hutter 2019) or, for some of the weights, Muon. `group`: ranks that update together.

    Muon orthogonalizes in `param_dtype`, in which the model's matmuls compute: bfloat16 suffices for Newton-Schulz.

    AdamW alone is torch's fused kernel, which refuses bfloat16 states. Otherwise it is our own, compiled if the model
    is.
    """
    groups = build_groups(((n, p) for part in parts for n, p in part.named_parameters() if p.requires_grad), optimizer)
    if optimizer.state_dtype == "float32" and all(group["kind"] == "adamw" for group in groups):
        return AdamW(groups, fused=True)
    dtypes = getattr(torch, optimizer.state_dtype), getattr(torch, param_dtype)
    return GroupedOptimizer(groups, *dtypes, compile or settings.Compile(), group)


def state_allocator(optimizer: Any) -> Callable[[], None]:
    """What gives every weight its state, for a load to fill: the optimizer's own method.

    For one of torch's that a fork builds, without such a method, a step with gradients and rates of 0.
    """
    own = getattr(optimizer, "allocate_state", None)
    if own is not None:
        return own
    return partial(_init_optim_state, optimizer)


class OuterOptimizer:
    """Lets islands train alone and meet now and then (DiLoCo, Douillard et al. 2023, algorithm 1).

    At a meeting the islands' mean change of the weights since the last one is the gradient of SGD with Nesterov
    momentum. All go on from its result. Unlike in the paper, AdamW's running means are averaged too. So islands that
    have met are equal, one checkpoint holds them all, and their number may change. This costs three times the bytes,
    but only once in many steps. The momentum is part of the state of `optimizer`, and so of checkpoints.
    """

    def __init__(
        self, optimizer: AdamW | GroupedOptimizer, islands: DeviceMesh, parallelism: settings.Parallelism, steps: int
    ):
        self.optimizer, self.islands, self.steps = optimizer, islands, steps
        self.lr, self.momentum = parallelism.outer_lr, parallelism.outer_momentum
        self.local_steps = parallelism.local_steps
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.anchors: list[Tensor] = []  # the weights of the last meeting
        self.steps_alone = 0
        optimizer.register_step_post_hook(self._count_step)

    @torch.no_grad()
    def meet(self, step: int) -> None:
        """Bring the islands to the same weights, if that is due and they have trained since they met. Collective.

        The first call, after a load and before any step, finds them with the same weights.
        """
        if not self.anchors:
            self.anchors = [local(parameter).clone() for parameter in self.parameters]
        if not (self.steps_alone and due(step, self.local_steps, self.steps)):
            return
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            weights, state = local(parameter), self.optimizer.state[parameter]
            way = _mean_of_islands(anchor - weights, self.islands)
            momentum = local(state["outer_momentum"]).mul_(self.momentum).add_(way)
            weights.copy_(anchor.sub_(way.add_(momentum, alpha=self.momentum), alpha=self.lr))
            for name in sorted(state):
                if name != "outer_momentum" and state[name].ndim > 0:  # AdamW's means; not its step
                    _mean_of_islands(local(state[name]), self.islands)
        self.steps_alone = 0

    def allocate_state(self) -> None:
        """Give every weight the state of the optimizer and the outer momentum, for a load to fill."""
        self.optimizer.allocate_state()
        self._allocate_momentum()

    def _count_step(self, *_: Any) -> None:
        self.steps_alone += 1
        self._allocate_momentum()

    def _allocate_momentum(self) -> None:
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            if "outer_momentum" not in state:
                state["outer_momentum"] = torch.zeros_like(parameter)


def _mean_of_islands(value: Tensor, islands: DeviceMesh) -> Tensor:
    """Average `value` over the islands, in place. If one island's is not finite, no island's result is."""
    dist.all_reduce(value, group=islands.get_group())
    return value.div_(islands.size())


def fit_schedule(schedule: settings.LRScheduler, steps: int) -> settings.LRScheduler:
    """The schedule. If warm-up and decay take more than all steps, as in a short trial, both shrink in proportion."""
    decay_steps = decay_length(steps, schedule)
    if (both := schedule.warmup_steps + decay_steps) <= steps:
        return schedule
    warmup_steps = schedule.warmup_steps * steps // both
    return dataclasses.replace(schedule, warmup_steps=warmup_steps, decay_steps=steps - warmup_steps)


def learning_rate(step: int, steps: int, peak: float, schedule: settings.LRScheduler) -> float:
    """The learning rate of a step; the first step is 1.

    A pure function of the step, so a checkpoint holds no schedule. After a linear warm-up `constant` holds the peak;
    `wsd` (Hu et al. 2024, MiniCPM) holds it, then decays at the end: as a line, as 1 - the root of the decay's share
    (Hägele et al. 2024), or as half a cosine; `cosine` does that from the end of the warm-up (Loshchilov and Hutter
    2017).
    """
    schedule = fit_schedule(schedule, steps)
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    shape, decay_steps = schedule.decay, decay_length(steps, schedule)
    if schedule.schedule == "cosine":
        shape = "cosine"
    done = max(0.0, 1 - (steps - step) / decay_steps) if decay_steps else 0.0
    share = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done), "cosine": 0.5 * (1 + math.cos(math.pi * done))}[shape]
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * share)


def decay_length(steps: int, schedule: settings.LRScheduler) -> int:
    """Steps at the end of a run in which the rate falls."""
    if schedule.schedule == "wsd":
        return schedule.decay_steps or round(schedule.decay_fraction * steps)
    return max(0, steps - schedule.warmup_steps) if schedule.schedule == "cosine" else 0


def due(step: int, interval: int, steps: int) -> bool:
    """Whether what comes every `interval` steps, and after the last of all `steps`, comes after `step`."""
    return step % interval == 0 or step == steps


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, float]:
    """Set the rate of every group: `lr` times its factor. Returns `lr`, and `lr/PATTERN` of groups with a factor."""
    rates = {"lr": lr}
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("factor", 1.0)
        if group["lr"] != lr:
            rates[f"lr/{group['pattern']}"] = group["lr"]
    return rates


def clip_grad_norm_(
    parameters: Sequence[Tensor], max_norm: float, pp: DeviceMesh | None = None, islands: DeviceMesh | None = None
) -> Tensor:
    """Scale gradients in place to a total norm of at most `max_norm` (0: leave them). Returns the norm before.

    The norm is over all ranks, including those of the pipeline `pp`, and stays on the device. Each of the `islands`
    clips by its own, and returns their mean. If it is not finite, gradients may be NaN or 0 afterwards, and the loop
    must find it.
    """
    norm = nn.utils.get_total_norm([_with_same_norm(p.grad) for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pp is not None and pp.size() > 1:
        squared = norm.square()
        dist.all_reduce(squared, group=pp.get_group())
        norm = squared.sqrt()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return _mean_of_islands(norm, islands) if islands else norm


def _with_same_norm(grad: Tensor) -> Tensor:
    """`grad` itself or, in place of one on the host, its norm.

    On CPU torch adds up the squares of a tensor in a few float32 numbers (2.11 to 2.13): the norm of [128256, 4096]
    normal values comes out 9 % too low. Over PIECE numbers the error is below 1e-6.
    """
    if grad.device.type != "cpu":
        return grad
    if isinstance(grad, DTensor):
        places = [Replicate() if place.is_replicate() else Shard(0) for place in grad.placements]
        return DTensor.from_local(_with_same_norm(grad.to_local()), grad.device_mesh, places)
    if grad.dim() > 1 and grad.shape[-1] <= PIECE:
        norms = torch.linalg.vector_norm(grad, dim=-1)
    else:
        flat = grad.reshape(-1)
        pieces = flat[: len(flat) // PIECE * PIECE].view(-1, PIECE)
        norms = torch.cat((torch.linalg.vector_norm(pieces, dim=1), flat[pieces.numel() :].norm()[None]))
    return torch.linalg.vector_norm(norms, dtype=torch.float64)[None].to(grad.dtype)


def main(argv: Sequence[str]) -> None:
    """Draw the learning rate of a config over its steps."""
    loaded = settings.load_config(argv)
    steps, peak = loaded.training.steps, loaded.optimizer.lr
    check_optim(loaded)
    for step in sorted({max(1, round(steps * part / 20)) for part in range(21)}):
        lr = learning_rate(step, steps, peak, loaded.lr_scheduler)
        print(f"{step:>9,} {lr:>9.2e} {'#' * round(60 * lr / peak)}")


if __name__ == "__main__":
    with settings.command_line():
        main(sys.argv[1:])
