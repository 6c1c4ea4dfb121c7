"""Linear layers to float8, by torchao's dynamically scaled recipes."""

import dataclasses

import torch
from torch import nn

import config as settings
from config import ConfigError


def check_float8(float8: settings.Float8) -> None:
    """Refuse a device that has no float8 matmul, unless emulation is asked for. Raises ConfigError."""
    if not float8.enable or float8.emulate or not torch.cuda.is_available():
        return  # CPUs compute float8 matmuls for real, if not fast
    if torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            f"float8.enable = true: {torch.cuda.get_device_name()} has no float8 matmul (compute capability "
            "8.9 or newer has); set float8.emulate = true to try the numerics"
        )


def convert_to_float8(model: nn.Module, float8: settings.Float8) -> tuple[list[str], dict[str, str]]:
    """Swap the linear layers of `model`, in place, before it is compiled or sharded.

    Returns the names of the converted layers, and name → reason of those that were not.
    Raises ConfigError if none is converted.
    """
    # Imported here: torchao takes a second to load, and only float8 runs need it.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: list[str] = []
    skipped: dict[str, str] = {}

    def wanted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        reason = _reason_to_skip(module, name, float8.skip)
        if reason:
            skipped[name] = reason
        else:
            converted.append(name)
        return not reason

    recipe = Float8LinearConfig.from_recipe_name(float8.recipe)
    convert_to_float8_training(
        model, module_filter_fn=wanted, config=dataclasses.replace(recipe, emulate=float8.emulate)
    )
    if not converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise ConfigError(f"float8.enable = true, but no linear layer can be converted ({reasons})")
    return converted, skipped


def _reason_to_skip(linear: nn.Linear, name: str, skip: tuple[str, ...]) -> str:
    matches = [part for part in skip if part in name]
    if matches:
        return f"float8.skip names {matches[0]!r}"
    if linear.in_features % 16 or linear.out_features % 16:
        return f"{linear.out_features} x {linear.in_features} is not divisible by 16"
    return ""
