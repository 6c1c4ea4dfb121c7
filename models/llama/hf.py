"""Llama and its kin to and from Hugging Face: names of weights and fields of config.json. Weights cross unchanged.

transformers reads a config.json: it knows what a missing key means in each family, and refuses impossible values.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from transformers import AutoConfig

from models.llama.model import LlamaConfig, RopeScaling

OUTPUT = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"  # in old files; left out, since they follow from config.json
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

# Fields of LlamaConfig → keys of config.json that have the same meaning in every family.
CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# Kinds of rotary scaling → fields of RopeScaling → their keys.
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_seq_len": "original_max_position_embeddings",
    },
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "beta_slow": "beta_slow",
        "beta_fast": "beta_fast",
        "attention_factor": "attention_factor",
        "original_seq_len": "original_max_position_embeddings",
    },
}
# Keys that change what a model computes → their value that does not. A family reads some of them.
OFF: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "hidden_act": "silu",
    "quantization_config": None,
    "original_max_position_embeddings": None,  # outside of the rotary settings
}
OLD_KEYS = ("torch_dtype", "rope_theta", "rope_scaling")  # that transformers 5 reads, and writes otherwise


class Family(NamedTuple):
    """A family of transformers: the keys that only some read, and fields of LlamaConfig that no key says."""

    architecture: str
    options: Sequence[str] = ()
    fixed: Mapping[str, Any] = {}


BIASES = ("attention_bias", "mlp_bias")
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", BIASES),
    "mistral": Family("MistralForCausalLM", ["sliding_window"]),
    "qwen2": Family("Qwen2ForCausalLM", WINDOWS, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", ["attention_bias", *WINDOWS], {"qk_norm": "head"}),
    "granite": Family("GraniteForCausalLM", [*BIASES, *FACTORS]),
    "smollm3": Family("SmolLM3ForCausalLM", [*BIASES, *WINDOWS, "no_rope_layers"]),
    "olmo2": Family("Olmo2ForCausalLM", ["attention_bias"], {"norm_after": True, "qk_norm": "width"}),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        ["attention_bias", "sliding_window", "layer_types", "rope_parameters"],
        {"norm_after": True, "qk_norm": "width"},
    ),
}


# ---------------------------------------------------------------- names of weights


def hf_names(config: LlamaConfig) -> dict[str, str]:
    """Our name → Hugging Face's for every parameter, in the model's order. Tied embeddings have no output.weight."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for i in range(config.n_layers):
        for ours, theirs in _block_names(config).items():
            names[f"layers.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_embeddings:
        names["output.weight"] = OUTPUT
    return names


def _block_names(config: LlamaConfig) -> dict[str, str]:
    modules = BLOCK_NAMES | (NORMS_AFTER if config.norm_after else NORMS_BEFORE)
    if config.qk_norm:
        modules |= QK_NORMS
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}
    biased = {"wq": config.qkv_bias, "wk": config.qkv_bias, "wv": config.qkv_bias, "wo": config.o_bias}
    for ours, theirs in BLOCK_NAMES.items():
        if biased.get(ours.rpartition(".")[2], config.mlp_bias):
            names[f"{ours}.bias"] = f"{theirs}.bias"
    return names


def check_hf_names(found: Collection[str], config: LlamaConfig) -> None:
    """Raises ValueError that says which of a Hugging Face model's weight names are missing or left over.

    Not left over are a tied lm_head, which the caller compares with the embedding, and FREQUENCIES.
    """
    known = set(hf_names(config).values())
    missing = known - set(found)
    if config.tie_embeddings:
        known.add(OUTPUT)
    surplus = [name for name in found if name not in known and not name.endswith(FREQUENCIES)]
    if missing or surplus:
        raise ValueError(f"not the weights of this model: missing {_some(missing)}; left over {_some(surplus)}")


def _some(names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:3])
    if len(names) > 3:
        return f"{listed} and {len(names) - 3} more"
    return listed or "nothing"


# ---------------------------------------------------------------- config.json


def read_config(values: Mapping[str, Any]) -> Any:
    """A config.json as transformers reads it. Raises ValueError for one that it refuses, or that we cannot run."""
    model_type = str(values.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type!r}: must be one of {', '.join(FAMILIES)}")
    try:
        hf = AutoConfig.for_model(**copy.deepcopy(dict(values)))
    except Exception as error:  # of any kind, from any of its checks
        raise ValueError(f"transformers refuses it: {' '.join(str(error).split())}") from None
    if hf.hidden_act == "swish":
        hf.hidden_act = "silu"  # another name of it
    for key, off in OFF.items():
        value = getattr(hf, key, off)
        if key not in FAMILIES[model_type].options and value != off:
            raise ValueError(f"{key} = {value!r}: for a {model_type} only {off!r} can be run")
    return hf


def from_hf_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The shape that a config.json describes. Raises ValueError for one we cannot run."""
    hf = read_config(values)
    family = FAMILIES[hf.model_type]
    windows = _read_windows(hf, family)
    rope = hf.rope_parameters
    sliding = rope
    if "rope_parameters" in family.options:
        sliding = rope["sliding_attention"]
        rope = rope["full_attention"]
        if sliding.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type = {sliding['rope_type']!r} of sliding_attention: only 'default' can be run")
    theta = float(rope["rope_theta"])
    thetas = [float(sliding["rope_theta"]) if window else theta for window in windows]
    if "no_rope_layers" in family.options:
        thetas = [theta if rotated else 0.0 for rotated in hf.no_rope_layers[: hf.num_hidden_layers]]
        if len(thetas) < hf.num_hidden_layers:
            raise ValueError(f"no_rope_layers: has {len(thetas)} entries, num_hidden_layers = {hf.num_hidden_layers}")
    read = {key: getattr(hf, key, off) for key, off in OFF.items()}
    for key in FACTORS:
        if read[key] == 0:
            raise ValueError(f"{key} = {read[key]!r}: must not be 0")
    options = {
        "qkv_bias": read["attention_bias"],
        "o_bias": read["attention_bias"],
        "mlp_bias": read["mlp_bias"],
        "attention_multiplier": read["attention_multiplier"] or 0.0,
        "embedding_multiplier": _unless_1(read["embedding_multiplier"]),
        "residual_multiplier": _unless_1(read["residual_multiplier"]),
        "logits_divisor": _unless_1(read["logits_scaling"]),
    }
    return LlamaConfig(
        **{name: getattr(hf, key) for name, key in CONFIG_KEYS.items()},
        head_dim=getattr(hf, "head_dim", 0),
        rope_theta=theta,
        rope_scaling=_read_scaling(rope, only_full=sliding is not rope),
        windows=_shortest(windows, off=0),
        rope_thetas=_shortest(thetas, off=theta),
        **{**options, **family.fixed},
    )


def ignored_keys(values: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json, switched on, that transformers does not know in its family, and neither do we."""
    known = {*AutoConfig.for_model(values["model_type"]).to_dict(), *OFF, *OLD_KEYS}
    unknown = [key for key in values if key not in known and not key.endswith("_token_id")]
    return [key for key in unknown if values[key]]


def _unless_1(value: float) -> float:
    """0, which means none, for 1."""
    return 0.0 if value == 1.0 else float(value)


def _read_windows(hf: Any, family: Family) -> list[int]:
    """Of each layer; 0: none."""
    window = hf.sliding_window if "sliding_window" in family.options else None
    if "layer_types" not in family.options:
        return [window or 0] * hf.num_hidden_layers
    if not getattr(hf, "use_sliding_window", True):
        window = None
    sizes = {"full_attention": 0}
    if window:
        sizes["sliding_attention"] = window
    for kind in hf.layer_types:
        if kind not in sizes:
            raise ValueError(f"layer_types: {kind} cannot be run with sliding_window = {window!r}")
    return [sizes[kind] for kind in hf.layer_types]


def _shortest(values: Sequence[Any], off: Any) -> tuple[Any, ...]:
    """The shortest pattern that gives `values`, repeated. Empty if all are `off`."""
    length = 1
    while any(value != values[i % length] for i, value in enumerate(values)):
        length += 1
    pattern = tuple(values[:length])
    return () if pattern == (off,) else pattern


def _read_scaling(rope: Mapping[str, Any], only_full: bool) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind not in ("default", *SCALINGS):
        raise ValueError(f"rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    keys = SCALINGS.get(kind, {})
    known = {"rope_type", "type", "rope_theta", "truncate", *keys.values()}
    for key, value in rope.items():
        if key not in known and (key, value) != ("partial_rotary_factor", 1.0):
            raise ValueError(f"{key} = {value!r}: cannot be run with rope_type = {kind!r}")
    if kind == "default":
        return None
    given = {name: rope[key] for name, key in keys.items() if rope.get(key) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{keys[name]} = {value!r}: must be a number")
    if "factor" not in given:
        raise ValueError(f"rope_type = {kind!r}: needs a factor")
    exact = not rope.get("truncate", True)
    return RopeScaling(kind=kind.replace("llama3", ""), exact_bounds=exact, full_layers_only=only_full, **given)


def to_hf_config(config: LlamaConfig, max_positions: int, dtype: str, model_type: str = "llama") -> dict[str, Any]:
    """The config.json of a model with weights in `dtype`, for up to `max_positions` tokens.

    Its family is `model_type` if that has all options of `config`, otherwise the first that has. Raises ValueError if
    none has. It uses the fields from before transformers 5, which transformers 5 and vLLM read too; OLMo 3 has both.
    """
    lacking: dict[str, list[str]] = {}
    for name in dict.fromkeys((model_type, *FAMILIES)):
        hf = _write_config(config, name, max_positions, dtype)
        lacking[name] = _differences(config, from_hf_config(hf))
        if not lacking[name]:
            return hf
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    options = ", ".join(f"{name} = {getattr(config, name)!r}" for name in lacking[nearest])
    raise ValueError(f"{options}: {nearest} has no such option, and other families of transformers lack no less")


def _differences(ours: LlamaConfig, theirs: LlamaConfig) -> list[str]:
    """The fields in which two models differ."""
    ours = _spell_out(ours)
    theirs = _spell_out(theirs)
    return [one.name for one in fields(ours) if getattr(ours, one.name) != getattr(theirs, one.name)]


def _spell_out(config: LlamaConfig) -> LlamaConfig:
    """The same model with a value for each layer, and factors in place of their defaults."""
    windows = [config.window(i) for i in range(config.n_layers)]
    thetas = [config.rope(i).theta for i in range(config.n_layers)]
    return replace(
        config,
        windows=tuple(windows),
        rope_thetas=tuple(thetas),
        rope_theta=max(thetas) or config.rope_theta,
        embedding_multiplier=config.embedding_multiplier or 1.0,
        attention_multiplier=config.attention_multiplier or config.head_dim**-0.5,
        residual_multiplier=config.residual_multiplier or 1.0,
        logits_divisor=config.logits_divisor or 1.0,
    )


def _write_config(config: LlamaConfig, name: str, max_positions: int, dtype: str) -> dict[str, Any]:
    family = FAMILIES[name]
    config = _spell_out(config)
    window = max(config.windows) or None
    theta = config.rope_theta
    options = {
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "use_sliding_window": any(config.windows),
        "max_window_layers": config.n_layers,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "no_rope_layers": [int(theta > 0) for theta in config.rope_thetas],
        "embedding_multiplier": config.embedding_multiplier,
        "attention_multiplier": config.attention_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }
    if "rope_parameters" in family.options:
        window = window or max_positions  # transformers wants one, even if no layer has it
        layers = list(zip(config.windows, config.rope_thetas, strict=True))
        theta = max([theta for window, theta in layers if not window], default=theta)
        sliding = max([theta for window, theta in layers if window], default=theta)
        options["rope_parameters"] = {
            "full_attention": {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        }
    options["sliding_window"] = window
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: getattr(config, ours) for ours, key in CONFIG_KEYS.items()},
        "head_dim": config.head_dim,
        "rope_theta": theta,
        "rope_scaling": _write_scaling(config.rope_scaling),
        "max_position_embeddings": max_positions,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        **{key: value for key, value in options.items() if key in family.options},
    }


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    kind = scaling.kind or "llama3"
    written = {key: getattr(scaling, name) for name, key in SCALINGS[kind].items()}
    written = {key: value for key, value in written.items() if value}  # 0: transformers' default
    if scaling.exact_bounds:
        written["truncate"] = False
    return {"rope_type": kind, **written}
