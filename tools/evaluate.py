"""Benchmarks on a trained model, by EleutherAI's lm-evaluation-harness, so that scores compare with published ones.

    python -m tools.evaluate outputs/NAME --tasks arc_easy,hellaswag --output_path results/
    python -m tools.evaluate --follow outputs/NAME --tasks arc_easy,hellaswag

Exports the model to a temporary folder in Hugging Face's format (`tools.hf`) and runs `lm-eval run --model hf` on it;
with `--follow` each checkpoint of a run, as it appears (`tools.follow`). All further options are the harness's
(`lm-eval run --help`). Needs `pip install -r requirements-eval.txt`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpoint.loading import load_place
from config import TitaniteError, close_match, command_line
from metrics import configure_logging, quiet_noisy_loggers
from models.trained import add_place_arguments
from parallel.device import device_type
from tools.follow import follow
from tools.hf import export_model

# What IBM's and PyTorch's float8 study compares models by.
TASKS = "mmlu,arc_easy,arc_challenge,hellaswag,sciq,openbookqa,piqa,winogrande"


def main(argv: list[str]) -> int:
    """The command line. Returns lm-eval's exit code. Raises TitaniteError."""
    about = "Benchmarks on a trained model. Further options are lm-eval's."
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description=about, allow_abbrev=False)
    add_place_arguments(parser)
    parser.add_argument("--tasks", default=TASKS, help="names of lm-eval's tasks, by commas (default %(default)s)")
    help = "evaluate each checkpoint of a run as it appears (--follow --help: its options)"
    parser.add_argument("--follow", action="store_true", help=help)
    parser.add_argument("--output_path", help="folder of the results (default: none, with --follow RUN/scores)")
    if "--follow" in argv:
        parser.add_argument("--poll-seconds", type=float, default=30, help="between two looks (default %(default)s)")
    arguments, options = parser.parse_known_args(argv)
    if find_spec("lm_eval") is None:
        raise TitaniteError("lm_eval is not installed; evaluation needs: pip install -r requirements-eval.txt")
    dtype = arguments.dtype

    def command(folder: Path) -> list[str]:
        model = ["--model=hf", f"--model_args=pretrained={folder},dtype={dtype}", f"--device={device_type()}"]
        words = [*model, f"--tasks={arguments.tasks}", "--batch_size=16", *options]
        return [sys.executable, "-m", "lm_eval", "run", *words]

    check_tasks(arguments.tasks, options)
    if arguments.follow:
        configure_logging((0,), 0)
        if "://" in arguments.place:
            raise TitaniteError(f"--follow {arguments.place}: must be the folder of a run, which names its checkpoints")
        asked = [arguments.tasks, dtype, arguments.tokenizer, *options]
        follow(arguments, " ".join(asked), command)
        return 0
    step = load_place(arguments.place, lambda opened: opened.manifest["step"])
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "exported")
        export_model(arguments.place, folder, dtype=dtype, tokenizer=arguments.tokenizer)
        words = command(folder)
        if arguments.output_path:
            name = arguments.place.rstrip("/").rpartition("/")[2].partition("@")[0]
            words.append(f"--output_path={Path(arguments.output_path, f'{name}-step-{step}')}")
        return subprocess.run(words).returncode


def check_tasks(tasks: str, options: Sequence[str]) -> None:
    """Refuse tasks that lm-eval does not know or whose data it cannot reach, before an export. Raises TitaniteError."""
    from lm_eval.tasks import TaskManager

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--include_path")
    own, _ = parser.parse_known_args(options)
    manager = TaskManager(include_path=own.include_path)
    for task in tasks.split(","):
        if not manager.match_tasks([task]) and not Path(task).exists():
            raise TitaniteError(f"--tasks {task}: lm-eval has no such task{close_match(task, manager.all_tasks)}")
        try:
            manager.load(manager.match_tasks([task]))
        except OSError as error:
            hint = "without network set HF_HUB_OFFLINE=1, and HF_HOME to a folder that has the data"
            raise TitaniteError(f"--tasks {task}: {error}; {hint}") from None
        except Exception:
            pass  # ruler and babilong also need the model: lm-eval says what is wrong


if __name__ == "__main__":
    quiet_noisy_loggers()  # from torchao, which transformers imports
    with command_line():
        sys.exit(main(sys.argv[1:]))
