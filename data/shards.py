"""Prepared datasets: manifest.json, an index of blocks (blocks.arrow), and blocks of documents in Arrow files.

In a file such as train-00000.arrow a row is a document, a record batch is a block. tokenizer.json lies beside it.
A dataset for fine-tuning is packed: see data.packing. docs/data.md describes the files. Imports no torch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from config import PATIENCE, Config, ConfigError, TitaniteError
from data.files import Files
from data.packing import TOKEN_BITS
from data.tokenizer import Tokenizer, parse_tokenizer
from storage import DamagedError

FORMAT = "titanite-tokens"
VERSION = 3
SPLITS = ("train", "validation")
# Offset, size and checksum are those of the record batch message in its file, in bytes.
_UINT32 = dict.fromkeys(("size", "documents", "tokens", "crc32"), pa.uint32())
INDEX_SCHEMA = pa.schema({"offset": pa.uint64(), **_UINT32})


class DataError(TitaniteError):
    """Data that is missing, damaged or does not fit together."""


class Shard(NamedTuple):
    """One Arrow file of a dataset."""

    file: str
    split: str
    bytes: int
    blocks: int
    documents: int
    tokens: int


class Block(NamedTuple):
    """The documents of a block, as views of the mapped file."""

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
    """The blocks of one split. The arrays after `bounds` have one entry per block."""

    files: Files
    dtype: str
    vocab_size: int
    packed_seq_len: int  # tokens per row, with the bits of data.packing; 0: rows are documents and tokens are ids
    shards: tuple[Shard, ...]
    total_tokens: int
    bounds: np.ndarray  # [shards + 1] the first block of each shard, then the number of blocks
    offset: np.ndarray
    size: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    crc32: np.ndarray

    def find(self, block: int) -> tuple[Shard, int]:
        """The shard that holds a block, and the block's number in that shard."""
        shard = int(self.bounds.searchsorted(block, side="right")) - 1
        return self.shards[shard], block - int(self.bounds[shard])

    def read(self, block: int) -> Block:
        """Map one block and check it. Raises DataError naming the block, StoreError."""
        shard, number = self.find(block)
        name = f"{self.files.url}/{shard.file}, block {number}"
        where = (int(column[block]) for column in (self.offset, self.size, self.crc32))
        try:
            content = self.files.map(shard.file, *where)
        except DamagedError as error:
            raise DataError(f"{error} (block {number}); `python -m tools.verify` names all files to replace") from None
        column = pa.ipc.read_record_batch(pa.py_buffer(content), token_schema(self.dtype)).column(0)
        values = column.values.to_numpy()
        offsets = column.offsets.to_numpy()
        ids = self.ids(values)
        if len(ids) and ids.max() >= self.vocab_size:  # a model with a larger vocabulary would be trained on it
            row = int(offsets.searchsorted(ids.argmax(), side="right")) - 1
            raise DataError(f"{name}, row {row}: token id {ids.max()} is not below vocab_size {self.vocab_size}")
        return Block(values, offsets)

    def ids(self, values: np.ndarray) -> np.ndarray:
        """The ids of stored tokens."""
        return values & TOKEN_BITS if self.packed_seq_len else values


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared dataset: its manifest and index, without tokens."""

    url: str
    files: Files
    hash: str  # first 16 hex digits of the SHA-256 of the manifest, which covers everything else
    vocab_size: int
    eos_id: int
    tokenizer_fingerprint: str
    packed_seq_len: int  # as in every split
    splits: dict[str, Split]
    chat_template: str  # digest of its text, "" without one
    kind: str  # of its examples, "chat" or "sft"; "" for documents
    tokenizer_files: dict[str, str]  # name → digest

    def split(self, name: str) -> Split:
        """One split. Raises DataError if it is empty."""
        if not self.splits[name].shards:
            raise DataError(f"{self.url}: has no {name} documents; name validation.datasets, or do not validate")
        return self.splits[name]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the data. Raises DataError if it did not make the data."""
        return parse_tokenizer(self.check_tokenizer(), self.url)

    def check_tokenizer(self) -> dict[str, bytes]:
        """The tokenizer's files, name → content. Raises DataError if they did not make the data, StoreError."""
        files = {name: self.files.read(name) for name in self.tokenizer_files}
        wrong = [name for name in files if digest(files[name]) != self.tokenizer_files[name]]
        if wrong:
            raise DataError(f"{self.url}: its {' or '.join(wrong)} is not the one that made the data; put that back")
        return files


def digest(content: bytes) -> str:
    """First 16 hex digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def seal(content: bytes) -> bytes:
    """The end of a manifest: the SHA-256 of all before it, so that a damaged one never passes for another dataset."""
    return f',\n "sha256": "{hashlib.sha256(content).hexdigest()}"\n}}\n'.encode()


def open_dataset(url: str, config: Config | None = None) -> Dataset:
    """Read and check manifest and index of a dataset; `config` says how to fetch them. Raises DataError, StoreError."""
    files = Files(url, config or Config())
    text = files.read("manifest.json")
    manifest = _parse_manifest(text, f"{url}/manifest.json")
    return Dataset(
        url=files.url,
        files=files,
        hash=digest(text),
        vocab_size=manifest["vocab_size"],
        eos_id=manifest["eos_id"],
        tokenizer_fingerprint=manifest["tokenizer"],
        packed_seq_len=manifest.get("packed_seq_len", 0),
        splits=_open_splits(files, manifest),
        chat_template=manifest.get("chat_template", ""),
        kind=manifest.get("kind", ""),
        tokenizer_files=manifest["tokenizer_files"],
    )


def _parse_manifest(text: bytes, name: str) -> dict[str, Any]:
    """The manifest in the content of the file `name`. Raises DataError."""
    try:
        # Shards while parsing: the 78,000 of 10 T tokens need half the memory of their dicts.
        manifest = json.loads(text, object_hook=_shard_or_dict)
        made_by = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name}: not a manifest: {type(error).__name__} {error}") from None
    if made_by != (FORMAT, VERSION):
        raise DataError(f"{name}: format {made_by[0]} {made_by[1]}; this code reads {FORMAT} {VERSION}")
    content = text[: -len(seal(b""))]
    if text != content + seal(content):
        raise DataError(f"{name}: is damaged, its checksum does not match")
    return manifest


def _shard_or_dict(item: dict[str, Any]) -> Any:
    if "file" not in item:
        return item
    return Shard(*(item[field] for field in Shard._fields))


def _open_splits(files: Files, manifest: dict[str, Any]) -> dict[str, Split]:
    """The splits of a dataset, with views of its mapped index, so that ranks share memory."""
    content = files.map("blocks.arrow", 0, manifest["index_bytes"], manifest["index_crc32"])
    index = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0)
    splits = {}
    first = 0
    for name in SPLITS:  # the manifest has the shards in this order
        shards = tuple(shard for shard in manifest["shards"] if shard.split == name)
        bounds = np.cumsum([0, *(shard.blocks for shard in shards)])
        blocks = index.slice(first, int(bounds[-1]))
        splits[name] = Split(
            files=files,
            dtype=manifest["dtype"],
            vocab_size=manifest["vocab_size"],
            packed_seq_len=manifest.get("packed_seq_len", 0),
            shards=shards,
            total_tokens=sum(shard.tokens for shard in shards),
            bounds=bounds,
            **{column: blocks.column(column).to_numpy() for column in INDEX_SCHEMA.names},
        )
        first += len(blocks)
    return splits


def with_chat_template(datasets: Sequence[Dataset]) -> Dataset:
    """The dataset whose chat template a run on all uses: one with a template, preferably packed, or the first."""
    return max(datasets, key=lambda dataset: (bool(dataset.chat_template), dataset.packed_seq_len))


def check_datasets(config: Config) -> tuple[list[Dataset], list[Dataset]]:
    """Open data.datasets and validation.datasets, and refuse what cannot be trained on. Raises TitaniteError."""
    data = config.data
    if not data.datasets:
        raise ConfigError("data.datasets = []: name at least one folder made by `python -m data.prepare`")
    if data.weights and len(data.weights) != len(data.datasets):
        raise ConfigError(f"data.weights = {list(data.weights)}: must have an entry for each of data.datasets")
    _check_retries(config)
    try:
        datasets = [open_dataset(url, config) for url in data.datasets]
        held_out = [open_dataset(url, config) for url in config.validation.datasets]
    except (DataError, DamagedError) as error:
        raise DataError(f"{error}. `python -m data.prepare --source FILES --output FOLDER` makes a dataset") from None
    for dataset in (*datasets, *held_out):
        check_dataset(dataset, datasets[0], config)
    for dataset in datasets:
        _check_training(dataset, with_chat_template(datasets), config.training.max_seq_len)
    for dataset in held_out:
        dataset.split("validation")
    if len({dataset.hash for dataset in datasets}) < len(datasets):
        raise DataError(f"data.datasets = {list(data.datasets)}: two folders hold the same dataset")
    return datasets, held_out


def _check_retries(config: Config) -> None:
    """Raises ConfigError if requests to a store may be repeated for so long that a rank looks hung."""
    comm = config.comm
    measured = [*config.validation.datasets, *config.validation.answers]
    urls = [*config.data.datasets, *measured, config.checkpoint.folder]
    limit = PATIENCE * min(comm.init_timeout_seconds, comm.train_timeout_seconds)
    if any("://" in url for url in urls) and comm.store_retry_seconds >= limit:
        asked = f"must be below {limit:g} = {PATIENCE:g} x the shorter timeout of comm, or waits look like hangs"
        raise ConfigError(f"comm.store_retry_seconds = {comm.store_retry_seconds}: {asked}")


def check_dataset(dataset: Dataset, first: Dataset, config: Config) -> None:
    """Raises DataError for a dataset that does not fit the settings, the `first` one or its own manifest."""
    seq_len = config.training.seq_len
    if dataset.packed_seq_len not in (0, seq_len):  # would cut examples
        needed = f"{dataset.packed_seq_len}, the --seq-len of {dataset.url}"
        raise DataError(f"training.seq_len = {seq_len}: must be {needed}")
    if dataset.packed_seq_len and not config.data.mask_documents:  # would let them see each other
        raise DataError(f"data.mask_documents = false: must be true for {dataset.url}, whose rows hold examples")
    if dataset.tokenizer_fingerprint != first.tokenizer_fingerprint:
        advice = "prepare one of them again with the other's folder as --tokenizer"
        raise DataError(f"{dataset.url} was made with another tokenizer than {first.url}; {advice}")
    if "://" in dataset.url:  # there a listing is not cheap, or not permitted
        return
    sizes = dataset.files.store.sizes()
    for split in dataset.splits.values():
        for shard in split.shards:
            size = sizes.get(shard.file, 0)
            if size != shard.bytes:
                raise DataError(f"{dataset.url}/{shard.file}: has {size} bytes, the manifest says {shard.bytes}")


def _check_training(dataset: Dataset, chat: Dataset, seq_len: int) -> None:
    """Raises DataError for a training set that is too small, damaged or of another chat template than `chat`."""
    tokens = dataset.split("train").total_tokens
    if tokens <= seq_len:
        raise DataError(f"{dataset.url}: {tokens} training tokens are too few for training.seq_len = {seq_len}")
    dataset.check_tokenizer()
    if dataset.packed_seq_len and dataset.chat_template not in ("", chat.chat_template):
        raise DataError(f"data.datasets: {dataset.url} was made with another chat template than {chat.url}")
