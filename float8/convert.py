"""Convert linear layers to float8, by torchao's dynamically scaled recipes.

torchao is imported where it is used: it takes seconds to load, and only float8 runs need it.
"""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import config as settings
from config import Config, ConfigError
from float8.cpu import replace_matmul
from parallel.stand_ins import check_stand_in, numbers, with_parts

logger = logging.getLogger(__name__)

ONE_SCALE = "tensorwise"  # the recipe with one scale per tensor, independent of which rank holds which rows


def gathers_float8(float8: settings.Float8) -> bool:
    """Whether FSDP2 gathers the converted weights in float8."""
    return float8.enable and float8.fsdp_all_gather != "off" and float8.recipe == ONE_SCALE


def check_float8(config: Config, here: bool = True) -> None:
    """Raises ConfigError for settings that contradict each other and, for a run `here`, a device without float8."""
    float8 = config.float8
    if not float8.enable:
        return
    group = config.parallelism.reshard_group_size
    if group and gathers_float8(float8):
        raise ConfigError(
            f"parallelism.reshard_group_size = {group}: FSDP2 gathers no float8 weights from such groups; "
            'set float8.fsdp_all_gather = "off"'
        )
    if own_kernels(float8) and float8.recipe == "rowwise_with_gw_hp":
        raise ConfigError(f'float8.kernels = "own": cannot be used with float8.recipe = "{float8.recipe}"')
    _check_tokens(config)
    # CPUs need no check: they compute float8 matmuls for real, if not fast.
    if here and torch.cuda.is_available():
        _check_gpu()


def _check_tokens(config: Config) -> None:
    if config.float8.recipe == "rowwise_with_gw_hp":
        return
    training, parallelism = config.training, config.parallelism
    sequences = training.local_batch_size if parallelism.pp == 1 else parallelism.pp_microbatch_size
    tokens = sequences * training.max_seq_len // parallelism.cp
    multiple = 16
    float8 = config.float8
    is_skipped = any(part in "output" for part in float8.skip)
    is_output_in_float8 = any(part in "output" for part in float8.always) or not is_skipped
    if is_output_in_float8 and parallelism.tp == parallelism.pp == 1:
        multiple *= training.loss_chunks or 4  # each chunk of the loss sums its tokens
    if tokens % multiple:
        raise ConfigError(
            f"float8.enable = true: sequences x training.seq_len / parallelism.cp = {sequences} x "
            f"{training.max_seq_len} / {parallelism.cp} = {tokens} tokens must be a multiple of {multiple}, as it sums "
            "them"
        )


def _check_gpu() -> None:
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        needed = "has no float8 matmul, as from compute capability 8.9 on"
        raise ConfigError(f"float8.enable = true: {name} {needed}")


def convert_to_float8(
    model: nn.Module, float8: settings.Float8, tp: int = 1, shards: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Convert the linear layers of `model` in place. Call it before compiling and before sharding over `tp` x `shards`.

    Returns the names of the converted layers, and name → reason for the others. Raises ConfigError if none is
    converted, or if no layer matches a name in `skip`.
    """
    replace_matmul()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    _check_skip(list(linears), float8)
    converted: list[str] = []
    skipped: dict[str, str] = {}
    uneven: dict[str, None] = {}
    for name, linear in linears.items():
        reason = _reason_to_skip(linear, name, float8, tp)
        if reason:
            skipped[name] = reason
            continue
        _check_edits(name, linear, float8)
        own = float8
        if gathers_float8(float8) and linear.out_features % (tp * shards):
            uneven[_kind(name)] = None
            own = dataclasses.replace(float8, fsdp_all_gather="off")
        model.set_submodule(name, build_linear(linear, own))
        converted.append(name)
    if uneven:  # torchao does not pad the rank with fewer rows and loses its scale: ranks would hang
        rows = ", ".join(uneven)
        logger.info(f"float8: {tp * shards} ranks cannot share the rows of {rows} evenly: gathered as without float8")
    if not converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        hint = 'for small layers set float8.filter = "all"'
        raise ConfigError(f"float8.enable = true: no linear layer can be converted ({reasons}); {hint}")
    if own_kernels(float8):
        from float8.layers import convert_around

        convert_around(model, norms=tp == 1)
    return converted, skipped


def own_kernels(float8: settings.Float8) -> bool:
    """Whether layers cast by the kernels of float8/kernels.py, not as torchao does."""
    return float8.enable and float8.kernels == "own"


def _check_edits(name: str, linear: nn.Linear, float8: settings.Float8) -> None:
    """Refuse a layer whose forward a fork has edited, or whose bias own kernels would drop. Raises ConfigError."""
    instead = f'float8.skip = ["{name.rpartition(".")[2]}"]'
    if own_kernels(float8) and linear.bias is not None:
        raise ConfigError(f'{name}: has a bias, which float8.kernels = "own" cannot add: set {instead}')
    x, weight = numbers(4, 8), numbers(16, 8)
    bias = None if linear.bias is None else numbers(16)

    def own(x: Tensor, weight: Tensor) -> Tensor:
        return with_parts(linear, weight=weight, bias=bias)(x)

    stand_in = "float8.convert.build_linear"
    check_stand_in(name, own, partial(F.linear, bias=bias), [x, weight], stand_in, instead)
    compute: Any = getattr(linear, "compute", None)  # of the model's logits
    if compute is not None:
        check_stand_in(f"{name}.compute", compute, F.linear, [x, weight], stand_in, instead)


def build_linear(linear: nn.Linear, float8: settings.Float8) -> nn.Linear:
    """A float8 layer with the weight of `linear`."""
    from float8.layers import Linear, OwnLinear

    linear_config = build_linear_config(float8)
    if own_kernels(float8):
        layer: Any = OwnLinear.from_float(linear, linear_config)
        layer.recipe = float8.recipe
        return layer
    return Linear.from_float(linear, linear_config)


def build_linear_config(float8: settings.Float8) -> Any:
    """torchao's Float8LinearConfig for these settings.

    `round_scales_to_power_of_2` is the recipe's. No recipe that sets it has the float8 all-gather, with which torchao
    (0.18) would ignore it.
    """
    from torchao.float8.config import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(float8.recipe)
    return dataclasses.replace(recipe, enable_fsdp_float8_all_gather=gathers_float8(float8))


def summarize(converted: list[str], skipped: dict[str, str]) -> str:
    """One line: how many layers of which kinds are in float8, which kinds are not, and why."""
    kinds = dict.fromkeys(_kind(name) for name in converted)
    reasons = dict.fromkeys(f"{_kind(name)} ({reason})" for name, reason in skipped.items())
    return f"{len(converted)} linear layers ({', '.join(kinds)}); not: {', '.join(reasons) or 'none'}"


def _kind(name: str) -> str:
    """`layers.3.attention.wq` → `attention.wq`, the same for every block."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _check_skip(names: Sequence[str], float8: settings.Float8) -> None:
    kinds = dict.fromkeys(map(_kind, names))
    for field in ("skip", "always"):
        by_default = getattr(settings.Float8(), field)  # a model may lack those
        for part in getattr(float8, field):
            if part not in by_default and not any(part in name for name in names):
                raise ConfigError(f"float8.{field} names {part!r}; known are {', '.join(kinds)}")


def _reason_to_skip(linear: nn.Linear, name: str, float8: settings.Float8, tp: int) -> str:
    from torchao.float8 import _auto_filter_for_recipe

    always = any(part in name for part in float8.always)
    for part in float8.skip:
        if part in name and not always:
            return f"float8.skip names {part!r}"
    shape = f"{linear.out_features} x {linear.in_features}"
    each = 16 * tp  # of both sizes, since only the model's plan knows which of them tp splits
    if linear.in_features % each or linear.out_features % each:
        ranks = f" on each of {tp} ranks" if tp > 1 else ""
        return f"{shape} is not divisible by 16{ranks}"
    if float8.filter == "all" or always:
        return ""
    # torchao's thresholds, measured on H100 GPUs. For recipes without their own rowwise's are taken.
    measured = ONE_SCALE if float8.recipe == ONE_SCALE else "rowwise"
    gains = _auto_filter_for_recipe(measured, filter_fqns=[])
    return "" if gains(linear, name) else f"{shape} is too small to gain"
