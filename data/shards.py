"""Prepared datasets: a manifest, and blocks of documents in Arrow files.

    manifest.json        what the dataset is; its SHA-256 names the dataset; written last
    blocks.arrow         one row per block: byte range, documents, tokens, checksum
    train-00000.arrow    Arrow IPC file; column `tokens: list<uint16 | uint32>`, a row is a
                         document, a record batch is a block; validation-00000.arrow likewise
    train-00000.lengths  uint32 little-endian, the tokens of each document of that shard; read
                         only to keep the place of a damaged block
    tokenizer.json       made the tokens, with tokenizer_config.json naming the eos token

Imports no torch.
"""

import hashlib
import json
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from config import Config, TitaniteError
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = "titanite-tokens"
VERSION = 1
SPLITS = ("train", "validation")
INDEX_SCHEMA = pa.schema(
    [
        ("offset", pa.uint64()),  # of the record batch message in its file
        ("size", pa.uint32()),  # bytes of that message
        ("documents", pa.uint32()),
        ("tokens", pa.uint32()),
        ("crc32", pa.uint32()),  # of that message
    ]
)


class DataError(TitaniteError):
    """Data that is missing, damaged or does not fit together."""


class BadBlockError(DataError):
    """One block is missing or damaged; the others may be sound."""


class Shard(NamedTuple):
    """One Arrow file of a dataset."""

    file: str
    split: str
    bytes: int
    blocks: int
    documents: int
    tokens: int
    lengths_crc32: int


class Block(NamedTuple):
    """The documents of one block, still in the mapped file."""

    values: np.ndarray  # [tokens] uint16 or uint32
    offsets: np.ndarray  # [documents + 1] int32


def token_type(dtype: str) -> pa.DataType:
    """The Arrow type of the column `tokens`."""
    return pa.list_(pa.field("item", pa.type_for_alias(dtype), nullable=False))


def token_schema(dtype: str) -> pa.Schema:
    """The schema of a shard."""
    return pa.schema([pa.field("tokens", token_type(dtype), nullable=False)])


@dataclass(frozen=True, eq=False)
class Split:
    """The blocks of one split; arrays have one entry per block."""

    url: str
    name: str
    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    crc32: np.ndarray

    @property
    def total_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def location(self, block: int) -> str:
        """Where a block is, for messages."""
        shard = int(self.shard[block])
        first = sum(other.blocks for other in self.shards[:shard])
        return f"{self.url}/{self.shards[shard].file}, block {block - first}"

    def read(self, block: int) -> Block:
        """Map one block of a local dataset and check it. Raises BadBlockError."""
        path = Path(self.url) / self.shards[int(self.shard[block])].file
        offset, size = int(self.offset[block]), int(self.size[block])
        skip = offset % mmap.ALLOCATIONGRANULARITY
        try:
            with path.open("rb") as file:
                if offset + size > os.fstat(file.fileno()).st_size:
                    raise BadBlockError(f"{self.location(block)}: the file is cut short")
                mapped = mmap.mmap(file.fileno(), skip + size, offset=offset - skip, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadBlockError(f"{self.location(block)}: cannot be read: {error.strerror}") from None
        return self.decode(block, memoryview(mapped)[skip:])

    def decode(self, block: int, data: memoryview) -> Block:
        """The block that `data` holds, checked against the index. Raises BadBlockError, DataError."""
        if len(data) != self.size[block] or zlib.crc32(data) != self.crc32[block]:
            raise BadBlockError(f"{self.location(block)}: is damaged, its checksum does not match")
        column = pa.ipc.read_record_batch(pa.py_buffer(data), token_schema(self.dtype)).column(0)
        values = column.values.to_numpy()
        offsets = column.offsets.to_numpy()
        if len(column) != self.documents[block] or len(values) != self.tokens[block]:
            raise BadBlockError(f"{self.location(block)}: holds other documents than blocks.arrow says")
        if len(values) and values.max() >= self.vocab_size:
            token = int(np.argmax(values >= self.vocab_size))
            row = int(offsets.searchsorted(token, side="right")) - 1
            raise DataError(
                f"{self.location(block)}, row {row}: token id {values[token]} is not below the vocabulary "
                f"size {self.vocab_size}; prepare the data again with its tokenizer"
            )
        return Block(values, offsets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared dataset: its manifest and index, no tokens yet."""

    url: str
    hash: str
    """First 16 hex digits of the SHA-256 of the manifest, which covers all else."""
    vocab_size: int
    eos_id: int
    tokenizer_fingerprint: str
    splits: dict[str, Split]

    def split(self, name: str) -> Split:
        """One split. Raises DataError when it is empty."""
        if not self.splits[name].shards:
            raise DataError(f"{self.url}: has no {name} documents; prepare it with --validation-fraction above 0")
        return self.splits[name]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the data. Raises DataError when it is not the one that made it."""
        tokenizer = load_tokenizer(self.url)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"{self.url}/tokenizer.json: fingerprint {tokenizer.fingerprint}, but the data was made by "
                f"{self.tokenizer_fingerprint}; put the right file back or prepare the data again"
            )
        return tokenizer


def open_dataset(url: str) -> Dataset:
    """Read and check the manifest and the index of a prepared dataset. Raises DataError."""
    url = url.rstrip("/")
    text = _read(url, "manifest.json")
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise DataError(
                f"{url}/manifest.json: format {manifest['format']} version {manifest['version']}; "
                f"this code reads {FORMAT} version {VERSION}"
            )
        shards = [Shard(**entry) for entry in manifest["shards"]]
        vocab_size, eos_id = manifest["vocab_size"], manifest["eos_id"]
        dtype, fingerprint, index_hash = manifest["dtype"], manifest["tokenizer"], manifest["index_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url}/manifest.json: not a manifest: {type(error).__name__} {error}") from None
    index_bytes = _read(url, "blocks.arrow")
    if hashlib.sha256(index_bytes).hexdigest() != index_hash:
        raise DataError(f"{url}/blocks.arrow: is damaged, its SHA-256 is not the one in manifest.json")
    table = pa.ipc.open_file(pa.py_buffer(index_bytes)).read_all().combine_chunks()
    index = {name: table.column(name).to_numpy() for name in INDEX_SCHEMA.names}
    shard_of = np.repeat(np.arange(len(shards), dtype=np.uint32), [shard.blocks for shard in shards])
    splits = {}
    for name in SPLITS:
        own = [i for i, shard in enumerate(shards) if shard.split == name]
        rows = slice(0, 0)
        if own:  # the shards of a split are next to each other
            rows = slice(int(shard_of.searchsorted(own[0])), int(shard_of.searchsorted(own[-1], side="right")))
        columns = {column: values[rows] for column, values in index.items()}
        shard = shard_of[rows] - (own[0] if own else 0)
        splits[name] = Split(url, name, dtype, vocab_size, tuple(shards[i] for i in own), shard, **columns)
    name = hashlib.sha256(text).hexdigest()[:16]
    return Dataset(url, name, vocab_size, eos_id, fingerprint, splits)


def _read(url: str, name: str) -> Any:
    """The bytes of a small file of the dataset; mapped, when it is local."""
    path = Path(url) / name
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if name.endswith(".arrow") else file.read()
    except FileNotFoundError:
        raise DataError(
            f"{path}: not found. Make a dataset with: python -m data.prepare --source FILES --output {url}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def check_datasets(config: Config) -> None:
    """Refuse data that cannot be trained on: manifests, file sizes, tokenizer, number of tokens.

    Reads no tokens and imports no torch, so that train.py can call it first. Raises DataError.
    """
    datasets = [open_dataset(url) for url in config.data.datasets]
    for dataset in datasets:
        if dataset.tokenizer_fingerprint != datasets[0].tokenizer_fingerprint:
            raise DataError(
                f"data.datasets: {dataset.url} was made with another tokenizer than {datasets[0].url} "
                f"({dataset.tokenizer_fingerprint}, {datasets[0].tokenizer_fingerprint})"
            )
        tokens, needed = dataset.split("train").total_tokens, config.training.seq_len + 1
        if tokens < needed:
            raise DataError(
                f"{dataset.url}: {tokens} training tokens are too few for a single sample of "
                f"training.seq_len + 1 = {needed}"
            )
        if config.validation.enable:
            dataset.split("validation")
        for split in dataset.splits.values():
            _check_sizes(split)
        dataset.tokenizer()
    if len({dataset.hash for dataset in datasets}) < len(datasets):
        raise DataError(f"data.datasets = {list(config.data.datasets)}: two folders hold the same dataset")
    if config.data.tokenizer:
        tokenizer = load_tokenizer(config.data.tokenizer)
        if tokenizer.fingerprint != datasets[0].tokenizer_fingerprint:
            raise DataError(
                f"data.tokenizer = {config.data.tokenizer!r}: fingerprint {tokenizer.fingerprint}, but the data in "
                f"{datasets[0].url} was made by {datasets[0].tokenizer_fingerprint}"
            )


def _check_sizes(split: Split) -> None:
    for shard in split.shards:
        path = Path(split.url) / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DataError(f"{path}: {found}, the manifest says {shard.bytes} bytes")
