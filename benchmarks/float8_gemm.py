"""Float8 against bfloat16, layer by layer: where float8 wins for the shapes of a config, and which layers to skip.

    python -m benchmarks.float8_gemm --config=train_configs/llama3_8b.toml [--quick] [--json FILE]

For each kind of linear layer it times a compiled forward and backward with the config's tokens per microbatch, in
bfloat16 and in each recipe, casts included. It needs a GPU with float8, since a CPU's float8 matmuls say nothing about
a GPU's. Without one it says so and ends with exit code 0 (1 with --check).
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.report import build_parser, finish, print_row
from config import Float8, TitaniteError, load_config
from float8.convert import build_linear_config
from models import build_model, find_model

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


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


def milliseconds(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor, rounds: int) -> float:
    """Median time of a compiled forward and backward, by CUDA events."""
    step = compiled(linear)
    spans = []
    for _ in range(rounds + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x.grad = None
        linear.zero_grad()
        begin.record()
        step(x).backward(dy)
        end.record()
        spans.append((begin, end))  # read at the end: the device must never wait for the host
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans[5:])  # the first compile and warm up


def measure(shape: tuple[int, int], tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds in bfloat16 and in every recipe."""
    from torchao.float8.float8_linear import Float8Linear

    n_out, n_in = shape
    x = torch.randn(tokens, n_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, n_out, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(n_in, n_out, bias=False, device="cuda", dtype=torch.bfloat16)
    result = {"bf16": milliseconds(plain, x, dy, rounds)}
    for recipe in RECIPES:
        settings = build_linear_config(Float8(enable=True, recipe=recipe, fsdp_all_gather="off"))  # type: ignore[arg-type]
        result[recipe] = milliseconds(Float8Linear.from_float(plain, settings), x, dy, rounds)
    return result


def main() -> int:
    parser = build_parser("float8 linear layers against bfloat16, for the shapes of a config")
    parser.add_argument("--config", default="train_configs/llama3_8b.toml", help="default %(default)s")
    arguments = parser.parse_args()
    try:
        config = load_config([f"--config={arguments.config}"])
    except TitaniteError as error:
        parser.error(str(error))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print(
            "no GPU with float8 matmuls (compute capability 8.9) here: where float8 wins cannot be told, none measured"
        )
        return int(arguments.check)
    tokens = config.training.local_batch_size * config.training.seq_len
    rows: list[dict[str, Any]] = []
    for shape, kinds in layer_shapes(build_model(*find_model(config.model, data_vocab_size=1))).items():
        if shape[0] % 16 or shape[1] % 16:
            continue
        times = measure(shape, tokens, 10 if arguments.quick else 50)
        rows.append(
            {"layers": " ".join(kinds), "out": shape[0], "in": shape[1], "tokens": tokens}
            | {f"{name} ms": time for name, time in times.items()}
            | {f"{name} speed-up": times["bf16"] / times[name] for name in RECIPES}
        )
        print_row(rows[-1])
    code = finish(arguments, rows, [])
    for recipe in RECIPES:
        losing = [kind for row in rows if row[f"{recipe} speed-up"] < 1 for kind in row["layers"].split()]
        print(f"{recipe}: float8.skip = {losing}" if losing else f"{recipe}: every layer gains")
    return code


if __name__ == "__main__":
    sys.exit(main())
