"""Llama and its kin to and from Hugging Face: names of weights and fields of config.json. Weights cross unchanged."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from models.llama.model import LlamaConfig, RopeScaling

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

# Fields of LlamaConfig → keys that every config.json must have.
CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
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
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "beta_slow": "beta_slow",
        "beta_fast": "beta_fast",
        "attention_factor": "attention_factor",
        "original_seq_len": "original_max_position_embeddings",
    },
}
# Kinds of values, as transformers checks them.
WHOLE = "a whole number above 0"
COUNT = "a whole number"
NUMBER = "a number above 0"
DECIMAL = "a number such as 1e-6"
FLAG = "true or false"
LIST = "a list"
OBJECT = "an object"
KINDS: Mapping[str, Callable[[Any], bool]] = {
    WHOLE: lambda value: type(value) is int and value > 0,
    COUNT: lambda value: type(value) is int and value >= 0,
    NUMBER: lambda value: type(value) in (int, float) and 0 < value < math.inf,
    DECIMAL: lambda value: type(value) is float and 0 <= value < 1,
    FLAG: lambda value: type(value) is bool,
    LIST: lambda value: isinstance(value, list | tuple),
    OBJECT: lambda value: isinstance(value, Mapping),
}
# Keys that every family reads, and those that only some have (OPTIONS) → (kind, what a missing one means).
KEYS: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(CONFIG_KEYS.values(), (WHOLE, None)),
    "num_key_value_heads": (WHOLE, None),
    "head_dim": (WHOLE, None),
    "rms_norm_eps": (DECIMAL, 1e-6),
    "max_position_embeddings": (WHOLE, 2048),
    "tie_word_embeddings": (FLAG, False),
    "rope_theta": (NUMBER, 10_000.0),
    "rope_scaling": (OBJECT, None),
    "rope_parameters": (OBJECT, None),
}
OPTIONS: Mapping[str, tuple[str, Any]] = {  # a missing one changes nothing
    "attention_bias": (FLAG, False),
    "mlp_bias": (FLAG, False),
    "sliding_window": (WHOLE, None),
    "use_sliding_window": (FLAG, False),
    "max_window_layers": (COUNT, 28),
    "layer_types": (LIST, None),
    "no_rope_layers": (LIST, None),
    "no_rope_layer_interval": (WHOLE, 4),
    "embedding_multiplier": (NUMBER, 1.0),
    "attention_multiplier": (NUMBER, None),
    "residual_multiplier": (NUMBER, 1.0),
    "logits_scaling": (NUMBER, 1.0),
}
DEPENDENT = ("max_window_layers", "no_rope_layer_interval")  # without effect in families that lack them
# Keys that our model supports with one value only, however that is written.
ONLY = {"hidden_act": ("silu", "swish"), "quantization_config": (None,), "partial_rotary_factor": (1.0, None)}
# Keys that say nothing about what a model computes; so do those that end in `_token_id`, `dropout` or `version`.
SILENT = (
    "architectures", "model_type", "dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp",
    "original_max_position_embeddings", "is_llama_config", "chunk_size_feed_forward", "id2label",
    "label2id", "return_dict", "problem_type", "max_length", "do_sample", "temperature", "top_k", "top_p",
)  # fmt: skip
NULL = ("num_key_value_heads", "sliding_window", "layer_types", "no_rope_layers", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model_type of transformers: which OPTIONS its config has, and what a missing key means, where not as in KEYS.

    `null`: keys that may be null. `fixed`: fields of LlamaConfig that no key of config.json says.
    """

    architecture: str
    options: Sequence[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    null: Collection[str] = NULL


BIASES = ("attention_bias", "mlp_bias")
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", options=BIASES, null={*NULL, "head_dim"}),
    "mistral": Family(
        architecture="MistralForCausalLM",
        options=["sliding_window"],
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        null={*NULL, "head_dim"} - {"num_key_value_heads"},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", options=QWEN_WINDOWS, defaults=QWEN, fixed={"qkv_bias": True}
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        options=["attention_bias", *QWEN_WINDOWS],
        defaults={**QWEN, "head_dim": 128},
        fixed={"qk_norm": "head"},
    ),
    "granite": Family(
        architecture="GraniteForCausalLM", options=[*BIASES, *FACTORS], defaults={"attention_multiplier": 1.0}
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        options=[
            *BIASES, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types",
        ],
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
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
        null={*NULL} - {"sliding_window"},
    ),
}  # fmt: skip
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

    Not left over are a tied lm_head, which the caller compares with the embedding, and FREQUENCIES.
    """
    known = set(hf_names(config, found).values())
    missing = known - set(found)
    if config.tie_embeddings:
        known.add("lm_head.weight")
    surplus = [name for name in found if name not in known and not name.endswith(FREQUENCIES)]
    if missing or surplus:
        raise ValueError(f"not the weights of this model: missing {_some(missing)}; left over {_some(surplus)}")


# ---------------------------------------------------------------- config.json


def from_hf_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """The shape that a config.json describes. Raises ValueError for one we cannot run."""
    hf = complete_config(hf)
    family = FAMILIES[hf["model_type"]]
    windows = _read_windows(hf, family)
    if hf["model_type"] == "olmo3":
        theta, scaling, sliding_theta = _read_ropes_by_type(hf)
        thetas = [sliding_theta if window else theta for window in windows]
    else:
        theta, scaling = _read_rope(hf)
        thetas = [theta if rotated else 0.0 for rotated in _read_rotated(hf, family)]
    return LlamaConfig(
        **{name: hf[key] for name, key in CONFIG_KEYS.items()},
        n_kv_heads=hf["num_key_value_heads"] or hf["num_attention_heads"],
        head_dim=hf["head_dim"] or 0,
        norm_eps=hf["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=hf["tie_word_embeddings"],
        o_bias=hf["attention_bias"],
        mlp_bias=hf["mlp_bias"],
        windows=_shortest(windows, off=0),
        rope_thetas=_shortest(thetas, off=theta),
        attention_multiplier=hf["attention_multiplier"] or 0.0,
        embedding_multiplier=_unless_1(hf["embedding_multiplier"]),
        residual_multiplier=_unless_1(hf["residual_multiplier"]),
        logits_divisor=_unless_1(hf["logits_scaling"]),
        **{"qkv_bias": hf["attention_bias"], **family.fixed},
    )


def complete_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what each missing key means in its family. Raises ValueError for values that are none."""
    family = _find_family(hf.get("model_type"))
    missing = [key for key in CONFIG_KEYS.values() if key not in hf]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    for key, only in ONLY.items():
        if hf.get(key, only[0]) not in only:
            raise ValueError(f"{key} = {hf[key]!r}: only {only[0]!r} can be run")
    foreign = OPTIONS.keys() - set(family.options)
    for key in sorted(foreign - set(DEPENDENT)):
        if not _is_off(hf, key):
            raise ValueError(f"{key} = {hf[key]!r}: a {hf['model_type']} has no such option")
    own = {key: value for key, value in hf.items() if key not in foreign}
    known = {**KEYS, **OPTIONS}
    for key, (kind, _) in known.items():
        if key in own and (own[key] is not None or key not in family.null):
            _check(key, own[key], kind)
    defaults = {key: default for key, (_, default) in known.items()}
    return {**defaults, **family.defaults, **own}


def _is_off(hf: Mapping[str, Any], key: str) -> bool:
    unused = key == "sliding_window" and hf.get("use_sliding_window") is False
    return unused or hf.get(key) in (OPTIONS[key][1], None)


def _check(key: str, value: Any, kind: str) -> None:
    if not KINDS[kind](value):
        raise ValueError(f"{key} = {value!r}: must be {kind}")


def ignored_keys(hf: Mapping[str, Any]) -> list[str]:
    """Keys that may change what a model computes, but in its family neither in transformers nor here."""
    known = {*KEYS, *OPTIONS, *ONLY, *SILENT}
    harmless = ("_token_id", "dropout", "version")
    unknown = [key for key in hf if key not in known and not key.endswith(harmless) and not key.startswith("_")]
    return [key for key in unknown if hf[key]]


def _find_family(model_type: Any) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    message = f"model_type = {model_type!r}: must be one of {', '.join(FAMILIES)}"
    if model_type in OTHERS:
        nearest, besides = OTHERS[model_type]
        message = f"model_type = {model_type!r}: cannot be run; nearest to it is {nearest}, but it has {besides}"
    raise ValueError(message)


def _unless_1(value: float) -> float:
    """0, which means none, for 1."""
    return 0.0 if value == 1.0 else float(value)


def _read_windows(hf: Mapping[str, Any], family: Family) -> list[int]:
    """Of each layer; 0: none."""
    layers = hf["num_hidden_layers"]
    window = hf["sliding_window"]
    if "use_sliding_window" in family.options and not hf["use_sliding_window"]:
        window = None
    types = hf["layer_types"]
    if "layer_types" not in family.options or (types is None and window is None):
        return [window or 0] * layers
    if types is None:
        types = _default_types(hf, family)
    strange = set(map(str, types)) - {"full_attention", "sliding_attention"}
    if strange:
        raise ValueError(f"layer_types: {_some(strange)} cannot be run")
    if len(types) != layers:
        raise ValueError(f"layer_types: has {len(types)} entries, must have num_hidden_layers = {layers}")
    if window is None and "sliding_attention" in types:
        raise ValueError("layer_types: has sliding_attention, but sliding_window is off")
    return [window if kind == "sliding_attention" else 0 for kind in types]


def _default_types(hf: Mapping[str, Any], family: Family) -> list[str]:
    layers = range(hf["num_hidden_layers"])
    if "max_window_layers" in family.options:
        full = [i < hf["max_window_layers"] for i in layers]
    elif "no_rope_layers" in family.options:
        full = [bool(rotated) for rotated in _read_rotated(hf, family)]
    else:
        full = [i % 4 == 3 for i in layers]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def _read_rotated(hf: Mapping[str, Any], family: Family) -> list[int]:
    """1 for each layer with a rotary embedding. SmolLM3 has some without."""
    layers = hf["num_hidden_layers"]
    if "no_rope_layers" not in family.options:
        return [1] * layers
    given = hf["no_rope_layers"]
    if given is None:
        return [int((i + 1) % hf["no_rope_layer_interval"] != 0) for i in range(layers)]
    if len(given) < layers:
        raise ValueError(f"no_rope_layers = {given!r}: must have an entry for each of num_hidden_layers = {layers}")
    return list(given[:layers])


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
    rope = hf["rope_scaling"] or hf["rope_parameters"] or {}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope_parameters of {', '.join(nested)}: only those of olmo3 can be run")
    original = "original_max_position_embeddings"
    if original in hf:  # in transformers it counts more than the one beside the kind
        rope = {**rope, original: hf[original]}
    return _read_theta({"rope_theta": hf["rope_theta"], **rope}), _read_scaling(hf, rope)


def _read_theta(rope: Mapping[str, Any]) -> float:
    _check("rope_theta", rope["rope_theta"], NUMBER)
    return rope["rope_theta"]


def _read_ropes_by_type(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """OLMo 3: theta and scaling of full layers, and theta of those with a window.

    As in transformers 5, a theta or scaling outside `rope_parameters` is that of the full layers only.
    """
    by_type = hf["rope_parameters"] or {}
    for key, value in by_type.items():
        if key not in ("full_attention", "sliding_attention"):
            raise ValueError(f"rope_parameters.{key} = {value!r}: must stand in those of a type of layer")
        if value is not None:
            _check(f"rope_parameters.{key}", value, OBJECT)
    default = {"rope_theta": FAMILIES["olmo3"].defaults["rope_theta"]}
    sliding = by_type.get("sliding_attention") or {}
    if _read_scaling(hf, sliding) is not None:
        raise ValueError(f"rope_type = {sliding['rope_type']!r} of sliding_attention: only 'default' can be run")
    scaling = hf["rope_scaling"] or {}
    if "type" in scaling:  # which transformers 5 does not see
        raise ValueError(f"rope_scaling.type = {scaling['type']!r}: is rope_type for an olmo3")
    full = {"rope_theta": hf["rope_theta"], **(by_type.get("full_attention") or {}), **scaling}
    return _read_theta(full), _read_scaling(hf, full), _read_theta({**default, **sliding})


def _read_scaling(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: only 1.0 can be run")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(f"rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    longest = hf["max_position_embeddings"]
    rope = {"original_max_position_embeddings": longest, **rope}
    needed = ["factor"] if kind == "yarn" else SCALINGS[kind].values()
    for key in needed:
        if key not in rope:
            raise ValueError(f"rope_scaling: has no {key}, which rope_type = {kind!r} needs")
    if kind == "yarn":
        factor = rope["factor"] or longest / rope["original_max_position_embeddings"]
        rope |= {"factor": factor, "attention_factor": _yarn_attention_factor(rope, factor)}
    fields = {name: rope[key] for name, key in SCALINGS[kind].items() if rope.get(key) is not None}
    for name, value in fields.items():
        _check(f"rope_scaling.{SCALINGS[kind][name]}", value, NUMBER)
    if kind == "dynamic":
        fields["original_seq_len"] = longest
    if kind == "yarn":
        fields["exact_bounds"] = not rope.get("truncate", True)
    only_full = hf["model_type"] == "olmo3"
    return RopeScaling(kind=kind.replace("llama3", ""), full_layers_only=only_full, **fields)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """As DeepSeek states it by two other keys; None for the default."""
    given = rope.get("attention_factor")
    if given is not None or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return given
    if factor <= 1:
        return 1.0
    return (0.1 * rope["mscale"] * math.log(factor) + 1) / (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1)


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
    nowhere = [name for name in lacking[nearest] if all(name in others for others in lacking.values())]
    options = ", ".join(f"{name} = {getattr(config, name)!r}" for name in nowhere or lacking[nearest])
    message = f"{options}: no family of transformers has this"
    if not nowhere:
        message += f" with the other options of this model, which {nearest} has"
    raise ValueError(message)


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
    windows = config.windows
    options = {
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
        "max_window_layers": config.n_layers,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "no_rope_layers": [int(theta > 0) for theta in config.rope_thetas],
        "no_rope_layer_interval": 4,
        "embedding_multiplier": config.embedding_multiplier,
        "attention_multiplier": config.attention_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        max_positions = scaling.original_seq_len  # from where on transformers scales
    ropes: dict[str, Any] = {"rope_theta": config.rope_theta}
    if name == "olmo3":
        options["sliding_window"] = max(windows) or max_positions  # transformers wants one, even if no layer has it
        layers = list(zip(windows, config.rope_thetas, strict=True))
        full = max([theta for window, theta in layers if not window], default=config.rope_theta)
        sliding = max([theta for window, theta in layers if window], default=config.rope_theta)
        ropes = {
            "rope_theta": full,
            "rope_parameters": {
                "full_attention": {"rope_theta": full},
                "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
            },
        }
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: getattr(config, ours) for ours, key in CONFIG_KEYS.items()},
        "rms_norm_eps": config.norm_eps,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        **ropes,
        "rope_scaling": _write_scaling(scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": max_positions,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        **{key: options[key] for key in family.options},
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


def _some(names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:3])
    if len(names) > 3:
        return f"{listed} and {len(names) - 3} more"
    return listed or "nothing"
