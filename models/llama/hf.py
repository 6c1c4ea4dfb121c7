"""Llama and its kin to and from Hugging Face: names of weights and fields of config.json. Weights cross unchanged."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from config import AboveZero, Count, NonNegative, Positive
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
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "o_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
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
# Keys that our model supports with one value only, however that is written.
ONLY = {"hidden_act": ("silu", "swish"), "quantization_config": (None,), "partial_rotary_factor": (1.0, None)}
# Keys that say nothing about what a model computes; so do those that end in `_token_id`, `dropout` or `version`.
SILENT = (
    "architectures", "model_type", "dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp",
    "original_max_position_embeddings", "is_llama_config", "chunk_size_feed_forward", "id2label",
    "label2id", "return_dict", "problem_type", "max_length", "do_sample", "temperature", "top_k", "top_p",
)  # fmt: skip


class HFConfig(msgspec.Struct, kw_only=True):
    """What a config.json says, and what a missing key means, in most families. Types are those of transformers.

    A family has of `OPTIONS` those in `options`; in others they are off, as here. `fixed`: fields of LlamaConfig that
    no key says.
    """

    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    vocab_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | UnsetType = UNSET
    rms_norm_eps: NonNegative = 1e-6
    max_position_embeddings: Positive = 2048
    tie_word_embeddings: bool = False
    rope_theta: AboveZero = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Positive | UnsetType = UNSET

    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Positive | None = None
    max_window_layers: Count = 28
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Positive = 4
    embedding_multiplier: AboveZero = 1.0
    attention_multiplier: AboveZero | None = None
    residual_multiplier: AboveZero = 1.0
    logits_scaling: AboveZero = 1.0

    architecture: ClassVar[str] = ""
    options: ClassVar[Sequence[str]] = ()
    fixed: ClassVar[Mapping[str, Any]] = {}


DEPENDENT = ("max_window_layers", "no_rope_layer_interval")  # without effect in families that lack them
OFF = MappingProxyType({field.name: field.default for field in msgspec.structs.fields(HFConfig)})
OPTIONS = tuple(OFF)[tuple(OFF).index("attention_bias") :]
BIASES = ("attention_bias", "mlp_bias")
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
SMOLLM3 = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")


class LlamaHF(HFConfig, kw_only=True):
    head_dim: Positive | None = None  # type: ignore[assignment]
    architecture = "LlamaForCausalLM"
    options = BIASES


class MistralHF(HFConfig, kw_only=True):
    num_key_value_heads: Positive = 8
    head_dim: Positive | None = None  # type: ignore[assignment]
    max_position_embeddings: Positive = 131072
    sliding_window: Positive | None = 4096
    architecture = "MistralForCausalLM"
    options = ("sliding_window",)


class Qwen2HF(HFConfig, kw_only=True):
    num_key_value_heads: Positive | None = 32
    max_position_embeddings: Positive = 32768
    sliding_window: Positive | None = 4096
    architecture = "Qwen2ForCausalLM"
    options: ClassVar[Sequence[str]] = QWEN_WINDOWS
    fixed = {"qkv_bias": True}


class Qwen3HF(Qwen2HF, kw_only=True):
    head_dim: Positive = 128
    architecture = "Qwen3ForCausalLM"
    options = ("attention_bias", *QWEN_WINDOWS)
    fixed = {"qk_norm": "head"}


class GraniteHF(HFConfig, kw_only=True):
    attention_multiplier: AboveZero = 1.0
    architecture = "GraniteForCausalLM"
    options = (*BIASES, *FACTORS)


class SmolLM3HF(HFConfig, kw_only=True):
    num_key_value_heads: Positive | None = 4
    max_position_embeddings: Positive = 32768
    tie_word_embeddings: bool = True
    rope_theta: AboveZero = 2e6
    architecture = "SmolLM3ForCausalLM"
    options = (*BIASES, *SMOLLM3)


class Olmo2HF(HFConfig, kw_only=True):
    rms_norm_eps: NonNegative = 1e-5
    architecture = "Olmo2ForCausalLM"
    options: ClassVar[Sequence[str]] = ("attention_bias",)
    fixed = {"norm_after": True, "qk_norm": "width"}


class Olmo3HF(Olmo2HF, kw_only=True):
    rope_theta: AboveZero = 5e5
    sliding_window: Positive = 4096
    architecture = "Olmo3ForCausalLM"
    options = ("attention_bias", "sliding_window", "layer_types")


FAMILIES: Mapping[str, type[HFConfig]] = {
    "llama": LlamaHF,
    "mistral": MistralHF,
    "qwen2": Qwen2HF,
    "qwen3": Qwen3HF,
    "granite": GraniteHF,
    "smollm3": SmolLM3HF,
    "olmo2": Olmo2HF,
    "olmo3": Olmo3HF,
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
    biased |= dict.fromkeys(("w1", "w2", "w3"), config.mlp_bias)
    for ours, theirs in BLOCK_NAMES.items():
        if biased[ours.rpartition(".")[2]]:
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


# ---------------------------------------------------------------- config.json


def from_hf_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The shape that a config.json describes. Raises ValueError for one we cannot run."""
    hf = read_config(values)
    windows = _read_windows(hf)
    if isinstance(hf, Olmo3HF):
        theta, scaling, sliding_theta = _read_ropes_by_type(hf)
        thetas = [sliding_theta if window else theta for window in windows]
    else:
        theta, scaling = _read_rope(hf)
        thetas = [theta if rotated else 0.0 for rotated in _read_rotated(hf)]
    return LlamaConfig(
        **{name: getattr(hf, key) for name, key in CONFIG_KEYS.items()},
        n_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or 0,
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_shortest(windows, off=0),
        rope_thetas=_shortest(thetas, off=theta),
        attention_multiplier=hf.attention_multiplier or 0.0,
        embedding_multiplier=_unless_1(hf.embedding_multiplier),
        residual_multiplier=_unless_1(hf.residual_multiplier),
        logits_divisor=_unless_1(hf.logits_scaling),
        **{"qkv_bias": hf.attention_bias, **hf.fixed},
    )


def read_config(values: Mapping[str, Any]) -> HFConfig:
    """A config.json, with what each missing key means in its family. Raises ValueError for values that are none."""
    model_type = str(values.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type!r}: must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for key, only in ONLY.items():
        if values.get(key, only[0]) not in only:
            raise ValueError(f"{key} = {values[key]!r}: only {only[0]!r} can be run")
    own = dict(values)
    if own.get("use_sliding_window") is False and "sliding_window" not in family.options:
        own.pop("sliding_window", None)
    for key in [key for key in OPTIONS if key not in family.options]:
        value = own.pop(key, None)
        if value not in (None, OFF[key]) and key not in DEPENDENT:
            raise ValueError(f"{key} = {value!r}: a {model_type} has no such option")
    return _convert(own, family)


def _convert(values: Any, kind: Any, name: str = "") -> Any:
    """`values` as msgspec converts them. Raises ValueError that names a key and its value."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        key = re.search(r"`\$\.(\w+)", message)
        if key:
            name = key[1]
            values = values[name]
        if not name:  # a key is missing
            raise ValueError(message) from None
        raise ValueError(f"{name} = {values!r}: {message.partition(' - at')[0]}") from None


def ignored_keys(hf: Mapping[str, Any]) -> list[str]:
    """Keys that may change what a model computes, but in its family neither in transformers nor here."""
    known = {*OFF, *ONLY, *SILENT}
    harmless = ("_token_id", "dropout", "version")
    unknown = [key for key in hf if key not in known and not key.endswith(harmless) and not key.startswith("_")]
    return [key for key in unknown if hf[key]]


def _unless_1(value: float) -> float:
    """0, which means none, for 1."""
    return 0.0 if value == 1.0 else float(value)


def _read_windows(hf: HFConfig) -> list[int]:
    """Of each layer; 0: none."""
    layers = hf.num_hidden_layers
    window = hf.sliding_window
    if "use_sliding_window" in hf.options and not hf.use_sliding_window:
        window = None
    types = hf.layer_types
    if "layer_types" not in hf.options or (types is None and window is None):
        return [window or 0] * layers
    if types is None:
        types = _default_types(hf)
    strange = set(types) - {"full_attention", "sliding_attention"}
    if strange:
        raise ValueError(f"layer_types: {_some(strange)} cannot be run")
    if len(types) != layers:
        raise ValueError(f"layer_types: has {len(types)} entries, must have num_hidden_layers = {layers}")
    if window is None and "sliding_attention" in types:
        raise ValueError("layer_types: has sliding_attention, but sliding_window is off")
    size = {"sliding_attention": window or 0, "full_attention": 0}
    return [size[kind] for kind in types]


def _default_types(hf: HFConfig) -> list[str]:
    layers = range(hf.num_hidden_layers)
    if "max_window_layers" in hf.options:
        full = [i < hf.max_window_layers for i in layers]
    elif "no_rope_layers" in hf.options:
        full = [bool(rotated) for rotated in _read_rotated(hf)]
    else:
        full = [i % 4 == 3 for i in layers]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def _read_rotated(hf: HFConfig) -> list[int]:
    """1 for each layer with a rotary embedding. SmolLM3 has some without."""
    layers = hf.num_hidden_layers
    if "no_rope_layers" not in hf.options:
        return [1] * layers
    given = hf.no_rope_layers
    if given is None:
        return [int((i + 1) % hf.no_rope_layer_interval != 0) for i in range(layers)]
    if len(given) < layers:
        raise ValueError(f"no_rope_layers = {given!r}: must have an entry for each of num_hidden_layers = {layers}")
    return given


def _shortest(values: Sequence[Any], off: Any) -> tuple[Any, ...]:
    """The shortest pattern that gives `values`, repeated. Empty if all are `off`."""
    if all(value == off for value in values):
        return ()
    for length in range(1, len(values)):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)


def _read_rope(hf: HFConfig) -> tuple[float, RopeScaling | None]:
    """Theta and scaling. transformers 5 keeps both in one dict."""
    rope = hf.rope_scaling or hf.rope_parameters or {}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope_parameters of {', '.join(nested)}: only those of olmo3 can be run")
    if hf.original_max_position_embeddings:  # in transformers it counts more than the one beside the kind
        rope = {**rope, "original_max_position_embeddings": hf.original_max_position_embeddings}
    return _read_theta({"rope_theta": hf.rope_theta, **rope}), _read_scaling(hf, rope)


def _read_theta(rope: Mapping[str, Any]) -> float:
    return _convert(rope["rope_theta"], AboveZero, "rope_theta")


def _read_ropes_by_type(hf: HFConfig) -> tuple[float, RopeScaling | None, float]:
    """OLMo 3: theta and scaling of full layers, and theta of those with a window.

    As in transformers 5, a theta or scaling outside `rope_parameters` is that of the full layers only.
    """
    by_type = hf.rope_parameters or {}
    for key, value in by_type.items():
        if key not in ("full_attention", "sliding_attention"):
            raise ValueError(f"rope_parameters.{key} = {value!r}: must stand in those of a type of layer")
        if value is not None:
            _convert(value, dict, f"rope_parameters.{key}")
    default = {"rope_theta": 5e5}
    sliding = by_type.get("sliding_attention") or {}
    if _read_scaling(hf, sliding) is not None:
        raise ValueError(f"rope_type = {sliding['rope_type']!r} of sliding_attention: only 'default' can be run")
    scaling = hf.rope_scaling or {}
    if "type" in scaling:  # which transformers 5 does not see
        raise ValueError(f"rope_scaling.type = {scaling['type']!r}: is rope_type for an olmo3")
    full = {"rope_theta": hf.rope_theta, **(by_type.get("full_attention") or {}), **scaling}
    return _read_theta(full), _read_scaling(hf, full), _read_theta({**default, **sliding})


def _read_scaling(hf: HFConfig, rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: only 1.0 can be run")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(f"rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    longest = hf.max_position_embeddings
    rope = {"original_max_position_embeddings": longest, **rope}
    needed = ["factor"] if kind == "yarn" else SCALINGS[kind].values()
    for key in needed:
        if key not in rope:
            raise ValueError(f"rope_scaling: has no {key}, which rope_type = {kind!r} needs")
    if kind == "yarn":
        factor = rope["factor"] or longest / rope["original_max_position_embeddings"]
        rope |= {"factor": factor, "attention_factor": _yarn_attention_factor(rope, factor)}
    known = {name: rope[key] for name, key in SCALINGS[kind].items() if rope.get(key) is not None}
    for name, value in known.items():
        _convert(value, AboveZero, f"rope_scaling.{SCALINGS[kind][name]}")
    if kind == "dynamic":
        known["original_seq_len"] = longest
    if kind == "yarn":
        known["exact_bounds"] = not rope.get("truncate", True)
    only_full = isinstance(hf, Olmo3HF)
    return RopeScaling(kind=kind.replace("llama3", ""), full_layers_only=only_full, **known)


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
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        max_positions = scaling.original_seq_len  # from where on transformers scales
    windows = config.windows
    window = max(windows) or None
    theta = config.rope_theta
    ropes = {}
    if name == "olmo3":
        window = window or max_positions  # transformers wants one, even if no layer has it
        layers = list(zip(windows, config.rope_thetas, strict=True))
        theta = max([theta for window, theta in layers if not window], default=theta)
        sliding = max([theta for window, theta in layers if window], default=theta)
        ropes = {
            "full_attention": {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        }
    hf = {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: getattr(config, ours) for ours, key in CONFIG_KEYS.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": theta,
        "rope_scaling": _write_scaling(scaling),
        "rope_parameters": ropes,
        "max_position_embeddings": max_positions,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "use_sliding_window": any(windows),
        "sliding_window": window,
        "max_window_layers": config.n_layers,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "no_rope_layers": [int(theta > 0) for theta in config.rope_thetas],
        "no_rope_layer_interval": 4,
        "embedding_multiplier": config.embedding_multiplier,
        "attention_multiplier": config.attention_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }
    left_out = {*OPTIONS} - {*family.options}
    if not ropes:
        left_out.add("rope_parameters")
    return {key: value for key, value in hf.items() if key not in left_out}


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
