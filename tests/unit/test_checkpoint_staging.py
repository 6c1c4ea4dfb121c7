"""Host copies are of the moment they were asked for, whatever the device does next."""

import threading

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoint.state import Staging


def check_copies(device):
    """Long queues before and after: on an accelerator the copy must come between them on a stream of its own."""
    value = torch.zeros(1 << 22, device=device)
    index, staging, memory = MetadataIndex("value"), Staging(value.device), set()
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
        memory.add(staging.copies[index].data_ptr())
        value.zero_()
    assert len(memory) == 1, "later saves use it again"


def test_copies_hold_what_was_there_before_what_waited():  # on a GPU: tests/gpu
    check_copies("cpu")
