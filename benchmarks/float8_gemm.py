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

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import float8.layers  # noqa: F401  (registers the kernels)
from benchmarks.report import add_row, build_parser, finish
from config import Float8, TitaniteError, load_config
from float8.casts import Cast, cast, multiply
from float8.convert import build_linear
from float8.cpu import replace_matmul
from models import build_model, find_model
from parallel.device import device_type

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise")  # own: kernels
SCALINGS = ("tensorwise", "rowwise")
CHECKED = 16  # tokens whose products are compared with float32's
WRONG = 0.02  # relative error; rounding to bfloat16 makes 0.0017, and fast accumulation 0.0033 in all


def layer_shapes(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    """(out, in) → the kinds of linear layers of that shape, such as `attention.wq`."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kinds = shapes.setdefault((module.out_features, module.in_features), [])
            kind = re.sub(r"^layers\.\d+\.", "", name)
            if kind not in kinds:
                kinds.append(kind)
    return shapes


def milliseconds(action: Callable[[], Any], rounds: int) -> float:
    """Mean time of `action`. The first rounds compile and warm up; a GPU is waited for once, at the end."""
    for _ in range(5):
        action()
    return 1e3 * Timer("action()", globals={"action": action}).timeit(rounds).mean


def layer_milliseconds(linear: nn.Module, x: Tensor, dy: Tensor, rounds: int) -> float:
    """Mean time of a compiled forward and backward."""
    torch.compiler.reset()  # float8 layers share one function, of which torch compiles eight versions and no more
    step = torch.compile(linear)

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
        options: dict[str, Any] = {"recipe": recipe.removeprefix("own ")}
        if recipe.startswith("own "):
            options["kernels"] = "own"
        settings = Float8(enable=True, fsdp_all_gather="off", **options)
        result[recipe] = layer_milliseconds(build_linear(plain, settings), x, dy, rounds)
    return result


def dequantized(x: Cast) -> Tensor:
    return x.rows.float() * x.row_scales


def measure_matmuls(shape: tuple[int, int], tokens: int, rounds: int) -> dict[str, Any]:
    """TFLOP/s of the forward's matmul and its error, in bfloat16 and in float8 by each scaling. Errors become text."""
    n_out, n_in = shape
    x, weight = (torch.randn(n, n_in, device=device_type(), dtype=torch.bfloat16) for n in (tokens, n_out))
    result: dict[str, Any] = {}

    def add(way: str, product: Callable[[], Tensor], x: Tensor, weight: Tensor) -> None:
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
    for name in SCALINGS:
        (x8,) = cast("copy", name, [x], columns=False)
        (weight8,) = cast("copy", name, [weight], columns=False)
        for fast in (True, False):
            product = partial(multiply, x8[:2], weight8[:2], torch.bfloat16, fast)
            add(f"{name}{', fast' * fast}", product, dequantized(x8), dequantized(weight8))
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
    has_float8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if not (rehearse or has_float8):
        print("no GPU with float8 matmuls (compute capability 8.9) here: nothing measured")
        return int(arguments.check)
    tokens = 128 if rehearse else config.training.local_batch_size * config.training.max_seq_len
    replace_matmul()  # that of CPUs, for a rehearsal
    rows: list[dict[str, Any]] = []
    shapes = layer_shapes(build_model(*find_model(config.model, data_vocab_size=1)))
    if rehearse:
        shapes = {(256, 128): ["any"]}
    for shape, kinds in shapes.items():
        if any(size % 16 for size in shape):  # as float8 needs it
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
