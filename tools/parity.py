"""Does float8 train like bfloat16, for this model and these shapes?

    python -m tools.parity --config=train_configs/debug.toml --float8.filter=all

Trains the config in bfloat16 and in float8, from the same seed on the same data, and in bfloat16 from the next seed;
also under torchrun. Writes to `--output` the runs, a page of their curves (compare.html) and report.json with a
verdict: the difference of the validation losses, beside what another seed changes. Equal losses of a small model prove
little. So each converted layer of the trained bfloat16 model is also measured by itself: the noise that float8 adds to
its output and gradients, on its own activations.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from config import Config, ConfigError, command_line, load_config
from data.loader import validation_batches
from float8.convert import build_linear, convert_to_float8
from loss import cross_entropy
from models import build_model, find_model
from models.trained import load_trained
from parallel.device import device_type
from run.processes import launch_environment
from storage.records import output_path
from tools.compare import write_page
from train import train

# What the report needs of every config, such as the loss on held-out documents of the training data alone.
SETTINGS = (
    "--training.param_dtype=bfloat16", "--float8.enable=true", "--metrics.log_interval=1", "--validation.enable=true",
    "--validation.datasets=[]", "--checkpoint.enable=true", "--checkpoint.folder=", "--checkpoint.upload=",
)  # fmt: skip


def measure_layers(
    model: nn.Module, names: list[str], config: Config, device: torch.device
) -> dict[str, dict[str, float]]:
    """Layer → SQNR in dB, against float64, of its own y, dx and dw, on a validation batch of `model` in bfloat16."""
    from torchao.float8.float8_utils import compute_error  # SQNR in dB

    settings = replace(config.float8, fsdp_all_gather="off")
    noise = dict[str, dict[str, float]]()

    def watch(name: str, linear: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        y.register_hook(partial(measure, name, linear, args[0].detach()))

    def measure(name: str, linear: nn.Module, x: Tensor, dy: Tensor) -> None:
        weight = linear.weight.detach().bfloat16()  # type: ignore[operator]
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight)
        float8 = build_linear(plain, settings)
        x, dy = (tensor.flatten(0, -2).bfloat16() for tensor in (x, dy))
        with torch.enable_grad():
            y = float8(x.requires_grad_())
            dx, dw = torch.autograd.grad(y, (x, float8.weight), dy)
        x64, w64, dy64 = x.detach().double(), weight.double(), dy.double()
        pairs = {"y": (x64 @ w64.T, y.detach()), "dx": (dy64 @ w64, dx), "dw": (dy64.T @ x64, dw)}
        noise[name] = {key: compute_error(exact, found.double()).item() for key, (exact, found) in pairs.items()}

    model.requires_grad_(False)
    for name in names:
        model.get_submodule(name).register_forward_hook(partial(watch, name))
    model.tok_embeddings.weight.requires_grad_(True)  # type: ignore[union-attr]
    model.compute_dtype = torch.bfloat16  # type: ignore[assignment]
    tokens, labels, positions = next(validation_batches(config, 0, 1)).to(device)
    cross_entropy(model(tokens, positions), labels).backward()
    return noise


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    about = "Train a config in bfloat16 and in float8 and compare. Other options are settings of the run."
    parser = argparse.ArgumentParser(prog="python -m tools.parity", description=about, allow_abbrev=False)
    default = Path("outputs/float8-parity")
    parser.add_argument("--output", type=output_path, default=default, help="new folder (default %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    output = arguments.output.resolve()
    config = load_config([*rest, *SETTINGS])
    rank = launch_environment().rank
    if rank == 0 and output.exists():
        raise ConfigError(f"--output {output}: exists; name a new folder")
    seed = config.run.seed
    folders = []
    losses = []
    for name, its_seed in (("bf16", seed), ("float8", seed), ("bf16", seed + 1)):
        folder = output / f"{name}-seed{its_seed}"
        run = replace(config.run, seed=its_seed, folder=str(folder))
        _, row = train(replace(config, run=run, float8=replace(config.float8, enable=name == "float8")))
        folders.append(folder)
        losses.append(row["validation_loss"])
    if rank:
        return

    device = torch.device(device_type())
    converted, skipped = convert_to_float8(build_model(*find_model(config.model, data_vocab_size=1)), config.float8)
    trained = load_trained(str(folders[0]), device=device, dtype=torch.float32).model
    layers = measure_layers(trained, converted, config, device)
    difference = losses[1] - losses[0]
    seeds_differ = abs(losses[2] - losses[0])
    within = abs(difference) < seeds_differ
    verdict = {"difference": difference, "seeds_differ": seeds_differ, "within": within}
    report = {"verdict": verdict, "validation_losses": losses, "skipped": skipped, "layers": layers}
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_page({folder: folder.name for folder in folders}, output / "compare.html")
    for key in ("y", "dx", "dw"):
        noise, name = min((noise[key], name) for name, noise in layers.items())
        print(f"worst {key:<2}: {noise:.1f} dB, in {name}")
    found = f"{difference:+.4f} nats, {'within' if within else 'BEYOND'} what another seed changes, {seeds_differ:.4f}"
    print(f"validation loss, float8 - bf16: {found}\nwritten: {output}/report.json")


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
