"""The tensors of a checkpoint: model, optimizer and random state, under names independent of wrappers and meshes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpoint import CheckpointError

WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def model_tensors(model_parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Name → parameter or persistent buffer, sharing memory with the model. A tied weight appears once."""
    tensors: dict[str, Tensor] = {}
    for part in model_parts:
        state = part.state_dict()  # its hooks also bring FSDP2 parameters back to their sharded form
        shared = {_clean(name) for name, _ in part.named_parameters(remove_duplicate=False)}
        unique = {_clean(name) for name, _ in part.named_parameters()}
        tensors |= {_clean(name): _plain(name, value) for name, value in state.items()}
        for duplicate in shared - unique:
            del tensors[duplicate]
    return tensors


def parameters(model_parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Name → parameter as the optimizer holds it, sharded with FSDP2. A tied weight appears once."""
    for part in model_parts:
        part.state_dict()  # its hooks bring FSDP2's sharded parameters back
    return {_clean(name): parameter for part in model_parts for name, parameter in part.named_parameters()}


def optimizer_tensors(model_parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`parameter name.state name` → tensor, sharing memory with the optimizer; empty before its first step.

    Leaves out hyperparameters: they come from the config, so that a resumed run may change them. Raises CheckpointError
    for state that cannot be saved, or of which only one rank's would be saved for all.
    """
    names = {id(parameter): name for name, parameter in parameters(model_parts).items()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}.{key}"
            if not isinstance(value, Tensor):
                raise CheckpointError(f"optimizer state {name} is a {type(value).__name__}: only tensors can be saved")
            if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise CheckpointError(
                    f"optimizer state {name} is a plain tensor, but its weight is sharded: only one rank's part would "
                    "be saved; make it a DTensor, by torch.zeros_like(weight) or DTensor.from_local"
                )
            if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
                raise CheckpointError(
                    f"optimizer state {name} has placements {value.placements}: partial sums cannot be saved; "
                    "redistribute it to Replicate()"
                )
            tensors[name] = _plain(name, value)
    return tensors


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state tensors of an optimizer that has not stepped yet, by a step with gradient, rate and decay of 0.

    Changes no parameter. torch.distributed.checkpoint.state_dict does the same.
    """
    if optimizer.state:
        return
    saved = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(lr=torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0, weight_decay=0.0)
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)


def random_state() -> dict[str, Tensor]:
    """Copies of torch's random states of the CPU and of this rank's accelerator, as 1-D tensors of bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device := torch.accelerator.current_accelerator(check_available=True):  # also if the weights are on the host
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Restore states from `random_state`."""
    for kind, value in states.items():
        if kind == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(kind).set_rng_state(value)


def _clean(name: str) -> str:
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


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
