"""Qwen, Mistral, Granite, SmolLM and OLMo, and each option of LlamaConfig, against Hugging Face transformers."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.llama.hf import from_hf_config, hf_names, to_hf_config
from models.llama.model import KVCache, Llama
from tests.unit.test_llama import random_tokens

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e3},
    "dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "yarn, all set": {
        "model_type": "llama",
        "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
    },
    "yarn, as DeepSeek": {"model_type": "llama", "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "mistral, head_dim": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 with windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True, "layer_types": MIXED, "sliding_window": 9,
                          "use_sliding_window": True, "head_dim": 16},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "logits_scaling": 8.0, "tie_word_embeddings": True,
    },
    "granite, no factors": {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "smollm3": {"model_type": "smollm3"},
    "smollm3, chosen layers": {
        "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 11,
        "tie_word_embeddings": False,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 4},
    "olmo3": {"model_type": "olmo3", "sliding_window": 16, "rope_scaling": {**YARN, "rope_theta": 5e5}},
}  # fmt: skip


def hf_model(name: str) -> nn.Module:
    """A model of transformers with random weights, large enough that every part shows in the logits."""
    torch.manual_seed(1)
    settings = dict(MODELS[name])
    config = AutoConfig.for_model(**(SHAPE | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def ours_from(hf: nn.Module) -> Llama:
    model = Llama(from_hf_config(hf.config.to_dict()))
    weights = hf.state_dict()
    names = hf_names(model.config, weights.keys())
    model.load_state_dict({name: weights[hf_name] for name, hf_name in names.items()})
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    """At 1, 2 and 4 times the length from which rotary scaling acts, and beyond every window."""
    hf = hf_model(name)
    ours = ours_from(hf)
    for length in (40, 80, 160):
        tokens = random_tokens(2, length)
        expected = hf(tokens).logits
        actual = ours(tokens)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    labels = random_tokens(2, length)
    for logits in (expected, actual):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs, names = dict(hf.named_parameters()), hf_names(ours.config)
    for parameter_name, parameter in ours.named_parameters():
        expected = theirs[names[parameter_name]].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max(), msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_config_crosses_both_ways(name: str) -> None:
    """What is written makes the same model in transformers; what is read back is the same flavor."""
    hf = hf_model(name)
    flavor = from_hf_config(hf.config.to_dict())
    written = json.loads(json.dumps(to_hf_config(flavor, 64, "float32", hf.config.model_type)))
    assert written["model_type"] == hf.config.model_type
    assert from_hf_config(written) == flavor
    again = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**written | {"pad_token_id": None}), attn_implementation="eager"
    ).eval()
    again.load_state_dict(hf.state_dict())
    tokens = random_tokens(2, 160)
    torch.testing.assert_close(again(tokens).logits, hf(tokens).logits)


@pytest.mark.parametrize("name", ["mistral", "smollm3, chosen layers", "olmo3", "qwen3"])
def test_cached_decoding_gives_the_same_logits(name: str) -> None:
    model, tokens = ours_from(hf_model(name)), random_tokens(2, 40)
    expected = model(tokens)
    caches = [KVCache() for _ in model.layers]
    parts = [torch.arange(a, b)[None] for a, b in ((0, 17), (17, 18), (18, 19), (19, 40))]
    pieces = [model(tokens[:, part[0]], part, caches) for part in parts]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-5, atol=1e-5)
