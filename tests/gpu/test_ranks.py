"""Several ranks on one GPU, against the plain loop there: every parallelism by CUDA's kernels and NCCL.

NCCL refuses two ranks on a device only while they name the same host; with names of their own it connects them by
sockets. So this proves what is computed and says nothing about its speed. On a machine without a GPU the same runs on
CPU with gloo, to find mistakes before a GPU is at hand:

TEST_GPU=1 python -m pytest tests/gpu/test_ranks.py [-k "2ranks"]
"""

import os
from pathlib import Path

import pytest
import torch

from tests.layouts import HSDP, Table, some
from tools.same import (
    BFLOAT16,
    COMPILED,
    CP,
    DOCUMENTS,
    EXACT,
    FLOAT8,
    PP,
    RING,
    ROUNDED,
    TP,
    Layout,
    Tolerance,
    compare_layouts,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TEST_GPU") != "1", reason="needs TEST_GPU=1, and a CUDA GPU to say more"
)
ON_GPU = torch.cuda.is_available()
CONFIG = Path(__file__).parents[2] / "train_configs" / "debug.toml"
# Fewer than 128 queries on a rank would take the kernel for decoding (torch 2.11 to 2.14), which no run trains with.
LONG = (*DOCUMENTS, "--training.seq_len=512")
ON_A_GPU = Tolerance(1e-5, 2e-4, 0.02)
IN_FLOAT8 = (*FLOAT8, *BFLOAT16)
LAYOUTS = some(
    "one process", "loss in chunks", "recomputed", "DDP 2", "FSDP 2", "FSDP 2 on the host", "TP 2", "CP 2",
    "CP 2, chunks", "PP 2", "FSDP 2, chunks, compiled", "FSDP 2, own reduce-scatter, bfloat16",
    "HSDP 2 x 2, selective", "FSDP 2 x TP 2", "FSDP 2 x TP 2, full, compiled",
    "FSDP 2 x PP 2, interleaved, bfloat16, compiled",
) | {
    "documents": Layout(1, LONG, LONG),
    "CP 2, documents, compiled": Layout(2, (*CP, *LONG, *COMPILED), LONG),
    "FSDP 2 x CP 2, documents": Layout(4, (*CP, *LONG), LONG),
    "CP 2, ring, bfloat16": Layout(2, (*RING, *BFLOAT16), BFLOAT16, ROUNDED),
    "CP 2, ring, compiled": Layout(2, (*RING, *BFLOAT16, *COMPILED), BFLOAT16, ROUNDED),
    "TP 2, compiled, bfloat16": Layout(2, (*TP, *BFLOAT16, *COMPILED), BFLOAT16, ROUNDED),
    "PP 2, bfloat16": Layout(2, (*PP, *BFLOAT16), BFLOAT16, ROUNDED),
    "FSDP 2, float8": Layout(2, IN_FLOAT8, IN_FLOAT8, ROUNDED),
    "TP 2, float8, compiled": Layout(2, (*TP, *IN_FLOAT8, *COMPILED), IN_FLOAT8, ROUNDED),
    "HSDP 2 x 2, float8": Layout(4, (*HSDP, *IN_FLOAT8), IN_FLOAT8, ROUNDED),
}  # fmt: skip
TABLES = {
    "llama": Table(LAYOUTS),
    "muon": Table(some("one process", "FSDP 2", "TP 2", "HSDP 2 x 2, selective"), ("--optimizer.name=muon",)),
}


def here(layout):
    """With the compiler and the tolerances of this device."""
    words = layout.words
    if ON_GPU:
        words = tuple(word.replace("aot_eager", "inductor") for word in words)
    tolerance = layout.tolerance
    if tolerance == EXACT:
        tolerance = ON_A_GPU
    return layout._replace(words=words, tolerance=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"{ranks}ranks")
@pytest.mark.parametrize("name", TABLES)
def test_every_layout_trains_as_a_plain_loop(name, ranks):
    table = TABLES[name]
    layouts = {key: here(layout) for key, layout in table.layouts.items() if layout.ranks == ranks}
    words = [f"--config={CONFIG}", "--data.datasets=[]", "--optimizer.lr=3e-3", *table.words]
    found = dict(compare_layouts(words, layouts))
    assert {layout: verdict for layout, verdict in found.items() if verdict.kind != "same"} == {}
    assert set(found) == set(layouts)
