"""Llama to and from Hugging Face: names of weights and fields of config.json. Values of weights cross unchanged."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from models.llama.model import LlamaConfig, RopeScaling, rope_frequencies

MODEL_TYPE = "llama"
FREQUENCIES = "rotary_emb.inv_freq"  # in old files, which follow from config.json
BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}

# Fields of LlamaConfig → keys of config.json, all required but the last. from_hf_config handles the other fields.
CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
# Keys of config.json that our model supports with one value only: key → that value.
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
UNWRITTEN = {"sliding_window": None, "quantization_config": None, "partial_rotary_factor": 1.0}  # likewise


def hf_names(config: LlamaConfig, found: Collection[str] = ()) -> dict[str, str]:
    """Our name → Hugging Face's for every parameter, in the model's order. Tied embeddings have no output.weight.

    Among `found`, the names in files saved without lm_head, none may begin with "model.", and of two tied weights
    there may be either.
    """
    base = "model."
    if found and not any(name.startswith(base) for name in found):
        base = ""
    names = {"tok_embeddings.weight": f"{base}embed_tokens.weight"}
    if config.tie_embeddings and "lm_head.weight" in found and names["tok_embeddings.weight"] not in found:
        names["tok_embeddings.weight"] = "lm_head.weight"
    for i in range(config.n_layers):
        for ours, theirs in BLOCK_NAMES.items():
            names[f"layers.{i}.{ours}"] = f"{base}layers.{i}.{theirs}"
    names["norm.weight"] = f"{base}norm.weight"
    if not config.tie_embeddings:
        names["output.weight"] = "lm_head.weight"
    return names


def check_hf_names(found: Collection[str], config: LlamaConfig) -> None:
    """Raises ValueError that says which of a Hugging Face Llama's weight names are missing or left over.

    Not left over are a tied lm_head, which is the embedding, and FREQUENCIES; the caller checks that by their values.
    """
    known = set(hf_names(config, found).values())
    missing = known - set(found)
    if config.tie_embeddings:
        known.add("lm_head.weight")
    surplus = [name for name in found if name not in known and not name.endswith(FREQUENCIES)]
    if missing or surplus:
        raise ValueError(f"not the weights of this model: missing {_some(missing)}; left over {_some(surplus)}")


def check_frequencies(found: Tensor, config: LlamaConfig) -> None:
    """Raises ValueError if a file's FREQUENCIES, maybe rounded to bfloat16 or float16, are not those of `config`."""
    expected = rope_frequencies(config, found.device)
    if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-7):
        raise ValueError(f"rope_theta = {config.rope_theta:g}, but the weights hold the {FREQUENCIES} of another one")


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """The shape that a config.json of MODEL_TYPE describes. Raises ValueError for one we cannot run."""
    hf = {"rms_norm_eps": 1e-6, **hf}  # transformers' default
    missing = [key for key in CONFIG_KEYS.values() if key not in hf]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    # transformers 5 keeps the rotary settings in one dict; older files spread them over two fields.
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)}
    rope |= hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    values = hf | rope
    for key, only in (ONLY | UNWRITTEN).items():
        value = values.get(key)
        if value not in (only, None, "swish"):  # which is silu
            raise ValueError(f"{key} = {value!r}: only {only!r} can be run")
    scaling = None
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "llama3":
        scaling = RopeScaling(**{field: rope[key] for field, key in ROPE_KEYS.items()})
    elif rope_type != "default":
        raise ValueError(f"rope_type = {rope_type!r}: only 'default' and 'llama3' can be run")
    return LlamaConfig(
        **{field: hf[key] for field, key in CONFIG_KEYS.items()},
        n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or 0,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        tie_embeddings=hf.get("tie_word_embeddings", False),
    )


def to_hf_config(config: LlamaConfig, max_positions: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model with weights in `dtype`, for up to `max_positions` tokens.

    It uses the fields from before transformers 5, which transformers 5 and vLLM read too.
    """
    scaling = config.rope_scaling
    rope_scaling = None
    if scaling:
        rope_scaling = {"rope_type": "llama3"}
        rope_scaling |= {key: getattr(scaling, field) for field, key in ROPE_KEYS.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": max_positions,
        "torch_dtype": dtype,
        **ONLY,
    }


def _some(names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:3])
    if len(names) > 3:
        return f"{listed} and {len(names) - 3} more"
    return listed or "nothing"
