"""Turn token ids that another project has written into a dataset that training reads, without the text.

    python -m tools.convert --source train.bin --dtype uint16 --tokenizer tokenizer.json --output datasets/old

Reads files of ids and nothing else (nanoGPT's, Megatron-LM's with --append-eod), of the data type --dtype, files with
llm.c's header, and .npy. There a document ends with eos. In Arrow and Parquet a row of a column of lists is a document,
as Hugging Face's datasets has it. Each document gets exactly one eos, and keeps its place; training shuffles them. A
hash of its tokens tells whether one is held out.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from config import command_line
from data import writer
from data.shards import SPLITS, DataError, token_type
from data.sources import ARROW_FILE, failures_of, identity, open_arrow
from data.tokenizer import Tokenizer, load_tokenizer

IDS_AT_ONCE = 2**24  # searched for ends of documents
ROWS_AT_ONCE = 1024  # of Arrow and Parquet
DTYPES = ("uint8", "uint16", "uint32", "uint64")  # signed ones have the same bits
# First of the 256 integers before the tokens in files of llm.c and modded-nanogpt. The third is the number of tokens.
MAGIC_NUMBERS = {20240520: "uint16", 20240801: "uint32"}
PARQUET_FILE = b"PAR1"  # how one begins
ARROW_NAMES = (".arrow", ".feather", ".ipc")  # how the name of a stream ends, which begins like ids

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """How to read files of ids."""

    dtype: str = ""  # of an id, in files that do not say it
    column: str = ""  # of tables; "": the only one that holds lists of integers
    packed: bool = False  # a document goes on in the next row of a table


class Ids(NamedTuple):
    """Consecutive ids of a file."""

    ids: np.ndarray  # of any integer type
    ends: np.ndarray  # where documents end, besides after an eos


def read_ids(path: Path, how: Reading) -> Iterator[Ids]:
    """Yield all ids of a file, piece by piece. Raises DataError."""
    with path.open("rb") as file:
        magic = file.read(len(ARROW_FILE))
    is_parquet = magic.startswith(PARQUET_FILE)
    if is_parquet or magic == ARROW_FILE or path.suffix.lower() in ARROW_NAMES:
        if how.dtype:
            raise DataError(f"{path}: --dtype {how.dtype} is for files of bare ids, a table says the type itself")
        yield from _read_rows(path, is_parquet, how)
        return
    if how.column or how.packed:
        raise DataError(f"{path}: --column and --packed are for Arrow and Parquet")
    ids = _map_ids(path, how.dtype)
    nowhere = np.zeros(0, np.int64)
    for first in range(0, len(ids), IDS_AT_ONCE):
        yield Ids(ids[first : first + IDS_AT_ONCE], nowhere)


def _read_rows(path: Path, is_parquet: bool, how: Reading) -> Iterator[Ids]:
    """Yield the rows of a table's column of lists."""
    with pa.memory_map(str(path)) as stream:
        if is_parquet:
            table = pq.ParquetFile(stream)
            column = _token_column(path, table.schema_arrow, how.column)
            batches = table.iter_batches(ROWS_AT_ONCE, columns=[column])
        else:
            schema, batches = open_arrow(stream)
            column = _token_column(path, schema, how.column)
        for batch in batches:
            for first in range(0, len(batch), ROWS_AT_ONCE):
                rows = batch.column(column).slice(first, ROWS_AT_ONCE)
                ids = rows.flatten()
                if ids.null_count:
                    raise DataError(f"{path}: column {column!r} holds null in place of an id")
                lengths = pc.list_value_length(rows).fill_null(0).to_numpy(zero_copy_only=False)
                ends = lengths[:0] if how.packed else lengths.cumsum()
                yield Ids(ids.to_numpy(zero_copy_only=False), ends)


def _token_column(path: Path, schema: pa.Schema, asked: str) -> str:
    """The name of the column of ids. Raises DataError that names what is there."""
    lists = [field.name for field in schema if _is_list_of_integers(field.type)]
    chosen = [name for name in lists if asked in ("", name)]
    if len(chosen) != 1:
        there = ", ".join(f"{field.name} ({field.type})" for field in schema)
        wanted = f"--column {asked or chosen}: must be one column of lists of integers"
        raise DataError(f"{path}: {wanted}; it has {there}")
    return chosen[0]


def _is_list_of_integers(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _map_ids(path: Path, dtype: str) -> np.ndarray:
    """Map the ids of a file that holds nothing else than them and a header. Raises DataError."""
    with path.open("rb") as file:
        beginning = file.read(1024)
    if beginning.startswith(np.lib.format.MAGIC_PREFIX):
        ids = np.load(path, mmap_mode="r").reshape(-1)
        if ids.dtype.kind not in "iu":
            raise DataError(f"{path}: holds {ids.dtype}, not integers")
        _check_dtype(path, ids.dtype, dtype)
        return ids
    header = np.frombuffer(beginning[: len(beginning) // 4 * 4], "<u4")
    if len(header) == 256 and int(header[0]) in MAGIC_NUMBERS:
        ids = np.memmap(path, MAGIC_NUMBERS[int(header[0])], "r", offset=header.nbytes)
        if len(ids) != header[2]:
            raise DataError(f"{path}: its header says {header[2]} ids of {ids.dtype}, it holds {len(ids)}")
        _check_dtype(path, ids.dtype, dtype)
        return ids
    if not dtype:
        raise DataError(f"{path}: name the --dtype of its ids, one of {', '.join(DTYPES)}")
    return np.memmap(path, dtype, "r")


def _check_dtype(path: Path, found: np.dtype, asked: str) -> None:
    if asked and np.dtype(asked) != found:
        raise DataError(f"{path}: --dtype {asked}: its header says {found}")


def read_documents(path: Path, tokenizer: Tokenizer, how: Reading) -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with one eos at its end. Leaves out empty ones. Raises DataError."""
    eos = tokenizer.eos_id
    dtype = np.dtype(writer.token_dtype(tokenizer.vocab_size))
    count = 0  # of ids before the piece
    is_divided = False
    unfinished: list[np.ndarray] = []
    with failures_of(f"{path}: cannot be read"):
        for ids, ends in read_ids(path, how):
            _check_ids(path, ids, count, tokenizer.vocab_size)
            stops = np.union1d(ends, np.flatnonzero(ids == eos) + 1)
            start = 0
            for stop in stops.tolist():
                yield from _finished([*unfinished, ids[start:stop]], dtype, eos)
                unfinished = []
                start = stop
            unfinished.append(ids[start:])
            is_divided = is_divided or len(stops) > 0
            count += len(ids)
        if count and not is_divided:
            what = f"none of its {count} ids ends a document, as {eos} would"
            raise DataError(f"{path}: {what}; see --eos-token, --dtype and --packed")
        if unfinished:
            yield from _finished(unfinished, dtype, eos)


def _check_ids(path: Path, ids: np.ndarray, first: int, vocab_size: int) -> None:
    """Raises DataError naming the first id that is not in the vocabulary. `first`: how many came before `ids`."""
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        known = f"the tokenizer's vocabulary of {vocab_size}"
        what = f"id {ids[bad][0]} is not in {known}, read as {ids.dtype}"
        raise DataError(f"{path}: token {first + bad.argmax()}: {what}; see --dtype and --column")


def _finished(pieces: Sequence[np.ndarray], dtype: np.dtype, eos: int) -> Iterator[np.ndarray]:
    """Yield the document with one eos at its end, unless there is nothing else in it."""
    document = np.concatenate(pieces).astype(dtype, copy=False)
    if len(document) and document[-1] != eos:
        document = np.append(document, dtype.type(eos))
    if len(document) > 1:
        yield document


class Shards:
    """The shards of a split, each written as soon as enough documents are there."""

    def __init__(self, folder: Path, split: str, dtype: str, block_bytes: int, shard_bytes: float):
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.block_bytes = block_bytes
        self.shard_bytes = shard_bytes
        self.written: list[writer.WrittenShard] = []
        self.waiting: list[np.ndarray] = []
        self.waiting_bytes = 0

    def add(self, document: np.ndarray) -> None:
        self.waiting.append(document)
        self.waiting_bytes += document.nbytes
        if self.waiting_bytes >= self.shard_bytes:
            self.write()

    def write(self) -> None:
        """Write what waits, if anything does."""
        if not self.waiting:
            return
        offsets = pa.array(np.cumsum([0, *map(len, self.waiting)]), pa.int32())
        values = np.concatenate(self.waiting)
        documents = pa.ListArray.from_arrays(offsets, values, type=token_type(self.dtype))
        number = len(self.written)
        self.written.append(writer.write_shard(self.folder, self.split, number, documents, self.block_bytes))
        self.waiting = []
        self.waiting_bytes = 0


def convert(
    sources: Sequence[str], output: str, tokenizer: str, eos_token: str = "", validation_fraction: float = 0.02,
    block_mb: float = 8, shard_mb: float = 256, overwrite: bool = False,
    dtype: str = "", column: str = "", packed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Convert tokens and return the manifest. `--help` explains the parameters. Raises DataError, TitaniteError."""
    folder = writer.check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    chosen = load_tokenizer(tokenizer, eos_token)
    how = Reading(dtype, column, packed)
    check_sources(sources, chosen, how)
    with writer.locked(folder):
        writer.remove_dataset(folder)
        chosen.save(folder)
        stored = writer.token_dtype(chosen.vocab_size)
        sizes = int(block_mb * 2**20), shard_mb * 2**20
        splits = {split: Shards(folder, split, stored, *sizes) for split in SPLITS}
        for source in tqdm(sources, desc="convert", unit=" files"):
            for document in read_documents(Path(source), chosen, how):
                is_held_out = writer.is_held_out(document.astype("<u4").tobytes(), validation_fraction)
                splits[SPLITS[is_held_out]].add(document)
        for shards in splits.values():
            shards.write()
        written = chain.from_iterable(shards.written for shards in splits.values())
        return writer.write_manifest(folder, chosen, list(written))


def check_sources(sources: Sequence[str], tokenizer: Tokenizer, how: Reading) -> None:
    """Read the beginning of each file, so that bad input is found before anything is removed. Raises DataError."""
    names: dict[str, str] = {}  # identity → source
    for source in sources:
        if next(read_documents(Path(source), tokenizer, how), None) is None:
            log.warning(f"--source {source}: holds no documents")
            continue
        other = names.setdefault(identity(source), source)
        if other != source or sources.count(source) > 1:
            raise DataError(f"--source {source}: is the same file as {other}")
    if not names:
        raise DataError(f"--source {' '.join(sources)}: holds no documents, nothing to convert")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description="Turn tokens into a dataset.")
    parser.add_argument("--source", nargs="+", required=True, dest="sources", help="local files of ids")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer.json that made the tokens, or its folder")
    parser.add_argument("--dtype", default="", choices=DTYPES, help="of an id, for files without a header")
    parser.add_argument("--column", default="", help="of Arrow and Parquet files, if several hold lists of integers")
    parser.add_argument("--packed", action="store_true", help="a document goes on in the next row, until eos ends it")
    writer.add_output_options(parser)
    arguments = vars(parser.parse_args(argv))
    with command_line():
        writer.report(convert(**arguments), arguments["output"])


if __name__ == "__main__":
    main()
