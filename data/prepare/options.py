"""The options of data.prepare, and which of them fit together."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from msgspec import Meta

from config import Count, FolderOrS3, close_match, convert, field_docs
from data.prepare.sources import File, has_keys
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
    "seq_len": TUNING,
    "chat_template": ("chat",),
}
NO_PART_OF_THE_PLAN = ("source", "output", "tokenizer", "skip_bad", "processes", "cluster")
Megabytes = Annotated[float, Meta(ge=1e-6, le=LARGEST_SHARD_MB, description=f"from 1e-6 to {LARGEST_SHARD_MB}")]
Share = Annotated[float, Meta(ge=0, le=1, description="from 0 to 1")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn text, or tokens of another project, into a dataset that training reads."""

    source: tuple[str, ...]
    """stdlib, or folders, files, globs or URLs."""
    output: FolderOrS3
    """Folder of the dataset, or s3://bucket/folder."""
    tokenizer: str = ""
    """tokenizer.json, or a folder with one; default: train one on the text."""
    vocab_size: Count = 0
    """Size of the vocabulary to train; 0: 4,096."""
    eos_token: str = ""
    """Token that ends a document; default: the tokenizer's own."""
    format: Literal["text", "tokens", "sft", "chat"] = "text"
    """text; tokens; for fine-tuning: sft (prompts with responses) or chat (messages)."""
    keys: str = ""
    """Keys or columns of a record, comma-separated; default: text, prompt,response or messages."""
    separator: str = ""
    r"""What ends a document in text files; \n: a line end, LF or CRLF, \t: a tab."""
    max_characters: Count = 0
    """Cut longer texts at line ends; without a number at 4,000 characters, 0: never."""
    dtype: Literal["", "uint8", "uint16", "uint32", "uint64"] = ""
    """Type of tokens in files without a header: uint8, uint16, uint32 or uint64, also of signed ones."""
    seq_len: Count = 0
    """Tokens per row of packed examples; longer ones are left out, counted."""
    chat_template: str = ""
    """File with a Jinja template that marks what the assistant says; default: the tokenizer's."""
    validation_fraction: Share = 0.02
    """Share of documents held out."""
    skip_bad: Count = 0
    """Bad records to leave out at most, listed in bad_records.log."""
    block_mb: Megabytes = 8
    """MiB of tokens shuffled and read as one block."""
    shard_mb: Megabytes = 256
    """Approximate MiB of tokens in a file."""
    processes: Count = 0
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
    docs = field_docs(Options)
    for name, about in docs.items():
        given: dict[str, Any] = {"default": getattr(Options, name, None), "type": kinds[name]}
        if name in ("source", "output"):
            given = {"required": True}
        if get_origin(kinds[name]) is tuple:
            given["nargs"] = "+"
        elif get_origin(kinds[name]) is Literal:
            del given["type"]
        elif name == "max_characters":
            given |= {"nargs": "?", "const": PIECE_CHARACTERS}
        if given.get("default"):
            about += " (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **given)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in docs]
        parser.error(f"{unknown[0]}: no such option{close_match(unknown[0].partition('=')[0], names)}")
    return Options(**vars(found) | {"source": tuple(found.source)})


def check_options(options: Options) -> None:
    """Raises ConfigError, DataError for a value that makes no sense, and for an option that would have no effect."""

    def refuse(name: str, wanted: str) -> None:
        raise DataError(f"--{name.replace('_', '-')} {getattr(options, name)}: {wanted}")

    for name, kind in get_type_hints(Options, include_extras=True).items():
        convert(f"--{name.replace('_', '-')}", getattr(options, name), kind)
    for name, formats in ONLY_FOR.items():
        if getattr(options, name) and options.format not in formats:
            refuse(name, f"no effect with --format {options.format}")
    if options.processes and options.cluster:
        refuse("processes", "no effect with --cluster")
    wanted = KEYS[options.format]
    if len(options.columns) != len(wanted.split(",")):
        refuse("keys", f"must be as many as in {wanted or 'ids'}")
    if options.tokenizer and options.vocab_size:
        refuse("vocab_size", "is to train a tokenizer, not for --tokenizer")
    if options.eos_token and not options.tokenizer:
        refuse("eos_token", "needs --tokenizer; a trained one has its own")
    if options.format != "text" and not options.tokenizer:
        refuse("format", "needs the --tokenizer of the tokens, or of the model to be tuned")
    if 0 < options.vocab_size < 257:
        refuse("vocab_size", "must be at least 257: bytes and eos")
    if options.format in TUNING and options.seq_len < 2:
        refuse("seq_len", "must be at least 2, the later training.seq_len")


def check_files(options: Options, files: Sequence[File]) -> None:
    """Raises DataError for keys and separators that have no effect on any file."""
    have_keys = {has_keys(file) for file in files}
    if options.keys and options.format == "text" and have_keys == {False}:
        raise DataError(f"--keys {options.keys}: no effect, as text such as {files[0].url} has no keys")
    if options.separator and have_keys == {True}:
        raise DataError(f"--separator {options.separator!r}: no effect, as no file is text; {files[0].url} has records")
