"""The float8 kernels without a GPU: what the compiler makes of them for Hopper, and the bytes they move.

    python -m benchmarks.float8_kernels [--check] [--json FILE]

Each kernel is compiled for sm_90. `registers` and `spilled bytes` are of a thread, `instructions` of its machine code
per value of a tile, an upper bound, since no branch is followed. `load bits` is the widest access. At 4.26 TB/s and
1.755 GHz an H200 has 6.9 instructions for each byte that it moves: a kernel with more is not bound by memory.

`bytes` are those that loads, stores and atomics of Triton's interpreter ask for, per value. A block of the 8B says
which operators run, on which shapes. `fewest`: each input read once, twice if a scale needs the maxima of a whole row,
column or tensor first, and each output written once. What torch computes is not counted, but for maxima of tensors.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import add_row, build_parser, finish
from config import Float8
from float8.convert import convert_to_float8
from models.llama import FLAVORS
from models.llama.model import Llama

RECIPES = ("tensorwise", "rowwise", "blockwise")
SOURCES = ("copy", "gate", "gate_grad")
TOKENS = 8192
SAMPLE = 512, 1024  # the matrix whose bytes are counted


class Kernel(NamedTuple):
    """A kernel as it is launched: `function` of float8/kernels.py, its compile-time arguments, warps."""

    name: str
    function: str
    constants: dict[str, Any]
    warps: int
    elements: int  # of a program
    bytes_per_element: float


def kernels() -> list[Kernel]:
    from float8 import kernels as own

    def value(code: Any) -> int:
        return code.value

    found = []
    for recipe in (*RECIPES, "squares"):
        for source in ("norm", *SOURCES) if recipe != "squares" else ("copy",):
            read = {"gate": 4, "gate_grad": 6}.get(source, 2)
            BM, BN, warps = own.tile_shape(source, recipe)
            layouts = {"gate": (1, 0)}.get(source, (1, 1))
            written = layouts[0] * (2 if source == "gate_grad" else 1) + layouts[1] * (
                3 if source == "gate_grad" else 1
            )
            both = {"SOURCE": value(own.SOURCES[source]), "RECIPE": value(own.RECIPES[recipe])}
            flags = {"E5M2": recipe == "tensorwise", "ROWS": bool(layouts[0]), "COLUMNS": bool(layouts[1])}
            constants = both | flags | {"BM": BM, "BN": BN}
            found.append(Kernel(f"cast {source} {recipe}", "cast_kernel", constants, warps, BM * BN, read + written))
            if recipe == "rowwise":
                BM, BN, warps = own.tile_shape(source, recipe, collects=True)
                constants = {"SOURCE": both["SOURCE"], "BM": BM, "BN": BN}
                found.append(Kernel(f"maxima {source} {recipe}", "maxima_kernel", constants, warps, BM * BN, read))
    return found


def inspect(kernel: Kernel) -> dict[str, Any]:
    """What Triton and ptxas make of a kernel for sm_90, with sizes that 16 divides, as those of float8 are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from float8 import kernels as own

    function = getattr(own, kernel.function)
    bf16 = ("a_ptr", "b_ptr", "c_ptr")
    types: dict[str, str] = dict.fromkeys(function.arg_names, "*fp32") | dict.fromkeys(bf16, "*bf16")
    types |= {"rows_ptr": "*u8", "columns_ptr": "*u8"}
    types |= dict.fromkeys(("M", "N", "row_scales", "column_scales"), "i32")
    if " norm " in kernel.name:
        types["b_ptr"] = "*fp32"
    signature = {name: "constexpr" if name in kernel.constants else types[name] for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if signature[n][0] in "*i"}
    source = ASTSource(fn=function, signature=signature, constexprs=kernel.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.warps})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])

        def run(*words: str) -> str:
            tool = [str(tools / words[0]), *words[1:], str(cubin)]
            return subprocess.run(tool, capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", run("cuobjdump", "--dump-resource-usage"))
        code = run("nvdisasm", "-c")
    assert usage
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)) - len(re.findall(r"\bNOP\b", code))
    per_element = instructions * kernel.warps * 32 / kernel.elements
    widths = [
        int(count or 1) * int(bits)
        for count, bits in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)", compiled.asm["ptx"])
    ]
    return {
        "kernel": kernel.name, "warps": kernel.warps, "registers": int(usage[1]), "spilled bytes": int(usage[2]),
        "shared bytes": compiled.metadata.shared, "instructions": per_element,
        "instructions / byte": per_element / kernel.bytes_per_element, "load bits": max(widths),
    }  # fmt: skip


class Call(NamedTuple):
    """A cast of a matrix [M, N]."""

    source: str
    recipe: str
    rows: bool
    columns: bool

    def fewest(self) -> int:
        """Bytes per value that it must read and write, its maxima included."""
        read = {"gate": 4, "gate_grad": 6}.get(self.source, 2)
        passes = 1 if self.recipe in ("blockwise", "squares") else 2
        outputs = (2, 3) if self.source == "gate_grad" else (1, 1)
        return passes * read + outputs[0] * self.rows + outputs[1] * self.columns


class Calls(TorchDispatchMode):
    """Remembers the casts, and how many values their matrices have."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Call, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.titanite.to_float8.default:
            source, recipe, tensors, _, _, rows, columns = args
            self.found.append((Call(source, recipe, rows, columns), tensors[0].numel()))
        return func(*args, **(kwargs or {}))


def block_calls(recipe: str) -> list[tuple[Call, int]]:
    """The operators of a block of the 8B, forward and backward, on TOKENS tokens, without recomputation."""
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        model = Llama(dataclasses.replace(FLAVORS["8B"], n_layers=1, vocab_size=128))
    torch.set_default_dtype(torch.float32)
    float8 = Float8(enable=True, recipe=recipe, kernels="own", filter="all", fsdp_all_gather="off")  # type: ignore[arg-type]
    convert_to_float8(model, float8)
    with model.norm.weight.fake_mode, Calls() as calls:  # type: ignore[union-attr]
        model(torch.zeros(1, TOKENS, dtype=torch.long)).sum().backward()
    # With one scale weights are gathered, or kept for a step, in float8. All other casts to one layout are of weights.
    kept = [(call, n) for call, n in calls.found if recipe != "tensorwise" or call.source != "copy" or call.columns]
    return [(call, n) for call, n in kept if recipe != "tensorwise" or call.source != "copy" or call.rows]


def count_bytes(call: Call) -> float:
    """Bytes per value that a call's kernels load, store and change by atomics. In the interpreter's process."""
    import numpy as np
    from triton.runtime import interpreter

    from float8 import kernels as own

    builder: Any = interpreter.InterpreterBuilder
    total = 0

    def count(name: str, pointer: int, mask: int) -> Any:
        original = getattr(builder, name)

        def counting(self: Any, *args: Any) -> Any:
            nonlocal total
            total += int(np.count_nonzero(args[mask].data)) * (args[pointer].get_element_ty().primitive_bitwidth // 8)
            return original(self, *args)

        setattr(builder, name, counting)
        return original

    names = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}
    originals = {name: count(name, *places) for name, places in names.items()}
    try:
        x = torch.randn(SAMPLE).bfloat16()
        tensors = [x] * {"gate": 2, "gate_grad": 3}.get(call.source, 1)
        if call.source == "norm":
            tensors += [torch.ones(SAMPLE[0]), torch.ones(SAMPLE[1]).bfloat16()]
        maxima = torch.ones(3)
        if call.recipe == "tensorwise":  # torch's kernel, of which at best the compiler makes one that reads once
            total += x.numel() * {"gate": 4, "gate_grad": 6}.get(call.source, 2)
        elif call.recipe == "rowwise":
            maxima = own.line_maxima(call.source, tensors)
        own.to_float8(call.source, call.recipe, tensors, maxima, False, call.rows, call.columns)
    finally:
        for name, original in originals.items():
            setattr(builder, name, original)
    return total / x.numel()


def measure_block(recipe: str, interpreter: Any) -> tuple[list[dict[str, Any]], float]:
    """The rows of a block's casts and of the block; its bytes over the fewest."""
    calls = block_calls(recipe)
    rows: list[dict[str, Any]] = []
    moved = fewest = 0.0
    found: dict[Call, float] = {}
    for call, size in calls:
        if call not in found:
            found[call] = interpreter(count_bytes, call)
            layouts = "+".join(name for name in ("rows", "columns") if getattr(call, name))
            cast = f"{call.source} {call.recipe} {layouts}"
            rows.append({"cast": cast, "bytes": found[call], "fewest": call.fewest()})
        moved += found[call] * size
        fewest += call.fewest() * size
    # Of torch: two that find the maximum of a tensor, or one that sets maxima of lines to 0.
    launches = {"tensorwise": 3, "rowwise": 3, "blockwise": 1}[recipe] * len(calls)
    row = {"block": recipe, "casts": len(calls), "kernels": launches, "bytes / token": moved / TOKENS}
    rows.append(row | {"fewest / token": fewest / TOKENS, "ratio": moved / fewest})
    return rows, moved / fewest


def main() -> int:
    arguments = build_parser(__doc__ or "").parse_args()
    from tests.interpreter import TRITON, WithTriton

    sys.path.append(str(TRITON))
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    rows: list[dict[str, Any]] = []
    bars: list[tuple[str, bool]] = []
    for kernel in kernels():
        row = inspect(kernel)
        add_row(arguments, rows, row)
        bars.append((f"{kernel.name}: no registers are spilled", row["spilled bytes"] == 0))
        bars.append((f"{kernel.name}: loads of 128 bits", row["load bits"] == 128))
    interpreter = WithTriton(interpret=True)
    for recipe in RECIPES:
        found, ratio = measure_block(recipe, interpreter)
        for row in found:
            add_row(arguments, rows, row)
        bars.append((f"{recipe}: a block moves at most 1.10 of the fewest bytes", ratio <= 1.10))
    interpreter.pool.shutdown()
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
