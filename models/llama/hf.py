"""Llama to and from Hugging Face: names of weights and fields of config.json. Values cross unchanged."""

from typing import Any

from torch import Tensor

from models.llama.model import LlamaConfig, RopeScaling

TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
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


def to_hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters. Raises KeyError for a name that is not Llama's."""
    if not name.startswith("layers."):
        return TOP_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{BLOCK_NAMES[rest]}"


def from_hf_state_dict(hf: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Our names for the weights of a Hugging Face Llama.

    Raises ValueError naming what is missing or left over; a tied lm_head is no error, being the embedding.
    """
    names = [name for name in TOP_NAMES if not (config.tie_embeddings and name == "output.weight")]
    names += [f"layers.{i}.{rest}" for i in range(config.n_layers) for rest in BLOCK_NAMES]
    ours = {name: to_hf_name(name) for name in names}
    missing = set(ours.values()) - hf.keys()
    surplus = hf.keys() - set(ours.values()) - ({"lm_head.weight"} if config.tie_embeddings else set())
    if missing or surplus:
        raise ValueError(f"not the weights of this model: missing {sorted(missing)}, left over {sorted(surplus)}")
    return {name: hf[hf_name] for name, hf_name in ours.items()}


def to_hf_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names for our weights."""
    return {to_hf_name(name): value for name, value in state_dict.items()}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """The shape that a config.json of model_type "llama" describes. Raises ValueError for what we cannot run."""
    if hf["model_type"] != "llama":
        raise ValueError(f"model_type {hf['model_type']!r}: only llama can be read")
    for key, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if hf.get(key, only) != only:
            raise ValueError(f"{key} = {hf[key]!r}: only {only!r} can be run")
    # transformers 5 holds the rotary settings in one dict; files written before it spread them over two fields.
    rope = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10_000.0), **(hf.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope_type!r}: only default and llama3 can be run")
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_seq_len=rope["original_max_position_embeddings"],
        )
    return LlamaConfig(
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or 0,
        hidden_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        tie_embeddings=hf.get("tie_word_embeddings", False),
    )
