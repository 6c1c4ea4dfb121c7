"""The options of data.prepare, and which of them fit together."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from config import LOCAL_OR_S3, close_match, is_form
from data.prepare.output import Output
from data.prepare.sources import File, has_keys
from data.prepare.tokens import DTYPES
from data.prepare.writer import LARGEST_SHARD_MB
from data.shards import DataError

PIECE_CHARACTERS = 4000  # of a piece of one's own text, which is one document to a run
VOCAB_SIZE = 4096  # of a trained tokenizer
# Format → keys of a record. Tokens have one column, whatever its name.
KEYS = {"text": "text", "tokens": "", "sft": "prompt,response", "chat": "messages"}
TUNING = ("sft", "chat")  # formats for fine-tuning
# Options that have an effect with some formats only.
ONLY_FOR = {
    "vocab_size": ("text",),
    "separator": ("text",),
    "max_characters": ("text",),
    "dtype": ("tokens",),
    "packed": ("tokens",),
    "seq_len": TUNING,
    "truncate": TUNING,
    "chat_template": ("chat",),
}
NO_PART_OF_THE_PLAN = ("source", "output", "tokenizer", "overwrite", "skip_bad", "processes", "cluster")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn text, or tokens of another project, into a dataset that training reads."""

    source: tuple[str, ...]
    """stdlib, or folders, files, globs or URLs."""
    output: str
    """Folder of the dataset, or s3://bucket/folder."""
    overwrite: bool = False
    """Replace a finished dataset, once the new one is whole."""
    tokenizer: str = ""
    """tokenizer.json, or a folder with one; default: train one on the text."""
    vocab_size: int = 0
    """Size of the vocabulary to train; 0: 4,096."""
    eos_token: str = ""
    """Token that ends a document; default: the tokenizer's own."""
    format: str = "text"
    """text; tokens; for fine-tuning: sft (prompts with responses) or chat (messages)."""
    keys: str = ""
    """Keys or columns of a record, comma-separated; default: text, prompt,response or messages."""
    separator: str = ""
    r"""What ends a document in text files; \n: a line end, LF or CRLF, \t: a tab."""
    max_characters: int = 0
    """Cut longer texts at line ends; 0: never."""
    dtype: str = ""
    """Type of tokens in files without a header: uint8, uint16, uint32 or uint64."""
    packed: bool = False
    """Of tokens: a document goes on in a table's next row, until eos ends it."""
    seq_len: int = 0
    """Tokens per row of packed examples; longer ones are left out, counted."""
    truncate: bool = False
    """Cut longer examples at the end of a row, not leave them out."""
    chat_template: str = ""
    """File with a Jinja template that marks what the assistant says; default: the tokenizer's."""
    validation_fraction: float = 0.02
    """Share of documents held out."""
    skip_bad: int = 0
    """Bad records to leave out at most, listed in bad_records.txt."""
    block_mb: float = 8
    """MiB of tokens shuffled and read as one block."""
    shard_mb: float = 256
    """Approximate MiB of tokens in a file."""
    processes: int = 0
    """0: one per available core, or one for a few MB."""
    cluster: str = ""
    """Scheduler of a Dask cluster: tcp://host:port, or its JSON file (docs/prepare-cluster.md)."""

    @property
    def columns(self) -> list[str]:
        return (self.keys or KEYS[self.format]).split(",")

    @property
    def separator_text(self) -> str:
        text = self.separator
        for escape, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            text = text.replace(escape, character)
        return text

    def planned(self) -> dict[str, Any]:
        """Those that decide the bytes of the dataset, beside the input and the tokenizer."""
        options = dataclasses.asdict(self)
        return {name: value for name, value in options.items() if name not in NO_PART_OF_THE_PLAN}


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line. Ends the process for what is no option."""
    parser = argparse.ArgumentParser("python -m data.prepare", description=Options.__doc__, allow_abbrev=False)
    kinds = get_type_hints(Options)
    # Field → the text under it.
    docs = dict(re.findall(r'^    (\w+): .*\n    r?"""(.*)"""', inspect.getsource(Options), re.MULTILINE))
    for field in dataclasses.fields(Options):
        option = f"--{field.name.replace('_', '-')}"
        about = docs[field.name]
        if field.default:
            about += f" (default: {field.default})"
        if kinds[field.name] is bool:
            parser.add_argument(option, action="store_true", help=about)
        elif field.default is dataclasses.MISSING:
            nargs = "+" if get_args(kinds[field.name]) else None
            parser.add_argument(option, required=True, nargs=nargs, help=docs[field.name])
        else:
            parser.add_argument(option, type=kinds[field.name], default=field.default, help=about)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in docs]
        parser.error(f"{unknown[0]}: no such option{close_match(unknown[0].partition('=')[0], names)}")
    return Options(**vars(found) | {"source": tuple(found.source)})


def check_options(options: Options) -> None:
    """Raises DataError for a value that makes no sense, and for an option that would have no effect."""

    def check(name: str, is_right: object, wanted: str) -> None:
        if not is_right:
            raise DataError(f"--{name.replace('_', '-')} {getattr(options, name)}: {wanted}")

    check("format", options.format in KEYS, f"must be one of {', '.join(KEYS)}")
    check("dtype", options.dtype in ("", *DTYPES), f"must be one of {', '.join(DTYPES)}")
    for name in ("max_characters", "skip_bad", "processes"):
        check(name, getattr(options, name) >= 0, "must be at least 0")
    for name in ("block_mb", "shard_mb"):
        check(name, 1e-6 <= getattr(options, name) <= LARGEST_SHARD_MB, f"must be from 1e-6 to {LARGEST_SHARD_MB}")
    for name, formats in ONLY_FOR.items():
        check(
            name, not getattr(options, name) or options.format in formats, f"no effect with --format {options.format}"
        )
    check("validation_fraction", 0 <= options.validation_fraction <= 1, "must be from 0 to 1")
    check("output", options.output and is_form(options.output, LOCAL_OR_S3), f"must be {LOCAL_OR_S3.description}")
    check("processes", not (options.processes and options.cluster), "no effect with --cluster")
    wanted = KEYS[options.format]
    check("keys", len(options.columns) == len(wanted.split(",")), f"must be as many as in {wanted or 'ids'}")
    if options.tokenizer:
        check("vocab_size", not options.vocab_size, "is to train a tokenizer, not for --tokenizer")
    else:
        check("vocab_size", options.vocab_size == 0 or options.vocab_size >= 257, "must be at least 257: bytes and eos")
        check("eos_token", not options.eos_token, "needs --tokenizer; a trained one has its own")
        check("format", options.format == "text", "needs the --tokenizer of the tokens, or of the model to be tuned")
    if options.format in TUNING:
        check("seq_len", options.seq_len >= 2, "must be at least 2, the later training.seq_len")


def check_replaced(options: Options) -> None:
    """Raises DataError for a finished dataset that is not to be replaced, or cannot be."""
    if not Output(options.output).is_finished():
        return
    held = f"{options.output}: already holds a finished dataset"
    if not options.overwrite:
        raise DataError(f"{held}; give --overwrite to replace it")
    if "://" in options.output:
        raise DataError(f"{held}, and nothing there can be replaced at once; remove its manifest.json first")


def check_files(options: Options, files: Sequence[File]) -> None:
    """Raises DataError for keys and separators that do not fit the kinds of files."""
    with_keys = [file.url for file in files if has_keys(file)]
    if options.format == "text" and options.columns != ["text"] and not with_keys:
        raise DataError(f"--keys {options.keys}: no effect, as text such as {files[0].url} has no keys")
    if options.separator and len(with_keys) == len(files):
        raise DataError(f"--separator {options.separator!r}: no effect, as no file is text; {files[0].url} has records")
