"""Convert linear layers to float8, by torchao's dynamically scaled recipes.

torchao is imported where it is used: it takes seconds to load, and only float8 runs need it.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import config as settings
from config import Config, ConfigError, close_match
from float8.cpu import replace_matmul

logger = logging.getLogger(__name__)

ONE_SCALE = "tensorwise"  # the recipe with one scale per tensor, independent of which rank holds which rows


def gathers_float8(float8: settings.Float8) -> bool:
    """Whether FSDP2 gathers the converted weights in float8."""
    return float8.enable and float8.fsdp_all_gather != "off" and float8.recipe == ONE_SCALE


def check_float8(config: Config, here: bool = True) -> None:
    """Raises ConfigError for settings that contradict each other and, for a run `here`, a device without float8."""
    float8, training = config.float8, config.training
    if not float8.enable:
        return
    if gathers_float8(float8) and config.parallelism.reshard_group_size:
        asked = f"parallelism.reshard_group_size = {config.parallelism.reshard_group_size}"
        advice = 'set float8.fsdp_all_gather = "off"'
        raise ConfigError(f"{asked}: FSDP2 gathers no float8 weights from such groups; {advice}")
    if float8.emulate:
        return
    parallelism = config.parallelism
    sequences = training.local_batch_size if parallelism.pp == 1 else parallelism.pp_microbatch_size
    tokens = sequences * training.seq_len // parallelism.cp
    if tokens % 16 and float8.recipe != "rowwise_with_gw_hp":
        product = f"sequences x training.seq_len / parallelism.cp = {sequences} x {training.seq_len} / {parallelism.cp}"
        raise ConfigError(
            f"float8.enable = true: {product} = {tokens} tokens must be a multiple of 16, as it sums them"
        )
    # CPUs need no check: they compute float8 matmuls for real, if not fast.
    if here and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        needed = "has no float8 matmul, as from compute capability 8.9 on; float8.emulate = true tries the numerics"
        raise ConfigError(f"float8.enable = true: {torch.cuda.get_device_name()} {needed}")


def convert_to_float8(
    model: nn.Module, float8: settings.Float8, tp: int = 1, shards: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Convert the linear layers of `model` in place. Call it before compiling and before sharding over `tp` x `shards`.

    Returns the names of the converted layers, and name → reason for the others. Raises ConfigError if none is
    converted, or if no layer matches a name in `skip`.
    """
    from torchao.float8 import convert_to_float8_training

    replace_matmul()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    _check_skip(list(linears), float8)
    reasons_to_skip = {name: _reason_to_skip(linear, name, float8, tp) for name, linear in linears.items()}
    skipped = {name: reason for name, reason in reasons_to_skip.items() if reason}
    converted = [name for name in linears if name not in skipped]
    ranks = tp * shards
    uneven = [name for name in converted if gathers_float8(float8) and linears[name].out_features % ranks]
    if uneven:  # torchao does not pad the rank with fewer rows and loses its scale: ranks would hang
        rows = dict.fromkeys(f"{_kind(name)} ({linears[name].out_features})" for name in uneven)
        which = f"the rows of {', '.join(rows)} cannot be shared evenly by {ranks} ranks"
        logger.info(f"float8: {which}: gathered as without float8")
    elsewhere = dataclasses.replace(float8, fsdp_all_gather="off")
    for names, how in ((set(converted) - set(uneven), float8), (set(uneven), elsewhere)):
        linear_config = build_linear_config(how)
        convert_to_float8_training(model, module_filter_fn=lambda _, name, own=names: name in own, config=linear_config)
    if not converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        hint = '; for small layers set float8.filter = "all"' if float8.filter == "auto" else ""
        raise ConfigError(f"float8.enable = true: no linear layer can be converted ({reasons}){hint}")
    return converted, skipped


def build_linear_config(float8: settings.Float8) -> Any:
    """torchao's Float8LinearConfig for these settings.

    `round_scales_to_power_of_2` is the recipe's. No recipe that sets it has the float8 all-gather, with which torchao
    (0.18) would ignore it.
    """
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(float8.recipe)
    return dataclasses.replace(recipe, enable_fsdp_float8_all_gather=gathers_float8(float8), emulate=float8.emulate)


def summarize(converted: list[str], skipped: dict[str, str]) -> str:
    """One line: how many layers of which kinds are in float8, which kinds are not, and why."""
    kinds = dict.fromkeys(_kind(name) for name in converted)
    reasons = dict.fromkeys(f"{_kind(name)} ({reason})" for name, reason in skipped.items())
    return f"{len(converted)} linear layers ({', '.join(kinds)}); not: {', '.join(reasons) or 'none'}"


def _kind(name: str) -> str:
    """`layers.3.attention.wq` → `attention.wq`, the same for every block."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _check_skip(names: Sequence[str], float8: settings.Float8) -> None:
    for part in set(float8.skip) - set(settings.Float8().skip):  # the default may name what a model lacks
        if not any(part in name for name in names):
            kinds = dict.fromkeys(word for name in names for word in (_kind(name), name.split(".")[-1]))
            hint = close_match(part, kinds) or f"; known are {', '.join(map(_kind, names[:7]))}"
            raise ConfigError(f"float8.skip names {part!r}, which is in the name of no linear layer{hint}")


def _reason_to_skip(linear: nn.Linear, name: str, float8: settings.Float8, tp: int) -> str:
    from torchao.float8 import _auto_filter_for_recipe

    matches = [part for part in float8.skip if part in name]
    shape = f"{linear.out_features} x {linear.in_features}"
    if matches:
        return f"float8.skip names {matches[0]!r}"
    if linear.in_features % (16 * tp) or linear.out_features % (16 * tp):
        return f"{shape} is not divisible by 16" + (f" on each of {tp} ranks" if tp > 1 else "")
    # torchao's thresholds, measured on H100 GPUs. None are for rowwise_with_gw_hp, whose forward is rowwise's.
    gains = _auto_filter_for_recipe(float8.recipe.removesuffix("_with_gw_hp"), filter_fqns=[])
    return f"{shape} is too small to gain" if float8.filter == "auto" and not gains(linear, name) else ""
