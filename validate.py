"""Loss on held-out documents, in a run or of a trained model, and a sample of what a run's model writes.

python validate.py outputs/NAME --datasets datasets/web datasets/code
"""

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import config as settings
from checkpoint.manager import CheckpointManager
from config import Config, ConfigError, command_line
from data.answers import Answers, load_answers, name_sets
from data.loader import Batch, validation_batches
from data.shards import DataError, open_dataset
from data.tokenizer import Tokenizer
from loss import IGNORED, cross_entropy
from models.generation import Request, TextStream, check_prompt, generate
from models.trained import Trained, add_place_arguments, load_from_arguments
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
            total = sum_batches(run.watchdog.follow(batches), forward, lengths, run.device, run.asked_to_stop)
        if total is None:
            logger.info(f"step {step}: not validated to the end, since the run is to stop")
            return {}
        dist.all_reduce(total)
        total[1:] /= dims.copies
        if not total[1]:
            logger.info(f"step {step}: {name or 'the data'} not validated: {NO_LABEL}")
            continue
        for key, value in _figures(total, answer_bytes).items():
            figures[f"{key}/{name}".rstrip("/")] = value
    return figures


def sum_batches(
    batches: Iterable[Batch],
    forward: Callable[..., Tensor],
    byte_lengths: Tensor,
    device: torch.device,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """[loss in nats, tokens that have one, bytes of their text] of this rank's batches; None if asked to stop.

    `forward(tokens, labels, positions)` returns the summed loss. Added up in float64: float32 would lose digits of a
    long set.
    """
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        if asked_to_stop():
            return None
        tokens, labels, positions = batch.to(device)
        is_counted = labels != IGNORED
        total[0] += forward(tokens, labels, positions)
        total[1] += is_counted.sum()
        total[2] += (byte_lengths[labels.clamp(min=0)] * is_counted).sum()
    return total


def _figures(total: Tensor, answer_bytes: int | None = None) -> dict[str, float]:
    """The mean loss and, where bytes are known, bits per byte. `answer_bytes`: of a set of answers, see `Answers`."""
    nats, tokens, n_bytes = total.tolist()
    n_bytes = answer_bytes or n_bytes
    figures = {"validation_loss": nats / tokens}
    if n_bytes:
        figures["bits_per_byte"] = nats / math.log(2) / n_bytes
    if answer_bytes is not None:
        del figures["validation_loss"]
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
        longest = config.training.max_seq_len
        check_prompt("validation.sample_prompt", config.validation.sample_prompt, tokenizer, longest)


def sample_text(
    parts: list[nn.Module], tokenizer: Tokenizer, config: Config, dims: ParallelDims, device: torch.device
) -> Iterator[str]:
    """Yield the sample that `config.validation` asks for, a piece per token. All ranks must take all pieces."""
    if dims.copies > 1:
        yield "none, since tp, cp or pp split the model; generate.py writes text from its checkpoint"
        return
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


# ---------------------------------------------------------------- of a trained model


def measure(trained: Trained, config: Config) -> Tensor:
    """What `sum_batches` adds up, of a trained model on the held-out documents of `config.data`.

    Raises DataError for data that was made with another tokenizer than the model's, or without a trained token.
    """
    for url in config.data.datasets:
        made_by = open_dataset(url, config).tokenizer_fingerprint
        if made_by != trained.tokenizer.fingerprint:
            raise DataError(f"{url}: was made with tokenizer {made_by}, the model's is {trained.tokenizer.fingerprint}")
    return sum_trained(trained, validation_batches(config, 0, 1), ", ".join(config.data.datasets))


@torch.no_grad()
def sum_trained(trained: Trained, batches: Iterable[Batch], name: str) -> Tensor:
    """What `sum_batches` adds up, of a trained model on a set of a `name`. Raises DataError without a trained token."""
    lengths = torch.from_numpy(trained.tokenizer.byte_lengths).to(trained.device)

    def forward(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        return cross_entropy(trained.model(tokens, positions), labels)

    total = sum_batches(batches, forward, lengths, trained.device)
    assert total is not None
    if not total[1]:
        raise DataError(f"{name}: {NO_LABEL}")
    return total


def as_packed(config: Config, seq_len: int | None, recorded: bool) -> Config:
    """`config` with what its dataset needs, if that is packed: otherwise examples would be cut or see each other.

    `seq_len` is what was asked for, if anything; `recorded`: `config` holds a run's. Raises ConfigError if packed rows
    have another length, or if nothing says how long the sequences of other data are.
    """
    (url,) = config.data.datasets
    packed = 0
    if not Path(url).is_file():
        packed = open_dataset(url, config).split("validation").packed_seq_len
    if not packed and not (seq_len or recorded):
        raise ConfigError(f"{url}: no run says how long its sequences were; name it with --seq-len")
    if not packed:
        return config
    if seq_len not in (None, packed):
        raise ConfigError(f"--seq-len {seq_len}: must be {packed} for {url}, which was packed so")
    data, training = replace(config.data, mask_documents=True), replace(config.training, seq_len=packed)
    return replace(config, data=data, training=training)


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(description="Loss and perplexity of a trained model on held-out documents.")
    add_place_arguments(parser)
    parser.add_argument("--datasets", nargs="+", help="prepared datasets; default: those of the run")
    parser.add_argument("--answers", nargs="+", help="files as in validation.answers; default: the run's")
    parser.add_argument("--max-samples", type=int, help="sequences of each, 0: all; default: as the run")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; default: as the run")
    parser.add_argument("--batch-size", type=int, help="sequences in a forward; default: as the run")
    arguments = parser.parse_args(argv)
    trained = load_from_arguments(arguments)
    values = settings.read_recorded(trained.manifest.get("config", "").encode(), trained.place)
    recorded = "seq_len" in values.get("training", {})
    for section, name, value in (
        ("validation", "max_samples", arguments.max_samples),
        ("training", "seq_len", arguments.seq_len),
        ("training", "local_batch_size", arguments.batch_size),
    ):
        if value is not None:
            values.setdefault(section, {})[name] = value
    config = settings.from_dict(values)
    datasets = arguments.datasets or []
    answers = arguments.answers or []
    if not (datasets or answers) and values.get("data"):
        datasets = config.validation.datasets or config.data.datasets
        answers = config.validation.answers
    if not (datasets or answers):
        raise ConfigError(f"{arguments.place}: no run says which datasets to measure; name them with --datasets")
    config = replace(config, validation=replace(config.validation, datasets=tuple(datasets)))
    sets = validation_sets(config) if datasets else {}
    packed = {name: as_packed(sets[name], arguments.seq_len, recorded) for name in sets}  # refuses before measuring
    gold: list[Answers] = []
    for place in answers:
        alone = replace(config, data=replace(config.data, datasets=(place,)))
        alone = as_packed(alone, arguments.seq_len, recorded)
        validation = replace(config.validation, enable=True, answers=(place,))
        gold += load_answers(replace(alone, validation=validation), trained.tokenizer)
    for name, held_out in packed.items():
        total = measure(trained, held_out)
        figures = _figures(total)
        loss = figures["validation_loss"]
        line = f"{name}  loss {loss:.4f}  perplexity {math.exp(loss):.3f}  {int(total[1]):,} tokens"
        if "bits_per_byte" in figures:
            line += f"  {figures['bits_per_byte']:.4f} bits per byte"
        print(line, flush=True)
    for own in gold:
        total = sum_trained(trained, own.batches(0, 1), own.name)
        bits = _figures(total, own.n_bytes)["bits_per_byte"]
        print(f"{own.name}  {bits:.4f} bits per byte of answers  {int(total[1]):,} tokens", flush=True)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
