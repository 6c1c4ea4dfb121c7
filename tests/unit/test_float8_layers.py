"""Own float8 layers in a whole model: their noise beside torchao's, compiled, with an output layer in chunks."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from config import Compile, Float8
from float8.convert import convert_to_float8
from float8.layers import OwnFeedForward, OwnLinear, OwnNorm
from loss import build_chunked_loss, cross_entropy
from models.llama.model import Llama, LlamaConfig

FLAVOR = LlamaConfig(dim=512, n_layers=1, n_heads=4, n_kv_heads=4, hidden_dim=1024, vocab_size=128)


def build(float8=None, dtype=torch.bfloat16):
    model = Llama(FLAVOR)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0 if weight.dim() > 1 else 1.0, 0.05, generator=generator)
            weight.copy_(weight.bfloat16())
        model.tok_embeddings.weight[::2] /= 128  # so small that the norm's eps counts
    model.to(dtype)
    if float8:
        convert_to_float8(model, float8)
    return model


def settings(**options):
    return Float8(**{"enable": True, "filter": "all", "fsdp_all_gather": "off", "kernels": "own", **options})


def tokens():
    return torch.randint(0, FLAVOR.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))


def gradients(model, device="cpu"):
    """The loss, and the gradient of each weight, computed on a device."""
    given = tokens().to(device)
    loss = cross_entropy(model.to(device)(given), given.roll(1))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    found = {"loss": loss.detach()} | dict(zip(dict(model.named_parameters()), grads, strict=True))
    return {name: value.cpu() for name, value in found.items()}


@pytest.fixture(scope="module")
def exact():
    return gradients(build(dtype=torch.float64))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_block_is_as_near_to_float64_as_torchaos(recipe, exact):
    model = build(settings(recipe=recipe))
    block = model.layers["0"]
    kinds = [type(layer) for layer in (block.attention_norm, block.ffn_norm, block.feed_forward, block.attention.wq)]
    assert kinds == [OwnNorm, OwnNorm, OwnFeedForward, OwnLinear]
    plain = build(settings(recipe=recipe, skip=("output", "wk"))).layers["0"]
    assert not isinstance(plain.attention_norm, OwnNorm)  # wk reads it
    check_block(recipe, "cpu", exact)


def check_block(recipe, device, exact):
    """The noise of own layers on a device, beside that of torchao's on CPU."""
    theirs = settings(recipe=recipe, kernels="compiler")
    own = gradients(build(settings(recipe=recipe)), device)
    torchaos = gradients(build(theirs))
    for name, truth in exact.items():
        limit = 1.15 * (torchaos[name] - truth).norm() + 1e-3 * truth.norm()
        assert (own[name] - truth).norm() < limit, name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_whole_a_block_gives_the_same_bits(recipe):
    """Each cast stays one operator, and what only carries a gradient is not computed."""
    counted = Counter()

    def look(graph, _):
        counted.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    eager, compiled = build(settings(recipe=recipe)), build(settings(recipe=recipe))
    compiled.layers["0"].compile(backend=aot_autograd(fw_compiler=look), fullgraph=True)  # type: ignore[union-attr]
    found, expected = gradients(compiled), gradients(eager)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Forward: 2 norms, wo's input, SwiGLU. Backward: outputs of wq, wk, wv, wo, w2, and SwiGLU. Weights are cast twice.
    assert counted["titanite.to_float8.default"] == 4 + 6 + 2 * 7
    assert counted["aten._scaled_mm.default"] == 3 * 7


@pytest.mark.parametrize("kernels", ["own", "compiler"])
def test_an_output_layer_in_float8_with_the_loss_in_chunks(kernels):
    """Rows have scales of their own, so only the weight's gradient, which sums over chunks, is cast otherwise."""
    mesh = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    chunked = build_chunked_loss(Compile(), mesh, 2)
    models = [build(settings(recipe="rowwise", kernels=kernels, always=("output",))) for _ in range(2)]
    labels = tokens().roll(1)
    models[0](tokens(), loss=partial(chunked, labels)).backward()
    loss = cross_entropy(models[1](tokens()), labels)
    loss.backward()
    assert hasattr(models[0].output, "linear_mm_config"), "converted"
    for (name, ours), whole in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        difference = ((ours.grad - whole.grad).float().norm() / whole.grad.float().norm()).item()
        assert difference < (0.05 if name == "output.weight" else 0.02), name
