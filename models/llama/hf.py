"""Llama and its kin to and from Hugging Face: names of weights and fields of config.json. Weights cross unchanged."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.llama.model import LlamaConfig, Rope, RopeScaling, rope_frequencies

FREQUENCIES = "rotary_emb.inv_freq"  # in old files, which follow from config.json
BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
NORMS_BEFORE = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

# Fields of LlamaConfig → keys of config.json, all required but the last.
CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
YARN_KEYS = {
    "factor": "factor",
    "beta_slow": "beta_slow",
    "beta_fast": "beta_fast",
    "attention_factor": "attention_factor",
    "original_seq_len": "original_max_position_embeddings",
}
# Keys of config.json that only some families have → the value with which they change nothing.
OPTIONS: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "no_rope_layers": None,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
# Keys that our model supports with one value only.
ONLY = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model_type of transformers: which OPTIONS its config has, and what a missing key means."""

    architecture: str
    options: Sequence[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of LlamaConfig that no key of config.json says


BIASES = ("attention_bias", "mlp_bias")
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", options=BIASES),
    "mistral": Family(
        architecture="MistralForCausalLM",
        options=["sliding_window"],
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        options=["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"],
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        fixed={"qkv_bias": True},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        options=["attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"],
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        fixed={"qk_norm": "head"},
    ),
    "granite": Family(
        architecture="GraniteForCausalLM", options=[*BIASES, *FACTORS], defaults={"attention_multiplier": 1.0}
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        options=[*BIASES, "no_rope_layers", "use_sliding_window", "sliding_window", "layer_types"],
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        options=["attention_bias"],
        defaults={"rms_norm_eps": 1e-5},
        fixed={"norm_after": True, "qk_norm": "width"},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        options=["attention_bias", "sliding_window", "layer_types"],
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        fixed={"norm_after": True, "qk_norm": "width"},
    ),
}
# Families that we do not run → the nearest that we do, and what they have besides.
OTHERS = {
    "apertus": ("qwen3", "xIELU in place of SwiGLU"),
    "cohere": ("llama", "attention beside the feed-forward, LayerNorm"),
    "deepseek_v3": ("llama", "latent attention, experts"),
    "gemma2": ("olmo2", "four norms a block, GELU, capped logits"),
    "gemma3_text": ("qwen3", "four norms a block, GELU"),
    "glm4": ("olmo2", "four norms a block, half of each head rotated"),
    "gpt_oss": ("mistral", "experts, attention sinks"),
    "hunyuan_v1_dense": ("qwen3", "norms of q and k after the rotation"),
    "ministral3": ("mistral", "queries scaled by their position"),
    "mixtral": ("mistral", "experts"),
    "phi3": ("mistral", "q, k and v in one matrix, w1 and w3 in another"),
    "qwen3_moe": ("qwen3", "experts"),
}


# ---------------------------------------------------------------- names of weights


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
        for ours, theirs in _block_names(config).items():
            names[f"layers.{i}.{ours}"] = f"{base}layers.{i}.{theirs}"
    names["norm.weight"] = f"{base}norm.weight"
    if not config.tie_embeddings:
        names["output.weight"] = "lm_head.weight"
    return names


def _block_names(config: LlamaConfig) -> dict[str, str]:
    modules = BLOCK_NAMES | (NORMS_AFTER if config.norm_after else NORMS_BEFORE)
    if config.qk_norm:
        modules |= QK_NORMS
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}
    biased = {"wq": config.qkv_bias, "wk": config.qkv_bias, "wv": config.qkv_bias, "wo": config.o_bias}
    biased |= dict.fromkeys(("w1", "w2", "w3"), config.mlp_bias)
    for ours, theirs in BLOCK_NAMES.items():
        if biased[ours.rpartition(".")[2]]:
            names[f"{ours}.bias"] = f"{theirs}.bias"
    return names


def check_hf_names(found: Collection[str], config: LlamaConfig) -> None:
    """Raises ValueError that says which of a Hugging Face model's weight names are missing or left over.

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
    rope = Rope(config.rope_theta, config.head_dim, config.rope_scaling)
    expected = rope_frequencies(rope, found.device)
    if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-7):
        raise ValueError(f"rope_theta = {config.rope_theta:g}, but the weights hold the {FREQUENCIES} of another one")


# ---------------------------------------------------------------- config.json


def from_hf_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """The shape that a config.json describes. Raises ValueError for one we cannot run."""
    family = _find_family(hf.get("model_type"))
    hf = {"rms_norm_eps": 1e-6, **family.defaults, **hf}
    if "sliding_window" not in family.options and hf.get("use_sliding_window") is False:
        hf["sliding_window"] = None
    missing = [key for key in CONFIG_KEYS.values() if key not in hf]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    for key, only in ONLY.items():
        if hf.get(key) not in (only, None, "swish"):  # which is silu
            raise ValueError(f"{key} = {hf[key]!r}: only {only!r} can be run")
    for key, off in OPTIONS.items():
        if key not in family.options and hf.get(key) not in (off, None):
            raise ValueError(f"{key} = {hf[key]!r}: a {hf['model_type']} has no such option")
    windows = _read_windows(hf, family)
    if hf["model_type"] == "olmo3":
        theta, scaling, sliding_theta = _read_ropes_by_type(hf)
        thetas = [sliding_theta if window else theta for window in windows]
    else:
        theta, scaling = _read_rope(hf)
        thetas = _read_thetas(hf, family, theta)
    return LlamaConfig(
        **{name: hf[key] for name, key in CONFIG_KEYS.items()},
        n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or 0,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=hf.get("tie_word_embeddings", False),
        o_bias=bool(hf.get("attention_bias")),
        mlp_bias=bool(hf.get("mlp_bias")),
        windows=windows,
        rope_thetas=_shortest(thetas, off=theta),
        attention_multiplier=hf.get("attention_multiplier") or 0.0,
        embedding_multiplier=_factor(hf, "embedding_multiplier"),
        residual_multiplier=_factor(hf, "residual_multiplier"),
        logits_divisor=_factor(hf, "logits_scaling"),
        **{"qkv_bias": bool(hf.get("attention_bias")), **family.fixed},
    )


def _find_family(model_type: Any) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    message = f"model_type = {model_type!r}: must be one of {', '.join(FAMILIES)}"
    if model_type in OTHERS:
        nearest, besides = OTHERS[model_type]
        message = f"model_type = {model_type!r}: cannot be run; nearest to it is {nearest}, but it has {besides}"
    raise ValueError(message)


def _factor(hf: Mapping[str, Any], key: str) -> float:
    """0, which means none, for 1."""
    value = float(hf.get(key) or 1.0)
    return 0.0 if value == 1.0 else value


def _read_windows(hf: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    window = hf.get("sliding_window")
    if "use_sliding_window" in family.options and not hf.get("use_sliding_window"):
        window = None  # it is off by default
    if "layer_types" not in family.options:
        windows = [window or 0]
    elif hf.get("layer_types") is None and window is None:
        windows = [0]
    else:
        types = hf.get("layer_types") or _default_types(hf, family)
        strange = set(types) - {"full_attention", "sliding_attention"}
        if strange:
            raise ValueError(f"layer_types: {_some(strange)} cannot be run")
        if window is None and "sliding_attention" in types:
            raise ValueError("layer_types: has sliding_attention, but sliding_window is off")
        windows = [window if kind == "sliding_attention" else 0 for kind in types]
    return _shortest(windows, off=0)


def _default_types(hf: Mapping[str, Any], family: Family) -> list[str]:
    layers = range(hf["num_hidden_layers"])
    if "max_window_layers" in family.options:
        full = [i < hf["max_window_layers"] for i in layers]
    elif "no_rope_layers" in family.options:
        full = [bool(rotated) for rotated in _rotated(hf)]
    else:
        full = [i % 4 == 3 for i in layers]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def _rotated(hf: Mapping[str, Any]) -> list[int]:
    """SmolLM3: 1 for each layer with a rotary embedding."""
    interval = hf.get("no_rope_layer_interval", 4)
    every = [int((i + 1) % interval != 0) for i in range(hf["num_hidden_layers"])]
    return hf.get("no_rope_layers") or every


def _read_thetas(hf: Mapping[str, Any], family: Family, theta: float) -> list[float]:
    if "no_rope_layers" not in family.options:
        return []
    return [theta if rotated else 0.0 for rotated in _rotated(hf)]


def _shortest(values: Sequence[Any], off: Any) -> tuple[Any, ...]:
    """The shortest pattern that gives `values`, repeated. Empty if all are `off`."""
    if all(value == off for value in values):
        return ()
    for length in range(1, len(values)):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling. transformers 5 keeps both in one dict."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope_parameters of {', '.join(nested)}: only those of olmo3 can be run")
    theta = rope.get("rope_theta", hf.get("rope_theta")) or 10_000.0
    return theta, _read_scaling(hf, rope)


def _read_ropes_by_type(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """OLMo 3: theta and scaling of full layers, and theta of those with a window.

    As in transformers 5, a theta or scaling outside `rope_parameters` is that of the full layers only.
    """
    by_type = hf.get("rope_parameters") or {}
    for key, value in by_type.items():
        if key not in ("full_attention", "sliding_attention"):
            raise ValueError(f"rope_parameters.{key} = {value!r}: must stand in those of a type of layer")
    default = FAMILIES["olmo3"].defaults["rope_theta"]
    sliding = by_type.get("sliding_attention") or {}
    if _read_scaling(hf, sliding) is not None:
        raise ValueError(f"rope_type = {sliding['rope_type']!r} of sliding_attention: only 'default' can be run")
    scaling = hf.get("rope_scaling") or {}
    if "type" in scaling:  # which transformers 5 does not see
        raise ValueError(f"rope_scaling.type = {scaling['type']!r}: is rope_type for an olmo3")
    full = {**(by_type.get("full_attention") or {}), **scaling}
    theta = full.get("rope_theta") or hf["rope_theta"]
    return theta, _read_scaling(hf, full), sliding.get("rope_theta") or default


def _read_scaling(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: only 1.0 can be run")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    longest = hf.get("max_position_embeddings", 2048)
    original = hf.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", longest))
    rope = {**rope, "original_max_position_embeddings": original}
    if kind == "llama3":
        kind = ""
        fields = {name: rope[key] for name, key in LLAMA3_KEYS.items()}
    elif kind == "linear":
        fields = {"factor": rope["factor"]}
    elif kind == "dynamic":
        fields = {"factor": rope["factor"], "original_seq_len": longest}
    elif kind == "yarn":
        factor = rope.get("factor") or longest / original
        rope |= {"factor": factor, "attention_factor": _yarn_attention_factor(rope, factor)}
        fields = {name: rope[key] for name, key in YARN_KEYS.items() if rope.get(key) is not None}
        fields["exact_bounds"] = rope.get("truncate") is False
    else:
        raise ValueError(f"rope_type = {kind!r}: must be default, llama3, linear, dynamic or yarn")
    return RopeScaling(kind=kind, full_layers_only=hf.get("model_type") == "olmo3", **fields)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """As DeepSeek states it by two other keys; 0 for the default."""
    if rope.get("attention_factor") is not None or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return rope.get("attention_factor") or 0.0
    if factor <= 1:
        return 1.0
    return (0.1 * rope["mscale"] * math.log(factor) + 1) / (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1)


def to_hf_config(config: LlamaConfig, max_positions: int, dtype: str, model_type: str = "llama") -> dict[str, Any]:
    """The config.json of a model with weights in `dtype`, for up to `max_positions` tokens.

    Its family is `model_type` if that has all options of `config`, otherwise the first that has. Raises ValueError if
    none has. It uses the fields from before transformers 5, which transformers 5 and vLLM read too; OLMo 3 has both.
    """
    for name in dict.fromkeys((model_type, *FAMILIES)):
        hf = _write_config(config, name, max_positions, dtype)
        if from_hf_config(hf) == config:
            return hf
    raise ValueError(f"no family of transformers has the options of this model together: {config}")


def _write_config(config: LlamaConfig, name: str, max_positions: int, dtype: str) -> dict[str, Any]:
    family = FAMILIES[name]
    layers = range(config.n_layers)
    windows = [config.window(i) for i in layers]
    options = {
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
        "max_window_layers": config.n_layers,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "no_rope_layers": [int(config.rope(i).theta > 0) for i in layers],
        "embedding_multiplier": config.embedding_multiplier or 1.0,
        "attention_multiplier": config.attention_multiplier or config.head_dim**-0.5,
        "residual_multiplier": config.residual_multiplier or 1.0,
        "logits_scaling": config.logits_divisor or 1.0,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        max_positions = scaling.original_seq_len  # from where on transformers scales
    ropes = {}
    if name == "olmo3":
        options["sliding_window"] = max(windows) or max_positions  # transformers wants one, even if no layer has it
        sliding = [config.rope(i).theta for i in layers if windows[i]]
        ropes["rope_parameters"] = {
            "full_attention": {"rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": max(sliding, default=config.rope_theta)},
        }
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: getattr(config, ours) for ours, key in CONFIG_KEYS.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_scaling(scaling),
        **ropes,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": max_positions,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        **{key: options[key] for key in family.options},
    }


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {"": LLAMA3_KEYS, "yarn": YARN_KEYS}.get(scaling.kind, {"factor": "factor"})
    written = {key: getattr(scaling, name) for name, key in keys.items()}
    if scaling.kind == "yarn":
        written = {key: value for key, value in written.items() if value}  # 0: transformers' default
    if scaling.exact_bounds:
        written["truncate"] = False
    return {"rope_type": scaling.kind or "llama3", **written}


def _some(names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:3])
    if len(names) > 3:
        return f"{listed} and {len(names) - 3} more"
    return listed or "nothing"
