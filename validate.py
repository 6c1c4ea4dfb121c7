"""Loss and perplexity of a trained model on held-out documents, and bits per byte of gold answers.

python validate.py outputs/NAME --datasets datasets/web datasets/code
"""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import config as settings
from config import Config, ConfigError, command_line
from data.answers import Answers, load_answers
from data.loader import Batch, validation_batches
from data.shards import DataError, open_dataset
from loss import cross_entropy
from models.trained import Trained, add_place_arguments, load_from_arguments
from validation import NO_LABEL, figures_of, sum_batches, validation_sets


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
        figures = figures_of(total)
        loss = figures["validation_loss"]
        line = f"{name}  loss {loss:.4f}  perplexity {math.exp(loss):.3f}  {int(total[1]):,} tokens"
        if "bits_per_byte" in figures:
            line += f"  {figures['bits_per_byte']:.4f} bits per byte"
        print(line, flush=True)
    for own in gold:
        total = sum_trained(trained, own.batches(0, 1), own.name)
        bits = figures_of(total, own.n_bytes)["bits_per_byte"]
        print(f"{own.name}  {bits:.4f} bits per byte of answers  {int(total[1]):,} tokens", flush=True)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
