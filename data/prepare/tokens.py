"""Read token ids that another project has written: tables with a column of lists, and files of ids and nothing else.

Files of ids are nanoGPT's and Megatron-LM's (with --append-eod), and those with llm.c's header. There a document ends
with eos. In Arrow and Parquet a row is a document, as Hugging Face's datasets has it. Imports no torch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.prepare.readers import ARROW_FILE, HEADER_BYTES, PARQUET_FILE, Unit, header_of, table_batches
from data.prepare.sources import File, check_end, failures_of, kind_of, open_file
from data.shards import DataError
from data.tokenizer import Tokenizer

READ_BYTES = 2**25  # searched for ends of documents at once; whole ids of every type
# First of the 256 integers before the tokens in files of llm.c and modded-nanogpt. The third is the number of tokens.
MAGIC_NUMBERS = {20240520: "uint16", 20240801: "uint32"}
ARROW_NAMES = (".arrow", ".feather", ".ipc")  # how the name of a stream ends, which is refused
NPY_FILE = b"\x93NUMPY"
NOWHERE = np.zeros(0, np.int64)

Chunks = Iterator[tuple[np.ndarray, np.ndarray]]  # (consecutive ids, where documents end, besides after an eos)


def token_documents(
    unit: Unit, tokenizer: Tokenizer, dtype: str = "", column: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (file, ids) of a unit's documents (uint32), each with one eos at its end, without empty ones.

    `dtype`: of an id, in files that do not say it. `column`: of tables; "": the only one that holds lists of integers.
    Raises DataError for a file that cannot be read, or in which nothing ends a document.
    """
    for file in unit.files:
        is_divided = False
        unfinished: list[np.ndarray] = []
        with failures_of(f"{file.url}: cannot be read"), open_file(file) as stream:
            for ids, ends in _chunks(file, stream, dtype, column):
                _check_ids(file, ids, tokenizer.vocab_size)
                stops = np.union1d(ends, np.flatnonzero(ids == tokenizer.eos_id) + 1)
                *ended, rest = np.split(ids.astype(np.uint32), stops)
                for end in ended:
                    yield file.url, _whole([*unfinished, end], tokenizer.eos_id)
                    unfinished = []
                unfinished.append(rest)
                is_divided = is_divided or bool(ended)
        if unfinished and not is_divided:
            what = f"none of its ids ends a document, as {tokenizer.eos_id} would"
            raise DataError(f"{file.url}: {what}; see --eos-token and --dtype")
        yield file.url, _whole([NOWHERE, *unfinished], tokenizer.eos_id)


def _whole(chunks: list[np.ndarray], eos_id: int) -> np.ndarray:
    """The document with one eos at its end, or nothing if there is no more in it."""
    ids = np.concatenate(chunks, dtype=np.uint32, casting="unsafe")
    ids = ids[ids != eos_id]
    return np.append(ids, np.uint32(eos_id)) if len(ids) else ids


def _check_ids(file: File, ids: np.ndarray, vocab_size: int) -> None:
    """Raises DataError naming an id that is not in the vocabulary."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        what = f"id {bad[0]} is not in the tokenizer's vocabulary of {vocab_size}, read as {ids.dtype}"
        raise DataError(f"{file.url}: {what}; see --dtype and --keys")


def _chunks(file: File, stream: Any, dtype: str, column: str) -> Chunks:
    """All ids of a file. Raises DataError if an option contradicts what the file is."""
    if kind_of(file.url)[1]:
        raise DataError(f"{file.url}: tokens are read from files that are not compressed")
    header = header_of(stream)
    if header.startswith((PARQUET_FILE, ARROW_FILE)) or file.url.lower().endswith(ARROW_NAMES):
        if dtype:
            raise DataError(f"{file.url}: --dtype {dtype} is for files of bare ids, a table says the type itself")
        yield from _rows(file, stream, column)
        return
    if column:
        raise DataError(f"{file.url}: --keys {column} is for Arrow and Parquet")
    if header.startswith(NPY_FILE):
        raise DataError(f"{file.url}: .npy is not read; numpy.load(FILE).tofile(OTHER) writes the ids alone")
    found = dtype
    if len(header) == HEADER_BYTES and int.from_bytes(header[:4], "little") in MAGIC_NUMBERS:
        found = MAGIC_NUMBERS[int.from_bytes(header[:4], "little")]
        count = int.from_bytes(header[8:12], "little")
        held = (file.size - stream.seek(HEADER_BYTES)) // np.dtype(found).itemsize
        if held != count:
            raise DataError(f"{file.url}: its header says {count} ids of {found}, it holds {held}")
    if dtype not in ("", found):
        raise DataError(f"{file.url}: --dtype {dtype}: its header says {found}")
    if not found:
        raise DataError(f"{file.url}: name the --dtype of its ids")
    for content in iter(partial(stream.read, READ_BYTES), b""):
        yield np.frombuffer(content, found), NOWHERE
    check_end(file, stream, file.size)


def _rows(file: File, stream: Any, asked: str) -> Chunks:
    """The rows of a table's column of lists."""
    for _, _, batch in table_batches(stream, Unit((file,)), partial(_token_columns, file, asked)):
        rows = batch.column(0)
        ids = rows.flatten()
        if rows.null_count or ids.null_count:
            raise DataError(f"{file.url}: column {batch.schema.names[0]!r} holds null in place of ids")
        lengths = pc.list_value_length(rows).to_numpy(zero_copy_only=False)
        yield ids.to_numpy(zero_copy_only=False), lengths.cumsum()


def _token_columns(file: File, asked: str, schema: pa.Schema) -> list[str]:
    """The name of the column of ids. Raises DataError that names what is there."""
    chosen = []
    for field in schema:
        item = getattr(field.type, "value_type", pa.null())
        if pa.types.is_integer(item) and asked in ("", field.name):
            chosen.append(field.name)
    if len(chosen) != 1:
        there = ", ".join(f"{field.name} ({field.type})" for field in schema)
        wanted = f"--keys {asked or chosen}: must be one column of lists of integers"
        raise DataError(f"{file.url}: {wanted}; it has {there}")
    return chosen
