"""Triton on CPU, in a process of its own: its compiler, or its interpreter with the hardware's casts.

The interpreter (Triton 3.6 to 3.9) rounds to bfloat16 and float8 wrongly, so torch casts here. It must be asked for
before Triton is imported. Triton lies in .venv/triton (requirements-triton.txt), unless torch has brought one.
"""

import importlib.util
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[1]
KERNELS, TRITON = ROOT / "float8" / "kernels.py", ROOT / ".venv" / "triton"


class WithTriton:
    """`call(function, *args)` calls a function of a test module in the other process. Skips the test without Triton."""

    def __init__(self, interpret):
        if not (TRITON.exists() or importlib.util.find_spec("triton")):
            pytest.skip("needs Triton: ./setup.sh test")
        with mock.patch.dict("os.environ", {"TRITON_INTERPRET": "1"} if interpret else {}):
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            self.pool.submit(prepare, interpret).result()

    def __call__(self, function, *args):
        return self.pool.submit(function, *args).result()


def prepare(interpret):
    sys.path.append(str(TRITON))
    if interpret:
        correct_casts()


def correct_casts():
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
    }  # fmt: skip
    builder = interpreter.InterpreterBuilder
    others = builder.cast_impl

    def cast(self, src, dst_type, *_):
        old, new = src.dtype.scalar, dst_type.scalar
        if old not in dtypes or new not in dtypes or old == new:
            return others(self, src, dst_type)
        bits = torch.from_numpy(src.data.copy().view(f"int{old.primitive_bitwidth}"))
        values = bits.view(dtypes[old]).float()
        if new.primitive_bitwidth == 8:  # as on the hardware finite and infinite values saturate
            largest = torch.finfo(dtypes[new]).max
            values = values.clamp(-largest, largest)
        found = values.to(dtypes[new]).view(getattr(torch, f"int{new.primitive_bitwidth}")).numpy()
        return interpreter.TensorHandle(found.view(interpreter._get_np_dtype(dst_type)), new)

    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc", "create_fp_to_fp"):
        setattr(builder, name, cast)


def load_kernels(*changes):
    """float8/kernels.py as a module of its own, with `changes` in its text, old and new."""
    text = KERNELS.read_text()
    for old, new in changes:
        assert old in text, f"no longer in the kernels: {old}"
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:  # Triton reads the source when it decorates
        path = Path(folder) / "changed.py"
        path.write_text(text)
        module = ModuleType("changed")
        exec(compile(text, path, "exec"), vars(module))
    return module
