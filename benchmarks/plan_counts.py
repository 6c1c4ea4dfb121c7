"""The planner's peak memory against the count of the real step on fake ranks, over a grid of settings.

    python -m benchmarks.plan_counts [--quick] [--check]

Every layout below, in every checkpointing mode, eager and compiled, but what train.py refuses; of pipelines both ends.
A model of 4 layers as wide as the 1.8B, whose vocabulary is small, middling or large in turn, so that the peak is in a
block, in the loss or in the embedding. Counts do not depend on the machine. Norms are not fused on CPU, and the loss is
not compiled; so planned.
"""

import dataclasses
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import models
import train
from benchmarks.report import build_parser, finish, print_row, require_cpu
from config import Compile, Config, from_dict
from loss import build_loss
from parallel.mesh import ParallelDims
from tools.devices import GIB
from tools.dry_run import dry_run
from tools.plan import build_work
from tools.plan_memory import memory

MODES = ("none", "selective", "full")
VOCABULARIES = (4096, 32_064, 128_256)
PIPELINE = {"parallelism.pp": 2, "training.local_batch_size": 4}
# Name → world size and settings.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"training.local_batch_size": 1}),
    "one rank, tied": (1, {"training.local_batch_size": 1, "model.flavor": "tied"}),
    "DDP 4": (4, {"parallelism.dp_replicate": 4}),
    "FSDP 16": (16, {}),
    "FSDP 16, tied": (16, {"model.flavor": "tied"}),
    "FSDP 16, 2 microbatches": (16, {"training.global_batch_size": 64}),
    "FSDP 16, kept gathered": (16, {"parallelism.reshard_after_forward": False}),
    "FSDP 16, on the host": (16, {"parallelism.cpu_offload": True}),
    "HSDP 4 x 4": (16, {"parallelism.dp_replicate": 4}),
    "TP 2": (16, {"parallelism.tp": 2}),
    "TP 4": (16, {"parallelism.tp": 4}),
    "CP 4": (16, {"parallelism.cp": 4}),
    "CP 4, ring": (16, {"parallelism.cp": 4, "parallelism.cp_method": "ring"}),
    "CP 2 x TP 2": (16, {"parallelism.cp": 2, "parallelism.tp": 2}),
    "PP 2": (16, PIPELINE),
    "PP 4": (16, {**PIPELINE, "parallelism.pp": 4}),
    "PP 2 x TP 2": (16, {**PIPELINE, "parallelism.tp": 2}),
    "PP 2, interleaved": (16, {**PIPELINE, "parallelism.pp_schedule": "Interleaved1F1B"}),
}


class Case(NamedTuple):
    """One count: of the first or last stage, by its rank."""

    layout: str
    mode: str
    compiled: bool
    vocab_size: int
    stage: int

    def config(self) -> Config:
        """The run's."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in LAYOUTS[self.layout][1].items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        sections["model"] = {"flavor": "untied", **sections.get("model", {})}
        sections["training"] = {"seq_len": 4096, "local_batch_size": 2, **sections.get("training", {})}
        sections |= {"activation_checkpoint": {"mode": self.mode}, "compile": {"enable": self.compiled}}
        return from_dict(sections)


def cases() -> Iterator[Case]:
    """All of the grid that train.py takes."""
    turn = 0
    for layout, (_, settings) in LAYOUTS.items():
        ends = sorted({0, settings.get("parallelism.pp", 1) - 1})
        for compiled in (False, True):
            for mode in MODES:
                turn += 1
                yield from (Case(layout, mode, compiled, VOCABULARIES[turn % len(VOCABULARIES)], end) for end in ends)
        turn += 1  # so that a mode meets another vocabulary in the next layout


def measure(case: Case) -> dict[str, Any]:
    """Count and plan, in a process of its own."""
    torch._logging.set_logs(dynamo=50)
    spec = models.MODELS["llama"]
    untied = dataclasses.replace(spec.flavors["1.8B"], n_layers=4, vocab_size=case.vocab_size)
    flavors = {"untied": untied, "tied": dataclasses.replace(untied, tie_embeddings=True)}
    world_size, config = LAYOUTS[case.layout][0], case.config()
    with (
        mock.patch.object(models, "MODELS", {"llama": dataclasses.replace(spec, flavors=flavors)}),
        mock.patch.object(train, "build_loss", lambda _, mesh: build_loss(Compile(), mesh)),
    ):
        dims = ParallelDims.from_config(config.parallelism, world_size)
        work = dataclasses.replace(build_work(config, dims), unfused_norm=True, compiled_loss=False, stage=case.stage)
        counted = dry_run(config, world_size, rank=case.stage * world_size // dims.pp).peak
    planned = memory(work).peak
    end = {0: ", first stage", dims.pp - 1: ", last stage"}[case.stage] if dims.pp > 1 else ""
    return {
        "layout": case.layout + end,
        "mode": case.mode,
        "compiled": case.compiled,
        "vocabulary": case.vocab_size,
        "counted GiB": round(counted / GIB, 3),
        "planned GiB": round(planned / GIB, 3),
        "error %": round(100 * (planned / counted - 1), 2),
    }


def main() -> int:
    parser = build_parser("the planner's memory against counts of the real step")
    arguments = parser.parse_args()
    require_cpu(parser)
    chosen = list(cases())[:: 11 if arguments.quick else 1]
    rows = []
    # Spawned, one count each: a process group of fake ranks cannot be left.
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        for row in pool.imap(measure, chosen):
            rows.append(row)
            print_row(row)
    errors = [abs(row["error %"]) for row in rows]
    within = {bar: sum(error <= bar for error in errors) for bar in (1, 5)}
    print(f"{len(rows)} counts: {within[1]} within 1 %, {within[5]} within 5 %, the worst {max(errors)} % off")
    median = statistics.median(errors)
    bars = [
        (f"{median:.2f} % off in the median, at most 1", median <= 1),
        (f"the worst {max(errors)} % off, at most 10", max(errors) <= 10),
    ]
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
