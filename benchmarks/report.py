"""What every benchmark prints: a JSON line per row once it is measured, then a table, then the missed bars."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from parallel.device import device_type
from run.code import git_commit, package_versions


def build_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: done within a minute, and less certain")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed, naming it last")
    parser.add_argument("--json", type=Path, help="also write rows, machine and versions to this file")
    return parser


def require_cpu(parser: argparse.ArgumentParser) -> None:
    """End with one line if train.py would use an accelerator: all it is compared with uses a CPU."""
    if (device := device_type()) != "cpu":
        parser.error(f"measures on CPU, and torch has found a device of type {device!r}: set CUDA_VISIBLE_DEVICES=")


def prepare_once(dataset: Path, source: str = "stdlib") -> None:
    """Prepare a dataset as ./run_llama_train.sh does, unless it exists.

    It runs the command, since workers import again what the process that starts them has imported, here torch.
    """
    if not (dataset / "manifest.json").exists():
        words = [f"--source={source}", "--max-characters", f"--output={dataset}"]
        subprocess.run([sys.executable, "-m", "data.prepare", *words], check=True)


def add_row(arguments: argparse.Namespace, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a measured row, print it, and write all so far, for runs that are cut short."""
    rows.append(row)
    print_row(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def print_row(row: Mapping[str, Any]) -> None:
    """Print a measured row as a JSON line."""
    print(json.dumps(row), flush=True)


def finish(arguments: argparse.Namespace, rows: list[dict[str, Any]], bars: Iterable[tuple[str, bool]]) -> int:
    """Print the table and the missed ones of `bars`, (bar, whether it is met). Returns the exit code."""
    print("\n" + table(rows))
    missed = [text for text, met in bars if not met]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
        result = {"machine": machine(), "command": command, "missed": missed, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for text in missed:
        print(f"missed: {text}")
    return int(bool(missed) and arguments.check)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, whose columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def machine() -> dict[str, Any]:
    """The machine and software that the figures were measured with."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu,
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **package_versions(),
        "cudnn": torch.backends.cudnn.version(),
        "commit": git_commit(),
    }


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
