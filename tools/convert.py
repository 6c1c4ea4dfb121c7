"""Turn token ids that another project has written into a dataset that training reads, without the text.

    python -m tools.convert --source train.bin --tokenizer tokenizer.json --output datasets/old

Reads .bin files of ids and nothing else, as nanoGPT's data/*/prepare.py writes them and, with --append-eod,
Megatron-LM, files with llm.c's header, and .npy. There the ids show how many bits each has, and a document ends with
eos. In Arrow and Parquet a row of a column of lists is a document, as Hugging Face's datasets has it. Each document
gets exactly one eos, and keeps its place; training shuffles them. A hash of its tokens tells whether one is held out.
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
from data.sources import ARROW_FILE, failures_of, identity, kind_of, open_arrow
from data.tokenizer import Tokenizer, load_tokenizer

IDS_AT_ONCE = 2**24  # searched for ends of documents
ROWS_AT_ONCE = 1024  # of Arrow and Parquet
SAMPLE_IDS = 2**20  # looked at to find their data type
DTYPES = ("uint8", "uint16", "uint32", "uint64")  # signed ones have the same bits
# First of the 256 integers before the tokens in files of llm.c and modded-nanogpt. The third is the number of tokens.
MAGIC_NUMBERS = {20240520: "uint16", 20240801: "uint32"}
PARQUET_FILE = b"PAR1"  # how one begins
ARROW_NAMES = (".arrow", ".feather", ".ipc")  # how the name of a stream ends, which begins like ids
TEXT_KINDS = ("text", "jsonl", "json", "csv", "tsv")

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """How to read files of ids."""

    dtype: str = ""  # of an id; "": as a header or the ids themselves show
    column: str = ""  # of tables; "": the only one that holds lists of integers
    packed: bool = False  # a document goes on in the next row of a table


class Ids(NamedTuple):
    """Consecutive ids of a file."""

    ids: np.ndarray  # of any integer type
    ends: np.ndarray  # where documents end, besides after an eos


def read_ids(path: Path, vocab_size: int, how: Reading) -> Iterator[Ids]:
    """Yield all ids of a file, piece by piece. Raises DataError."""
    with path.open("rb") as file:
        magic = file.read(len(ARROW_FILE))
    is_parquet = magic.startswith(PARQUET_FILE)
    if is_parquet or magic == ARROW_FILE or path.suffix.lower() in ARROW_NAMES:
        yield from _read_rows(path, is_parquet, how)
        return
    if how.column or how.packed:
        raise DataError(f"{path}: --column and --packed are for Arrow and Parquet")
    ids = _map_ids(path, vocab_size, how.dtype)
    nowhere = np.zeros(0, np.int64)
    for first in range(0, len(ids), IDS_AT_ONCE):
        yield Ids(ids[first : first + IDS_AT_ONCE], nowhere)


def _read_rows(path: Path, is_parquet: bool, how: Reading) -> Iterator[Ids]:
    """Yield the rows of a table's column of lists."""
    if how.dtype:
        raise DataError(f"{path}: --dtype {how.dtype}: no effect, a table has its own; leave it out")
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
    kinds = {field.name: field.type for field in schema}
    there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    lists = [name for name, kind in kinds.items() if _is_list_of_integers(kind)]
    if asked and asked not in lists:
        raise DataError(f"{path}: --column {asked}: is no column of lists of integers; it has {there}")
    if not lists:
        raise DataError(f"{path}: no column of token ids, that is of lists of integers; it has {there}")
    if len(lists) > 1 and not asked:
        raise DataError(f"{path}: has several columns of lists of integers: name one by --column; it has {there}")
    return asked or lists[0]


def _is_list_of_integers(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _map_ids(path: Path, vocab_size: int, dtype: str) -> np.ndarray:
    """Map the ids of a file that holds nothing else than them and a header. Raises DataError."""
    if np.fromfile(path, "u1", 6).tobytes() == np.lib.format.MAGIC_PREFIX:
        ids = np.load(path, mmap_mode="r").reshape(-1)
        if ids.dtype.kind not in "iu":
            raise DataError(f"{path}: holds {ids.dtype}, not integers")
        _check_dtype(path, dtype, ids.dtype)
        return ids
    header = np.fromfile(path, "<u4", 256)
    magic = int(header[0]) if len(header) == 256 else 0
    if magic not in MAGIC_NUMBERS and (dtype or magic == 0 or header[3:].any()):
        return np.memmap(path, dtype or _seen_dtype(path, vocab_size), "r")
    ids = np.memmap(path, MAGIC_NUMBERS.get(magic, "uint16"), "r", offset=header.nbytes)
    if magic not in MAGIC_NUMBERS or len(ids) != header[2]:
        what = f"header {header[:3].tolist()} is unknown or not that of its {len(ids)} {ids.dtype}"
        raise DataError(f"{path}: its {what}; cut it off, 1024 bytes, and name --dtype")
    _check_dtype(path, dtype, ids.dtype)
    return ids


def _check_dtype(path: Path, asked: str, own: np.dtype) -> None:
    """Raises DataError if --dtype contradicts what a file's header says."""
    if asked and np.dtype(asked).itemsize != own.itemsize:
        raise DataError(f"{path}: --dtype {asked}: its header says {own}; leave --dtype out")


def _seen_dtype(path: Path, vocab_size: int) -> str:
    """The data type of a file's ids. In too narrow a type, every other number is the upper half of an id, almost 0."""
    for bits in (16, 32):
        numbers = np.fromfile(path, f"uint{bits}", SAMPLE_IDS)[1::2]
        small = (numbers <= (vocab_size - 1) >> bits).sum() / max(1, len(numbers))
        if small < 0.5:
            return f"uint{bits}"
        if small < 0.9:
            raise DataError(f"{path}: may hold uint{bits} or uint{2 * bits}; name --dtype, one of {', '.join(DTYPES)}")
    return "uint64"


def read_documents(path: Path, tokenizer: Tokenizer, how: Reading) -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with one eos at its end. Leaves out empty ones. Raises DataError."""
    eos = tokenizer.eos_id
    dtype = np.dtype(writer.token_dtype(tokenizer.vocab_size))
    count = 0  # of ids before the piece
    is_divided = False
    unfinished: list[np.ndarray] = []
    with failures_of(f"{path}: cannot be read"):
        for ids, ends in read_ids(path, tokenizer.vocab_size, how):
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
        if count and not is_divided and not how.dtype:
            what = f"{count} ids as {ids.dtype}, of which none ends a document, as {eos} would"
            other = "leave out --packed" if how.packed else "name --dtype if it is one document"
            raise DataError(f"{path}: {what}; choose with --eos-token, or {other}")
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
    ids = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    document = ids.astype(dtype, copy=False)
    if len(document) and document[-1] != eos:
        document = np.append(document, dtype.type(eos))
    if len(document) > 1:
        yield document


def looks_packed(rows: Ids, eos: int) -> bool:
    """Whether documents may go on in the next row: all are of one length, and some end without an eos."""
    lengths = np.diff(rows.ends, prepend=0)
    if len(lengths) < 2 or lengths.min() != lengths.max() or lengths[0] < 2:
        return False
    return bool((rows.ids[rows.ends - 1] != eos).any())


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
        written: dict[str, list[writer.WrittenShard]] = {split: [] for split in SPLITS}
        waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        waiting_bytes = dict.fromkeys(SPLITS, 0)

        def write_waiting(split: str) -> None:
            offsets = pa.array(np.cumsum([0, *map(len, waiting[split])]), pa.int32())
            kind = token_type(writer.token_dtype(chosen.vocab_size))
            documents = pa.ListArray.from_arrays(offsets, np.concatenate(waiting[split]), type=kind)
            waiting[split], waiting_bytes[split] = [], 0
            number = len(written[split])
            written[split].append(writer.write_shard(folder, split, number, documents, int(block_mb * 2**20)))

        for source in tqdm(sources, desc="convert", unit=" files"):
            for document in read_documents(Path(source), chosen, how):
                split = SPLITS[writer.is_held_out(document.astype("<u4").tobytes(), validation_fraction)]
                waiting[split].append(document)
                waiting_bytes[split] += document.nbytes
                if waiting_bytes[split] >= shard_mb * 2**20:
                    write_waiting(split)
        for split in filter(waiting.get, SPLITS):
            write_waiting(split)
        return writer.write_manifest(folder, chosen, list(chain.from_iterable(written.values())))


def check_sources(sources: Sequence[str], tokenizer: Tokenizer, how: Reading) -> None:
    """Read the beginning of each file, so that bad input is found before anything is removed. Raises DataError."""
    names: dict[str, str] = {}  # identity → source
    empty = []
    for source in sources:
        if kind_of(source)[0] in TEXT_KINDS:
            raise DataError(f"{source}: is text by its name, not token ids; python -m data.prepare makes them")
        if next(read_documents(Path(source), tokenizer, how), None) is None:
            empty.append(source)
            continue
        other = names.get(identity(source))
        if other:
            raise DataError(f"--source {source}: is the same file as {other}")
        names[identity(source)] = source
        rows = next(read_ids(Path(source), tokenizer.vocab_size, how))
        if looks_packed(rows, tokenizer.eos_id):
            advice = "each becomes a document; give --packed if documents go on in the next row"
            log.warning(f"{source}: its rows are all of {rows.ends[0]} ids, and not all end with eos: {advice}")
    if not names:
        raise DataError(f"--source {' '.join(sources)}: holds no documents, nothing to convert")
    if empty:
        log.warning(f"--source {' '.join(empty)}: holds no documents")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description="Turn tokens into a dataset.")
    parser.add_argument("--source", nargs="+", required=True, dest="sources", help="local files of ids")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer.json that made the tokens, or its folder")
    parser.add_argument("--dtype", default="", choices=DTYPES, help="of an id; default: as the ids, or a header, show")
    parser.add_argument("--column", default="", help="of Arrow and Parquet files, if several hold lists of integers")
    parser.add_argument("--packed", action="store_true", help="a document goes on in the next row, until eos ends it")
    writer.add_output_options(parser)
    arguments = vars(parser.parse_args(argv))
    with command_line():
        writer.report(convert(**arguments), arguments["output"])


if __name__ == "__main__":
    main()
