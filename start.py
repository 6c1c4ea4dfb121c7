"""What a start settles and checks, before a process group starts and before a byte is written."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from checkpoint.checks import check_checkpoints, check_settings
from config import Config, check_effects, file_errors
from data.answers import Answers, load_answers
from data.ledger import build_phases
from data.loader import DataLoader
from float8.convert import check_float8, convert_to_float8, summarize
from loss import check_loss, loss_chunks
from metrics import find_trackers
from models import ModelSpec, build_model, find_model, settle_model
from optim import check_optim, summarize_groups
from parallel.device import check_compiler, choose_param_dtype, device_type
from parallel.mesh import ParallelDims
from run.failures import check_failures
from run.folder import check_run_folder
from run.processes import LaunchEnvironment
from run.profiling import check_profiling
from validation import check_sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """A config without mistakes, and what it names."""

    config: Config  # as the run records it
    environment: LaunchEnvironment
    dims: ParallelDims
    data: DataLoader
    answers: list[Answers]
    spec: ModelSpec
    flavor: Any
    identity: dict[str, Any]  # of the model
    model: nn.Module  # on the meta device, with its float8 layers
    groups: list[str]  # a line for each group of weights, if there are any

    def check_folder(self, folder: Path) -> str:
        """Find what is wrong with going on in the run's folder. For rank 0. Returns the run's id."""
        self.data.check_run(folder)
        return check_checkpoints(self.config, self.identity, folder, self.data)


def set_up(config: Config, environment: LaunchEnvironment) -> Setup:
    """Settle what a config leaves open, open what it names, and find all mistakes, slow checks last.

    Raises TitaniteError.
    """
    config = choose_param_dtype(config)
    dims = ParallelDims.from_config(config.parallelism, environment.world_size)
    check_config(config, environment, dims)
    with file_errors():
        config = settle_model(config)
        data = DataLoader(config, dims.dp_rank(environment.rank), dims.dp, pin_memory=device_type() != "cpu")
        config = data.settle(config)
        spec, flavor = find_model(config.model, data.vocab_size)
        identity = {"name": config.model.name, **dataclasses.asdict(flavor)}
        check_opened(config, data, spec, flavor, identity)
        answers = load_answers(config, data.tokenizer)
    model = build_model(spec, flavor)
    spec.check_replacements(model, config, loss_chunks(config))
    if config.float8.enable:
        converted = convert_to_float8(model, config.float8, dims.tp, dims.shards)
        logger.info(f"float8: {summarize(*converted)}")
    groups = summarize_groups(model, config.optimizer)
    return Setup(config, environment, dims, data, answers, spec, flavor, identity, model, groups)


def check_config(config: Config, environment: LaunchEnvironment, dims: ParallelDims) -> None:
    """Find settings that do not fit together. Raises ConfigError."""
    check_effects(config)
    build_phases(config.training, dims.dp)  # the batch
    check_loss(config)
    check_float8(config)
    find_trackers(config)
    check_failures(config, environment)
    check_compiler(config)


def check_opened(config: Config, data: DataLoader, spec: ModelSpec, flavor: object, identity: dict[str, Any]) -> None:
    """Find settings that do not fit the data, the model or the run's folder. Raises TitaniteError."""
    check_optim(config)
    check_profiling(config.profiling, config.training.steps)
    check_settings(config)
    check_sample(config, data.tokenizer)
    spec.check_parallelism(flavor, config)
    check_run_folder(config, identity)
