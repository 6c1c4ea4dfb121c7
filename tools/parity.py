"""Does float8 train like bfloat16, for this model and these shapes?

    python -m tools.parity --config=train_configs/debug.toml --training.param_dtype=bfloat16 --float8.filter=all

Trains the config in bfloat16 and in float8, from the same seeds on the same data, also under torchrun. Writes to
`--output` the runs, a page of their curves (compare.html) and report.json with a verdict: the difference of the
validation losses, beside what another seed changes. Equal losses of a small model prove little. So each converted layer
of the trained bfloat16 model is also measured by itself: the noise that float8 adds to its output and gradients, on its
own activations.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, ConfigError, command_line, load_config
from data.loader import validation_batches
from float8.convert import build_linear_config, convert_to_float8
from loss import cross_entropy
from models import build_model, find_model
from parallel.device import device_type
from records import output_path, read_records
from run.processes import launch_environment
from tools.compare import write_page
from train import train
from trained import load_trained


def read_run(folder: Path) -> dict[str, Any]:
    """Folder, final validation loss and median step seconds of a run."""
    rows = read_records(folder / "metrics.jsonl")
    (loss,) = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    seconds = [row["step_seconds"] for row in rows if row["loss"] is not None][1:]  # the first compiles
    return {"folder": str(folder), "validation_loss": loss, "step_seconds": statistics.median(seconds)}


def measure_layers(model: nn.Module, names: list[str], config: Config, device: torch.device) -> list[dict[str, Any]]:
    """SQNR in dB, against float64, of y, dx and dw of every layer in `names`, on one validation batch of `model`.

    Each layer is measured alone, on the activations and gradients of the bfloat16 model.
    """
    from torchao.float8.float8_linear import Float8Linear

    settings = build_linear_config(replace(config.float8, fsdp_all_gather="off"))
    rows: list[dict[str, Any]] = []

    def measure(name: str, linear: nn.Module, x: Tensor, dy: Tensor) -> None:
        weight = linear.weight.detach().bfloat16()  # type: ignore[operator]
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight)
        float8 = Float8Linear.from_float(plain, settings)
        x, dy = x.flatten(0, -2).bfloat16().requires_grad_(), dy.flatten(0, -2).bfloat16()
        with torch.enable_grad():
            y = float8(x)
            dx, dw = torch.autograd.grad(y, (x, float8.weight), dy)
        x64, w64, dy64 = x.detach().double(), weight.double(), dy.double()
        exact = {"y": (x64 @ w64.T, y), "dx": (dy64 @ w64, dx), "dw": (dy64.T @ x64, dw)}
        rows.append({"layer": name, **{f"{key} dB": sqnr(*pair) for key, pair in exact.items()}})

    def watch(name: str, linear: nn.Module) -> None:
        kept: list[Tensor] = []
        linear.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
        linear.register_full_backward_hook(lambda _, dx, dy: measure(name, linear, kept.pop(), dy[0]))  # type: ignore[index]

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in names:
        watch(name, model.get_submodule(name))
    model.tok_embeddings.weight.requires_grad_(True)  # type: ignore[union-attr]
    model.compute_dtype = torch.bfloat16  # type: ignore[assignment]
    tokens, labels, positions = next(validation_batches(config, 0, 1)).to(device)
    cross_entropy(model(tokens, positions), labels).backward()
    return rows[::-1]


def sqnr(exact: Tensor, approximate: Tensor) -> float:
    """Signal to quantization noise, dB."""
    noise = (exact - approximate.detach().double()).norm().item()
    return 20 * math.log10(exact.norm().item() / noise) if noise else math.inf


def judge(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The mean difference of the validation losses, and their spread over bfloat16's seeds, both in nats."""
    bf16, float8 = ([run["validation_loss"] for run in runs[name]] for name in ("bf16", "float8"))
    difference = statistics.mean(b - a for a, b in zip(bf16, float8, strict=True))
    spread = max(bf16) - min(bf16)
    return {"difference": difference, "seed_spread": spread, "within": abs(difference) < spread}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.parity",
        description="Train a config in bfloat16 and in float8 and compare. Other options go to the config.",
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, at least 2 (default %(default)s)")
    default = Path("outputs/float8-parity")
    parser.add_argument("--output", type=output_path, default=default, help="new folder (default %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for their spread")
    output, config, rank = arguments.output.resolve(), prepare_config(load_config(rest)), launch_environment().rank
    if rank == 0 and output.exists():
        raise ConfigError(f"--output {output}: exists; name a new folder")
    folders: dict[str, list[Path]] = {"float8": [], "bf16": []}
    for seed in range(config.run.seed, config.run.seed + arguments.seeds):
        for name, members in folders.items():
            members.append(output / f"{name}-seed{seed}")
            run = replace(config.run, seed=seed, folder=str(members[-1]))
            train(replace(config, run=run, float8=replace(config.float8, enable=name == "float8")))
    if rank:
        return

    runs = {name: [read_run(folder) for folder in members] for name, members in folders.items()}
    device = torch.device(device_type())
    converted, skipped = convert_to_float8(build_model(*find_model(config.model, data_vocab_size=1)), config.float8)
    trained = load_trained(str(folders["bf16"][0]), device=device, dtype=torch.float32).model
    layers = measure_layers(trained, converted, config, device)
    verdict = judge(runs)
    seconds = {name: statistics.median(run["step_seconds"] for run in members) for name, members in runs.items()}
    report = {
        "verdict": verdict,
        "step_time_ratio": seconds["float8"] / seconds["bf16"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "skipped": skipped,
        "layers": layers,
        "runs": runs,
    }
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_page([folder for members in folders.values() for folder in members], output / "compare.html")
    for key in ("y dB", "dx dB", "dw dB"):
        worst = min(layers, key=lambda row: row[key])
        print(f"worst {key[:-3]:<2}: {worst[key]:.1f} dB, in {worst['layer']}")
    print(f"step time float8 / bf16 on {device.type}: {report['step_time_ratio']:.2f}")
    print(
        f"validation loss, float8 - bf16: {verdict['difference']:+.4f} nats, mean of {arguments.seeds} seeds, "
        f"{'within' if verdict['within'] else 'BEYOND'} the spread of bf16 over its seeds, {verdict['seed_spread']:.4f}"
    )
    print(f"written: {output}/report.json")


def prepare_config(config: Config) -> Config:
    """The config with what the report needs: every loss, and one validation and one checkpoint at the end.

    It always validates on the held-out documents of the training data, even if `validation.datasets` names others.
    Raises ConfigError.
    """
    if (dtype := config.training.param_dtype) != "bfloat16":
        raise ConfigError(f'training.param_dtype = "{dtype}": must be "bfloat16", which float8 is compared with')
    steps = config.training.steps
    return replace(
        config,
        metrics=replace(config.metrics, log_interval=1, tensorboard=False),
        validation=replace(config.validation, enable=True, interval=steps, datasets=(), sample_tokens=0),
        checkpoint=replace(config.checkpoint, enable=True, interval=steps, folder="", upload=""),
        float8=replace(config.float8, enable=True),
    )


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
