"""What the size of a dataset costs, measured on a dataset with a manifest and an index but no tokens.

python -m benchmarks.data_growth FOLDER          start on it, without torch; prints a JSON line
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from data.order import Segment, build_epoch
from data.place import Place
from data.shards import Shard, open_dataset
from data.tokenizer import Tokenizer
from data.writer import write_manifest

BLOCKS_PER_SHARD = 32
SEQ_LEN, BATCH = 4096, 16


def write_simulated(folder: Path, blocks: int, tokenizer: Tokenizer) -> None:
    """Write manifest.json and blocks.arrow of a dataset with blocks of about 4 M uint16 tokens."""
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    rng = np.random.default_rng(0)
    written = []
    for number, first in enumerate(range(0, blocks, BLOCKS_PER_SHARD)):
        tokens = rng.integers(3_900_000, 4_100_001, min(BLOCKS_PER_SHARD, blocks - first))
        size = 2 * tokens + 4 * 6700
        documents = np.full(len(tokens), 6700)
        rows = np.stack([np.cumsum(size) - size, size, documents, tokens, tokens], axis=1)
        file = f"train-{number:05}.arrow"
        totals = (int(size.sum()), len(tokens), int(documents.sum()), int(tokens.sum()))
        written.append((Shard(file, "train", *totals), rows))
    write_manifest(Place(str(folder)), tokenizer, written)


def start(folder: str) -> dict[str, float]:
    """Open the dataset, lay out an epoch, and find the samples and the window of batches all over it."""
    begin = time.perf_counter()
    split = open_dataset(folder).split("train")
    epoch = build_epoch(split.tokens, 16, key=1)
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the process that started this one
    memory = int(status.split("VmHWM:")[1].split()[0]) * 1024
    segment = Segment(("simulated",), (1.0,), (0,), SEQ_LEN)
    samples = np.random.default_rng(0).integers(0, split.total_tokens // SEQ_LEN - BATCH, 20_000).tolist()
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for sample in samples:
            tokens = segment.locate(sample, BATCH)[1].tolist()
            epoch.window_of(tokens[0])
        rounds.append(time.perf_counter() - begin)
    return {
        "blocks": len(split.tokens),
        "tokens": split.total_tokens,
        "start_s": seconds,
        "memory_MB": memory / 1e6,
        "batch_us": min(rounds) / len(samples) * 1e6,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_growth", description="A start on a dataset.")
    parser.add_argument("folder", help="its folder; benchmarks.data makes one without tokens")
    print(json.dumps(start(parser.parse_args().folder)))
