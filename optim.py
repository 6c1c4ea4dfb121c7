"""The optimizer and the learning rate."""

import logging
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh

import config as settings
from checkpoint.state import clean_name
from config import Config, ConfigError, ParameterGroup
from muon import UPDATES, GroupedOptimizer, local

logger = logging.getLogger(__name__)

LARGE_JUMP = 0.1  # of the rate, from which on a resume says so

SLOWEST_BFLOAT16 = 0.98  # decay of a bfloat16 mean: it comes within 24 % of its input; at 0.999 it may never move


def check_optim(config: Config) -> None:
    """Refuse island intervals that do not divide; say that a schedule is scaled down to fit. Raises ConfigError."""
    optimizer = config.optimizer
    kinds = {optimizer.name, *(group.kind for group in optimizer.groups)}
    if config.parallelism.cpu_offload and "muon" in kinds:
        raise ConfigError("parallelism.cpu_offload = true: Muon's matrices are not sent from host to host")
    local_steps = config.parallelism.local_steps
    for name, section in (("checkpoint", config.checkpoint), ("validation", config.validation)):
        if local_steps and section.enable and section.interval % local_steps:
            needed = f"must be a multiple of parallelism.local_steps = {local_steps}"
            raise ConfigError(f"{name}.interval = {section.interval}: {needed}")
    schedule = config.lr_scheduler
    steps = config.training.steps
    asked = schedule.warmup_steps, _decay_steps(schedule, steps)
    found = fit_schedule(schedule, steps)
    if found != asked:
        misfit = "warmup_steps = {} and a decay of {} steps".format(*asked)
        fitting = "{} and {}".format(*found)
        logger.info(f"lr_scheduler.{misfit} do not fit in training.steps = {steps}: in this run they are {fitting}")


def build_groups(
    weights: Iterable[tuple[str, Tensor]], settings: settings.Optimizer, whole: bool = False
) -> list[dict[str, Any]]:
    """Groups of weights for an optimizer. The first of `optimizer.groups` whose pattern matches a name counts.

    Without one, weights of less than two dimensions have no decay and, if the optimizer is Muon, it gets the matrices
    of the layers and AdamW the rest. Raises ConfigError for Muon of what is no matrix and, if these are all weights of
    the `whole` model, for a pattern without a match.
    """
    patterns = [*settings.groups, ParameterGroup()]  # the last one is for weights that no other pattern matches
    matched = set()
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, weight in weights:
        name = clean_name(name)
        number = next(i for i, group in enumerate(patterns) if fnmatchcase(name, group.pattern))
        matched.add(number)
        fields = _group_fields(name, weight, patterns[number], settings)
        fields["factor"] = fields["lr"] / (settings.lr or 1.0)
        group = groups.setdefault((number, *fields.values()), {"params": [], **fields})
        group["params"].append(weight)
    for number, asked in enumerate(settings.groups):
        if whole and number not in matched:
            raise ConfigError(f"optimizer.groups: {asked.pattern!r} matches no weight that an earlier pattern leaves")
    return list(groups.values())


def _group_fields(name: str, weight: Tensor, group: ParameterGroup, settings: settings.Optimizer) -> dict[str, Any]:
    """What an optimizer must know of a weight that the pattern of `group` matches. Raises ConfigError."""
    kind = group.kind or "adamw"
    if not group.kind and weight.ndim == 2 and name.startswith("layers."):
        kind = settings.name
    if kind not in UPDATES:
        raise ConfigError(f"optimizer.name = {kind!r}: UPDATES in muon.py has no such kind of group")
    if kind == "muon" and weight.ndim != 2:
        raise ConfigError(f'optimizer.groups: {group.pattern!r} has kind = "muon", but {name} is no matrix')
    weight_decay = group.weight_decay
    if weight_decay is None:
        weight_decay = settings.weight_decay if weight.ndim >= 2 else 0.0
    betas = {"optimizer.beta1": settings.beta1, "optimizer.beta2": settings.beta2}
    if kind == "muon":
        betas = {"optimizer.momentum": settings.momentum}
    if group.betas:
        asked = f"optimizer.groups: betas of {group.pattern!r}"
        if len(group.betas) != len(betas):
            raise ConfigError(f"{asked}: {list(group.betas)}, but {kind} has {len(betas)}")
        betas = {f"{asked}[{i}]": beta for i, beta in enumerate(group.betas)}
    for key, beta in betas.items():
        if settings.state_dtype == "bfloat16" and beta > SLOWEST_BFLOAT16:
            limit = f'must be at most {SLOWEST_BFLOAT16} with optimizer.state_dtype = "bfloat16"'
            raise ConfigError(f"{key} = {beta}: {limit}")
    return {
        "kind": kind,
        "pattern": group.pattern,
        "lr": settings.lr * group.lr,
        "weight_decay": weight_decay,
        "betas": tuple(betas.values()),
        "eps": settings.eps,
    }


def summarize_groups(model: nn.Module, optimizer: settings.Optimizer) -> list[str]:
    """A line for each group of the whole model's weights, none if all have the usual AdamW. Raises ConfigError."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    lines = []
    for group in build_groups(model.named_parameters(), optimizer, whole=True):
        weights = group["params"]
        numbers = sum(weight.numel() for weight in weights)
        settings = f"{group['kind']}, lr {group['lr']:g}, decay {group['weight_decay']:g}"
        which = f"{len(weights)} weights, such as {names[id(weights[0])]}"
        lines.append(f"optimizer: {settings}: {numbers:,} numbers in {which}")
    return lines if optimizer.groups or optimizer.name != "adamw" else []


def build_optimizer(
    parts: list[nn.Module],
    optimizer: settings.Optimizer,
    compile: settings.Compile | None = None,
    group: dist.ProcessGroup | None = None,
    param_dtype: str = "float32",
) -> GroupedOptimizer:
    """AdamW (Loshchilov and Hutter 2019) and, for some of the weights, Muon. `group`: ranks that update together.

    Muon orthogonalizes in `param_dtype`, in which the model's matmuls compute: bfloat16 suffices for Newton-Schulz.
    """
    weights = []
    for part in parts:
        weights += [(name, weight) for name, weight in part.named_parameters() if weight.requires_grad]
    state_dtype = getattr(torch, optimizer.state_dtype)
    muon_dtype = getattr(torch, param_dtype)
    compile = compile or settings.Compile()
    built = GroupedOptimizer(build_groups(weights, optimizer), state_dtype, muon_dtype, compile, group)
    if state_dtype == torch.float32 and not built.fuses:
        logger.info("optimizer: _adamw_update was edited, so torch's fused AdamW does not stand in for it")
    return built


def allocate_state(optimizer: Any) -> None:
    """Give every weight the state that its first step would begin with, for a load to fill.

    An optimizer without such a method, as torch's, takes a step for it, with gradients and rates of 0, by DCP.
    """
    own = getattr(optimizer, "allocate_state", None)
    if own is not None:
        own()
    else:
        _init_optim_state(optimizer)


class OuterOptimizer:
    """Lets islands train alone and meet now and then (DiLoCo, Douillard et al. 2023, algorithm 1).

    At a meeting the islands' mean change of the weights since the last one is the gradient of SGD with Nesterov
    momentum. All go on from its result. Unlike in the paper, AdamW's running means are averaged too. So islands that
    have met are equal, one checkpoint holds them all, and their number may change. This costs three times the bytes,
    but only once in many steps. The momentum is part of the state of `optimizer`, and so of checkpoints.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, islands: DeviceMesh, parallelism: settings.Parallelism):
        self.optimizer = optimizer
        self.islands = islands
        self.lr = parallelism.outer_lr
        self.momentum = parallelism.outer_momentum
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.anchors: list[Tensor] = []  # the weights of the last meeting
        self.apart = False  # whether an island has updated its weights since they met

    def begin(self) -> None:
        """Note the weights, which all islands share after a load and before any step."""
        self.anchors = [local(parameter).clone() for parameter in self.parameters]

    @torch.no_grad()
    def meet(self) -> None:
        """Bring the islands to the same weights, if they have trained since they met. Collective."""
        if not self.apart:
            return
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            weights = local(parameter)
            state = self.optimizer.state[parameter]
            change = _mean_of_islands(anchor - weights, self.islands)
            momentum = local(self._momentum_of(parameter))
            momentum.mul_(self.momentum).add_(change)
            anchor.sub_(change.add_(momentum, alpha=self.momentum), alpha=self.lr)
            weights.copy_(anchor)
            for name in sorted(state):
                if name != "outer_momentum" and state[name].ndim > 0:  # AdamW's means; not its step
                    _mean_of_islands(local(state[name]), self.islands)
        self.apart = False

    def allocate_state(self) -> None:
        """Give every weight the state of the optimizer and the outer momentum, for a load to fill."""
        allocate_state(self.optimizer)
        for parameter in self.parameters:
            self._momentum_of(parameter)

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """The outer momentum of a weight; zeros at first."""
        state = self.optimizer.state[parameter]
        if "outer_momentum" not in state:
            state["outer_momentum"] = torch.zeros_like(parameter)
        return state["outer_momentum"]


def _mean_of_islands(value: Tensor, islands: DeviceMesh) -> Tensor:
    """Average `value` over the islands, in place. If one island's is not finite, no island's result is."""
    dist.all_reduce(value, group=islands.get_group())
    return value.div_(islands.size())


def fit_schedule(schedule: settings.LRScheduler, steps: int) -> tuple[int, int]:
    """Steps of warm-up and of decay. If both exceed `steps`, they are scaled down."""
    warmup_steps = schedule.warmup_steps
    decay_steps = _decay_steps(schedule, steps)
    both = warmup_steps + decay_steps
    if both > steps:
        warmup_steps = warmup_steps * steps // both
        decay_steps = steps - warmup_steps
    return warmup_steps, decay_steps


def _decay_steps(schedule: settings.LRScheduler, steps: int) -> int:
    """Steps at the end of a run in which the rate falls, as asked for."""
    if schedule.schedule == "wsd":
        return schedule.decay_steps or round(schedule.decay_fraction * steps)
    if schedule.schedule == "cosine":
        return max(0, steps - schedule.warmup_steps)
    if schedule.schedule == "constant":
        return 0
    raise ConfigError(f"lr_scheduler.schedule = {schedule.schedule!r}: _decay_steps in optim.py has no such schedule")


def learning_rate(step: int, steps: int, peak: float, schedule: settings.LRScheduler, batch: int = 0) -> float:
    """The learning rate of a step; the first step is 1. `batch`: its sequences, over all ranks.

    A pure function of the step and its size, so a checkpoint holds no schedule. After a linear warm-up `constant` holds
    the peak; `wsd` (Hu et al. 2024, MiniCPM) holds it, then decays at the end: as a line, as 1 - the root of the
    decay's share (Hägele et al. 2024), or as half a cosine; `cosine` does that from the end of the warm-up (Loshchilov
    and Hutter 2017).
    """
    if schedule.follow_batch:
        peak *= math.sqrt(batch / schedule.follow_batch)
    warmup_steps, decay_steps = fit_schedule(schedule, steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    left = steps - step
    if left >= decay_steps:
        return peak
    done = 1 - left / decay_steps  # share of the decay
    shape = "cosine" if schedule.schedule == "cosine" else schedule.decay
    if shape == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif shape == "sqrt":
        share = 1 - math.sqrt(done)
    elif shape == "linear":
        share = 1 - done
    else:
        raise ConfigError(f"lr_scheduler.decay = {shape!r}: learning_rate in optim.py has no such shape")
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * share)


def decay_start(schedule: settings.LRScheduler, steps: int) -> int:
    """The step after which the rate of `wsd` falls; 0 for other schedules."""
    if schedule.schedule != "wsd":
        return 0
    return steps - fit_schedule(schedule, steps)[1]


def log_jump(config: Config, run_folder: Path, step: int) -> None:
    """Say on a resume after `step` that its settings change the learning rate there."""
    began = settings.recorded_config(run_folder)
    if not (step and began):
        return
    rates = []
    for one in (began, config):
        steps = one.training.steps
        schedule = one.lr_scheduler
        rates.append(learning_rate(min(step + 1, steps), steps, one.optimizer.lr, schedule, schedule.follow_batch))
    before, after = rates
    if abs(after - before) > LARGE_JUMP * before:
        logger.info(f"resume: the learning rate goes from {before:.1e} to {after:.1e} here, and the loss may rise")


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
