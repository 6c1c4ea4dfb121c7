"""Every layout that the tests know, of every kind of model and optimizer, against the plain loop of tools.same."""

from functools import partial
from typing import Any, NamedTuple

from models.llama.model import RopeScaling
from tools.same import (
    BFLOAT16,
    COMPILED,
    CP,
    DDP,
    DOCUMENTS,
    FLOAT8,
    LAYOUTS,
    OWN_KERNELS,
    PP,
    RING,
    ROUNDED,
    TP,
    Layout,
    Tolerance,
)

HSDP = ("--parallelism.dp_replicate=2", "--parallelism.dp_shard=2")
CHUNKS = ("--training.loss_chunks=5",)
FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = ("--activation_checkpoint.mode=selective",)
BUDGET = ("--compile.enable=true", "--activation_checkpoint.mode=budget")
IN_PAIRS = ("--parallelism.reshard_after_forward=true", "--parallelism.reshard_group_size=2")
HOST = ("--parallelism.cpu_offload=true",)
KEPT = ("--parallelism.reshard_after_forward=false",)
LATE = ("--parallelism.sync_every_microbatch=false", *KEPT)
OWN_SCATTER = ("--parallelism.reduce_scatter=all_to_all",)
INTERLEAVED = (*PP, "--parallelism.pp_schedule=Interleaved1F1B")
ROWWISE = ("--float8.recipe=rowwise",)
GATHERED = (*FLOAT8, "--float8.fsdp_all_gather=auto")
IN_BFLOAT16 = partial(Layout, reference=BFLOAT16, tolerance=ROUNDED)
# Each microbatch has scales of its own, and so other roundings than all sequences at once.
SCALED = Tolerance(5e-4, 0.25, 0.5)
IN_FLOAT8 = partial(Layout, reference=FLOAT8, tolerance=SCALED)
OF_DOCUMENTS = partial(Layout, reference=DOCUMENTS)
# Kernels that the compiler fuses round elsewhere.
FUSED = Tolerance(1e-5, 1e-3, 0.02)

# Each kind of layout meets each mode of activation checkpointing, eager or compiled.
LLAMA = LAYOUTS | {
    "bfloat16, cast once a step": IN_BFLOAT16(1, (*BFLOAT16, *KEPT), batches=4),
    "on the host": Layout(1, HOST, batches=4),
    "budget, by inductor": Layout(1, BUDGET, tolerance=FUSED),
    "FSDP 2 on the host": Layout(2, HOST, batches=2),
    "FSDP 2, chunks, compiled": Layout(2, (*CHUNKS, *COMPILED), batches=2),
    "FSDP 2, full": Layout(2, FULL, batches=2),
    "FSDP 2, summed and gathered once": Layout(2, LATE, batches=4),
    "FSDP 2, own reduce-scatter, bfloat16": IN_BFLOAT16(2, (*OWN_SCATTER, *BFLOAT16)),
    "CP 2, compiled": Layout(2, (*CP, *COMPILED)),
    "CP 2, chunks": Layout(2, (*CP, *CHUNKS)),
    "CP 2, ring, selective, compiled": Layout(2, (*RING, *SELECTIVE, *COMPILED)),
    "PP 2, documents": OF_DOCUMENTS(2, (*PP, *DOCUMENTS)),
    "FSDP 4, kept gathered in pairs": Layout(4, IN_PAIRS, batches=2),
    "HSDP 2 x 2, selective": Layout(4, (*HSDP, *SELECTIVE), batches=2),
    "DDP 2 x TP 2": Layout(4, (*DDP, *TP)),
    "FSDP 2 x TP 2, full, compiled": Layout(4, (*TP, *FULL, *COMPILED)),
    "FSDP 2 x PP 2, interleaved, bfloat16, compiled": IN_BFLOAT16(4, (*INTERLEAVED, *BFLOAT16, *COMPILED), batches=2),
    "DDP 2 x PP 2": Layout(4, (*DDP, *PP), batches=2),
    "CP 4, ring": Layout(4, ("--parallelism.cp=4", "--parallelism.cp_method=ring")),
    "CP 2 x TP 2, documents": OF_DOCUMENTS(4, (*CP, *TP, *DOCUMENTS)),
    "FSDP 2 x TP 2 x PP 2": Layout(8, (*TP, *PP)),
    "FSDP 2, float8": IN_FLOAT8(2, (*GATHERED, *FULL), batches=2),
    "CP 2, float8 by rows": Layout(2, (*CP, *FLOAT8, *ROWWISE), (*FLOAT8, *ROWWISE), SCALED),
    "TP 2, float8": IN_FLOAT8(2, (*TP, *FLOAT8)),
    "TP 2, float8, own kernels, compiled": IN_FLOAT8(2, (*TP, *FLOAT8, *OWN_KERNELS, *COMPILED)),
    "PP 2, float8": IN_FLOAT8(2, (*PP, *FLOAT8)),
    "FSDP 2 x TP 2, float8": IN_FLOAT8(4, (*TP, *GATHERED)),
}
OPTIONS = {
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": "head",
    "norm_after": True,
    "windows": (8, 0),
    "rope_thetas": (500.0, 0.0, 1e4),
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, full_layers_only=True),
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_divisor": 3.0,
}
MUONS = ("HSDP 2 x 2, selective", "FSDP 2 x TP 2", "DDP 2 x PP 2")  # only Muon's table has these
# Slow, and of parts that other layouts have: run by ./run_tests.sh long.
COMBINED = (
    "CP 2, compiled",
    "CP 4, ring",
    "DDP 2 x TP 2",
    "FSDP 2 x TP 2, full, compiled",
    "CP 2 x TP 2, documents",
    "FSDP 2 x TP 2 x PP 2",
    "TP 2, float8, own kernels, compiled",
)
GROUPS = '[{pattern="*norm*",lr=0.5},{pattern="layers.1.*",weight_decay=0,betas=[0.8]}]'
USUAL = {name: layout for name, layout in LLAMA.items() if name not in (*MUONS, *COMBINED)}


class Table(NamedTuple):
    """Layouts of one kind of model and training."""

    layouts: dict[str, Layout]
    words: tuple[str, ...] = ()
    shape: dict[str, Any] = {}  # noqa: RUF012  # nothing changes it


def some(*names):
    return {name: LLAMA[name] for name in names}


TABLES = {
    "llama": Table({name: layout for name, layout in USUAL.items() if layout.ranks < 4}, shape={"n_layers": 2}),
    "llama, four ranks": Table({name: layout for name, layout in USUAL.items() if layout.ranks >= 4}),
    "combined": Table(some(*COMBINED)),
    "tied, with z-loss": Table(
        some("TP 2", "CP 2, chunks", "FSDP 2"), ("--training.z_loss=0.01",), {"tie_embeddings": True}
    ),
    "options": Table(some("TP 2", "PP 2", "CP 2, documents"), shape=OPTIONS),
    # Of sizes that ranks do not share evenly.
    "muon": Table(
        some("TP 2", *MUONS),
        ("--optimizer.name=muon", f"--optimizer.groups={GROUPS}"),
        {"hidden_dim": 110, "n_layers": 3},
    ),
}
