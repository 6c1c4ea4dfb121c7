"""Trainings of a tiny model on the ranks of a test, by tools.same."""

import dataclasses

import torch
import torch.distributed as dist

from config import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    Data,
    Float8,
    LRScheduler,
    Metrics,
    Optimizer,
    Parallelism,
    Training,
    Validation,
)
from models import LLAMA
from models.llama.model import LlamaConfig
from parallel.mesh import ParallelDims
from tools.same import SEQ_LEN, SEQUENCES, VOCAB_SIZE, Opened, start_in_layout, take_steps

FLAVOR = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=112, vocab_size=VOCAB_SIZE)
CPU = torch.device("cpu")


def config_for(
    dp_replicate,
    dp_shard,
    compile="",
    mode="none",
    documents=False,
    loss_chunks=1,
    param_dtype="float32",
    float8=None,
    **parallelism,
):
    return Config(
        data=Data(mask_documents=documents),
        metrics=Metrics(per_layer=True),
        validation=Validation(enable=False),
        checkpoint=Checkpoint(enable=False),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_fraction=0.0),
        training=Training(param_dtype=param_dtype, seq_len=SEQ_LEN, loss_chunks=loss_chunks, max_norm=0.5),
        optimizer=Optimizer(lr=3e-3),
        parallelism=Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard, **parallelism),
        compile=Compile(enable=bool(compile), backend=compile or "inductor"),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        float8=float8 or Float8(),
    )


def opened(config, steps, batches, **model_options):
    """For this process group: `steps` steps of some `batches` on each rank."""
    dp = ParallelDims.from_config(config.parallelism, dist.get_world_size()).dp
    sizes = {"steps": steps, "local_batch_size": SEQUENCES // dp // batches, "global_batch_size": SEQUENCES}
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, **sizes))
    return Opened(config, LLAMA, dataclasses.replace(FLAVOR, **model_options))


def losses_of(config, steps, batches=1, **model_options):
    """The same steps, of which nothing but the loss is looked at."""
    given = opened(config, steps, batches, **model_options)
    return [computed.loss.item() for computed in take_steps(given, start_in_layout(given, CPU))]
