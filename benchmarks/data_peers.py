"""Other loaders on the same tokens, each as its documentation recommends for fixed-length samples.

They write the corpus as samples of seq_len + 1 tokens, so none of them shuffles documents or says where they begin.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from benchmarks.data_growth import BATCH


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
    workers: tuple[int, ...]


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


# ---------------------------------------------------------------- a bare memory map


def write_flat(root: Path, samples: np.ndarray) -> None:
    if not (root / "samples.npy").exists():
        np.save(root / "samples.npy", samples)


def open_memmap(root: Path, state: Any, workers: int) -> Opened:
    samples = np.load(root / "samples.npy", mmap_mode="r")
    firsts = itertools.count(state or 0, BATCH)

    def batch() -> Any:
        first = next(firsts) % (len(samples) - BATCH)
        return _halves(torch.from_numpy(samples[first : first + BATCH].astype(np.int64)))

    return Opened(iter(batch, None), lambda: next(firsts))


# ---------------------------------------------------------------- torchdata


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


# ---------------------------------------------------------------- MosaicML streaming


def _let_streaming_import() -> None:
    """Replace torchvision, which streaming imports: it fails beside a torch of another build, and tokens need none."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        import transformers  # noqa: F401  looks for torchvision too, so must come before it is replaced

        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            sys.modules[f"torchvision{name}"] = MagicMock(__spec__=None)
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]


def write_streaming(root: Path, samples: np.ndarray) -> None:
    _let_streaming_import()
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{samples.shape[1]}"}
    with MDSWriter(out=str(root / "mds"), columns=columns, compression=None) as writer:
        for sample in samples:
            writer.write({"tokens": sample})


def open_streaming(root: Path, state: Any, workers: int) -> Opened:
    _let_streaming_import()
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(root / "mds"), shuffle=True, batch_size=BATCH)

    def collate(items: list[Any]) -> Tensor:
        return torch.from_numpy(np.stack([item["tokens"] for item in items]).astype(np.int64))

    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate, drop_last=True)
    return _opened(loader, state)


# ---------------------------------------------------------------- litdata


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

    samples = np.load(root / "samples.npy", mmap_mode="r")
    dataset = StreamingDataset(
        str(root / "litdata"), item_loader=TokensLoader(block_size=samples.shape[1]), shuffle=True, drop_last=True
    )
    return _opened(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers), state)


PEERS = {
    "numpy memory map": Peer("numpy", write_flat, open_memmap, (0,)),
    "torchdata": Peer("torchdata", write_flat, open_torchdata, (0, 2)),
    "streaming": Peer("streaming", write_streaming, open_streaming, (0, 1, 2)),
    "litdata": Peer("litdata", write_litdata, open_litdata, (0, 1, 2)),
}
