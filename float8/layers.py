"""Layers in float8 by the casts of float8/casts.py: each tensor is cast once, in both layouts that matmuls take.

They take the places of torchao's linear layers, of the norm before them and of SwiGLU between them, and keep the names
of the weights. With tensor parallelism norms stay torch's, since their results are gathered first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from float8.casts import Cast, cast, multiply
from parallel.stand_ins import check_stand_in, numbers, with_parts

if torch.cuda.is_available():
    from float8 import kernels  # noqa: F401  (registers them)

INSTEAD = 'float8.kernels = "compiler"'
# Llama's norms, and the layers that alone read what they return.
READERS = {
    "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
    "ffn_norm": ("feed_forward.w1", "feed_forward.w3"),
}


@dataclass(frozen=True)
class Quantized:
    """What linear layers read, in float8 already. Of `handle` they only take the shape, and give it the gradient."""

    handle: Tensor
    cast: Cast

    @property
    def shape(self) -> torch.Size:
        return self.handle.shape


def quantize(x: Tensor | Quantized, recipe: str) -> Quantized:
    """Cast x [..., K]; without gradients only what the forward reads."""
    if isinstance(x, Quantized):
        return x
    flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
    (found,) = cast("copy", recipe, [flat], columns=torch.is_grad_enabled())
    return Quantized(x, found)


def _weight(weight: Tensor, recipe: str, columns: bool) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in float8, or transposed, and its scales. FSDP2 may have gathered it in float8."""
    if isinstance(weight, Float8TrainingTensor):
        data = weight._data.t().contiguous() if columns else weight._data
        return data, weight._scale.reciprocal()
    (found,) = cast("copy", recipe, [weight], rows=not columns, columns=columns)
    return found[2:] if columns else found[:2]


def _multiply(x: Cast, weight: Tensor, recipe: str, dtype: torch.dtype, backward: bool = False) -> Tensor:
    """x [M, K] times the transposed of weight [N, K], or backward dy [M, N] times it. A GPU sums a forward fast."""
    return multiply(x[:2], _weight(weight, recipe, backward), dtype, fast=not backward)


def _cast_gradient(grad: Tensor, recipe: str) -> Cast:
    flat = grad.reshape(-1, grad.shape[-1]).contiguous()
    (found,) = cast("copy", recipe, [flat], gradient=True)
    return found


@torch._dynamo.allow_in_graph
class _Linear(torch.autograd.Function):
    """y [..., N] of the cast of x [..., K] and of weight [N, K]. The first argument only takes x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *parts[2:])
        ctx.recipe = recipe
        ctx.shape = x.shape
        return _multiply(Cast(*parts), weight, recipe, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *columns = ctx.saved_tensors
        recipe = ctx.recipe
        dy = _cast_gradient(grad, recipe)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(dy, weight, recipe, grad.dtype, backward=True).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = multiply(dy[2:], columns, grad.dtype, fast=False)
        return of_x, of_weight, *[None] * 5


@torch._dynamo.allow_in_graph
class _FeedForward(torch.autograd.Function):
    """w2(silu(w1(x)) * w3(x)) of the cast of x [..., D]. The first argument only takes x's gradient.

    Neither silu(g) * u nor the gradients of g and u exist in more than 8 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, recipe: str, *parts: Tensor) -> Tensor:
        ctx.recipe = recipe
        ctx.shape = x.shape
        g = _multiply(Cast(*parts), w1, recipe, x.dtype)
        u = _multiply(Cast(*parts), w3, recipe, x.dtype)
        (a,) = cast("gate", recipe, [g, u], columns=False)
        ctx.save_for_backward(w1, w3, w2, g, u, *parts[2:])
        return _multiply(a, w2, recipe, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w1, w3, w2, g, u, *columns = ctx.saved_tensors
        recipe = ctx.recipe
        dtype = grad.dtype
        dy = _cast_gradient(grad, recipe)
        of_a = _multiply(dy, w2, recipe, dtype, backward=True)
        dg, du, a = cast("gate_grad", recipe, [g, u, of_a], gradient=True)
        of_x = _multiply(dg, w1, recipe, dtype, backward=True) + _multiply(du, w3, recipe, dtype, backward=True)
        of_w1 = of_w3 = of_w2 = None
        if ctx.needs_input_grad[1]:
            of_w1 = multiply(dg[2:], columns, dtype, fast=False)
        if ctx.needs_input_grad[2]:
            of_w3 = multiply(du[2:], columns, dtype, fast=False)
        if ctx.needs_input_grad[3]:
            of_w2 = multiply(dy[2:], a[2:], dtype, fast=False)
        return of_x.view(ctx.shape), of_w1, of_w3, of_w2, *[None] * 5


class Linear(Float8Linear):
    """torchao's layer, which also lends its weight, like the model's `Output`."""

    def forward(self, input: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
        if use is None:
            return super().forward(input)
        return use(input, self.weight)

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), self.linear_mm_config, self.config)


class OwnLinear(Linear):
    """torchao's layer and weight, with casts of our own. Its input may be cast already."""

    recipe: str

    def forward(self, input: Any, use: Callable[..., Tensor] | None = None) -> Tensor:
        return super().forward(input, use or self.compute)

    def compute(self, x: Tensor | Quantized, weight: Tensor) -> Tensor:
        """y [..., N] of x [..., K]. With tensor parallelism each rank casts its own part."""
        if isinstance(x, DTensor) and isinstance(weight, DTensor):
            by_rows = weight.placements[0].is_shard(0)
            of_gradient = [Partial()] if by_rows else x.placements
            of_result = Shard(-1) if by_rows else Partial()
            y = self.compute(x.to_local(grad_placements=of_gradient), weight.to_local())
            return DTensor.from_local(y, x.device_mesh, [of_result], run_check=False)
        x = quantize(x, self.recipe)
        return _Linear.apply(x.handle, weight, self.recipe, *x.cast)


class OwnFeedForward(nn.Module):
    """SwiGLU of three `OwnLinear`. With tensor parallelism its result is split by tokens, the first dimension."""

    def __init__(self, w1: OwnLinear, w2: OwnLinear, w3: OwnLinear):
        super().__init__()
        self.w1 = w1
        self.w2 = w2
        self.w3 = w3

    def forward(self, x: Tensor | Quantized) -> Tensor:
        weights: list[Any] = [self.w1.weight, self.w3.weight, self.w2.weight]
        mesh = None
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            x = x.to_local(grad_placements=[Partial()])
            weights = [weight.to_local() for weight in weights]
        recipe = self.w1.recipe
        x = quantize(x, recipe)
        y = _FeedForward.apply(x.handle, *weights, recipe, *x.cast)
        if mesh is None:
            return y
        summand = DTensor.from_local(y, mesh, [Partial()], run_check=False)
        return summand.redistribute(placements=[Shard(0)]).to_local()


class OwnNorm(nn.RMSNorm):
    """RMSNorm whose result is also in float8, for the recipe of its readers.

    Statistics and gradients are plain torch, which the compiler joins with the sums of the residual stream. It drops
    the handle's values, since nothing reads them.
    """

    def __init__(self, norm: nn.RMSNorm, recipe: str):
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight
        self.recipe = recipe

    def forward(self, x: Tensor) -> Quantized:  # type: ignore[override]
        weight = self.weight.to(x.dtype)
        flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
        rstd = torch.rsqrt(flat.float().square().mean(-1) + (self.eps or 0.0))
        source = [flat, rstd, weight.detach()]
        (casts,) = cast("norm", self.recipe, source, columns=torch.is_grad_enabled())
        return Quantized(F.rms_norm(x, self.normalized_shape, weight, self.eps), casts)


def convert_around(model: nn.Module, norms: bool) -> None:
    """Fuse SwiGLU, and `norms` if asked, of each block of `model` with its linear layers, where all are `OwnLinear`."""
    for block in list(model.modules()):
        layers = dict(block.named_modules())
        own = {name for name, layer in layers.items() if isinstance(layer, OwnLinear)}
        for name, readers in READERS.items():
            norm = layers.get(name)
            before = norms and not getattr(block, "norm_after", False)
            if before and isinstance(norm, nn.RMSNorm) and own.issuperset(readers):
                _check_norm(norm)
                setattr(block, name, OwnNorm(norm, layers[readers[0]].recipe))
        for name, child in block.named_children():
            if own.issuperset(f"{name}.{w}" for w in ("w1", "w2", "w3")):
                _check_feed_forward(child)
                setattr(block, name, OwnFeedForward(**dict(child.named_children())))  # type: ignore[arg-type]


def _check_norm(norm: nn.RMSNorm) -> None:
    (dim,) = norm.normalized_shape

    def own(x: Tensor, weight: Tensor) -> Tensor:
        return with_parts(norm, weight=weight)(x)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (dim,), weight, norm.eps)

    what = type(norm).__qualname__
    tensors = [0.01 * numbers(4, dim), numbers(dim)]  # so small that the norm's eps counts
    check_stand_in(what, own, plain, tensors, "float8.layers.OwnNorm", INSTEAD)


def _check_feed_forward(layer: nn.Module) -> None:
    def own(x: Tensor, *weights: Tensor) -> Tensor:
        linears = {f"w{i}": partial(F.linear, weight=weight) for i, weight in enumerate(weights, 1)}
        return with_parts(layer, **linears)(x)

    def plain(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)

    what = type(layer).__qualname__
    tensors = [numbers(4, 8), numbers(16, 8), numbers(8, 16), numbers(16, 8) + 1]
    check_stand_in(what, own, plain, tensors, "float8.layers.OwnFeedForward", INSTEAD)
