"""Float8 against bfloat16, layer by layer: where float8 wins for the shapes of a config, and which layers to skip.

    python -m benchmarks.float8_gemm --config=train_configs/llama3_8b.toml [--matmuls [--rehearse]] [--quick]
        [--json FILE] [options]

For each kind of linear layer it times a compiled forward and backward with the config's tokens per microbatch, in
bfloat16 and in each recipe, casts included. With `--matmuls` it times the forward's matmul alone, without casts, for
each way to scale float8 that torch knows on Hopper, with fast accumulation and without. `error` is the relative error
against a product of the same rounded values in float32; what is wrong by that is not timed. Further options are those
of train.py.

It needs a GPU with float8, since a CPU's float8 matmuls say nothing about a GPU's. Without one it says so and ends with
exit code 0 (1 with --check). `--rehearse` tries the matmuls on CPU with a tiny shape, to find typos.
"""

import statistics
import sys
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.report import add_row, build_parser, finish
from config import Float8, TitaniteError, load_config
from float8.convert import build_linear
from models import build_model, find_model
from parallel.device import device_type

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise", "blockwise")  # own: kernels
# Rows and columns of the tokens, and of the weights, that share a scale. 0: all of them.
SCALINGS = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (1, 0)),
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)),
}
CHECKED = 16  # tokens whose products are compared with float32's
WRONG = 0.02  # relative error; rounding to bfloat16 makes 0.0017, and fast accumulation 0.0033 in all


def layer_shapes(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    """(out, in) → the kinds of linear layers of that shape, such as `attention.wq`."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kind = name.split(".", 2)[2] if name.startswith("layers.") else name
            kinds = shapes.setdefault((module.out_features, module.in_features), [])
            if kind not in kinds:
                kinds.append(kind)
    return shapes


def compiled(linear: nn.Module, backend: str | Callable[..., Any] = "inductor") -> Callable[..., torch.Tensor]:
    """Compile `linear` for its own shapes, however many were compiled before.

    Float8 layers share one function. torch compiles eight versions of it, then warns and compiles no more.
    """
    torch.compiler.reset()
    return torch.compile(linear, backend=backend)


def milliseconds(action: Callable[[], Any], rounds: int) -> float:
    """Median time of `action` by CUDA events, or on CPU by its clock. The first rounds compile and warm up."""
    if not torch.cuda.is_available():
        return 1e3 * statistics.median(timeit.repeat(action, number=1, repeat=rounds))
    spans = []
    for _ in range(rounds + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        spans.append((begin, end))  # read at the end: the device must never wait for the host
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans[5:])


def layer_milliseconds(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor, rounds: int) -> float:
    """Median time of a compiled forward and backward."""
    step = compiled(linear)

    def forward_and_backward() -> None:
        x.grad = None
        linear.zero_grad()
        step(x).backward(dy)

    return milliseconds(forward_and_backward, rounds)


def measure(shape: tuple[int, int], tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds in bfloat16 and in every recipe."""
    n_out, n_in = shape
    x = torch.randn(tokens, n_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, n_out, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(n_in, n_out, bias=False, device="cuda", dtype=torch.bfloat16)
    result = {"bf16": layer_milliseconds(plain, x, dy, rounds)}
    for recipe in RECIPES:
        name: Any = recipe.removeprefix("own ")
        settings = Float8(
            enable=True, recipe=name, kernels="compiler" if name == recipe else "own", fsdp_all_gather="off"
        )
        result[recipe] = layer_milliseconds(build_linear(plain, settings), x, dy, rounds)
    return result


def to_float8(x: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` rounded to float8 with a scale for each tile; the scales, laid out as torch wants them; and x as rounded."""
    rows, columns = (size or whole for size, whole in zip(tile, x.shape, strict=True))
    tiles = x.float().view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    scale = tiles.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    x8 = (tiles / scale).to(torch.float8_e4m3fn)
    scales = scale[:, 0, :, 0]
    if rows == 1:  # of single rows column after column, of squares row after row
        scales = scales.t().contiguous().t()
    return x8.view(x.shape), scales, (x8.float() * scale).view(x.shape)


def measure_matmuls(shape: tuple[int, int], tokens: int, rounds: int) -> dict[str, Any]:
    """TFLOP/s of the forward's matmul and its error, in bfloat16 and in float8 by each scaling. Errors become text."""
    n_out, n_in = shape
    x, weight = (torch.randn(n, n_in, device=device_type(), dtype=torch.bfloat16) for n in (tokens, n_out))
    result: dict[str, Any] = {}

    def add(way: str, product: Callable[[], torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
        exact = x[:CHECKED].float() @ weight.float().t()
        try:
            error = ((product()[:CHECKED] - exact).norm() / exact.norm()).item()
            result[f"{way} error"] = error
            if not error < WRONG:  # also NaN
                result[f"{way} failed"] = f"wrong by {error:.2g}, so not timed"
                return
            result[f"{way} TFLOP/s"] = 2 * tokens * n_out * n_in / milliseconds(product, rounds) / 1e9
        except (RuntimeError, ValueError) as reason:
            result[f"{way} failed"] = " ".join(str(reason).split())[:300]

    add("bf16", lambda: x @ weight.t(), x, weight)
    for name, (tile_x, tile_weight) in SCALINGS.items():
        x8, scale_x, rounded_x = to_float8(x, tile_x)
        weight8, scale_weight, rounded_weight = to_float8(weight, tile_weight)
        for fast in (True, False):
            matmul = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
            product = partial(matmul, x8, weight8.t(), scale_x, scale_weight.t())
            add(f"{name}{', fast' * fast}", product, rounded_x, rounded_weight)
    return result


def main() -> int:
    parser = build_parser("float8 linear layers against bfloat16, for the shapes of a config")
    parser.add_argument("--config", default="train_configs/llama3_8b.toml", help="default %(default)s")
    parser.add_argument("--matmuls", action="store_true", help="matmuls alone, by each scaling of float8")
    parser.add_argument("--rehearse", action="store_true", help="with --matmuls: on CPU; the figures say nothing")
    arguments, options = parser.parse_known_args()
    try:
        config = load_config([f"--config={arguments.config}", *options])
    except TitaniteError as error:
        parser.error(str(error))
    rehearse = arguments.matmuls and arguments.rehearse
    if not rehearse and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
        print(
            "no GPU with float8 matmuls (compute capability 8.9) here: where float8 wins cannot be told, none measured"
        )
        return int(arguments.check)
    tokens = 128 if rehearse else config.training.local_batch_size * config.training.seq_len
    rows: list[dict[str, Any]] = []
    shapes = layer_shapes(build_model(*find_model(config.model, data_vocab_size=1)))
    for shape, kinds in {(256, 128): ["any"]}.items() if rehearse else shapes.items():
        if any(size % 128 for size in shape):  # as blocks need it
            continue
        row: dict[str, Any] = {"layers": " ".join(kinds), "out": shape[0], "in": shape[1], "tokens": tokens}
        rounds = 10 if arguments.quick else 50
        if arguments.matmuls:
            row |= measure_matmuls(shape, tokens, rounds)
        else:
            times = measure(shape, tokens, rounds)
            row |= {f"{name} ms": time for name, time in times.items()}
            row |= {f"{name} speed-up": times["bf16"] / times[name] for name in RECIPES}
        add_row(arguments, rows, row)
    code = finish(arguments, rows, [])
    if arguments.matmuls:
        return code
    for recipe in RECIPES:
        losing = [kind for row in rows if row[f"{recipe} speed-up"] < 1 for kind in row["layers"].split()]
        print(f"{recipe}: float8.skip = {losing}" if losing else f"{recipe}: every layer gains")
    return code


if __name__ == "__main__":
    sys.exit(main())
