"""Benchmarks on a trained model, by EleutherAI's lm-evaluation-harness, so that scores compare with published ones.

    python -m tools.evaluate outputs/NAME --tasks arc_easy,hellaswag

Exports the model to Hugging Face's format (`tools.hf`) and lets the harness's own transformers model answer. Needs
`pip install -r requirements-eval.txt`. The harness downloads the tasks' data from Hugging Face; tasks of your own, in
its YAML format, may read local files (`--include`).
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from config import ConfigError, TitaniteError, close_match, command_line
from parallel.device import device_type
from records import output_file, write_output
from tools.hf import export_model
from trained import add_place_arguments, check_least, default_dtype

try:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    sys.exit(f"error: {error}; evaluation needs: pip install -r requirements-eval.txt")

# What IBM's and PyTorch's float8 study compares models by.
TASKS = "mmlu,arc_easy,arc_challenge,hellaswag,sciq,openbookqa,piqa,winogrande"


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description="Benchmarks on a trained model.")
    add_place_arguments(parser)
    parser.add_argument("--tasks", default=TASKS, help="names of the harness's tasks, by commas (default %(default)s)")
    parser.add_argument("--include", help="folder of further tasks, YAML files in the harness's format")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question; default: each task's own")
    parser.add_argument("--limit", type=int, help="questions per task; default: all")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a forward (default %(default)s)")
    parser.add_argument("--max-seq-len", type=int, default=0, help="longest context; default: the training's seq_len")
    parser.add_argument("--output", type=output_file, help="JSON file for the results and all that they depend on")
    arguments = parser.parse_args(argv)
    check_least(parser, arguments, batch_size=1, limit=1, max_seq_len=0)
    manager, tasks = TaskManager(include_path=arguments.include), arguments.tasks.split(",")
    for task in tasks:
        if task not in manager.all_tasks:
            hint = close_match(task, manager.all_tasks)
            raise ConfigError(f"--tasks {task}: no such task{hint} (lm-eval ls tasks lists them)")
    with TemporaryDirectory() as temporary:
        folder, dtype = Path(temporary, "exported"), arguments.dtype or default_dtype()
        tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
        place = export_model(
            arguments.place, folder, dtype=dtype, tokenizer=tokenizer, max_positions=arguments.max_seq_len
        )
        context = json.loads((folder / "config.json").read_bytes())["max_position_embeddings"]
        try:
            results = simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": dtype, "max_length": context},
                tasks=tasks,
                num_fewshot=arguments.num_fewshot,
                batch_size=arguments.batch_size,
                limit=arguments.limit,
                device=device_type(),
                task_manager=manager,
                log_samples=False,
            )
        except OSError as error:  # also what the Hub's libraries raise where there is no network, or no such dataset
            raise TitaniteError(
                f"--tasks {arguments.tasks}: data cannot be loaded: {error}. Without network: set HF_HUB_OFFLINE=1, "
                "and HF_HOME to a folder that this command filled on a machine with network"
            ) from None
    print(make_table(results))
    if arguments.output:
        results["config"]["model_args"]["pretrained"] = place  # the folder is gone
        write_output(arguments.output, json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
