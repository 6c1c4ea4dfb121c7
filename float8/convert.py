"""Convert linear layers to float8, by torchao's dynamically scaled recipes.

torchao is imported where it is used: it takes seconds to load, and only float8 runs need it.
"""

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import config as settings
from config import Config, ConfigError, close_match
from float8.cpu import replace_matmul
from parallel.originals import check_forward, check_original

logger = logging.getLogger(__name__)

# Digests of the model's linear and output layers that float8 layers compute, see parallel/originals.py.
LINEAR = ("288dc45ee651", "f9c13d2b755c")
LOGITS = "fda68fd1d73c"
BLOCK = 128  # values that share a scale of recipe `blockwise`
# What 4 scales of 128 x 128 cover. cuBLASLt reads a weight's scales in columns of a multiple of 4 along what a matmul
# sums, and is silently wrong where there are fewer ("Scaling factors layouts" in its documentation;
# github.com/pytorch/pytorch/pull/166752). A forward sums in_features and a gradient of inputs sums out_features. The
# gradient of a weight sums tokens, but has no squares: its scales of 1 x 128 need no more than whole blocks.
FOUR_BLOCKS = 4 * BLOCK
TOO_SMALL = "is too small to gain"
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
    blocks = float8.recipe == "blockwise"
    asked = f'float8.recipe = "{float8.recipe}"' if blocks else f'float8.kernels = "{float8.kernels}"'
    for refused, other in (
        (own_kernels(float8) and float8.emulate, "emulate = true"),
        (own_kernels(float8) and float8.recipe == "rowwise_with_gw_hp", f'recipe = "{float8.recipe}"'),
        (blocks and float8.fast_accumulation == "all", 'fast_accumulation = "all"'),
    ):
        if refused:
            raise ConfigError(f"{asked}: cannot be used with float8.{other}")
    if float8.emulate:
        return
    parallelism = config.parallelism
    sequences = training.local_batch_size if parallelism.pp == 1 else parallelism.pp_microbatch_size
    tokens = sequences * training.seq_len // parallelism.cp
    multiple = BLOCK if blocks else 16
    if tokens % multiple and float8.recipe != "rowwise_with_gw_hp":
        product = f"sequences x training.seq_len / parallelism.cp = {sequences} x {training.seq_len} / {parallelism.cp}"
        raise ConfigError(
            f"float8.enable = true: {product} = {tokens} tokens must be a multiple of {multiple}, as it sums them"
        )
    # CPUs need no check: they compute float8 matmuls for real, if not fast.
    if here and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        needed = "has no float8 matmul, as from compute capability 8.9 on; float8.emulate = true tries the numerics"
        raise ConfigError(f"float8.enable = true: {torch.cuda.get_device_name()} {needed}")
    if here and torch.cuda.is_available() and blocks:
        cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        if torch.cuda.get_device_capability() != (9, 0) or cuda < (12, 9):
            found = f"{torch.cuda.get_device_name()} with a torch for CUDA {torch.version.cuda}"
            raise ConfigError(f"{asked}: needs a Hopper GPU, of compute capability 9.0, and CUDA 12.9; here is {found}")


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
    for name in converted:
        _check_edits(name, linears[name], float8)
        model.set_submodule(name, build_linear(linears[name], elsewhere if name in uneven else float8))
    if not converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        hint = ""
        if any(reason.endswith(TOO_SMALL) for reason in skipped.values()):
            hint = '; for small layers set float8.filter = "all"'
        raise ConfigError(f"float8.enable = true: no linear layer can be converted ({reasons}){hint}")
    if own_kernels(float8):
        from float8.layers import convert_around

        convert_around(model, norms=tp == 1)
    return converted, skipped


def own_kernels(float8: settings.Float8) -> bool:
    """Whether layers cast by the kernels of float8/kernels.py, not as torchao does."""
    return float8.enable and (float8.kernels == "own" or float8.recipe == "blockwise")


def _check_edits(name: str, linear: nn.Linear, float8: settings.Float8) -> None:
    """Refuse a layer whose forward a fork has edited, or whose bias own kernels would drop. Raises ConfigError."""
    instead = f'float8.skip = ["{name.rpartition(".")[2]}"]'
    if own_kernels(float8) and linear.bias is not None:
        raise ConfigError(f'{name}: has a bias, which float8.kernels = "own" cannot add: set {instead}')
    stand_in = "the layer of float8.convert.build_linear"
    if type(linear).forward is not nn.Linear.forward:
        check_forward(linear, LINEAR, stand_in, instead)
    compute: Any = getattr(linear, "compute", None)
    if compute is not None:
        check_original(compute, {LOGITS}, stand_in, instead)


def build_linear(linear: nn.Linear, float8: settings.Float8) -> nn.Linear:
    """A float8 layer with the weight of `linear`."""
    from float8.layers import Float8Linear, Output, OwnLinear

    own = own_kernels(float8)
    takes_loss = "loss" in inspect.signature(type(linear).forward).parameters
    kind: Any = Output if takes_loss else Float8Linear
    if own:
        kind = OwnLinear
    layer = kind.from_float(linear, build_linear_config(float8))
    if own:
        layer.how = float8.recipe, float8.fast_accumulation == "all"
    return layer


def build_linear_config(float8: settings.Float8) -> Any:
    """torchao's Float8LinearConfig for these settings.

    `round_scales_to_power_of_2` is the recipe's. No recipe that sets it has the float8 all-gather, with which torchao
    (0.18) would ignore it.
    """
    from torchao.float8.config import Float8GemmConfig, Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name("rowwise" if float8.recipe == "blockwise" else float8.recipe)
    if float8.fast_accumulation == "all":
        fast = Float8GemmConfig(use_fast_accum=True)
        recipe = dataclasses.replace(recipe, gemm_config_grad_input=fast, gemm_config_grad_weight=fast)
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
    named = [("skip", part) for part in float8.skip if part not in settings.Float8().skip]  # a model may lack those
    for field, part in named + [("always", part) for part in float8.always]:
        if not any(part in name for name in names):
            kinds = dict.fromkeys(word for name in names for word in (_kind(name), name.split(".")[-1]))
            hint = close_match(part, kinds) or f"; known are {', '.join(map(_kind, names[:7]))}"
            raise ConfigError(f"float8.{field} names {part!r}, which is in the name of no linear layer{hint}")


def _reason_to_skip(linear: nn.Linear, name: str, float8: settings.Float8, tp: int) -> str:
    from torchao.float8 import _auto_filter_for_recipe

    always = any(part in name for part in float8.always)
    matches = [part for part in float8.skip if part in name and not always]
    shape = f"{linear.out_features} x {linear.in_features}"
    if matches:
        return f"float8.skip names {matches[0]!r}"
    multiple = FOUR_BLOCKS if float8.recipe == "blockwise" else 16
    each = multiple * tp  # of both sizes, since only the model's plan knows which of them tp splits
    if linear.in_features % each or linear.out_features % each:
        ranks = f" on each of {tp} ranks" if tp > 1 else ""
        return f"{shape} is not divisible by {multiple}{ranks}"
    if float8.filter == "all" or always:
        return ""
    # torchao's thresholds, measured on H100 GPUs. For recipes without their own rowwise's are taken.
    gains = _auto_filter_for_recipe("tensorwise" if float8.recipe == ONE_SCALE else "rowwise", filter_fqns=[])
    return "" if gains(linear, name) else f"{shape} {TOO_SMALL}"
