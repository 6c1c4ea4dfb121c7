"""Does float8 train like bfloat16, for this model and these shapes?

    python -m tools.parity --config=train_configs/debug.toml --training.param_dtype=bfloat16 --float8.filter=all

Trains the config in bfloat16 and in float8, from the same seeds on the same data. Writes to `--output` the loss curves
(losses.png, report.json) and a verdict: the difference of the validation losses, beside what another seed changes.
Equal losses of a small model prove little. So each converted layer of the trained bfloat16 model is also measured by
itself: the noise that float8 adds to its output and gradients, on its own activations.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, ConfigError, TitaniteError, command_line, load_config, to_toml
from data.loader import validation_batches
from data.shards import check_datasets
from float8.convert import build_linear_config, check_float8, convert_to_float8, gathers_float8, summarize
from loss import cross_entropy
from models import build_model, find_model
from parallel.device import device_type
from parallel.mesh import ParallelDims
from records import output_path, read_records
from trained import load_trained

ROOT = Path(__file__).parents[1]
QUICK = (
    "--training.steps=10",
    "--training.seq_len=32",
    "--training.local_batch_size=4",
    "--training.global_batch_size=0",
    "--lr_scheduler.warmup_steps=2",
    "--validation.max_samples=16",
)


def train_once(config: Config, processes: int, folder: Path) -> dict[str, Any]:
    """Train in processes of its own. Returns losses by step, the final validation loss and the median step seconds.

    Raises TitaniteError with the end of the log if training fails.
    """
    file = folder.with_suffix(".toml")
    file.write_text(to_toml(config), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "train.py"), f"--config={file}", f"--run.folder={folder}"]
    log = folder.with_suffix(".log")
    with open(log, "w", encoding="utf-8") as output:
        if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT).returncode:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-10:])
            raise TitaniteError(f"{' '.join(command)} failed; the end of {log}:\n{tail}")
    rows = read_records(folder / "metrics.jsonl")
    trained = [row for row in rows if row["loss"] is not None]
    (validation_loss,) = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    return {
        "steps": [row["step"] for row in trained],
        "losses": [row["loss"] for row in trained],
        "validation_loss": validation_loss,
        "step_seconds": statistics.median(row["step_seconds"] for row in trained[1:]),  # the first compiles
    }


def measure_layers(model: nn.Module, names: list[str], config: Config, device: torch.device) -> list[dict[str, Any]]:
    """SQNR in dB, against float64, of y, dx and dw of every layer in `names`, on one validation batch of `model`.

    Each layer is measured alone, on the activations and gradients of the bfloat16 model.
    """
    from torchao.float8.float8_linear import Float8Linear

    settings = build_linear_config(dataclasses.replace(config.float8, fsdp_all_gather="off"))
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


def gathered_bytes(model: nn.Module, names: list[str], config: Config, ranks: int = 1) -> tuple[int, int]:
    """Bytes that FSDP2 gathers to get all weights once, if `ranks` share them: (without float8, with it)."""
    itemsize = getattr(torch, config.training.param_dtype).itemsize
    numel = sum(p.numel() for p in model.parameters())
    weights = [model.get_parameter(f"{name}.weight") for name in names]
    in_float8 = sum(weight.numel() for weight in weights if len(weight) % ranks == 0)
    saved = (itemsize - 1) * in_float8 if gathers_float8(config.float8) else 0
    return itemsize * numel, itemsize * numel - saved


def judge(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The mean difference of the validation losses, and their spread over bfloat16's seeds, both in nats."""
    bf16, float8 = ([run["validation_loss"] for run in runs[name]] for name in ("bf16", "float8"))
    difference = statistics.mean(b - a for a, b in zip(bf16, float8, strict=True))
    spread = max(bf16) - min(bf16)
    return {"difference": difference, "seed_spread": spread, "within": abs(difference) < spread}


def plot(runs: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Losses by step, one line per run."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for (name, members), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        for i, run in enumerate(members):
            axes.plot(run["steps"], run["losses"], color=color, lw=1, alpha=0.8, label=None if i else name)
    axes.set(xlabel="step", ylabel="training loss (nats)")
    axes.legend()
    figure.savefig(file, dpi=150)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Train a config in bfloat16 and in float8 and compare. Other options go to the config.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="10 short steps: whether it works, not whether it is equal"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, at least 2 (default %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run (default %(default)s)")
    parser.add_argument("--output", type=output_path, default=Path("outputs/float8-parity"), help="default %(default)s")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.seeds < 2 or arguments.processes < 1:
        parser.error("--seeds must be at least 2, for their spread, and --processes at least 1")
    output: Path = arguments.output.resolve()

    # -- find mistakes before the first run
    config = load_config([*(QUICK if arguments.quick else ()), *rest])
    if config.training.param_dtype != "bfloat16":
        raise ConfigError(
            f'training.param_dtype = "{config.training.param_dtype}": must be "bfloat16", which float8 is compared with'
        )
    config = _prepared(config)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("the loss curves need matplotlib: ./setup.sh test, or pip install matplotlib") from None
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: already holds something; name a new folder")
    check_float8(config)
    check_datasets(config)
    dims = ParallelDims.from_config(config.parallelism, arguments.processes)
    model = build_model(*find_model(config.model, data_vocab_size=1))
    converted, skipped = convert_to_float8(model, config.float8, dims.tp, dims.shards)
    print(f"float8: {summarize(converted, skipped)}", flush=True)

    # -- the runs
    output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {"bf16": [], "float8": []}
    for seed in range(config.run.seed, config.run.seed + arguments.seeds):
        for name, members in runs.items():
            changed = dataclasses.replace(
                config,
                run=dataclasses.replace(config.run, seed=seed),
                float8=dataclasses.replace(config.float8, enable=name == "float8"),
            )
            run = train_once(changed, arguments.processes, output / f"{name}-seed{seed}")
            members.append(run)
            print(
                f"{name:<7} seed {seed}: validation loss {run['validation_loss']:.4f}, "
                f"{run['step_seconds']:.3f} s per step",
                flush=True,
            )

    # -- the report
    device = torch.device(device_type())
    place = str(output / f"bf16-seed{config.run.seed}")
    trained = load_trained(place, device=device, dtype=torch.float32).model
    before, after = gathered_bytes(trained, converted, config, dims.tp * dims.shards)
    layers = measure_layers(trained, converted, config, device)
    verdict = judge(runs)
    seconds = {name: statistics.median(run["step_seconds"] for run in members) for name, members in runs.items()}
    report = {
        "verdict": verdict,
        "step_time_ratio": seconds["float8"] / seconds["bf16"],
        "gathered_bytes": {"bf16": before, "float8": after},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "converted": converted,
        "skipped": skipped,
        "layers": layers,
        "runs": runs,
    }
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(runs, output / "losses.png")
    for key in ("y dB", "dx dB", "dw dB"):
        worst = min(layers, key=lambda row: row[key])
        print(f"worst {key[:-3]:<2}: {worst[key]:.1f} dB, in {worst['layer']}")
    aside = "" if device.type == "cuda" else f" (on {device.type}, which says nothing of a GPU)"
    print(f"step time float8 / bf16: {report['step_time_ratio']:.2f}{aside}")
    print(f"weights gathered once: {before:,} bytes in {config.training.param_dtype}, {after:,} with float8")
    print(f"validation loss, float8 - bf16: {verdict['difference']:+.4f} nats, mean of {arguments.seeds} seeds")
    print(
        f"{'within' if verdict['within'] else 'BEYOND'} the spread of bf16 over its seeds, "
        f"{verdict['seed_spread']:.4f}, for this model, these shapes and {config.training.steps} steps"
    )
    print(f"written: {output}/report.json, {output}/losses.png")


def _prepared(config: Config) -> Config:
    """The config with what the report needs: every loss, and one validation and one checkpoint at the end.

    It always validates on the held-out documents of the training data, even if `validation.datasets` names others.
    """
    steps = config.training.steps
    return dataclasses.replace(
        config,
        metrics=dataclasses.replace(config.metrics, log_interval=1, tensorboard=False),
        validation=dataclasses.replace(config.validation, enable=True, interval=steps, datasets=(), sample_tokens=0),
        checkpoint=dataclasses.replace(config.checkpoint, enable=True, interval=steps, folder="", upload=""),
        float8=dataclasses.replace(config.float8, enable=True),
    )


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
