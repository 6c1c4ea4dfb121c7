"""A training run, from top to bottom: build, loop, close.

torchrun --nproc-per-node=8 train.py --config=train_configs/llama3_8b.toml --training.steps=1000
"""

import dataclasses
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from checkpoint.companions import check_vocabulary
from checkpoint.manager import CheckpointManager, check_initial_load, check_owner, check_places, check_steps
from config import Config, ConfigError, TitaniteError, file_errors, grad_accum_steps, load_config, loss_chunks
from data.loader import Batch, DataLoader, validation_batches
from float8.convert import check_float8, convert_to_float8, summarize
from generate import check_prompt
from loss import IGNORED, build_chunked_loss, build_loss
from metrics import MetricsLogger, configure_logging, find_hook
from models import build_model, find_model
from models.init import init_weights
from models.weights import build_refresh
from optim import OuterOptimizer, build_optimizer, clip_grad_norm_, learning_rate, set_learning_rate
from parallel.comm import (
    bfloat16_is_slow,
    device_type,
    end_launcher,
    from_rank_0,
    init_distributed,
    launch_environment,
    set_timeout,
    shut_down,
)
from parallel.exits import AGAIN, SPEAKER_TIMEOUT_SECONDS, run_and_leave
from parallel.failures import BadSteps, Stragglers, check_replay, fetch_finite
from parallel.mesh import ParallelDims
from parallel.pipeline import build_step
from parallel.stop import StopRequest
from parallel.watchdog import Watchdog
from profiling import check_profiling, profile
from run_folder import CrashLoopError, check_run_folder, record_config, record_progress, start_run
from validate import sample_text, validate, validation_sets

logger = logging.getLogger(__name__)


def train(config: Config, after_step: Callable[[int], None] = lambda step: None) -> None:
    """Run `config` to its last step. Calls `after_step(step)` after each trained step, for benchmarks and tests."""
    # -- find mistakes, before any process group starts and any byte is written
    environment = launch_environment()
    rank, world_size, training, comm = environment.rank, environment.world_size, config.training, config.comm
    configure_logging(config.metrics.log_ranks, rank, world_size)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dp_rank = dims.dp_rank(rank)
    tokens_per_step = grad_accum_steps(training, dims.dp) * training.local_batch_size * dims.dp * training.seq_len
    check_float8(config)
    find_hook(config.metrics.hook)
    check_profiling(config.profiling)
    with file_errors():
        dataloader = DataLoader(config, dp_rank, dims.dp, pin_memory=device_type() != "cpu")
        if config.validation.sample_tokens:
            prompt = config.validation.sample_prompt
            check_prompt("validation.sample_prompt", prompt, dataloader.tokenizer, training.seq_len)
    spec, flavor = find_model(config.model, dataloader.vocab_size)
    spec.check_parallelism(flavor, config)
    identity = {"name": config.model.name, **dataclasses.asdict(flavor)}
    check_run_folder(config, identity)
    model = build_model(spec, flavor)
    if config.float8.enable:
        logger.info(f"float8: {summarize(*convert_to_float8(model, config.float8, dims.tp, dims.shards))}")

    # -- processes and the run's folder
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
    torch.use_deterministic_algorithms(config.run.deterministic)
    device = init_distributed(environment, comm)
    dataloader.check_ranks()
    mesh = dims.build_mesh(device.type)
    fits_data = partial(check_vocabulary, dataloader.tokenizer, config.checkpoint.initial_load)
    checks = (
        dataloader.check_run,
        partial(check_initial_load, config.checkpoint, identity, check=fits_data),
        partial(check_owner, config.checkpoint),
        partial(check_places, config.checkpoint),
        partial(check_steps, config),
    )
    start = partial(start_run, config, identity, world_size, environment.job, checks, dataloader.tokenizer.save)
    folder, changed = from_rank_0(start)
    for key, (old, new) in changed.items():
        logger.info(f"resume: {key} was {old!r}, is now {new!r}")
    logger.info(f"run folder {folder}  {world_size} x {device.type}  {dims}")
    if training.param_dtype == "bfloat16" and bfloat16_is_slow(device):
        logger.info('bfloat16 is very slow on this CPU: training.param_dtype = "float32" is faster')
    watchdog = Watchdog(folder, environment, config)

    # -- model, optimizer, checkpoint
    with watchdog:
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        flops_per_token = model.flops_per_token(training.seq_len)  # type: ignore[operator]
        logger.info(f"model {config.model.name} {config.model.flavor}: {n_parameters:,} parameters")
        parts = spec.apply_parallelism(model, mesh, config)
        set_timeout(comm.init_timeout_seconds)
        del model  # a pipeline holds only parts of it
        watchdog.enter("init")
        home = torch.device("cpu") if config.parallelism.cpu_offload else device
        for part in parts:
            init_weights(part, home, config.run.seed, watchdog.alive)
        loss_fn = build_loss(config.compile, mesh)
        chunks = loss_chunks(config)
        chunked = build_chunked_loss(config.compile, mesh, chunks) if chunks > 1 else None
        compute = build_step(parts, loss_fn, flavor.dim, flavor.vocab_size, mesh, config, chunked)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        optimizer = build_optimizer(parts, config.optimizer, config.compile)
        outer = OuterOptimizer(optimizer, mesh.islands, config.parallelism) if dims.islands > 1 else None
        refresh_weights = build_refresh(parts, config)

        def note(step: int) -> None:
            watchdog.last_checkpoint = step
            if rank == 0:
                record_progress(folder)

        checkpoint = CheckpointManager(
            config, folder, parts, optimizer, dataloader, identity, on_commit=note, on_progress=watchdog.alive
        )

        def load() -> int:
            watchdog.enter("load")
            step = checkpoint.load()
            if outer:
                outer.restart()
            refresh_weights()
            watchdog.resumed(step)
            return step

        step = load()
        if rank == 0:
            record_config(folder, config)
        if dims.is_first_copy(rank):
            dataloader.open_ledger(folder)
        metrics = MetricsLogger(config, folder, rank, device, first_step=step, flops_per_token=flops_per_token)
        bad_steps = BadSteps(config.failures, folder, step, config.checkpoint.enable)
        stragglers = Stragglers(device, comm.init_timeout_seconds) if config.failures.straggler_interval else None

    def forward_backward(microbatches: list[Batch], n_tokens: Tensor) -> list[Tensor]:
        losses = []
        for i, batch in enumerate(microbatches):
            watchdog.enter("forward/backward")
            is_last = i == len(microbatches) - 1
            losses.append(compute.forward_backward(batch.tokens, batch.labels, batch.positions, n_tokens, is_last))
        return losses

    def measure_validation() -> None:
        losses = {}
        for name, held_out in validation_sets(config).items():
            batches = validation_batches(held_out, dp_rank, dims.dp, dataloader.hashes)
            batches = watchdog.follow(batches, "validation")
            loss = validate(parts, compute, batches, dims, device, stop.agreed)
            if loss is None:
                logger.info(f"step {step}: not validated to the end, since the run is to stop")
                return
            losses[name] = loss
        metrics.log_validation(step, losses, dataloader.tokens_seen)

    def due(interval: int) -> bool:
        """Whether a multiple of `interval` has come since the last update, at this step or at one that was left out."""
        return step // interval > updated // interval or step == training.steps

    # -- the loop
    gc.disable()  # a collection on one rank stalls all the others, so all collect at the same steps
    starting = True  # until this start has trained a step
    updated = bad_steps.last_trained(step)  # the last step whose update is in the weights
    unchecked: dict[int, Tensor] = {}  # step → loss and gradient norm that the host has not fetched yet
    with (
        StopRequest(folder, environment, comm.init_timeout_seconds) as stop,
        watchdog,
        profile(config.profiling, folder / "profile", rank, step) as enter_step,
    ):
        while step < training.steps and not stop.agreed():
            step += 1
            enter_step(step)
            watchdog.enter("data", step)
            microbatches = [batch.to(device) for batch in dataloader.next_step()]
            if step in bad_steps.skipped:
                metrics.log_skipped(step, dataloader.tokens_seen)
                continue
            island_tokens = torch.zeros(dims.islands, dtype=torch.int64, device=device)
            island_tokens[dims.island(rank)] = sum((batch.labels != IGNORED).sum() for batch in microbatches)
            dist.all_reduce(island_tokens)
            n_tokens = island_tokens[dims.island(rank)] // dims.copies
            n_tokens.clamp_(min=1)  # if all tokens are masked, the loss is 0 instead of 0 / 0

            losses = forward_backward(microbatches, n_tokens)
            if config.failures.replay_interval and step % config.failures.replay_interval == 0:
                check_replay(step, parameters, losses, partial(forward_backward, microbatches, n_tokens))
            loss = torch.stack(losses).sum() / dims.tp / dims.islands  # all ranks of tp computed the same loss
            dist.all_reduce(loss)

            grad_norm = clip_grad_norm_(parameters, training.max_norm, mesh.pp).to(device)
            if outer:
                outer.mean(grad_norm)
            watchdog.enter("optimizer")
            if trouble := bad_steps.judge(step, loss, grad_norm):
                saved = checkpoint.newest_step if config.failures.on_bad_step == "rollback" else None
                bad_steps.leave_out(step if saved is None else saved + 1, step, trouble)
                metrics.log_skipped(step, dataloader.tokens_seen)
                optimizer.zero_grad()
                if saved is not None:
                    step = load()
                    updated = bad_steps.last_trained(step)
                    metrics.resume(step)
                continue
            lr = learning_rate(step, training.steps, config.optimizer.lr, config.lr_scheduler)
            set_learning_rate(optimizer, lr)
            optimizer.step()
            if outer and due(config.parallelism.local_steps):
                outer.meet()
            refresh_weights()
            optimizer.zero_grad()

            # From here on the host waits for the device, but only when something is due.
            unchecked[step] = torch.stack((loss, grad_norm))
            metrics.count_step(tokens_per_step / world_size, dataloader.wait_seconds)
            log_due = due(config.metrics.log_interval) or starting
            validation_due = config.validation.enable and due(config.validation.interval)
            save_due = config.checkpoint.enable and due(config.checkpoint.interval)
            if log_due or validation_due or save_due:
                history = fetch_finite(unchecked)
            if log_due:
                loss_value, norm_value = history[-1]
                metrics.log_step(step, loss=loss_value, grad_norm=norm_value, lr=lr, tokens=dataloader.tokens_seen)
            if validation_due:
                measure_validation()
            if save_due:
                watchdog.enter("checkpoint")
                checkpoint.save(step)
            if stragglers and step % config.failures.straggler_interval == 0:
                stragglers.check(step, dataloader.wait_seconds)
            checkpoint.check()  # raise a background save's error at once
            if starting:  # everything has been compiled and connected
                starting = False
                gc.collect()
                gc.freeze()  # all long-lived objects exist: later collections leave them out
                watchdog.enter("start")
                dist.barrier()  # the shorter limit must not run while a rank still compiles
                set_timeout(comm.train_timeout_seconds, apart=checkpoint.ranks.group)  # has its own limit
                watchdog.limit_seconds = comm.train_timeout_seconds
            if step % training.gc_interval == 0:
                gc.collect()
            if validation_due or save_due:
                metrics.restart_clock()
            updated = step
            after_step(step)

        # -- the end
        enter_step(step + 1)
        watchdog.enter("end", step)
        fetch_finite(unchecked)
        if outer:
            outer.meet()  # the run may have stopped between two meetings
            refresh_weights()
        if config.validation.enable and step == training.steps and step in bad_steps.skipped:
            measure_validation()  # the last step was left out, and its validation with it
            watchdog.enter("end")
        checkpoint.finish(step)  # saves if the run stopped between two saves or left out the last step
        if step < training.steps:
            logger.info(f"stopped after step {step}: {stop.asked_by or 'another rank was asked'}")
        elif config.validation.sample_tokens:
            sample = sample_text(parts, compute, dataloader.tokenizer, config, dims, mesh, device)
            logger.info("sample:\n" + "".join(watchdog.follow(sample, "end")))
        checkpoint.wait()
        dataloader.close()
        metrics.close()
    watchdog.close(step, training.steps, stop.asked_by)
    logger.info(f"done: step {step} of {training.steps}, run folder {folder}")
    if step < training.steps:
        dist.barrier()  # when a rank leaves with 75, torchrun ends the others: let rank 0 record the end first
        if stop.elsewhere:
            sys.exit(AGAIN)  # torchrun starts us again, with the nodes that remain


@record
def main() -> None:
    """Train as the command line says. A mistake is explained in one line and ends with exit code 2."""
    environment = launch_environment()
    try:
        train(load_config(sys.argv[1:]))
    except TitaniteError as error:
        running = dist.is_initialized()
        if environment.local_rank > 0 and (error.agreed or not running):
            # Local rank 0 prints the same. If we left first, torchrun would end it before that.
            time.sleep(SPEAKER_TIMEOUT_SECONDS)
        where = f" (rank {environment.rank})" if running and not error.agreed else ""
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
        would_recur = not running or isinstance(error, (ConfigError, CrashLoopError))
        if environment.local_rank == 0 and environment.restarts_left and would_recur:
            end_launcher()
        os._exit(2)  # a normal exit would wait for ranks that are still in a collective
    shut_down()


if __name__ == "__main__":
    run_and_leave(main)
