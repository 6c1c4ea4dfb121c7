"""Loss on held-out documents in a run, and a sample of what its model writes. validate.py is for trained models."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint.manager import CheckpointManager
from config import Config
from data.answers import Answers, name_sets
from data.loader import Batch, validation_batches
from data.tokenizer import Tokenizer
from loss import IGNORED
from parallel.fsdp import reshard
from parallel.mesh import ParallelDims
from run.run import TrainingRun
from trainer import Trainer

logger = logging.getLogger(__name__)

NO_LABEL = "no trained tokens (such as answers) in the held-out data"


def validation_sets(config: Config) -> dict[str, Config]:
    """Name → config that reads the batches, of every held-out set. The training data's own set is named "".

    Others are named by their last folders, or by their whole URLs if two share one.
    """
    urls = config.validation.datasets
    if not urls:
        return {"": config}
    sets = {}
    for name, url in zip(name_sets(*urls), urls, strict=True):
        sets[name] = replace(config, data=replace(config.data, datasets=(url,), weights=()))
    return sets


def validate_all(
    run: TrainingRun, trainer: Trainer, checkpoint: CheckpointManager, step: int, answers: Sequence[Answers] = ()
) -> dict[str, float]:
    """The figures of the weights after `step` and, as NAME/average, of the mean of the last checkpoints' weights.

    There are none of the latter unless validation.average asks for them and there is a checkpoint. Collective.
    """
    figures = validate_weights(run, trainer, step, answers)
    if figures and run.config.validation.average:
        with checkpoint.averaged(run.config.validation.average) as found:
            trainer.refresh_weights()
            if found:
                averaged = validate_weights(run, trainer, step, answers)
                figures |= {f"{name}/average": value for name, value in averaged.items()}
        trainer.refresh_weights()
    return figures


@torch.no_grad()
def validate_weights(
    run: TrainingRun, trainer: Trainer, step: int, answers: Sequence[Answers] = ()
) -> dict[str, float]:
    """`validation_loss` in nats per token and, if the tokenizer keeps all bytes, `bits_per_byte` of text after `step`.

    The names of further held-out sets follow after a slash, and those of sets of `answers`, which only have the latter.
    A set without a trained token has no figures. {} without validation, and if the run is to stop before the end.
    Collective. The ends of documents have a loss, but no bytes.
    """
    if not run.config.validation.enable:
        return {}
    dims = run.dims
    lengths = torch.from_numpy(run.data.tokenizer.byte_lengths).to(run.device)

    def forward(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        terms = trainer.compute.forward(tokens, labels, positions)
        return terms.reshape(-1)[0] / dims.tp  # the cross-entropy, which all ranks of tp computed

    dp_rank = dims.dp_rank(run.environment.rank)
    sets: list[tuple[str, Iterator[Batch], int | None]] = []
    for name, held_out in validation_sets(run.config).items():
        whole = validation_batches(held_out, dp_rank, dims.dp)  # as many on every rank
        sets.append((name, (batch.cut(run.data.seq_len) for batch in whole), None))
    for own in answers:
        sets.append((own.name, own.batches(dp_rank, dims.dp), own.n_bytes))
    figures: dict[str, float] = {}
    for name, batches, answer_bytes in sets:
        with run.watchdog.section("validation"), _no_training(trainer.parts):
            wanted = takewhile(lambda _: not run.asked_to_stop(), run.watchdog.follow(batches))
            total = sum_batches(wanted, forward, lengths, run.device)
        if run.asked_to_stop():
            logger.info(f"step {step}: not validated to the end, since the run is to stop")
            return {}
        dist.all_reduce(total)
        total[1:] /= dims.copies
        found = figures_of(total, answer_bytes)
        if not found:
            logger.info(f"step {step}: {name or 'the data'} not validated: {NO_LABEL}")
        for key, value in found.items():
            figures[f"{key}/{name}".rstrip("/")] = value
    return figures


def sum_batches(
    batches: Iterable[Batch], forward: Callable[..., Tensor], byte_lengths: Tensor, device: torch.device
) -> Tensor:
    """[loss in nats, tokens that have one, bytes of their text] of this rank's batches.

    `forward(tokens, labels, positions)` returns the summed loss. Added up in float64: float32 would lose digits of a
    long set.
    """
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        tokens, labels, positions = batch.to(device)
        is_counted = labels != IGNORED
        total[0] += forward(tokens, labels, positions)
        total[1] += is_counted.sum()
        total[2] += (byte_lengths[labels.clamp(min=0)] * is_counted).sum()
    return total


def figures_of(total: Tensor, answer_bytes: int | None = None) -> dict[str, float]:
    """The mean loss and, where bytes are known, bits per byte; nothing without a trained token.

    `answer_bytes`: of a set of answers, see `Answers`, which only has the latter.
    """
    nats, tokens, n_bytes = total.tolist()
    n_bytes = answer_bytes or n_bytes
    figures: dict[str, float] = {}
    if tokens and answer_bytes is None:
        figures["validation_loss"] = nats / tokens
    if tokens and n_bytes:
        figures["bits_per_byte"] = nats / math.log(2) / n_bytes
    return figures


@contextmanager
def _no_training(parts: list[nn.Module]) -> Iterator[None]:
    """Switch off what is for training only, such as dropout. At the end the parameters are shards again."""
    trained = [module for part in parts for module in part.modules() if module.training]
    for part in parts:
        part.eval()
    yield
    reshard(parts)
    for module in trained:
        module.training = True


def show_sample(run: TrainingRun, parts: list[nn.Module]) -> None:
    """Log the sample that `config.validation` asks for. Collective."""
    if run.config.validation.sample_tokens:
        sample = sample_text(parts, run.data.tokenizer, run.config, run.dims, run.device)
        with run.watchdog.section("sample"):
            text = "".join(run.watchdog.follow(sample))
        logger.info(f"sample:\n{text}")


def check_sample(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if `config.validation` asks for a sample that its prompt leaves no room for."""
    if config.validation.sample_tokens:
        from models.generation import check_prompt  # a run without samples loads none of it

        longest = config.training.max_seq_len
        check_prompt("validation.sample_prompt", config.validation.sample_prompt, tokenizer, longest)


def sample_text(
    parts: list[nn.Module], tokenizer: Tokenizer, config: Config, dims: ParallelDims, device: torch.device
) -> Iterator[str]:
    """Yield the sample that `config.validation` asks for, a piece per token. All ranks must take all pieces."""
    if dims.copies > 1:
        yield "none, since tp, cp or pp split the model; generate.py writes text from its checkpoint"
        return
    from models.generation import Request, TextStream, generate

    prompt = config.validation.sample_prompt
    tokens = tokenizer.encode(prompt)
    max_tokens = min(config.validation.sample_tokens, config.training.max_seq_len - len(tokens))
    request = Request(seed=config.run.seed, max_tokens=max_tokens)
    stream = TextStream(tokenizer, tokens, frozenset({tokenizer.eos_id}), stops=())
    yield prompt
    # Not compiled, since the length changes with each token.
    with _no_training(parts), torch.compiler.set_stance("force_eager"):
        for (token,) in generate(parts[0], [tokens], device, request):
            yield "" if stream.done else stream.push(token)
    yield stream.finish()
