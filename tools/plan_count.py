"""Counts of a real step of training for any number of ranks, on one CPU: fake ranks, fake tensors, the same code.

The model, its sharding, its graphs, loss, clipping and optimizer are those of a run (trainer.Trainer). Fake tensors
have shapes but no memory, and torch's fake backend answers every collective at once.

The second of three microbatches and all further ones are alike, and so are layers: many follow from few. A pipeline is
counted as one of its stages.
"""

import contextlib
import gc
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from tqdm import tqdm

import trainer
from config import Config
from data.ledger import build_phases
from data.loader import Batch
from float8.convert import check_float8, convert_to_float8
from loss import loss_chunks
from models import build_model, find_model
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.plan_tally import Counts, Message, Tally

DEFAULT_VOCAB_SIZE = 4096  # for a flavor that takes its tokenizer's: that of the default run
FEW_MICROBATCHES = 3  # the first, the last, and one that stands for all between them
FEW_LAYERS = (3, 4)  # with fewer, fewer are gathered at once than in a deep model
HIDDEN_BYTES = 2  # of a number that one stage of a pipeline sends to another: bfloat16
BACKEND: Any = "tally"


class Case(NamedTuple):
    """A run on so many ranks."""

    config: Config
    world_size: int

    @property
    def dims(self) -> ParallelDims:
        """The layout."""
        return ParallelDims.from_config(self.config.parallelism, self.world_size)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; of the last if the batch has a schedule."""
        return build_phases(self.config.training, self.dims.dp)[-1].shape.accumulation

    @property
    def flavor(self) -> Any:
        """The shape of the model."""
        return find_model(self.config.model, DEFAULT_VOCAB_SIZE)[1]


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError for a run that train.py would refuse wherever it is to run."""
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    loss_chunks(config)
    check_float8(config, here=False)
    _ = Case(config, world_size).microbatches  # the layout and the batch
    spec.check_parallelism(flavor, config)


# -- one step


def dry_runs(cases: Sequence[Case], microbatches: int) -> list[Counts]:
    """Run a step of each case with `microbatches` or all it has, as its first rank, and count it.

    Beside what a Tally counts: "weights", "optimizer" → bytes of a rank; "peak" → the most bytes it holds in the step.

    The cases share what the first compiles, so they may only differ by their number of layers. It starts process groups
    of fake ranks, so call it once per process. Raises what a run with these settings raises, above all ConfigError.
    """
    gc.freeze()  # otherwise a collection walks through, and so copies, all objects of the parent
    torch._logging.set_logs(dynamo=50)
    torch.compiler.reset()
    torch._dynamo.config.automatic_dynamic_shapes = False  # graphs are counted once, so sizes must be numbers
    tally = Tally()
    register_backend(tally.backend(), name=BACKEND)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    counts = []
    for case in cases:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
        with warnings.catch_warnings(), contextlib.ExitStack() as modes:
            warnings.simplefilter("ignore")
            for owner, name, stand_in in _stand_ins_of_torch():
                modes.enter_context(mock.patch.object(owner, name, stand_in))
            counts.append(_count_step(case, min(case.microbatches, microbatches), tally, fake, modes))
        dist.destroy_process_group()
        gc.collect()  # its model, before the next one is counted
    return counts


def _count_step(
    case: Case, microbatches: int, tally: Tally, fake: FakeTensorMode, modes: contextlib.ExitStack
) -> Counts:
    config = _settle(case.config)
    training = config.training
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    model = build_model(spec, flavor)
    if config.float8.enable:
        convert_to_float8(model, config.float8, case.dims.tp, case.dims.shards)

    def allocate(model: nn.Module, device: torch.device, *_: Any) -> None:
        """In place of `init_weights`: weights without values. From here on tensors are fake, and counted."""
        modes.enter_context(fake)
        modes.enter_context(tally.counting())
        model.to_empty(device=device)

    mesh = case.dims.build_mesh("cpu")
    with mock.patch.object(trainer, "init_weights", allocate):
        step = trainer.Trainer(config, model, spec, flavor, case.dims, mesh, torch.device("cpu"))
    weights = tally.live
    step.allocate_state()
    step.begin()
    optimizer = tally.live - weights
    tally.begin_step()
    shape = training.local_batch_size, training.max_seq_len
    tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    batch = Batch(tokens, labels, positions if config.data.mask_documents else None)
    after: list[Counts] = []  # each microbatch

    def forward_backward(compute: Any, batches: Sequence[Batch], n_tokens: Tensor) -> list[Tensor]:
        losses = []
        for number in range(microbatches):
            losses.append(compute.forward_backward(*batch, n_tokens, number == microbatches - 1))
            after.append(tally.counts.copy())
        return losses

    step.compute_gradients([batch] * microbatches, forward_backward)
    tally.part = "update"
    step.update()
    step.end_step(training.steps)
    counts = tally.counts.copy()
    if case.microbatches > microbatches > 2:
        counts = extend(counts, after[0], after[1], case.microbatches - microbatches)
    counts["weights"] = weights
    counts["optimizer"] = optimizer
    counts["peak"] = tally.peak
    return counts


def _stand_ins_of_torch() -> list[tuple[Any, str, Any]]:
    """What torch does with other ranks' shapes and with a GPU's kernels: owner, attribute, what replaces it."""
    attention = F.scaled_dot_product_attention
    # DTensor propagates global shapes by fake tensors that no rank holds: not to be counted.
    propagate = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """A GPU's kernels get a mask in blocks, and leave out what it hides: about half, as if it were causal."""
        return attention(q, k, v, **kwargs | {"is_causal": True})

    return [
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate),
        (F, "scaled_dot_product_attention", attend),
        (partitioners, "has_recomputable_rng_ops", lambda graph: False),  # otherwise attention hides in other operators
    ]


def _settle(config: Config) -> Config:
    """The config as a GPU has it, compiled by the tally. A ring is counted as a gather of the same keys and values."""
    training = config.training
    if training.param_dtype == "auto":
        training = replace(training, param_dtype="bfloat16")
    return replace(
        config,
        training=training,
        compile=replace(config.compile, backend=BACKEND),
        parallelism=replace(config.parallelism, cp_method="allgather"),
    )


# -- many steps, from few layers and microbatches


def count(cases: Sequence[Case]) -> dict[Case, Counts]:
    """What each case counts in a step, with a line on stderr.

    A deep model is counted with three and with four layers, and from there on as a line, on which layers lie. Only
    Muon's exchange lies near one, since ranks share whole matrices. Cases run in parallel, the dry runs of each in one
    process, forked, since imports take longer than small runs. Raises what a run with these settings raises, above all
    ConfigError.
    """
    # All processes begin before tqdm's thread and the pool's own: one forked later may inherit a lock that they hold.
    with multiprocessing.get_context("fork").Pool(len(cases), maxtasksperchild=1) as pool:
        done = tqdm(pool.imap(_count_one, cases), "counting steps", len(cases), leave=False, mininterval=1)
        return dict(zip(cases, done, strict=True))


def _count_one(case: Case) -> Counts:
    """What a case counts, in a process of its own."""
    if case.config.parallelism.pp > 1:
        return _count_pipeline(case)
    unit = case.config.activation_checkpoint.every_n_layers
    layers = case.flavor.n_layers
    few, more = (unit * times for times in FEW_LAYERS)
    if layers % unit or layers <= more:
        return dry_runs([case], FEW_MICROBATCHES)[0]
    low, high = dry_runs([with_layers(case, few), with_layers(case, more)], FEW_MICROBATCHES)
    return extend(high, low, high, (layers - more) // unit)


def with_layers(case: Case, layers: int) -> Case:
    """The case with another number of layers."""
    model = replace(case.config.model, n_layers=layers)
    return case._replace(config=replace(case.config, model=model))


def extend(start: Counts, low: Counts, high: Counts, steps: int) -> Counts:
    """Counts `steps` steps further from `start`, each as large as that from `low` to `high`."""
    return Counter({key: amount + steps * (high[key] - low[key]) for key, amount in start.items()})


def _count_pipeline(case: Case) -> Counts:
    """A stage of a pipeline: its layers with both ends of the model, and all microbatches that it holds at once."""
    config = case.config
    parallelism = config.parallelism
    training = config.training
    sequences = training.local_batch_size * case.microbatches
    held = parallelism.pp * parallelism.pp_microbatch_size
    if training.local_batch_size % held:
        held = training.local_batch_size
    alone = replace(
        config,
        # A pipeline's weights stay gathered and its gradients whole until the end of a step.
        parallelism=replace(parallelism, pp=1, reshard_after_forward=False, sync_every_microbatch=False),
        training=replace(training, local_batch_size=held, global_batch_size=sequences * case.dims.dp, loss_chunks=1),
    )
    stage = Case(alone, case.world_size // parallelism.pp)
    counts = _count_one(with_layers(stage, -(-case.flavor.n_layers // parallelism.pp)))
    hidden = sequences * training.max_seq_len // case.dims.cp * case.flavor.dim * HIDDEN_BYTES
    counts[Message("pp", "send")] = 2 * len(stages_of_rank(0, parallelism)) * hidden
    return counts
