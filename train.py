"""A training run, from top to bottom: build, loop, close.

torchrun --nproc-per-node=8 train.py --config=train_configs/llama3_8b.toml --training.steps=1000
"""

import dataclasses
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from checkpoint.manager import CheckpointManager
from config import Config, TitaniteError, grad_accum_steps, load_config
from data.loader import build_dataloader, validation_batches
from float8.convert import check_float8, convert_to_float8, summarize
from float8.fsdp import precompute_scales
from loss import IGNORED, build_loss
from metrics import MetricsLogger, configure_logging
from models import build_model, find_model
from models.init import init_weights
from optim import build_optimizer, clip_grad_norm_, learning_rate, set_learning_rate
from parallel.comm import broadcast_object, device_type, init_distributed, launch_environment, set_timeout, shut_down
from parallel.fsdp import set_last_microbatch
from parallel.mesh import ParallelDims
from parallel.stop import StopRequest
from profiling import profile
from run_folder import check_run_folder, name_run_folder, record_start
from validate import sample_text, validate

logger = logging.getLogger(__name__)


def train(config: Config, after_step: Callable[[int], None] = lambda step: None) -> None:
    """Run `config` to its last step; `after_step(step)` is called at the end of each, for benchmarks and tests."""
    # -- what can go wrong is found here, before any process group starts and any byte is written
    environment = launch_environment()
    rank, world_size, training = environment.rank, environment.world_size, config.training
    configure_logging(config.metrics.log_ranks, rank)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dp_rank = dims.dp_rank(rank)
    tokens_per_step = grad_accum_steps(training, dims.dp) * training.local_batch_size * dims.dp * training.seq_len
    check_float8(config)
    dataloader = build_dataloader(config, dp_rank, dims.dp, pin_memory=device_type() != "cpu")
    spec, flavor = find_model(config.model, dataloader.vocab_size)
    identity = {"name": config.model.name, **dataclasses.asdict(flavor)}
    check_run_folder(config, identity)
    model = build_model(spec, flavor)
    if config.float8.enable:
        logger.info(f"float8: {summarize(*convert_to_float8(model, config.float8))}")

    # -- processes and the run's folder
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.run.deterministic)
    device = init_distributed(environment, config.comm)
    mesh = dims.build_mesh(device.type)
    folder = broadcast_object(name_run_folder(config) if rank == 0 else None)
    if rank == 0:
        changed = record_start(folder, config, identity, world_size)
        dataloader.tokenizer.save(folder)
        for key, (old, new) in changed.items():
            logger.info(f"resume: {key} was {old!r}, is now {new!r}")
    logger.info(f"run folder {folder}  {world_size} x {device.type}  {dims}")

    # -- model, optimizer, checkpoint
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    flops_per_token = model.flops_per_token(training.seq_len)  # type: ignore[operator]
    logger.info(f"model {config.model.name} {config.model.flavor}: {n_parameters:,} parameters")
    spec.apply_parallelism(model, mesh, config)
    init_weights(model, device, config.run.seed)
    loss_fn = build_loss(config.compile)
    optimizer = build_optimizer(model, config.optimizer)
    checkpoint = CheckpointManager(
        config, folder, model=[model], optimizer=optimizer, dataloader=dataloader, identity=identity
    )
    first_step = step = checkpoint.load()
    precompute_scales(model, config.float8)
    dataloader.open_ledger(folder)
    metrics = MetricsLogger(
        config.metrics, folder, rank=rank, device=device, steps=training.steps, flops_per_token=flops_per_token
    )

    def due(interval: int) -> bool:
        return step % interval == 0 or step == training.steps

    # -- the loop
    gc.disable()  # a collection on one rank holds up all the others: they collect together
    unchecked: list[Tensor] = []  # loss and gradient norm of the steps since the host last looked
    with StopRequest(folder) as stop, profile(config.profiling, folder / "profile", rank, first_step) as profiler:
        while step < training.steps and not stop.agreed():
            step += 1
            microbatches = [batch.to(device) for batch in dataloader.next_step()]
            n_tokens = torch.stack([(batch.labels != IGNORED).sum() for batch in microbatches]).sum()
            dist.all_reduce(n_tokens)
            n_tokens.clamp_(min=1)  # all may be masked: a step of loss 0, not of 0 / 0

            losses = []
            for i, batch in enumerate(microbatches):
                set_last_microbatch(model, i == len(microbatches) - 1)
                # Divided by the tokens of the whole step, so that the update does not depend on how they were split.
                loss = loss_fn(model(batch.tokens, batch.positions), batch.labels) / n_tokens
                loss.backward()
                losses.append(loss.detach())
            loss = torch.stack(losses).sum()
            dist.all_reduce(loss)

            grad_norm = clip_grad_norm_(model.parameters(), training.max_norm)
            lr = learning_rate(step, training.steps, config.optimizer.lr, config.lr_scheduler)
            set_learning_rate(optimizer, lr)
            optimizer.step()
            precompute_scales(model, config.float8)
            optimizer.zero_grad()

            # The host waits for the device only in what follows, when something is due.
            unchecked.append(torch.stack((loss, grad_norm)))
            metrics.count_step(tokens_per_step / world_size, dataloader.wait_seconds)
            log_due = due(config.metrics.log_interval) or step == first_step + 1
            validation_due = config.validation.enable and due(config.validation.interval)
            save_due = config.checkpoint.enable and due(config.checkpoint.interval)
            if log_due or validation_due or save_due:
                history = fetch_finite(unchecked, step)
            if log_due:
                (*_, (loss_value, norm_value)) = history
                metrics.log_step(step, loss=loss_value, grad_norm=norm_value, lr=lr, tokens=dataloader.tokens_seen)
            if validation_due:
                validation_loss = validate(model, loss_fn, validation_batches(config, dp_rank, dims.dp), device)
                metrics.log_validation(step, validation_loss, dataloader.tokens_seen)
            if save_due:
                checkpoint.save(step)
            checkpoint.check()  # a background save that failed is no news for later
            if step == first_step + 1:
                set_timeout(mesh, config.comm.train_timeout_seconds)  # everything is compiled and connected
            if step % training.gc_interval == 0:
                gc.collect(1)
            if profiler:
                profiler.step()
            if validation_due or save_due:
                metrics.restart_clock()
            after_step(step)

        # -- the end
        if step < training.steps:
            logger.info(f"stopped after step {step}: {stop.asked_by or 'another rank was asked'}")
            fetch_finite(unchecked, step)
            checkpoint.save_if_due(step, last=True)
        elif config.validation.sample_tokens:
            prompt, length = config.validation.sample_prompt, config.validation.sample_tokens
            logger.info(f"sample:\n{sample_text(model, dataloader.tokenizer, prompt, length, device)}")
        checkpoint.close()
        dataloader.close()
        metrics.close()
    logger.info(f"done: {step} of {training.steps} steps, run folder {folder}")


class NotFiniteError(TitaniteError):
    """The loss or a gradient is no longer a number."""

    agreed = True


def fetch_finite(unchecked: list[Tensor], step: int) -> list[list[float]]:
    """The (loss, gradient norm) of the steps up to `step`, from the device; empties `unchecked`.

    Raises NotFiniteError on all ranks alike, both being sums over all ranks. Comes before anything is written.
    """
    history = torch.stack(unchecked).tolist() if unchecked else []
    unchecked.clear()
    for past, (loss, grad_norm) in zip(range(step - len(history) + 1, step + 1), history, strict=True):
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NotFiniteError(
                f"step {past}: loss {loss}, gradient norm {grad_norm}: not finite, so training stops and nothing "
                "of it is saved; resume from the last checkpoint, with a lower optimizer.lr or another run.seed"
            )
    return history


@record
def main() -> None:
    """Train as the command line says; a mistake is explained in one line and ends with exit code 2."""
    try:
        train(load_config(sys.argv[1:]))
    except TitaniteError as error:
        environment, running = launch_environment(), dist.is_initialized()
        if environment.local_rank > 0 and (error.agreed or not running):
            # Local rank 0 says the same. torchrun ends us once it has; if we went first, it would be ended unheard.
            time.sleep(SPEAKER_TIMEOUT_SECONDS)
        where = f" (rank {environment.rank})" if running and not error.agreed else ""
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # not through Python's end, which would wait for ranks that are still in a collective
    shut_down()


SPEAKER_TIMEOUT_SECONDS = 20

if __name__ == "__main__":
    main()
