"""Host copies are of the moment they were asked for, whatever the device does next."""

import threading

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoint import CheckpointError
from checkpoint.state import Staging


def check_copies(device: str) -> None:
    """Long queues before and after: on an accelerator the copy must come between them on a stream of its own."""
    value = torch.zeros(1 << 22, device=device)
    index, staging = MetadataIndex("value"), Staging(value.device)
    for _ in range(3):
        for _ in range(100):
            value.add_(1)
        thread = threading.Thread(target=staging.prepare({index: value}))
        thread.start()
        staging.wait()
        value.mul_(1000)  # what an optimizer would do
        thread.join()
        assert staging.copies[index].unique().tolist() == [100]
        assert staging.copies[index].is_pinned() == (device == "cuda")
        value.zero_()


def test_copies_hold_what_was_there_before_what_waited():  # on a GPU: tests/gpu
    check_copies("cpu")


def test_memory_that_cannot_be_pinned_is_said_to_be_the_hosts(monkeypatch):
    """By CUDA it is "out of memory". The optimizer goes on: it is the save that has failed."""
    staging, value = Staging(torch.device("cpu")), torch.zeros(1 << 22)

    def empty(*shape, pin_memory, **options):
        raise torch.AcceleratorError("CUDA error: out of memory\nMore of it")

    copy = staging.prepare({MetadataIndex("value"): value})
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(CheckpointError, match=r'0\.02 GB more .* host: CUDA error: out of memory; mode = "sync"'):
        copy()
    staging.wait()
