"""What the size of a dataset costs, on one of any size that has a manifest and an index but no tokens.

python -m benchmarks.data_growth FOLDER          start on it, without torch; a JSON line
"""

import hashlib
import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.order import shuffled_epoch
from data.shards import FORMAT, INDEX_SCHEMA, VERSION, open_dataset
from data.tokenizer import Tokenizer

BLOCKS_PER_SHARD = 32


def write_index(folder: Path, blocks: int, tokenizer: Tokenizer) -> None:
    """manifest.json and blocks.arrow of a dataset with blocks of about 4 M uint16 tokens."""
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3_900_000, 4_100_001, blocks)
    size = 2 * tokens + 4 * 6700
    offset = np.concatenate(
        [np.cumsum(part) - part for part in np.split(size, range(BLOCKS_PER_SHARD, blocks, BLOCKS_PER_SHARD))]
    )
    columns = {"offset": offset, "size": size, "documents": np.full(blocks, 6700), "tokens": tokens, "crc32": tokens}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_table(
            pa.table({k: v.astype(INDEX_SCHEMA.field(k).type.to_pandas_dtype()) for k, v in columns.items()})
        )
    index = memoryview(sink.getvalue())
    (folder / "blocks.arrow").write_bytes(index)
    shards = [
        {
            "file": f"train-{number:05}.arrow",
            "split": "train",
            "bytes": int(size[part].sum()),
            "blocks": len(size[part]),
            "documents": 6700 * len(size[part]),
            "tokens": int(tokens[part].sum()),
            "lengths_crc32": 0,
        }
        for number, part in enumerate(slice(i, i + BLOCKS_PER_SHARD) for i in range(0, blocks, BLOCKS_PER_SHARD))
    ]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "uint16",
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint,
        "index_bytes": len(index),
        "index_crc32": zlib.crc32(index),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def start(folder: str) -> dict[str, float]:
    """Open the dataset, lay out an epoch and look up places all over it."""
    begin = time.perf_counter()
    split = open_dataset(folder).split("train")
    epoch = shuffled_epoch(split.tokens, 16, key=1)
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
    memory = int(status.split("VmHWM:")[1].split()[0]) * 1024
    places = np.random.default_rng(0).integers(0, split.total_tokens, 100_000).tolist()
    begin = time.perf_counter()
    for place in places:
        epoch.window_of(place)
    lookup = (time.perf_counter() - begin) / len(places)
    return {
        "blocks": len(split.tokens),
        "tokens": split.total_tokens,
        "start_s": seconds,
        "memory_MB": memory / 1e6,
        "place_us": lookup * 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[1])))
