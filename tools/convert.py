"""Turn tokens in another project's format into a dataset that training reads, without the text.

    python -m tools.convert --format nanogpt --source train.bin --tokenizer tokenizer.json --output datasets/old

Formats, read file by file in bounded memory:

    nanogpt    .bin of uint16 ids, as nanoGPT's data/*/prepare.py writes it: documents end with eos
    megatron   PREFIX.bin with PREFIX.idx, as Megatron-LM's IndexedDataset writes them
    fms        Arrow files with the ids in column `tokens`: one document per record batch, as
               fms-fsdp reads them, or one document per row if the column holds lists

An eos ends a document wherever it stands, and each document gets exactly one eos at its end.
Documents keep their order; training shuffles them. A hash of its tokens decides whether a
document is held out.
"""

import argparse
import glob
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from config import command_line
from data.shards import SPLITS, DataError, token_type
from data.sources import failures_of
from data.tokenizer import Tokenizer, load_tokenizer
from data.writer import (
    WrittenShard,
    add_output_options,
    check_output,
    is_held_out,
    locked,
    remove_dataset,
    report,
    token_dtype,
    write_manifest,
    write_shard,
)

IDS_AT_ONCE = 2**24  # of nanoGPT's, searched for ends of documents

# From Megatron-LM's megatron/core/datasets/indexed_dataset.py.
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def nanogpt_documents(path: Path, eos_id: int) -> Iterator[np.ndarray]:
    """Yield the documents of a file of uint16 ids, each with its eos. Raises DataError."""
    if path.stat().st_size % 2:
        raise DataError(f"{path}: has {path.stat().st_size} bytes, which cannot be uint16 ids")
    ids = np.memmap(path, "<u2", "r")
    begin = 0
    for first in range(0, len(ids), IDS_AT_ONCE):
        for end in (np.flatnonzero(ids[first : first + IDS_AT_ONCE] == eos_id) + first + 1).tolist():
            yield ids[begin:end]
            begin = end
    yield ids[begin:]


def megatron_documents(path: Path, eos_id: int) -> Iterator[np.ndarray]:
    """Yield the documents of PREFIX.bin, cut by the index PREFIX.idx beside it. Raises DataError."""
    index_path = path.with_suffix(".idx")
    index = index_path.read_bytes()
    if index[:9] != MEGATRON_MAGIC or index[9:17] != b"\1".ljust(8, b"\0") or index[17] not in MEGATRON_DTYPES:
        raise DataError(f"{index_path}: not an index of Megatron's, version 1, of integers")
    sequences, documents = (int(n) for n in np.frombuffer(index, "<u8", 2, 18))
    sizes = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
    dtype = np.dtype(MEGATRON_DTYPES[index[17]])
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))  # of the sequences, in tokens, and their end
    begins, size = starts * dtype.itemsize, path.stat().st_size
    if (pointers != begins[:-1]).any() or begins[-1] != size or [*bounds[:1], *bounds[-1:]] != [0, sequences]:
        raise DataError(
            f"{index_path}: damaged, or of another file: its sequences do not follow each other, in whole documents, "
            f"up to the end of {path} at byte {size}"
        )
    ids = np.asarray(np.memmap(path, dtype, "r"))  # views of a memmap cost microseconds each
    for first, stop in pairwise(starts[bounds]):
        yield ids[first:stop]


def fms_documents(path: Path, eos_id: int) -> Iterator[np.ndarray]:
    """Yield the documents of an Arrow file, one per record batch or row of lists. Raises DataError."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    for i in range(reader.num_record_batches):
        column = reader.get_batch(i).column("tokens")
        if column.null_count:
            raise DataError(f"{path}, record batch {i}: holds a null, which is not a token")
        for row in [row.values for row in column] if isinstance(column, pa.ListArray) else [column]:
            yield row.to_numpy()


FORMATS: dict[str, Callable[[Path, int], Iterator[np.ndarray]]] = {
    "nanogpt": nanogpt_documents,
    "megatron": megatron_documents,
    "fms": fms_documents,
}


def convert(
    sources: Sequence[str],
    output: str,
    format: str,
    tokenizer: str,
    eos_token: str = "",
    validation_fraction: float = 0.02,
    block_mb: float = 8,
    shard_mb: float = 256,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Convert tokens and return the manifest. `--help` explains the parameters. Raises DataError, TitaniteError."""
    folder = check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    chosen = load_tokenizer(tokenizer, eos_token)
    if format == "megatron":  # Megatron-LM names both files by their prefix
        sources = [name if name.endswith(".bin") else f"{name.removesuffix('.idx')}.bin" for name in sources]
    paths = list[Path]()
    for source in sources:
        if not (found := sorted(glob.glob(source))):
            raise DataError(f"--source {source}: no files there; must be local files of tokens")
        paths += map(Path, found)
    # Of each file, even if the first has some: bad input is found before anything is removed.
    firsts = [next(_documents(path, format, chosen), None) for path in paths]
    if all(first is None for first in firsts):
        raise DataError(f"--source {' '.join(sources)}: holds no documents, nothing to convert")
    with locked(folder):
        remove_dataset(folder)
        chosen.save(folder)
        written: dict[str, list[WrittenShard]] = {split: [] for split in SPLITS}
        waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        waiting_bytes = dict.fromkeys(SPLITS, 0)

        def write_waiting(split: str) -> None:
            offsets = pa.array(np.cumsum([0, *map(len, waiting[split])]), pa.int32())
            kind = token_type(token_dtype(chosen.vocab_size))
            documents = pa.ListArray.from_arrays(offsets, np.concatenate(waiting[split]), type=kind)
            waiting[split], waiting_bytes[split] = [], 0
            written[split].append(write_shard(folder, split, len(written[split]), documents, int(block_mb * 2**20)))

        for path in tqdm(paths, desc="convert", unit=" files"):
            for document in _documents(path, format, chosen):
                split = SPLITS[is_held_out(document.astype("<u4").tobytes(), validation_fraction)]
                waiting[split].append(document)
                waiting_bytes[split] += document.nbytes
                if waiting_bytes[split] >= shard_mb * 2**20:
                    write_waiting(split)
        for split in filter(waiting.get, SPLITS):
            write_waiting(split)
        return write_manifest(folder, chosen, list(chain.from_iterable(written.values())))


def _documents(path: Path, format: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with one eos at its end. Leaves out empty ones. Raises DataError."""
    with failures_of(f"{path}: cannot be read"):
        for row, ids in enumerate(FORMATS[format](path, tokenizer.eos_id)):
            if len(ids) and ids.dtype.kind not in "iu":
                raise DataError(f"{path}, document {row}: token ids are of type {ids.dtype}, must be integers")
            if len(bad := ids[(ids < 0) | (ids >= tokenizer.vocab_size)]):
                known = f"the tokenizer's vocabulary of {tokenizer.vocab_size}"
                raise DataError(f"{path}, document {row}: token id {bad[0]} is not in {known}")
            for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id)):
                if len(text := part[part != tokenizer.eos_id]):
                    yield np.append(text, tokenizer.eos_id).astype(token_dtype(tokenizer.vocab_size))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert", description="Turn other projects' tokens into a dataset."
    )
    add = parser.add_argument
    add("--source", nargs="+", required=True, help="local files or globs (Megatron: prefixes or .bin files)")
    add("--format", choices=FORMATS, required=True, help="what the files are")
    add("--tokenizer", required=True, help="the tokenizer.json that made the tokens, or a folder with it")
    add_output_options(parser)
    arguments = vars(parser.parse_args(argv))
    arguments["sources"] = arguments.pop("source")
    with command_line():
        report(convert(**arguments), arguments["output"])


if __name__ == "__main__":
    main()
