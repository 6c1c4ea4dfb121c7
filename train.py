"""A training run, from top to bottom: build, loop, close.

torchrun --nproc-per-node=8 train.py --config=train_configs/llama3_8b.toml --training.steps=1000
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from checkpoint.manager import CheckpointManager
from config import Config, load_config
from metrics import MetricsLogger, configure_logging
from optim import decay_start, due, learning_rate, log_jump, set_learning_rate
from run.failures import BadSteps
from run.processes import launch_environment, set_timeout
from run.run import TrainingRun, run_and_leave
from start import set_up
from trainer import Trainer
from validation import show_sample, validate_all

logger = logging.getLogger(__name__)


def train(config: Config, after_step: Callable[[int], None] = lambda step: None) -> tuple[Path, dict[str, Any]]:
    """Run `config` to its last step. Returns the run's folder and its last row of metrics.

    Calls `after_step(step)` after each step, for benchmarks and tests. Raises TitaniteError.
    """
    environment = launch_environment()
    rank = environment.rank
    configure_logging(config.metrics.log_ranks, rank)
    setup = set_up(config, environment)
    config = setup.config
    dims = setup.dims
    data = setup.data
    model = setup.model
    training = config.training
    steps = training.steps
    with TrainingRun(config, environment, dims, data, setup.identity, setup.check_folder) as run:
        # -- model, optimizer, checkpoint
        watchdog = run.watchdog
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        flops_per_token = {S: model.flops_per_token(S) for S in training.seq_lens}  # type: ignore[operator]
        size = f"{n_parameters:,} parameters, in {training.param_dtype}"
        logger.info(f"model {config.model.name} {config.model.flavor}: {size}")
        for line in (*setup.groups, data.describe(steps)):
            logger.info(line)
        if dims.copies > 1:
            logger.info(f"{dims}: if you edited the model, python -m tools.same shows whether it trains alike so split")
        trainer = Trainer(config, model, setup.spec, setup.flavor, dims, run.mesh, run.device, watchdog.alive)
        set_timeout(config.comm.init_timeout_seconds)
        guard = BadSteps(config.failures, run.folder)
        stateful: dict[str, Stateful] = {"dataloader": data, "bad_steps": guard}
        checkpoint = CheckpointManager(
            config, run.folder, trainer.parts, trainer.optimizer, stateful, setup.identity, trainer.allocate_state,
            start=run.this_start, on_commit=run.saved, on_progress=watchdog.alive, section=watchdog.section,
        )  # fmt: skip
        step = checkpoint.load()
        log_jump(config, run.folder, step)
        trainer.begin()
        guard.start(step, checkpoint.last_saved)
        run.start_steps(step, checkpoint.ranks)
        metrics = MetricsLogger(config, run.folder, rank, environment.world_size, run.device, step)

        # -- the loop
        while step < steps and not run.asked_to_stop():
            step += 1
            run.begin(step)
            is_logged = due(step, config.metrics.log_interval, steps) or run.starting
            with watchdog.section("data"):
                batches = [batch.to(run.device) for batch in data.next_step() if step not in guard.skipped]
            tokens = data.tokens_per_step
            computed = trainer.compute_gradients(batches, run.forward_backward, measure=is_logged)
            batch_size = tokens // training.max_seq_len
            lr = learning_rate(step, steps, config.optimizer.lr, config.lr_scheduler, batch_size)
            rates = set_learning_rate(trainer.optimizer, lr)
            if guard.accepts(step, computed.loss, computed.grad_norm):
                checkpoint.wait_for_copies()  # a save in the background still reads weights and moments
                with watchdog.section("optimizer"):
                    metrics.add_layers(trainer.update())
                flops = tokens * flops_per_token[data.seq_len]
                figures = computed.loss, computed.grad_norm, rates, tokens, flops, data.wait_seconds, computed.terms
                metrics.add(step, *figures)
            else:  # no update; everything else goes on
                metrics.log_skipped(step, data.tokens_seen)
            trainer.end_step(step)

            # From here on the host waits for the device, but only when something is due.
            if is_logged:
                metrics.log(step, data.tokens_seen)
            if config.checkpoint.enable and due(step, config.checkpoint.interval, steps):
                metrics.check_finite()
                checkpoint.save(step)
                metrics.restart_clock()
            checkpoint.check()  # raise a background save's error at once
            if due(step, config.validation.interval, steps):
                metrics.check_finite()
                metrics.log_validation(
                    step, validate_all(run, trainer, checkpoint, step, setup.answers), data.tokens_seen
                )
                show_sample(run, trainer.parts)
                metrics.restart_clock()
            run.end(step)
            after_step(step)

        # -- the end
        run.end_steps(step)
        metrics.check_finite()
        trainer.finish()
        checkpoint.finish(step)  # saves if the run stopped between two saves
        checkpoint.wait()
        data.close()
        metrics.close()
        run.close(step, metrics.summary(), decay_start(config.lr_scheduler, steps))
    return run.folder, metrics.last


def main() -> None:
    """Train as the command line says."""
    train(load_config(sys.argv[1:]))


if __name__ == "__main__":
    run_and_leave(main)
