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
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import add_row, build_parser, finish
from config import Float8
from float8.convert import convert_to_float8
from models.llama import FLAVORS
from models.llama.model import Llama

RECIPES = ("tensorwise", "rowwise")
SOURCES = ("norm", "copy", "gate", "gate_grad")
TOKENS = 8192
SAMPLE = 512, 1024  # the matrix whose bytes are counted


class Call(NamedTuple):
    """A cast of a matrix [M, N]."""

    source: str
    recipe: str
    rows: bool
    columns: bool

    def read(self) -> int:
        """Bytes per value of one pass over what it casts."""
        return {"gate": 4, "gate_grad": 6}.get(self.source, 2)

    def written(self) -> int:
        row_outputs, column_outputs = (2, 3) if self.source == "gate_grad" else (1, 1)
        return row_outputs * self.rows + column_outputs * self.columns

    def fewest(self) -> int:
        """Bytes per value that it must read and write, its maxima included."""
        return 2 * self.read() + self.written()


def kernels() -> list[tuple[Call, bool]]:
    """The kernels as they are launched: for which cast, and whether it is the one that finds maxima."""
    found = []
    for recipe in RECIPES:
        for source in SOURCES:
            call = Call(source, recipe, True, source != "gate")
            found.append((call, False))
            if recipe == "rowwise":
                found.append((call, True))
    return found


def inspect(call: Call, maxima: bool) -> dict[str, Any]:
    """What Triton and ptxas make of a kernel for sm_90, with sizes that 16 divides, as those of float8 are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from float8 import kernels as own

    function = own.maxima_kernel if maxima else own.cast_kernel
    BM, BN, warps = own.tile_shape(call.source, call.recipe, maxima)
    constants = {
        "SOURCE": call.source, "RECIPE": call.recipe, "E5M2": call.recipe == "tensorwise", "ROWS": call.rows,
        "COLUMNS": call.columns, "BM": BM, "BN": BN,
    }  # fmt: skip
    kinds = {"maxima_ptr": "*fp32", "row_scales_ptr": "*fp32", "column_scales_ptr": "*fp32"}
    kinds |= {"rows_ptr": "*u8", "columns_ptr": "*u8", "a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16"}
    if call.source == "norm":
        kinds["b_ptr"] = "*fp32"
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    constexprs = {name: constants[name] for name in names if name in constants}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
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
    per_element = instructions * warps * 32 / (BM * BN)
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)", compiled.asm["ptx"])
    moved = call.read() + (0 if maxima else call.written())
    return {
        "kernel": f"{'maxima' if maxima else 'cast'} {call.source} {call.recipe}", "warps": warps,
        "registers": int(usage[1]), "spilled bytes": int(usage[2]), "shared bytes": compiled.metadata.shared,
        "instructions": per_element, "instructions / byte": per_element / moved,
        "load bits": max(int(count or 1) * int(bits) for count, bits in loads),
    }  # fmt: skip


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
    if recipe == "tensorwise":
        return [(call, n) for call, n in calls.found if call.source != "copy" or (call.rows and call.columns)]
    return calls.found


def count_bytes(call: Call) -> float:
    """Bytes per value that a call's kernels load, store and change by atomics. In the interpreter's process."""
    import numpy as np
    from triton.runtime import interpreter

    from float8 import kernels as own

    total = 0

    def count(name: str, pointer: int, mask: int) -> Any:
        original = getattr(interpreter.InterpreterBuilder, name)

        def counting(self: Any, *args: Any) -> Any:
            nonlocal total
            total += int(np.count_nonzero(args[mask].data)) * (args[pointer].get_element_ty().primitive_bitwidth // 8)
            return original(self, *args)

        return mock.patch.object(interpreter.InterpreterBuilder, name, counting)

    x = torch.randn(SAMPLE).bfloat16()
    tensors = [x] * (call.read() // 2)
    if call.source == "norm":
        tensors += [torch.ones(SAMPLE[0]), torch.ones(SAMPLE[1]).bfloat16()]
    if call.recipe == "tensorwise":  # torch's kernel of maxima: at best the compiler makes one that reads once
        total += x.numel() * call.read()
    loads = count("create_masked_load", 0, 1)
    stores = count("create_masked_store", 0, 2)
    with loads, stores, count("create_atomic_rmw", 1, 3):
        own.to_float8(call.source, call.recipe, tensors, torch.ones(3), False, call.rows, call.columns)
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
    launches = 3 * len(calls)
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
        row = inspect(*kernel)
        add_row(arguments, rows, row)
        bars.append((f"{row['kernel']}: no registers are spilled", row["spilled bytes"] == 0))
        bars.append((f"{row['kernel']}: loads of 128 bits", row["load bits"] == 128))
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
