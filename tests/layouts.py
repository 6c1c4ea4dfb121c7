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
    LAYOUTS,
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
LATE = ("--parallelism.sync_every_microbatch=false",)
OWN_SCATTER = ("--parallelism.reduce_scatter=all_to_all",)
INTERLEAVED = (*PP, "--parallelism.pp_schedule=Interleaved1F1B")
IN_BFLOAT16 = partial(Layout, reference=BFLOAT16, tolerance=ROUNDED)
OF_DOCUMENTS = partial(Layout, reference=DOCUMENTS)
# Kernels that the compiler fuses round elsewhere.
FUSED = Tolerance(1e-5, 1e-3, 0.02)

# Each kind of layout meets each mode of activation checkpointing, eager or compiled.
LLAMA = LAYOUTS | {
    "on the host": Layout(1, HOST, batches=4),
    "FSDP 2 on the host": Layout(2, HOST, batches=2),
    "DDP 2, selective, compiled": Layout(2, (*DDP, *SELECTIVE, *COMPILED)),
    "FSDP 2, compiled by inductor": Layout(2, ("--compile.enable=true",), tolerance=FUSED),
    "TP 2, budget, by inductor": Layout(2, (*TP, *BUDGET), tolerance=FUSED),
    "FSDP 2, chunks, compiled": Layout(2, (*CHUNKS, *COMPILED), batches=2),
    "FSDP 2, summed and gathered once": Layout(2, (*LATE, "--parallelism.reshard_after_forward=false"), batches=4),
    "FSDP 2, own reduce-scatter, bfloat16": IN_BFLOAT16(2, (*OWN_SCATTER, *BFLOAT16)),
    "FSDP 2, summed once, bfloat16": IN_BFLOAT16(2, (*LATE, *BFLOAT16), batches=2),
    "FSDP 2, summed in bfloat16": IN_BFLOAT16(2, (*BFLOAT16, "--training.reduce_dtype=bfloat16")),
    "CP 2, compiled": Layout(2, (*CP, *COMPILED)),
    "CP 2, chunks": Layout(2, (*CP, *CHUNKS)),
    "CP 2, ring, selective, compiled": Layout(2, (*RING, *SELECTIVE, *COMPILED)),
    "CP 2, ring, full, bfloat16": IN_BFLOAT16(2, (*RING, *FULL, *BFLOAT16)),
    "PP 2, documents": OF_DOCUMENTS(2, (*PP, *DOCUMENTS)),
    "PP 2, interleaved": Layout(2, INTERLEAVED),
    "FSDP 4, full": Layout(4, FULL, batches=2),
    "FSDP 4, kept gathered in pairs": Layout(4, IN_PAIRS, batches=2),
    "FSDP 4, own reduce-scatter": Layout(4, OWN_SCATTER, batches=2),
    "HSDP 2 x 2, selective": Layout(4, (*HSDP, *SELECTIVE), batches=2),
    "FSDP 2 x TP 2, full, compiled": Layout(4, (*TP, *FULL, *COMPILED)),
    "FSDP 2 x TP 2, selective, bfloat16": IN_BFLOAT16(4, (*TP, *SELECTIVE, *BFLOAT16)),
    "FSDP 2 x PP 2, selective, compiled": Layout(4, (*PP, *SELECTIVE, *COMPILED)),
    "FSDP 2 x PP 2, interleaved, bfloat16": IN_BFLOAT16(4, (*INTERLEAVED, *BFLOAT16), batches=2),
    "DDP 2 x PP 2": Layout(4, (*DDP, *PP), batches=2),
    "DDP 2 x CP 2": Layout(4, (*DDP, *CP), batches=2),
    "CP 4, ring": Layout(4, ("--parallelism.cp=4", "--parallelism.cp_method=ring")),
    "CP 2 x TP 2, documents": OF_DOCUMENTS(4, (*CP, *TP, *DOCUMENTS)),
    "HSDP 2 x 2 x TP 2": Layout(8, (*HSDP, *TP)),
    "FSDP 2 x TP 2 x PP 2": Layout(8, (*TP, *PP)),
}
OPTIONS: dict[str, Any] = {
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


class Table(NamedTuple):
    """Layouts of one kind of model and training."""

    layouts: dict[str, Layout]
    words: tuple[str, ...] = ()
    shape: dict[str, Any] = {}  # noqa: RUF012  # nothing changes it


def some(*names: str) -> dict[str, Layout]:
    return {name: LLAMA[name] for name in names}


TABLES = {
    "llama": Table(LLAMA),
    "tied": Table(some("TP 2", "FSDP 2, chunks, compiled"), shape={"tie_embeddings": True}),
    "z-loss": Table(
        some("one process", "CP 2, chunks", "FSDP 2, chunks, compiled", "TP 2"), ("--training.z_loss=0.01",)
    ),
    "options": Table(
        some(
            "loss in chunks", "compiled", "documents", "TP 2", "PP 2", "CP 2, documents",
            "FSDP 2 x TP 2, full, compiled", "FSDP 2 x TP 2 x PP 2",
        ),
        shape=OPTIONS,
    ),
    # Of sizes that ranks do not share evenly.
    "muon": Table(
        some("one process", "FSDP 2", "TP 2", "FSDP 4, full", "HSDP 2 x 2, selective", "FSDP 2 x TP 2", "DDP 2 x PP 2"),
        ("--optimizer.name=muon",),
        {"hidden_dim": 110, "n_layers": 3},
    ),
    "groups": Table(
        some("one process", "FSDP 2", "PP 2"),
        ('--optimizer.groups=[{pattern="*norm*",lr=0.5},{pattern="layers.1.*",weight_decay=0,betas=[0.8,0.9]}]',),
    ),
}  # fmt: skip
