"""The float8 matmul that takes the place of torch's on CPU, against torch's own; nobody hears of it, or of torchao."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN_AND_REPLACED = """
import os, float8.convert, metrics
metrics.configure_logging((0,), 0)
import torch, torchao.float8.float8_linear
from float8.cpu import replace_matmul

torch.manual_seed(0)
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
a, b, bias = torch.randn(64, 128).to(e4m3), torch.randn(96, 128).to(e5m2).t(), torch.randn(96)  # two kinds: fast
one, other, rows, columns = torch.tensor(1.3), torch.tensor(0.7), torch.rand(64, 1), torch.rand(1, 96)
rowwise = not torch.__version__.startswith("2.11")  # which takes one scale of each

def results():
    torch._dynamo.reset()
    matmul = torch._scaled_mm
    return [
        matmul(a, b, one, other, out_dtype=torch.bfloat16),
        *(matmul(a, b, rows, columns, out_dtype=torch.float32) for _ in range(rowwise)),
        matmul(a, b, one, other, bias, out_dtype=torch.float32),
        matmul(a, b, one, other, out_dtype=torch.float32, out=torch.empty(64, 96)),
        torch.compile(lambda x: matmul(x, b, one, other, out_dtype=torch.bfloat16))(a),
    ]

own = results()
replace_matmul()
assert all(map(torch.equal, own, results()))
try:
    torch._scaled_mm(a, b, one, other, scale_result=one)
except NotImplementedError:  # torch's own takes it
    print("replaced", flush=True)
    os._exit(0)  # as train.py ends
"""


def test_the_replaced_matmul_has_the_bits_of_torchs_own():
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHAO")}
    command = [sys.executable, "-c", OWN_AND_REPLACED]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("replaced\n", "")
