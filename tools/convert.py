"""Turn token ids that another project has written into a dataset that training reads, without the text.

    python -m tools.convert --source train.bin --tokenizer tokenizer.json --output datasets/old

Reads .bin files of ids and nothing else, as nanoGPT's data/*/prepare.py writes them and, with --append-eod,
Megatron-LM, files with llm.c's header, and .npy. The ids show how many bits each has. A document ends with eos. Each
gets exactly one, and keeps its place; training shuffles them. A hash of its tokens tells whether one is held out.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from config import command_line
from data import writer
from data.shards import SPLITS, DataError, token_type
from data.sources import failures_of
from data.tokenizer import Tokenizer, load_tokenizer

IDS_AT_ONCE = 2**24  # searched for ends of documents
SAMPLE_IDS = 2**20  # looked at to find their data type
DTYPES = ("uint8", "uint16", "uint32", "uint64")  # signed ones have the same bits
# First of the 256 integers before the tokens in files of llm.c and modded-nanogpt. The third is the number of tokens.
MAGIC_NUMBERS = {20240520: "uint16", 20240801: "uint32"}


def read_ids(path: Path, vocab_size: int, dtype: str = "") -> np.ndarray:
    """Map the ids of a file. `dtype`: "" to go by its header or the ids themselves. Raises DataError."""
    if np.fromfile(path, "u1", 6).tobytes() == np.lib.format.MAGIC_PREFIX:
        ids = np.load(path, mmap_mode="r").reshape(-1)
        return ids.view(f"u{ids.itemsize}")
    header = np.fromfile(path, "<u4", 256)
    magic = int(header[0]) if len(header) == 256 else 0
    if magic not in MAGIC_NUMBERS and (dtype or magic == 0 or header[3:].any()):
        return np.memmap(path, dtype or _seen_dtype(path, vocab_size), "r")
    ids = np.memmap(path, MAGIC_NUMBERS.get(magic, "uint16"), "r", offset=header.nbytes)
    if magic not in MAGIC_NUMBERS or len(ids) != header[2]:
        what = f"header {header[:3].tolist()} is unknown or not that of its {len(ids)} {ids.dtype}"
        raise DataError(f"{path}: its {what}; cut it off, 1024 bytes, and name --dtype")
    return ids


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


def read_documents(path: Path, tokenizer: Tokenizer, dtype: str = "") -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with one eos at its end. Leaves out empty ones. Raises DataError."""
    with failures_of(f"{path}: cannot be read"):
        ids = np.asarray(read_ids(path, tokenizer.vocab_size, dtype))
        start = 0  # of the document
        for first in range(0, len(ids), IDS_AT_ONCE):
            piece = ids[first : first + IDS_AT_ONCE]
            if (bad := piece >= tokenizer.vocab_size).any():
                known = f"the tokenizer's vocabulary of {tokenizer.vocab_size}"
                what = f"id {piece[bad][0]} is not in {known}, read as {ids.dtype}; see --dtype"
                raise DataError(f"{path}: token {first + bad.argmax()}: {what}")
            for stop in (first + 1 + np.flatnonzero(piece == tokenizer.eos_id)).tolist():
                if stop - start > 1:
                    yield ids[start:stop]
                start = stop
        if start == 0 < len(ids) and not dtype:
            what = f"{len(ids)} ids as {ids.dtype}, of which none ends a document, as {tokenizer.eos_id} would"
            raise DataError(f"{path}: {what}; choose with --eos-token, or name --dtype if it is one document")
        if start < len(ids):
            yield np.append(ids[start:], ids.dtype.type(tokenizer.eos_id))


def convert(
    sources: Sequence[str], output: str, tokenizer: str, eos_token: str = "", validation_fraction: float = 0.02,
    block_mb: float = 8, shard_mb: float = 256, overwrite: bool = False, dtype: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Convert tokens and return the manifest. `--help` explains the parameters. Raises DataError, TitaniteError."""
    folder = writer.check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    chosen = load_tokenizer(tokenizer, eos_token)
    # Read from each file, even if the first has some: bad input is found before anything is removed.
    firsts = [next(read_documents(Path(source), chosen, dtype), None) for source in sources]
    if all(first is None for first in firsts):
        raise DataError(f"--source {' '.join(sources)}: holds no documents, nothing to convert")
    with writer.locked(folder):
        writer.remove_dataset(folder)
        chosen.save(folder)
        written: dict[str, list[writer.WrittenShard]] = {split: [] for split in SPLITS}
        waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        waiting_bytes = dict.fromkeys(SPLITS, 0)

        def write_waiting(split: str) -> None:
            offsets = pa.array(np.cumsum([0, *map(len, waiting[split])]), pa.int32())
            kind = token_type(writer.token_dtype(chosen.vocab_size))
            ids = np.concatenate(waiting[split]).astype(kind.value_type.to_pandas_dtype(), copy=False)
            documents = pa.ListArray.from_arrays(offsets, ids, type=kind)
            waiting[split], waiting_bytes[split] = [], 0
            number = len(written[split])
            written[split].append(writer.write_shard(folder, split, number, documents, int(block_mb * 2**20)))

        for source in tqdm(sources, desc="convert", unit=" files"):
            for document in read_documents(Path(source), chosen, dtype):
                split = SPLITS[writer.is_held_out(document.astype("<u4").tobytes(), validation_fraction)]
                waiting[split].append(document)
                waiting_bytes[split] += document.nbytes
                if waiting_bytes[split] >= shard_mb * 2**20:
                    write_waiting(split)
        for split in filter(waiting.get, SPLITS):
            write_waiting(split)
        return writer.write_manifest(folder, chosen, list(chain.from_iterable(written.values())))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description="Turn tokens into a dataset.")
    parser.add_argument("--source", nargs="+", required=True, dest="sources", help="local files of ids")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer.json that made the tokens, or its folder")
    parser.add_argument("--dtype", default="", choices=DTYPES, help="of an id; default: as the ids, or a header, show")
    writer.add_output_options(parser)
    arguments = vars(parser.parse_args(argv))
    with command_line():
        writer.report(convert(**arguments), arguments["output"])


if __name__ == "__main__":
    main()
