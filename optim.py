"""The optimizer, the learning rate and gradient clipping."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import config as settings
from config import Config, ConfigError
from parallel.gradients import compile_each_shape

logger = logging.getLogger(__name__)

PIECE = 1024  # numbers whose squares are added up in float32
SLOWEST_BFLOAT16 = 0.98  # decay of a bfloat16 mean: it comes within 24 % of its input; at 0.999 it may never move


def check_optim(config: Config, run_folder: Path | None = None) -> None:
    """Raises ConfigError for means and islands that would not move and, in a run under way, too long a schedule."""
    optimizer, schedule, steps = config.optimizer, config.lr_scheduler, config.training.steps
    if run_folder and (fitted := fit_schedule(schedule, steps)) != schedule:
        asked = f"lr_scheduler.warmup_steps = {schedule.warmup_steps} and decay_fraction = {schedule.decay_fraction:g}"
        asked, file = f"{asked} do not fit in training.steps = {steps}", run_folder / "config.toml"
        began = settings.from_dict(settings.read_recorded(file.read_bytes(), file)) if file.is_file() else config
        if config.checkpoint.branch_from or (began.lr_scheduler, began.training.steps) != (schedule, steps):
            raise ConfigError(f"{asked}, and only a new run may shrink them")
        logger.info(f"{asked}: in this run they are {fitted.warmup_steps} and {fitted.decay_fraction:g}")
    slowest = max(optimizer.beta1, optimizer.beta2)
    if optimizer.state_dtype == "bfloat16" and slowest > SLOWEST_BFLOAT16:
        raise ConfigError(f"optimizer.beta1 or beta2 = {slowest}: must be at most {SLOWEST_BFLOAT16} in bfloat16")
    for name in ("checkpoint", "validation"):
        section, local_steps = getattr(config, name), config.parallelism.local_steps
        if local_steps and section.enable and section.interval % local_steps:
            needed = f"a multiple of parallelism.local_steps = {local_steps}"
            raise ConfigError(f"{name}.interval = {section.interval}: must be {needed}")


def build_optimizer(
    parts: list[nn.Module], optimizer: settings.Optimizer, compile: settings.Compile | None = None
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), without weight decay for norms and biases.

    It is torch's fused kernel. That refuses bfloat16 states, for which it is our own, compiled if the model is.
    """
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    options: Any = {"lr": optimizer.lr, "betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps}
    if optimizer.state_dtype == "bfloat16":
        update = compile_each_shape(_adamw_update, compile) if compile else _adamw_update
        return SmallStateAdamW(groups, update, **options)
    return torch.optim.AdamW(groups, **options, fused=True)


class SmallStateAdamW(torch.optim.Optimizer):
    """AdamW that stores its running means in bfloat16, under the state names of torch's AdamW.

    Both means are updated in float32 and rounded to nearest. With beta2 0.95 a mean follows its input to within 8 %:
    any closer, an update is less than half of bfloat16's last bit and rounds away.
    """

    def __init__(self, groups: list[dict[str, Any]], update: Callable[..., None], **defaults: Any):
        super().__init__(groups, defaults)
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            # What changes with the step is computed on the host, as tensors: a Python number that changes would cause
            # another compilation.
            shrink = torch.tensor(1 - group["lr"] * group["weight_decay"], dtype=torch.float32)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                rate = group["lr"] / (1 - beta1 ** state["step"])
                correction = 1 - beta2 ** state["step"]
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                self.update(*map(_local, tensors), shrink, rate, correction, beta1, beta2, group["eps"])


class OuterOptimizer:
    """Lets islands train alone and meet now and then (DiLoCo, Douillard et al. 2023, algorithm 1).

    At a meeting the islands' mean change of the weights since the last one is the gradient of SGD with Nesterov
    momentum. All go on from its result. Unlike in the paper, AdamW's running means are averaged too. So islands that
    have met are equal, one checkpoint holds them all, and their number may change. This costs three times the bytes,
    but only once in many steps. The momentum is part of the state of `optimizer`, and so of checkpoints.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, islands: DeviceMesh, parallelism: settings.Parallelism, steps: int
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
            self.anchors = [_local(parameter).clone() for parameter in self.parameters]
            self.steps_alone = 0  # a load makes a step of its own, so that there is a state to fill
        if not (self.steps_alone and due(step, self.local_steps, self.steps)):
            return
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            weights, state = _local(parameter), self.optimizer.state[parameter]
            way = _mean_of_islands(anchor - weights, self.islands)
            momentum = _local(state["outer_momentum"]).mul_(self.momentum).add_(way)
            weights.copy_(anchor.sub_(way.add_(momentum, alpha=self.momentum), alpha=self.lr))
            for name in sorted(state):
                if name != "outer_momentum" and state[name].ndim > 0:  # AdamW's means; not its step
                    _mean_of_islands(_local(state[name]), self.islands)
        self.steps_alone = 0

    def _count_step(self, *_: Any) -> None:
        self.steps_alone += 1
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            if "outer_momentum" not in state:
                state["outer_momentum"] = torch.zeros_like(parameter)


def _mean_of_islands(value: Tensor, islands: DeviceMesh) -> Tensor:
    """Average `value` over the islands, in place. If one island's is not finite, no island's result is."""
    dist.all_reduce(value, group=islands.get_group())
    return value.div_(islands.size())


def _local(x: Tensor) -> Tensor:
    """This rank's values as a plain tensor that shares memory: no DTensor, no float8 wrapper."""
    x = x.to_local() if isinstance(x, DTensor) else x
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


def fit_schedule(schedule: settings.LRScheduler, steps: int) -> settings.LRScheduler:
    """The schedule. If warm-up and decay take more than all steps, as in a short trial, both shrink in proportion."""
    decay_steps = round(schedule.decay_fraction * steps) if schedule.schedule == "wsd" else 0
    if (both := schedule.warmup_steps + decay_steps) <= steps:
        return schedule
    warmup_steps = schedule.warmup_steps * steps // both
    decay_fraction = 1 - warmup_steps / steps if decay_steps else schedule.decay_fraction
    return dataclasses.replace(schedule, warmup_steps=warmup_steps, decay_fraction=decay_fraction)


def learning_rate(step: int, steps: int, peak: float, schedule: settings.LRScheduler) -> float:
    """The learning rate of a step; the first step is 1.

    A pure function of the step, so a checkpoint holds no schedule. After a linear warm-up
    `wsd` holds the peak, then decays linearly over the last `decay_fraction` of all steps (Hu et al. 2024, MiniCPM);
    `cosine` follows half a cosine from the end of the warm-up to the last step (Loshchilov and Hutter 2017).
    """
    schedule = fit_schedule(schedule, steps)
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.schedule == "wsd":
        decay_steps = round(schedule.decay_fraction * steps)
        share = min(1.0, (steps - step) / decay_steps) if decay_steps else 1.0
    else:
        done = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * share)


def due(step: int, interval: int, steps: int) -> bool:
    """Whether what comes every `interval` steps, and after the last of all `steps`, comes after `step`."""
    return step % interval == 0 or step == steps


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the same rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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
