"""What stands in for a piece of the model or the loss refuses an edited original, in one line at the start."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.nn.functional as F
from torch import nn

import loss
import models
import train
from config import ConfigError, TitaniteError, load_config
from models.llama import model as llama
from parallel.stand_ins import check_stand_in, numbers, with_parts
from tests.corpus import write_dataset

SMALL = ("--data.datasets=data", "--model.flavor=debug", "--training.seq_len=256", "--training.local_batch_size=4")
FLOAT8 = ("--float8.enable=true", "--float8.filter=all")
OWN = (*FLOAT8, "--float8.kernels=own")
CHUNKS, ONE_CHUNK, TP = ("--training.loss_chunks=4",), ("--training.loss_chunks=1",), ("--parallelism.tp=2",)
RING, GATHER = ("--parallelism.cp=2", "--parallelism.cp_method=ring"), ("--parallelism.cp=2",)


class GeGLU(llama.FeedForward):
    def forward(self, x_BSD):
        return self.w2(F.gelu(self.w1(x_BSD)) * self.w3(x_BSD))


class Offset(llama.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight.to(x.dtype), self.eps)


class Noisy(llama.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x))


class Capped(llama.Output):
    def forward(self, x, use=None):
        return 30 * (super().forward(x, use) / 30).tanh()


class CappedModel(llama.Llama):
    def forward(self, *args, **kwargs):
        return 30 * (super().forward(*args, **kwargs) / 30).tanh()


class Warm(llama.Llama):
    """Whose logits have a bias that is trained."""

    def _compute_logits(self, h, weight):
        return super()._compute_logits(h, weight) + self.norm.weight.sum()


class Halved(llama.Block):
    def forward(self, x_BSD, *args, **kwargs):
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD) * 0.5)


class OtherLogits(llama.Output):
    @staticmethod
    def compute(x, weight):
        return 30 * (F.linear(x, weight.to(x.dtype)) / 30).tanh()


class Scaled(nn.Embedding):
    def forward(self, input):
        return 2 * super().forward(input)


SCALED = SimpleNamespace(**{**vars(nn), "Embedding": Scaled})


class Deaf(llama.Attention):
    def forward(self, x_BSD, cos, sin, *_, **__):
        return self.wo(x_BSD)


class OtherAttention(llama.Attention):
    def __init__(self, config):
        super().__init__(config)
        self.attend = lambda q, k, v, mask: llama.attention(q / 2, k, v, mask)


class Biased(llama.Linear):
    forward = llama.Linear.forward

    def __init__(self, rows, columns, bias=True):
        super().__init__(rows, columns, bias=True)


def halved(logits, labels, z_loss):
    return STACK_TERMS(logits, labels, z_loss) / 2


def windowed(query, key, window):
    return (query >= key) & (query - key < 4)


STACK_TERMS = loss.stack_terms


def of(model):
    return {"llama": replace(models.LLAMA, model=model)}


# (where, name, what a fork puts there, settings that ignored it, the stand-in, a setting that honours it)
EDITS = {
    "feed-forward": (llama, "FeedForward", GeGLU, OWN, "float8.layers.OwnFeedForward", FLOAT8),
    "a norm's result": (llama, "Block", Halved, OWN, "float8.kernels", FLOAT8),
    "norm": (llama, "RMSNorm", Offset, OWN, "float8.layers.OwnNorm", FLOAT8),
    "linear": (llama, "Linear", Noisy, FLOAT8, "float8.convert.build_linear", ()),
    "bias": (llama, "Linear", Biased, OWN, "float8.skip", FLOAT8),
    "output": (llama, "Output", Capped, CHUNKS, "training.loss_chunks", ("--training.loss_chunks=1",)),
    "logits": (models, "MODELS", of(CappedModel), CHUNKS, "training.loss_chunks", ONE_CHUNK),
    "trained logits": (models, "MODELS", of(Warm), CHUNKS, "training.loss_chunks", ONE_CHUNK),
    "output in float8": (
        llama, "Output", OtherLogits, (*FLOAT8, "--float8.always=output"), "float8.convert.build_linear", CHUNKS,
    ),
    "attention": (llama, "Attention", OtherAttention, RING, "parallel.context.ring_attention", GATHER),
    "mask": (llama, "visible", windowed, RING, "causal_mask", GATHER),
    "attention without attend": (llama, "Attention", Deaf, GATHER, "self.attend", ()),
    "embedding": (llama, "nn", SCALED, TP, "parallel.tensor.VocabParallelEmbedding", ()),
    "sum of terms": (loss, "stack_terms", halved, TP, "parallel.tensor.vocab_parallel_cross_entropy", ()),
}  # fmt: skip


class Started(Exception):
    """Nothing was refused."""


def start(words, monkeypatch):
    """The start of a run on rank 0 of as many as the settings need, up to its process group."""
    monkeypatch.setenv("WORLD_SIZE", "2" if "=2" in "".join(words) else "1")
    monkeypatch.setattr(train, "TrainingRun", mock.Mock(side_effect=Started))
    train.train(load_config([*SMALL, *words]))


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", [[[*range(1, 99), 0]] * 99], [[1, 0]])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_refused_where_it_would_be_ignored(edit, monkeypatch):
    module, name, edited, ignoring, stand_in, honouring = EDITS[edit]
    monkeypatch.setattr(module, name, edited)
    with pytest.raises(TitaniteError, match=stand_in) as refused:
        start(ignoring, monkeypatch)
    assert "set " in str(refused.value)
    with pytest.raises(Started):
        start(honouring, monkeypatch)


@pytest.mark.usefixtures("place")
def test_nothing_is_refused_without_an_edit(monkeypatch):
    for words in {ignoring for *_, ignoring, _, _ in EDITS.values()}:
        with pytest.raises(Started):
            start(words, monkeypatch)


def test_hooks_and_code_that_cannot_be_tried_count_as_edits():
    def check(layer):
        def own(x, weight):
            return with_parts(layer, weight=weight)(x)

        check_stand_in("Linear", own, F.linear, [numbers(3, 4), numbers(2, 4)], "float8", "float8.enable = false")

    layer = llama.Linear(400, 200, bias=False)
    check(layer)
    layer.register_forward_hook(lambda module, args, result: 2 * result)
    with pytest.raises(ConfigError, match=r"Linear: .*set float8\.enable = false"):
        check(layer)
    needs_other_sizes = llama.Linear(400, 200, bias=False)
    needs_other_sizes.register_forward_pre_hook(lambda module, args: args[0].view(-1, 400))
    with pytest.raises(ConfigError, match="cannot be tried"):
        check(needs_other_sizes)
