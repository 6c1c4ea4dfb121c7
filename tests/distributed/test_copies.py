"""A rank alone that casts its weights once a step: the same bits as where it casts them in each microbatch."""

import dataclasses
from functools import partial

import pytest
import torch

from tests.harness import run_ranks
from tests.parity import config_for, trace_of

STEPS, MICROBATCHES = 3, 4


def build_config(kept, **settings):
    config = config_for(1, 1, reshard_after_forward=not kept, **settings)
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, param_dtype="bfloat16", max_norm=0.0)
    )


CASES = {
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
