"""The data loader against others on the same corpus, and `data.prepare` against its tokenizer, with their bars.

    pip install -r requirements-bench.txt          the other loaders; without them only ours is measured
    python -m benchmarks.data [PART ...] [--quick] [--check]

Parts: loaders, prepare (default: both). The corpus is 200 M random tokens in documents of log-normal length, mean 600.
Each row comes from its own process; CPU seconds include its workers. A batch is 16 sequences of 4,096 tokens, as int64
tensors of inputs and labels. Others get the same tokens as their documentation recommends for fixed-length samples, so
none of them shuffles documents or says where they begin.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.report import build_parser, finish, print_row
from config import from_dict
from data.loader import DataLoader
from data.prepare.output import Output
from data.prepare.readers import documents, plan_units
from data.prepare.sources import list_files
from data.prepare.writer import write_manifest, write_shard
from data.shards import token_type
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

VOCAB_SIZE, MEAN_DOCUMENT = 50_000, 600
SEQ_LEN, BATCH = 4096, 16
RESUMES = 5  # the median is reported
MIXTURE = "titanite, 8 datasets, positions"
Row = dict[str, Any]
Bars = list[tuple[str, bool]]


# ---------------------------------------------------------------- corpus


def corpus(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [tokens] uint16, offsets of the documents). Each document ends with id 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(math.log(MEAN_DOCUMENT) - 0.5, 1.0, tokens // MEAN_DOCUMENT * 2).astype(np.int64) + 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = np.append(offsets[: offsets.searchsorted(tokens)], tokens)
    ids = rng.integers(1, VOCAB_SIZE, tokens, dtype=np.uint16)
    ids[offsets[1:] - 1] = 0
    return ids, offsets


def words_tokenizer() -> Tokenizer:
    """A stand-in tokenizer with VOCAB_SIZE words."""
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import models, pre_tokenizers

    raw = RawTokenizer(models.WordLevel({"<eos>": 0} | {str(i): i for i in range(1, VOCAB_SIZE)}, unk_token="1"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(raw, "<eos>")


def write_ours(folder: Path, ids: np.ndarray, offsets: np.ndarray) -> None:
    """Write the corpus as one of our datasets, in four shards."""
    folder.mkdir(parents=True)
    tokenizer = words_tokenizer()
    tokenizer.save(folder)
    cuts = np.linspace(0, len(offsets) - 1, 5).astype(int)
    written = []
    for number, (first, stop) in enumerate(itertools.pairwise(cuts)):
        part = (offsets[first : stop + 1] - offsets[first]).astype(np.int32)
        documents = pa.ListArray.from_arrays(part, ids[offsets[first] : offsets[stop]], type=token_type("uint16"))
        written.append(write_shard(Output(str(folder)), "train", number, documents, block_bytes=8 * 2**20))
    write_manifest(Output(str(folder)), tokenizer, written)


# ---------------------------------------------------------------- other loaders


class Opened(NamedTuple):
    """An open loader."""

    batches: Iterator[Any]  # (tokens, labels, ...), int64 [BATCH, seq_len]
    state: Callable[[], Any]
    close: Callable[[], None] = lambda: None


class Peer(NamedTuple):
    """How to write data for another loader, and how to open it."""

    module: str
    write: Callable[[Path, np.ndarray], None]
    open: Callable[[Path, Any, int], Opened]  # (folder, state or None, worker processes)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.to(torch.int64)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _opened(loader: Any, state: Any) -> Opened:
    """Open a torch DataLoader that has a state, for epoch after epoch."""
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            yield from map(_halves, loader)

    return Opened(batches(), loader.state_dict)


def write_torchdata(root: Path, samples: np.ndarray) -> None:
    np.save(root / "samples.npy", samples)


class _Samples(torch.utils.data.Dataset):
    def __init__(self, path: Path) -> None:
        self.samples = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.samples[index].astype(np.int64))


def open_torchdata(root: Path, state: Any, workers: int) -> Opened:
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = _Samples(root / "samples.npy")
    loader = StatefulDataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True)
    return _opened(loader, state)


def write_streaming(root: Path, samples: np.ndarray) -> None:
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{samples.shape[1]}"}
    with MDSWriter(out=str(root / "mds"), columns=columns, compression=None) as writer:
        for sample in samples:
            writer.write({"tokens": sample})


def open_streaming(root: Path, state: Any, workers: int) -> Opened:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(root / "mds"), shuffle=True, batch_size=BATCH)

    def collate(items: list[Any]) -> Tensor:
        return torch.from_numpy(np.stack([item["tokens"] for item in items]).astype(np.int64))

    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate, drop_last=True)
    return _opened(loader, state)


def write_litdata(root: Path, samples: np.ndarray) -> None:
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    (root / "litdata").mkdir()
    block = samples.shape[1]
    writer = BinaryWriter(cache_dir=str(root / "litdata"), chunk_bytes=64 * 2**20, item_loader=TokensLoader(block))
    for i, part in enumerate(np.array_split(samples, max(1, len(samples) // 64))):
        writer[i] = torch.from_numpy(part.reshape(-1).astype(np.int32))
    writer.done()
    writer.merge()


def open_litdata(root: Path, state: Any, workers: int) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    tokens = TokensLoader(block_size=SEQ_LEN + 1)
    dataset = StreamingDataset(str(root / "litdata"), item_loader=tokens, shuffle=True, drop_last=True)
    return _opened(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers), state)


PEERS = {
    "torchdata": Peer("torchdata", write_torchdata, open_torchdata),
    "streaming": Peer("streaming", write_streaming, open_streaming),
    "litdata": Peer("litdata", write_litdata, open_litdata),
}
WORKERS = (0, 2)  # of each peer


# ---------------------------------------------------------------- one loader in its own process


def open_ours(folders: list[Path], state: Any = None, **data: Any) -> Opened:
    config = from_dict(
        {
            "data": {"datasets": [str(folder) for folder in folders], **data},
            "training": {"seq_len": SEQ_LEN, "local_batch_size": BATCH},
            "validation": {"enable": False},
        }
    )
    loader = DataLoader(config, 0, 1)
    if state is not None:
        loader.load_state_dict(state)
    return Opened(iter(lambda: loader.next_step()[0], None), loader.state_dict, loader.close)


def measure(name: str, open_loader: Callable[[Any], Opened], tokens: int) -> Row:
    """Measure speed, state and resume of one loader, without its imports."""
    torch.set_num_threads(1)
    open_loader(None).close()  # imports, page cache
    loader = open_loader(None)
    for _ in range(4):
        next(loader.batches)
    steps = tokens // (SEQ_LEN * BATCH)
    begin, cpu = time.perf_counter(), _cpu_seconds()
    for _ in range(steps):
        batch = next(loader.batches)
        assert batch[0].dtype == batch[1].dtype == torch.int64
        assert batch[0].shape == batch[1].shape == (BATCH, SEQ_LEN)
    wall, cpu = time.perf_counter() - begin, _cpu_seconds() - cpu
    state = loader.state()
    loader.close()
    resumes = []
    for _ in range(RESUMES):
        begin = time.perf_counter()
        resumed = open_loader(state)
        next(resumed.batches)
        resumes.append(time.perf_counter() - begin)
        resumed.close()
    done = steps * SEQ_LEN * BATCH
    return {
        "loader": name,
        "Mtok/s": done / wall / 1e6,
        "Mtok/s/cpu": done / cpu / 1e6,
        "state_bytes": len(json.dumps(state, default=str)),
        "resume_ms": statistics.median(resumes) * 1e3,
    }


def _cpu_seconds() -> float:
    """Of this process and its workers, which share a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == os.getsid(0):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- parts


def in_own_process(row: list[Any]) -> Row:
    """Run `measure` in a new Python process. An error becomes the row's note."""
    command = [sys.executable, "-m", "benchmarks.data", "--row", json.dumps(row)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if result.returncode:
        return {"loader": row[0], "note": (result.stderr.strip().splitlines() or ["failed"])[-1][:120]}
    return json.loads(result.stdout.splitlines()[-1])


def run_row(name: str, folder: str, tokens: int, options: dict[str, Any]) -> Row:
    root = Path(folder)
    if name.startswith("titanite"):
        folders = sorted(root.glob(options.pop("datasets", "ours")))
        return measure(name, lambda state: open_ours(folders, state, **options), tokens)
    return measure(name, lambda state: PEERS[options["peer"]].open(root, state, options["workers"]), tokens)


def loaders(root: Path, quick: bool) -> tuple[list[Row], Bars]:
    tokens = 20_000_000 if quick else 200_000_000
    ids, offsets = corpus(tokens, seed=0)
    write_ours(root / "ours", ids, offsets)
    for number in range(8):
        write_ours(root / f"mixture-{number}", *corpus(tokens // 8, seed=number))
    weights = [5.0, 4.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0]
    rows: list[tuple[str, dict[str, Any]]] = [
        ("titanite", {}),
        ("titanite, positions", {"mask_documents": True}),
        (MIXTURE, {"datasets": "mixture-*", "mask_documents": True, "weights": weights}),
    ]
    for name, peer in PEERS.items():
        if importlib.util.find_spec(peer.module) is None:
            print_row({"loader": name, "note": f"{peer.module} is not installed"})
            continue
        peer.write(root, ids[: len(ids) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1))
        rows += [(f"{name}, {workers} workers", {"peer": name, "workers": workers}) for workers in WORKERS]
    found = []
    for row, options in rows:
        found.append(in_own_process([row, str(root), tokens * 9 // 10, options]))
        print_row(found[-1])
    ours, _, mixture, *others = found
    rates = [row["Mtok/s"] for row in others if row["loader"].startswith("streaming") and "note" not in row]
    return found, [
        ("loaders: 200 M tokens per CPU second", ours["Mtok/s/cpu"] >= 200),
        ("loaders: state of at most 1 KB", ours["state_bytes"] <= 1024),
        ("loaders: resume within 50 ms", ours["resume_ms"] <= 50),
        ("loaders: 5 times MosaicML streaming at its best", ours["Mtok/s"] >= 5 * max(rates, default=0)),
        ("mixture: 120 M tokens per CPU second with positions", mixture["Mtok/s/cpu"] >= 120),
    ]


def prepare(root: Path, quick: bool) -> tuple[list[Row], Bars]:
    """Measure `data.prepare`, with its start-up, against `encode_batch_fast` of the same text in a running process.

    In tokens/s on the same cores, and per CPU second of all processes, as medians of rounds. The text is Python's
    library, repeated.
    """
    megabytes, rounds = (25, 1) if quick else (200, 3)
    texts = []
    for unit in plan_units(list_files(["stdlib"])):
        texts += [text for _, text in documents(unit)]
    tokenizer = root / "tokenizer"
    tokenizer.mkdir()
    train_tokenizer(texts, 4096).save(tokenizer)
    raw = load_tokenizer(tokenizer).raw
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    repeats = math.ceil(megabytes * 1e6 / len(lines))
    source = root / "text.jsonl"
    with source.open("w") as file:
        for _ in range(repeats):
            file.write(lines)
    target = root / "prepared"

    def encode() -> int:
        tokens = 0
        for _ in range(repeats):
            for first in range(0, len(texts), 128):
                tokens += sum(len(encoding.ids) for encoding in raw.encode_batch_fast(texts[first : first + 128]))
        return tokens

    def prepare_with(*words: str) -> int:
        command = [sys.executable, "-m", "data.prepare", f"--source={source}", f"--output={target}", *words]
        subprocess.run([*command, f"--tokenizer={tokenizer}"], capture_output=True, check=True)
        return sum(shard["tokens"] for shard in json.loads((target / "manifest.json").read_text())["shards"])

    ways: dict[str, Callable[[], int]] = {
        "all cores": prepare_with,
        "1 process": partial(prepare_with, "--processes=1"),
        "encode_batch_fast": encode,
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # tokens/s, tokens per CPU second
    for _ in range(rounds):
        for name, work in ways.items():
            begin = time.perf_counter()
            cpu = sum(os.times()[:4])  # with children that have ended
            tokens = work()
            measured[name].append((tokens / (time.perf_counter() - begin), tokens / (sum(os.times()[:4]) - cpu)))
            shutil.rmtree(target, ignore_errors=True)
    rows: list[Row] = []
    for name, rates in measured.items():
        speed, cost = (statistics.median(rate) for rate in zip(*rates, strict=True))
        rows.append({"prepare": name, "tok/s": speed, "tok/cpu_s": cost})
    reference = rows[-1]
    for row in rows:
        row["ratio"] = row["tok/s"] / reference["tok/s"]
        row["cpu_ratio"] = row["tok/cpu_s"] / reference["tok/cpu_s"]
        print_row(row)
    return rows, [("prepare: 0.9 of encode_batch_fast", rows[0]["ratio"] >= 0.9)]


PARTS = {"loaders": loaders, "prepare": prepare}


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(run_row(*json.loads(arguments.row))), flush=True)
        os._exit(0)  # threads of some loaders never end
    unknown = set(arguments.part) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}: one of {', '.join(PARTS)}")
    rows: list[Row] = []
    bars: Bars = []
    for name in arguments.part or PARTS:
        with tempfile.TemporaryDirectory(prefix="benchmark-data-") as folder:
            part_rows, part_bars = PARTS[name](Path(folder), arguments.quick)
        rows += [{"part": name, **row} for row in part_rows]
        bars += part_bars
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
