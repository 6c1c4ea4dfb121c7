"""Host copies of the state for an async save, made while training goes on."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoint import CheckpointError


class Staging:
    """Host memory for this rank's part of a checkpoint, pinned with an accelerator and reused by every save.

    Forward and backward do not change weights and moments, so they are copied meanwhile. The optimizer's step, which
    changes them, must first call `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies: dict[MetadataIndex, Tensor] = {}
        self.stream = torch.Stream(device) if device.type != "cpu" else None
        self.queued = threading.Event()  # all copies are queued on the stream or, without one, made
        self.queued.set()
        self.copied: torch.Event | None = None  # on the stream, after the copies

    def prepare(self, sources: dict[MetadataIndex, Tensor]) -> Callable[[], None]:
        """Return a function that copies `sources` as they are now. Another thread must call it and then end.

        The function leaves its thread on the stream and its device. `with` would return to a new thread's default
        device, the first, where torch 2.11 to 2.13 then makes a CUDA context for each rank, in that GPU's memory.
        """
        self.queued, self.copied = threading.Event(), None
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

        def copy() -> None:
            try:
                if self.stream is not None:
                    torch.accelerator.set_stream(self.stream)
                for index, tensor in sources.items():
                    if index not in self.copies:
                        self.copies[index] = self._allocate(tensor)
                    self.copies[index].copy_(tensor, non_blocking=True)
                copied = self.copied = self.stream.record_event() if self.stream else None
            finally:
                self.queued.set()
            if copied is not None:
                copied.synchronize()

        return copy

    def wait(self) -> None:
        """Return when weights and moments may change; on an accelerator, only by work queued there from here on."""
        self.queued.wait()
        if self.stream is not None and self.copied is not None:
            torch.accelerator.current_stream(self.stream.device).wait_event(self.copied)

    def _allocate(self, tensor: Tensor) -> Tensor:
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        except torch.AcceleratorError as error:  # its "out of memory" would be taken for the device's
            what = f'checkpoint.mode = "async": {tensor.nbytes / 1e9:.2f} GB more of pinned memory of the host'
            raise CheckpointError(f'{what}: {str(error).splitlines()[0]}; mode = "sync" needs none') from None
