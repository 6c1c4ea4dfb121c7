"""Turn token ids that another project has written into a dataset that training reads, without the text.

    python -m tools.convert --source train.bin --tokenizer tokenizer.json --output datasets/old

Reads .bin files of ids and nothing else, as nanoGPT's data/*/prepare.py writes them and, with --append-eod,
Megatron-LM: uint16, or 32 bits each if the tokenizer has more than 65,536 tokens. A document ends with eos. Each gets
exactly one, and keeps its place; training shuffles them. A hash of its tokens tells whether one is held out.
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


def read_documents(path: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with one eos at its end. Leaves out empty ones. Raises DataError."""
    with failures_of(f"{path}: cannot be read"):
        ids = np.asarray(np.memmap(path, writer.token_dtype(tokenizer.vocab_size), "r"))
        start = 0  # of the document
        for first in range(0, len(ids), IDS_AT_ONCE):
            piece = ids[first : first + IDS_AT_ONCE]
            if (bad := piece >= tokenizer.vocab_size).any():
                known = f"the tokenizer's vocabulary of {tokenizer.vocab_size}"
                raise DataError(f"{path}: token {first + bad.argmax()}: id {piece[bad][0]} is not in {known}")
            for stop in (first + 1 + np.flatnonzero(piece == tokenizer.eos_id)).tolist():
                if stop - start > 1:
                    yield ids[start:stop]
                start = stop
        if start < len(ids):
            yield np.append(ids[start:], ids.dtype.type(tokenizer.eos_id))


def convert(
    sources: Sequence[str], output: str, tokenizer: str, eos_token: str = "", validation_fraction: float = 0.02,
    block_mb: float = 8, shard_mb: float = 256, overwrite: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Convert tokens and return the manifest. `--help` explains the parameters. Raises DataError, TitaniteError."""
    folder = writer.check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    chosen = load_tokenizer(tokenizer, eos_token)
    # Read from each file, even if the first has some: bad input is found before anything is removed.
    firsts = [next(read_documents(Path(source), chosen), None) for source in sources]
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
            documents = pa.ListArray.from_arrays(offsets, np.concatenate(waiting[split]), type=kind)
            waiting[split], waiting_bytes[split] = [], 0
            number = len(written[split])
            written[split].append(writer.write_shard(folder, split, number, documents, int(block_mb * 2**20)))

        for source in tqdm(sources, desc="convert", unit=" files"):
            for document in read_documents(Path(source), chosen):
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
    writer.add_output_options(parser)
    arguments = vars(parser.parse_args(argv))
    with command_line():
        writer.report(convert(**arguments), arguments["output"])


if __name__ == "__main__":
    main()
