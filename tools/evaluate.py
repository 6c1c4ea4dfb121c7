"""Benchmarks on a trained model, by EleutherAI's lm-evaluation-harness, so that scores compare with published ones.

    python -m tools.evaluate outputs/NAME --tasks arc_easy,hellaswag --output_path results/

Exports the model to a temporary folder in Hugging Face's format (`tools.hf`) and runs `lm-eval run --model hf` on it.
All further options are the harness's (`lm-eval run --help`). Needs `pip install -r requirements-eval.txt`.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from config import TitaniteError, command_line
from models.trained import add_place_arguments
from parallel.device import device_type
from tools.hf import export_model

# What IBM's and PyTorch's float8 study compares models by.
TASKS = "mmlu,arc_easy,arc_challenge,hellaswag,sciq,openbookqa,piqa,winogrande"


def main(argv: list[str]) -> int:
    """The command line. Returns lm-eval's exit code. Raises TitaniteError."""
    about = "Benchmarks on a trained model. Further options are lm-eval's."
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description=about, allow_abbrev=False)
    add_place_arguments(parser)
    parser.add_argument("--tasks", default=TASKS, help="names of lm-eval's tasks, by commas (default %(default)s)")
    arguments, options = parser.parse_known_args(argv)
    if find_spec("lm_eval") is None:
        raise TitaniteError("lm_eval is not installed; evaluation needs: pip install -r requirements-eval.txt")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "exported")
        dtype = arguments.dtype
        export_model(arguments.place, folder, dtype=dtype, tokenizer=arguments.tokenizer)
        model = ["--model=hf", f"--model_args=pretrained={folder},dtype={dtype}", f"--device={device_type()}"]
        command = [sys.executable, "-m", "lm_eval", "run", *model, f"--tasks={arguments.tasks}", "--batch_size=16"]
        return subprocess.run([*command, *options]).returncode


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
