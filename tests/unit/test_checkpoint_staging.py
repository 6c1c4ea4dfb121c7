"""Host copies are of the moment they were asked for, whatever the device does next."""

import threading
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoint import CheckpointError
from checkpoint.staging import Staging


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


class _ThirdDevicesStream:
    """As torch's stream of cuda:3: on CUDA every thread begins on the first device."""

    device = torch.device("cuda", 3)

    def __init__(self) -> None:
        self.thread = threading.local()
        self.contexts = [3]  # that the process has, by device

    def wait_stream(self, other):
        pass

    def record_event(self):
        return mock.Mock()

    def set_device(self, index):
        self.thread.device = index
        self.contexts += {index} - set(self.contexts)

    def set_stream(self, stream):
        self.set_device(stream.device.index)

    def __enter__(self):
        self.thread.before = getattr(self.thread, "device", 0)
        self.set_device(3)

    def __exit__(self, *_):
        self.set_device(self.thread.before)


def test_a_copy_makes_no_context_on_another_device(monkeypatch):
    stream, index, staging = _ThirdDevicesStream(), MetadataIndex("value"), Staging(torch.device("cpu"))
    staging.stream, staging.copies[index] = stream, torch.zeros(1)  # there already: nothing can be pinned here
    monkeypatch.setattr(torch.accelerator, "set_stream", stream.set_stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    thread = threading.Thread(target=staging.prepare({index: torch.ones(1)}))
    thread.start()
    thread.join()
    assert staging.copies[index].item() == 1
    assert stream.contexts == [3]


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
