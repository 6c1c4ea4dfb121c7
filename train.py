"""A training run, from top to bottom: build, loop, close.

torchrun --nproc-per-node=8 train.py --config=train_configs/llama3_8b.toml --training.steps=1000
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from checkpoint.manager import CheckpointManager
from config import Config, load_config
from layer_norms import LayerNorms, layer_of
from loss import (
    build_chunked_loss,
    build_loss,
    count_trained,
    loss_chunks,
    sum_losses,
    term_names,
)
from metrics import MetricsLogger, configure_logging
from models.init import init_weights
from models.weights import build_refresh
from optim import (
    OuterOptimizer,
    allocate_state,
    build_optimizer,
    clip_grad_norm_,
    decay_start,
    due,
    learning_rate,
    log_jump,
    set_learning_rate,
)
from parallel.pipeline import build_compute
from run.failures import BadSteps
from run.processes import launch_environment, set_timeout
from run.run import TrainingRun, run_and_leave
from start import set_up
from validate import show_sample, validate_all, validate_average

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
    chunks = loss_chunks(config)
    layers = list(dict.fromkeys(layer_of(name) for name, _ in model.named_parameters()))
    with TrainingRun(config, environment, dims, data, setup.identity, setup.check_folder) as run:
        # -- model, optimizer, checkpoint
        device = run.device
        mesh = run.mesh
        watchdog = run.watchdog
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        flops_per_token = {S: model.flops_per_token(S) for S in training.seq_lens}  # type: ignore[operator]
        size = f"{n_parameters:,} parameters, in {training.param_dtype}"
        logger.info(f"model {config.model.name} {config.model.flavor}: {size}")
        for line in (*setup.groups, data.describe(steps)):
            logger.info(line)
        parts = setup.spec.apply_parallelism(model, mesh, config)
        set_timeout(config.comm.init_timeout_seconds)
        home = torch.device("cpu") if config.parallelism.cpu_offload else device
        for part in parts:
            init_weights(part, home, config.run.seed, watchdog.alive)
        loss_fn = build_loss(config.compile, mesh, training.z_loss)
        chunked = build_chunked_loss(config.compile, mesh, chunks, training.z_loss) if chunks > 1 else None
        compute = build_compute(parts, loss_fn, setup.flavor, mesh, config, chunked)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        group = dims.build_update_group() if setup.groups else None
        optimizer = build_optimizer(parts, config.optimizer, config.compile, group, training.param_dtype)
        islands = OuterOptimizer(optimizer, mesh.islands, config.parallelism) if mesh.islands is not None else None
        allocate = partial(allocate_state, islands or optimizer)
        refresh_weights = build_refresh(parts, config)
        guard = BadSteps(config.failures, run.folder, config.checkpoint.enable)
        stateful: dict[str, Stateful] = {"dataloader": data, "bad_steps": guard}
        checkpoint = CheckpointManager(
            config, run.folder, parts, optimizer, stateful, setup.identity, allocate,
            start=run.this_start, on_commit=run.saved, on_progress=watchdog.alive, section=watchdog.section,
        )  # fmt: skip
        step = checkpoint.load()
        log_jump(config, run.folder, step)
        if islands:
            islands.begin()
        refresh_weights()
        guard.start(step, checkpoint.last_saved)
        run.start_steps(step, checkpoint.ranks)
        metrics = MetricsLogger(config, run.folder, rank, environment.world_size, device, step, run.writing)
        names = term_names(training.z_loss)
        layer_norms = LayerNorms(layers, parts, mesh, dims, device) if config.metrics.per_layer else None

        # -- the loop
        while step < steps and not run.asked_to_stop():
            step += 1
            run.begin(step)
            is_logged = due(step, config.metrics.log_interval, steps) or run.starting
            with watchdog.section("data"):
                batches = [batch.to(device) for batch in data.next_step() if step not in guard.skipped]
            tokens = data.tokens_per_step
            n_tokens = count_trained((batch.labels for batch in batches), dims, device)
            total = sum_losses(run.forward_backward(compute, batches, n_tokens), dims, device)
            loss, *other_terms = total.reshape(-1)  # the cross-entropy, and what else the loss has
            if layer_norms and is_logged:
                layer_norms.begin()
            grad_norm = clip_grad_norm_(parameters, training.max_norm, mesh.pp, mesh.islands).to(device)
            batch_size = tokens // training.max_seq_len
            lr = learning_rate(step, steps, config.optimizer.lr, config.lr_scheduler, batch_size)
            rates = set_learning_rate(optimizer, lr)
            if guard.accepts(step, loss, grad_norm):
                checkpoint.wait_for_copies()  # a save in the background still reads weights and moments
                with watchdog.section("optimizer"):
                    optimizer.step()
                if layer_norms and is_logged:
                    metrics.add_layers(layer_norms.end())
                if islands:
                    islands.apart = True
                terms = dict(zip(names, other_terms, strict=True))
                flops = tokens * flops_per_token[data.seq_len]
                metrics.add(step, loss, grad_norm, rates, tokens, flops, data.wait_seconds, terms)
            else:  # no update; everything else goes on
                metrics.log_skipped(step, data.tokens_seen)
            if islands and due(step, config.parallelism.local_steps, steps):
                islands.meet()
            refresh_weights()
            optimizer.zero_grad()

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
                figures = validate_all(run, parts, compute, step, setup.answers)
                if figures and config.validation.average:
                    figures |= validate_average(run, checkpoint, refresh_weights, parts, compute, step, setup.answers)
                metrics.log_validation(step, figures, data.tokens_seen)
                show_sample(run, parts)
                metrics.restart_clock()
            run.end(step)
            after_step(step)

        # -- the end
        run.end_steps(step)
        metrics.check_finite()
        if islands:
            islands.meet()  # those that have trained since they met
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
