"""The tensors of a checkpoint, under names independent of wrappers and meshes, and host copies of them."""

import re
import threading
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpoint import CheckpointError

OUTER_MOMENTUM = ".outer_momentum"
WRAPPER_PREFIXES = r"_orig_mod\.|_checkpoint_wrapped_module\."


def model_tensors(model_parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Name → parameter or persistent buffer, sharing memory with the model."""
    # The hooks of `state_dict` also bring FSDP2's parameters back to their sharded form.
    return {clean_name(name): _plain(name, value) for part in model_parts for name, value in part.state_dict().items()}


def parameters(model_parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Name → parameter as the optimizer holds it, sharded with FSDP2."""
    for part in model_parts:
        part.state_dict()  # its hooks bring FSDP2's sharded parameters back
    return {clean_name(name): parameter for part in model_parts for name, parameter in part.named_parameters()}


def optimizer_tensors(model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`parameter name.state name` → tensor, sharing memory with the optimizer; empty before its first step.

    Leaves out hyperparameters: they come from the config, so that a resumed run may change them.
    Raises CheckpointError for state that cannot be saved, or of which only one rank's would be
    saved for all.
    """
    names = {id(parameter): name for name, parameter in parameters(model_parts).items()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}.{key}"
            _check_state(name, parameter, value)
            tensors[name] = _plain(name, value)
    return tensors


def _check_state(name: str, parameter: Tensor, value: object) -> None:
    """Refuse what is no tensor, or may differ between ranks that would save it once for all."""
    savable = isinstance(value, Tensor)
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim:
        savable = isinstance(value, DTensor) and not any(part.is_partial() for part in value.placements)
    if not savable:
        raise CheckpointError(
            f"optimizer state {name} must be a tensor and, as its weight may be sharded, made by "
            "torch.zeros_like(weight) or redistributed to Replicate(): otherwise it cannot be saved"
        )


def tensors_to_fill(
    model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, saved: Collection[str]
) -> dict[str, Tensor]:
    """The optimizer's tensors to fill from those in a checkpoint, `saved`. Drops state of weights without any there.

    All its state is allocated. Raises CheckpointError if the checkpoint is of another optimizer.
    """
    stateful = {name.rpartition(".")[0] for name in saved}
    for name, parameter in parameters(model_parts).items():
        if name not in stateful:  # it had no gradient up to the save
            optimizer.state.pop(parameter, None)
    tensors = {}
    for name, tensor in optimizer_tensors(model_parts, optimizer).items():
        if name in saved:
            tensors[name] = tensor
        elif name.endswith(OUTER_MOMENTUM):  # of the islands: parallelism.local_steps was turned on after the save
            tensor.zero_()
        else:
            raise CheckpointError(
                f"the checkpoint holds no {name} of the optimizer: it is of another optimizer; set optimizer.name and "
                "groups as it had them, or begin a new run from its weights by checkpoint.initial_load"
            )
    return tensors


def random_state() -> dict[str, Tensor]:
    """Copies of torch's random states of the CPU and of this rank's accelerator, as 1-D tensors of bytes."""
    states = {"cpu": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator(check_available=True)  # also if the weights are on the host
    if device:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def clean_name(name: str) -> str:
    """The name of a weight without those of wrappers: of compilation and of activation checkpointing."""
    return re.sub(WRAPPER_PREFIXES, "", name)


def _plain(name: str, tensor: Tensor) -> Tensor:
    """`tensor` without a wrapper subclass (float8 weights) around its values, sharing memory."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        values = _plain(name, local)
        if values is local:
            return tensor
        return DTensor.from_local(
            values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    while is_traceable_wrapper_subclass(tensor):
        fields = [field for field in tensor.__tensor_flatten__()[0] if field != "_precomputed_scale"]  # made at a load
        if len(fields) != 1:
            raise CheckpointError(f"{name} is a {type(tensor).__name__} of {len(fields)} tensors: it cannot be saved")
        tensor = getattr(tensor, fields[0])
    return tensor


class Staging:
    """Host memory for this rank's part of a checkpoint, pinned with an accelerator and reused by every save.

    Forward and backward do not change weights and moments, so they are copied meanwhile. The
    optimizer's step, which changes them, must first call `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies: dict[MetadataIndex, Tensor] = {}
        self.stream = torch.Stream(device) if device.type != "cpu" else None
        self.queued = threading.Event()  # all copies are queued on the stream or, without one, made
        self.queued.set()
        self.copied: torch.Event | None = None  # on the stream, after the copies

    def prepare(self, sources: dict[MetadataIndex, Tensor]) -> Callable[[], None]:
        """Return a function that copies `sources` as they are now. Another thread must call it and then end.

        The function leaves its thread on the stream and its device. `with` would return to a new
        thread's default device, the first, where torch 2.11 to 2.13 then makes a CUDA context for
        each rank, in that GPU's memory.
        """
        self.queued = threading.Event()
        self.copied = None
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

        def copy() -> None:
            try:
                if self.stream is not None:
                    torch.accelerator.set_stream(self.stream)
                for index, tensor in sources.items():
                    if index not in self.copies:
                        self.copies[index] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=bool(self.stream))
                    self.copies[index].copy_(tensor, non_blocking=True)
                if self.stream is not None:
                    copied = self.copied = self.stream.record_event()
            finally:
                self.queued.set()
            if self.stream is not None:
                copied.synchronize()

        return copy

    def wait(self) -> None:
        """Return when weights and moments may change; on an accelerator, only by work queued there from here on."""
        self.queued.wait()
        if self.stream is not None and self.copied is not None:
            torch.accelerator.current_stream(self.stream.device).wait_event(self.copied)
