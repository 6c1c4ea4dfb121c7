"""The recipe of a preparation, from its options to its manifest, and the command."""

import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from config import command_line, file_errors
from data.chat import load_transformers
from data.prepare import workers, writer
from data.prepare.options import (
    TUNING,
    VOCAB_SIZE,
    Options,
    check_files,
    check_options,
    parse_options,
)
from data.prepare.output import BAD_RECORDS, MANIFEST, Output
from data.prepare.passes import Preparation, run_passes, tokenised
from data.prepare.readers import UNIT_BYTES, Tally, Unit, documents, plan_units
from data.prepare.sources import File, kind_of, list_files
from data.prepare.tuning import use_template
from data.shards import SPLITS, VERSION, DataError, digest
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from storage.records import written_whole

TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text to train a tokenizer on
TEXTS = ".texts.jsonl"  # file in which `prepare` keeps texts, as every pass reads them again
# Number in the manifest → what it counts.
TOLD = {
    "vocab_size": "vocabulary",
    "eos_id": "id that ends a document",
    "bad_records": f"bad records left out, listed in {BAD_RECORDS}",
    "conversations": "conversations or pairs",
    "dropped": "of those longer than --seq-len, left out",
    "trained_tokens": "trained tokens",
}
log = logging.getLogger(__name__)


def prepare(texts: Iterable[str | Mapping[str, Any]], output: str, **options: Any) -> dict[str, Any]:
    """Prepare texts, or records that hold a format's keys, and return the manifest. Raises DataError, TitaniteError.

    The options are the command's: `seq_len=4096` is --seq-len=4096.
    """
    if "://" in output:
        raise DataError(f"output = {output}: texts are kept in the output folder meanwhile, so it must be a folder")
    kept = Path(output).absolute() / TEXTS
    given = Options(source=(str(kept),), output=output, **options)
    with Output(output).locked(), written_whole(kept) as lines:
        for text in texts:
            if isinstance(text, str):
                text = {given.columns[0]: text}
            lines.write(json.dumps(dict(text)).encode() + b"\n")
    try:
        return prepare_sources(given)
    finally:
        kept.unlink()


def prepare_sources(options: Options) -> dict[str, Any]:
    """Prepare a dataset and return its manifest. Raises DataError, TitaniteError."""
    check_options(options)
    output = Output(options.output if "://" in options.output else os.path.abspath(options.output))
    if output.read_if_there(MANIFEST, 0, 1) is not None:
        advice = "name another --output, or remove its manifest.json to replace it"
        raise DataError(f"{output.url}: already holds a finished dataset; {advice}")
    with workers.connected(options.cluster) as client:
        files = list_files(options.source)
        check_files(options, files)
        units = plan_units(files, whole=options.format == "tokens")
        tokenizer = choose_tokenizer(options, units)
        preparation = plan(options, output, files, units, tokenizer)
        _check_usable(preparation, tokenizer, units)
        with output.locked():
            return run_passes(preparation, tokenizer, units, client)


def choose_tokenizer(options: Options, units: Sequence[Unit]) -> Tokenizer:
    """The tokenizer that is given, or one trained on a sample of the text. Raises TitaniteError."""
    if options.tokenizer:
        return load_tokenizer(options.tokenizer, options.eos_token)
    return train_tokenizer(_sample_texts(options, units), options.vocab_size or VOCAB_SIZE)


def _sample_texts(options: Options, units: Sequence[Unit]) -> Iterator[str]:
    """Yield the first documents of units spread evenly over the input, about TOKENIZER_SAMPLE_BYTES in all."""
    tally = Tally(options.skip_bad)
    chosen = units[:: max(1, len(units) * UNIT_BYTES // TOKENIZER_SAMPLE_BYTES)]
    for unit in chosen:
        left = TOKENIZER_SAMPLE_BYTES // len(chosen)
        for _, text in documents(unit, options.columns, "text", options.separator_text, tally):
            yield text
            left -= len(text)
            if left <= 0:
                break


def plan(
    options: Options, output: Output, files: Sequence[File], units: Sequence[Unit], tokenizer: Tokenizer
) -> Preparation:
    """What decides the bytes to write. Raises TitaniteError for a chat template that cannot be used."""
    facts: dict[str, Any] = {}
    if options.format == "chat":
        template = ""
        if options.chat_template:
            with file_errors():
                template = Path(options.chat_template).read_text(encoding="utf-8")
        use_template(tokenizer, template)
        if "strftime_now" in tokenizer.chat_template:
            facts["day"] = date.today().isoformat()  # as transformers tells it
            log.warning(f"the chat template is told the day, {facts['day']}; set it in the file to keep the bytes")
    if options.format in TUNING:
        load_transformers(tokenizer)  # what is missing is missing for every example
        facts |= {"dtype": "uint32", "packed_seq_len": options.seq_len, "kind": options.format}
        facts["transformers"] = version("transformers")
    dtype = facts.get("dtype", writer.token_dtype(tokenizer.vocab_size))
    token_bytes: float = sum(map(_text_bytes, files))
    if options.format != "tokens":
        token_bytes = token_bytes / 4 * np.dtype(dtype).itemsize  # a token is about four bytes of text
    shards = token_bytes / (options.shard_mb * 2**20)
    return Preparation(
        options=options,
        url=output.url,
        input=digest(json.dumps([VERSION, units, writer.file_digests(tokenizer)]).encode()),
        facts=facts,
        dtype=dtype,
        train_buckets=max(1, round(shards * (1 - options.validation_fraction))),
        validation_buckets=max(1, round(shards * options.validation_fraction)),
    )


def _text_bytes(file: File) -> int:
    """About how much text a file holds."""
    kind, compression = kind_of(file.url)
    return file.size * 5 if compression or kind == "parquet" else file.size


def _check_usable(preparation: Preparation, tokenizer: Tokenizer, units: Sequence[Unit]) -> None:
    """Find a mistake in the template or the keys before anything is written. Raises DataError without a document."""
    tally = Tally(preparation.options.skip_bad)
    for unit in units:
        for batch in tokenised(preparation, tokenizer, 0, unit, tally, batch_bytes=1):
            if len(batch) or tally.counts["conversations"]:
                return
    raise DataError("the input holds nothing that can be used: nothing to prepare")


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with command_line():
        manifest = prepare_sources(options)
        for name, what in TOLD.items():
            if name in manifest:
                print(f"{what}: {manifest[name]:,}")
        for split in SPLITS:
            shards = [shard for shard in manifest["shards"] if shard["split"] == split]
            documents = sum(shard["documents"] for shard in shards)
            tokens = sum(shard["tokens"] for shard in shards)
            print(f"{split}: documents {documents:,}, tokens {tokens:,}, files {len(shards)}")
        print(f"ready: {options.output}")
        print(f"train on it: {shlex.join(_train_command(options))}")


def _train_command(options: Options) -> list[str]:
    """Settings of a run on the dataset."""
    words = ["./run_llama_train.sh", f"--data.datasets={json.dumps([options.output])}"]
    if options.format in TUNING:
        words += [f"--training.seq_len={options.seq_len}", "--data.mask_documents=true"]
    return words
