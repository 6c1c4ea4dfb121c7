"""A rank alone that casts its weights once a step: the same bits as where it casts them in each microbatch."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama.model import Llama
from tests.harness import run_ranks
from tests.parity import FLAVOR, config_for, losses_of, trace_of

STEPS, MICROBATCHES = 3, 4


def build_config(kept, **settings):
    config = config_for(1, 1, reshard_after_forward=not kept, **settings)
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, param_dtype="bfloat16", max_norm=0.0)
    )


CASES: dict[str, dict[str, Any]] = {
    "documents, selective": {"documents": True, "mode": "selective"},
    "full, compiled": {"mode": "full", "compile": "aot_eager"},
    "loss in chunks": {"loss_chunks": 2},
}


def run_both(**settings):
    return [trace_of(build_config(kept, **settings), STEPS, MICROBATCHES) for kept in (True, False)]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_weights_cast_in_each_microbatch(name):
    ((ours, reference),) = run_ranks(1, partial(run_both, **CASES[name]))
    rounded = {"output.weight"} if name == "loss in chunks" else set()  # the sum of its chunks, to the copy's type
    for name, gradient in reference.gradients[0].items():
        if name in rounded:
            scale = gradient.abs().max().item()
            torch.testing.assert_close(ours.gradients[0][name], gradient, rtol=0, atol=2**-8 * scale)
        else:
            assert torch.equal(ours.gradients[0][name], gradient), name
    tolerance = 1e-4 if rounded else 0
    assert [loss for (loss,) in ours.losses] == pytest.approx([loss for (loss,) in reference.losses], rel=tolerance)


class Casts(TorchDispatchMode):
    """Counts the weights that are cast to bfloat16."""

    weights = 0
    shapes = frozenset(weight.shape for weight in Llama(FLAVOR).parameters() if weight.ndim == 2)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.weights += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def count_casts(kept):
    with Casts() as casts:
        losses_of(build_config(kept), STEPS, MICROBATCHES)
    return casts.weights


def test_each_weight_is_cast_once_a_step():
    matrices = 7 * FLAVOR.n_layers + 1
    assert run_ranks(1, count_casts, True) == [matrices * (STEPS + 1)]  # and before the first step
    assert run_ranks(1, count_casts, False) == [matrices * STEPS * MICROBATCHES]
