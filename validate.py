"""Loss on held-out documents, in a run or of a trained model, and a sample of what a run's model writes.

python validate.py outputs/NAME --datasets datasets/web datasets/code
"""

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import config as settings
from config import Config, ConfigError, command_line
from data.loader import validation_batches
from data.shards import DataError, open_dataset
from data.tokenizer import Tokenizer
from generate import Request, TextStream, check_prompt, generate
from loss import IGNORED, cross_entropy
from models.trained import Trained, add_place_arguments, load_from_arguments
from parallel.fsdp import reshard
from parallel.mesh import ParallelDims
from parallel.pipeline import Compute
from run.run import TrainingRun

logger = logging.getLogger(__name__)


def validation_sets(config: Config) -> dict[str, Config]:
    """Name → config that reads the batches, of every held-out set. The training data's own set is named "".

    Others are named by their last folders, or by their whole URLs if two share one.
    """
    urls = config.validation.datasets
    if not urls:
        return {"": config}
    names = tuple(url.rstrip("/").rpartition("/")[2] for url in urls)
    return {
        name: replace(config, data=replace(config.data, datasets=(url,), weights=()))
        for name, url in zip(names if len(set(names)) == len(urls) else urls, urls, strict=True)
    }


@torch.no_grad()
def validate_all(run: TrainingRun, parts: list[nn.Module], compute: Compute, step: int) -> dict[str, float]:
    """`validation_loss` in nats per token and, if the tokenizer keeps all bytes, `bits_per_byte` of text after `step`.

    The names of further held-out sets follow after a slash. A set without a trained token has no figures. {} without
    validation, and if the run is to stop before the end. Collective. The ends of documents have a loss, but no bytes.
    """
    if not run.config.validation.enable:
        return {}
    dims, figures = run.dims, dict[str, float]()
    lengths = torch.from_numpy(run.data.tokenizer.byte_lengths).to(run.device)
    for name, held_out in validation_sets(run.config).items():
        batches = validation_batches(held_out, dims.dp_rank(run.environment.rank), dims.dp)  # as many on every rank
        total = torch.zeros(3, dtype=torch.float64, device=run.device)  # summed loss, tokens, their bytes
        with run.watchdog.section("validation"), _no_training(parts):
            for batch in run.watchdog.follow(batches):
                if run.asked_to_stop():
                    logger.info(f"step {step}: not validated to the end, since the run is to stop")
                    return {}
                tokens, labels, positions = batch.to(run.device)
                total[0] += compute.forward(tokens, labels, positions).reshape(-1)[0] / dims.tp  # the cross-entropy
                total[1:] += _count(labels, lengths)
        dist.all_reduce(total)
        total[1:] /= dims.copies
        if not total[1]:
            logger.info(f"step {step}: not validated: {_no_label(held_out)}")
            continue
        figures |= {f"{key}/{name}".rstrip("/"): value for key, value in _mean_figures(*total.tolist()).items()}
    return figures


def _count(labels: Tensor, byte_lengths: Tensor) -> Tensor:
    """[tokens, bytes of their text] of the labels that are not IGNORED."""
    counted = labels != IGNORED
    return torch.stack((counted.sum(), (byte_lengths[labels.clamp(min=0)] * counted).sum()))


def _no_label(held_out: Config) -> str:
    return f"no held-out token of {', '.join(held_out.data.datasets)} is one to train on, as answers are"


def _mean_figures(nats: float, tokens: float, n_bytes: float) -> dict[str, float]:
    """The mean loss and, where bytes are known, bits per byte."""
    loss = {"validation_loss": nats / tokens}
    return loss | ({"bits_per_byte": nats / math.log(2) / n_bytes} if n_bytes else {})


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
        check_prompt("validation.sample_prompt", config.validation.sample_prompt, tokenizer, config.training.seq_len)


def sample_text(
    parts: list[nn.Module], tokenizer: Tokenizer, config: Config, dims: ParallelDims, device: torch.device
) -> Iterator[str]:
    """Yield the sample that `config.validation` asks for, a piece per token. All ranks must take all pieces."""
    if dims.copies > 1:
        yield "none, since tp, cp or pp split the model; generate.py writes text from its checkpoint"
        return
    prompt = config.validation.sample_prompt
    tokens = tokenizer.encode(prompt)
    max_tokens = min(config.validation.sample_tokens, config.training.seq_len - len(tokens))
    request = Request(seed=config.run.seed, max_tokens=max_tokens)
    stream = TextStream(tokenizer, tokens, frozenset({tokenizer.eos_id}), stops=())
    yield prompt
    # Not compiled, since the length changes with each token.
    with _no_training(parts), torch.compiler.set_stance("force_eager"):
        for (token,) in generate(parts[0], [tokens], device, request):
            yield "" if stream.done else stream.push(token)
    yield stream.finish()


# ---------------------------------------------------------------- of a trained model


@torch.no_grad()
def measure(trained: Trained, config: Config) -> tuple[float, int, int]:
    """(summed loss in nats, tokens, their bytes) of a trained model on the held-out documents of `config.data`.

    Summed in float64: float32 would lose digits of a long set.

    Raises DataError for data that was made with another tokenizer than the model's.
    """
    for url in config.data.datasets:
        made_by = open_dataset(url, config).tokenizer_fingerprint
        if made_by != trained.tokenizer.fingerprint:
            raise DataError(f"{url}: was made with tokenizer {made_by}, the model's is {trained.tokenizer.fingerprint}")
    lengths = torch.from_numpy(trained.tokenizer.byte_lengths).to(trained.device)
    summed = torch.zeros((), dtype=torch.float64, device=trained.device)
    count = torch.zeros(2, dtype=torch.int64, device=trained.device)
    for batch in validation_batches(config, 0, 1):
        tokens, labels, positions = batch.to(trained.device)
        summed += cross_entropy(trained.model(tokens, positions), labels)
        count += _count(labels, lengths)
    return float(summed), *count.tolist()


def as_packed(config: Config, seq_len: int | None, recorded: bool) -> Config:
    """`config` with what a packed dataset needs: otherwise examples would be cut or see each other.

    `seq_len` is what was asked for, if anything; `recorded`: `config` holds a run's. Raises ConfigError if packed rows
    have another length, or if nothing says how long the sequences of other data are.
    """
    (url,) = config.data.datasets
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
    parser.add_argument("--max-samples", type=int, help="sequences of each, 0: all; default: as the run")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; default: as the run")
    parser.add_argument("--batch-size", type=int, help="sequences in a forward; default: as the run")
    arguments = parser.parse_args(argv)
    trained = load_from_arguments(arguments)
    values = settings.read_recorded(trained.manifest.get("config", "").encode(), trained.place)
    recorded = "seq_len" in values.get("training", {})
    given = {
        "validation": {"max_samples": arguments.max_samples},
        "training": {"seq_len": arguments.seq_len, "local_batch_size": arguments.batch_size},
    }
    for section, fields in given.items():
        values.setdefault(section, {}).update({key: value for key, value in fields.items() if value is not None})
    config = settings.from_dict(values)
    datasets = arguments.datasets or (values.get("data") and (config.validation.datasets or config.data.datasets))
    if not datasets:
        raise ConfigError(f"{arguments.place}: no run says which datasets to measure; name them with --datasets")
    config = replace(config, validation=replace(config.validation, datasets=tuple(datasets)))
    sets = {name: as_packed(own, arguments.seq_len, recorded) for name, own in validation_sets(config).items()}
    for name, held_out in sets.items():
        counts = measure(trained, held_out)
        if not counts[1]:
            raise DataError(_no_label(held_out))
        figures = _mean_figures(*counts)
        loss, bits = figures["validation_loss"], figures.get("bits_per_byte")
        line = f"{name}  loss {loss:.4f}  perplexity {math.exp(loss):.3f}  {counts[1]:,} tokens"
        print(line + (f"  {bits:.4f} bits per byte" if bits else ""), flush=True)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
