"""Llama, Qwen, Mistral, Granite, SmolLM and OLMo, and each option of LlamaConfig, against Hugging Face transformers."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.loading import model_differences
from config import ConfigError, Float8
from data.tokenizer import train_tokenizer
from float8.convert import convert_to_float8
from models.llama import FLAVORS
from models.llama import hf as llama_hf
from models.llama.hf import from_hf_config, hf_names, to_hf_config
from models.llama.model import KVCache, Llama, LlamaConfig
from tools.hf import export_model, import_model

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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama2": {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_theta": 10_000.0},
    "llama3": {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 500_000.0},
    "llama3.1": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500_000.0, **LLAMA3_ROPE},
        "max_position_embeddings": 512,
    },
    "llama3.2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500_000.0, **LLAMA3_ROPE, "factor": 32.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
MODELS = {
    **{name: {"model_type": "llama", **settings} for name, settings in FAMILIES.items()},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e3},
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "yarn, all set": {
        "model_type": "llama",
        "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24, "use_sliding_window": False},  # which it has not
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
    "olmo3, two thetas": {"model_type": "olmo3", "sliding_window": 16, "rope_theta": 100.0},
    "olmo3, no windows": {"model_type": "olmo3", "layer_types": ["full_attention"] * 5},
}  # fmt: skip
# Where config.json leaves out, or says in another place, what transformers would write.
TYPED = {
    "qwen3, windows from the first layer on": {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0
    },
    "smollm3, every other layer": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3, more entries than layers": {"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1, 1, 1, 0, 1]},
    "smollm3, windows by default": {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 11},
    "smollm3, yarn": {"model_type": "smollm3", "rope_parameters": YARN},
    "yarn, no original length": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, bounds beyond the pairs": {
        "model_type": "llama", "max_position_embeddings": 800_000,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 200_000},
    },
    "yarn, equal bounds": {
        "model_type": "llama", "max_position_embeddings": 24,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 6},
    },
    "window of all tokens but one": {"model_type": "mistral", "sliding_window": 159},
    "yarn, bounds of one pair": {
        "model_type": "llama", "rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}
    },
    "olmo3, theta of windows": {
        "model_type": "olmo3", "sliding_window": 16, "rope_theta": 3e5,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 77.0}},
    },
}  # fmt: skip


def typed_config(name):
    return copy.deepcopy(SHAPE | {**MODELS, **TYPED}[name])


def hf_model(name):
    """A model of transformers with random weights, large enough that every part shows in the logits."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(**typed_config(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def random_tokens(*shape):
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(2))


def ours_from(hf):
    model = Llama(from_hf_config(hf.config.to_dict()))
    weights = hf.state_dict()
    names = hf_names(model.config)
    model.load_state_dict({name: weights[hf_name] for name, hf_name in names.items()})
    return model


@pytest.mark.parametrize("name", [*MODELS, *TYPED])
def test_logits_and_gradients_equal_transformers(name):
    """At 1, 2 and 4 times the length from which rotary scaling acts, and beyond every window."""
    hf = hf_model(name)
    ours = ours_from(hf)
    typed = typed_config(name)
    assert from_hf_config(typed) == ours.config
    assert to_hf_config(ours.config, 64, "float32", typed["model_type"])["model_type"] == typed["model_type"]
    for length in (40, 80, 160):
        tokens = random_tokens(2, length)
        expected = hf(tokens).logits
        actual = ours(tokens)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    labels = random_tokens(2, length)
    for logits in (expected, actual):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs, names = dict(hf.named_parameters()), hf_names(ours.config)
    for parameter_name, parameter in ours.named_parameters():
        grad = theirs[names[parameter_name]].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5 * grad.abs().max(), msg=parameter_name)


@pytest.mark.parametrize("name", ["llama3.1", "mistral", "smollm3, chosen layers", "olmo3", "qwen3"])
def test_cached_decoding_gives_the_same_logits(name):
    model, tokens = ours_from(hf_model(name)), random_tokens(2, 40)
    expected = model(tokens)
    caches = [KVCache() for _ in model.layers]
    parts = [torch.arange(a, b)[None] for a, b in ((0, 17), (17, 18), (18, 19), (19, 40))]
    pieces = [model(tokens[:, part[0]], part, caches) for part in parts]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kernels", "biases"), [("own", False), ("compiler", True)])
def test_in_float8_each_gradient_is_near_that_of_float64(kernels, biases):
    """With norms after the branches, which own kernels must not take for those that feed a matmul."""
    options = {"qkv_bias": biases, "o_bias": biases, "mlp_bias": biases}
    flavor = LlamaConfig(
        dim=512, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=512, vocab_size=128, norm_after=True, qk_norm="head",
        windows=(40, 0), embedding_multiplier=8.0, attention_multiplier=0.1, residual_multiplier=0.5, **options,
    )  # fmt: skip
    exact = Llama(flavor).double()
    torch.manual_seed(0)
    for weight in exact.parameters():
        nn.init.normal_(weight, float(weight.ndim == 1), 0.05)
    low = copy.deepcopy(exact).bfloat16()
    settings = Float8(enable=True, filter="all", fsdp_all_gather="off", kernels=kernels)  # type: ignore[arg-type]
    assert len(convert_to_float8(low, settings)[0]) == 14
    tokens = torch.randint(0, 128, (2, 128))
    for model in (exact, low):
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten()).backward()
    for (name, weight), expected in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert weight.grad is not None
        assert expected.grad is not None
        error = (weight.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 0.25, name  # wrong ones differ by as much as they are


def test_own_float8_kernels_refuse_a_bias():
    flavor = dataclasses.replace(FLAVORS["debug"], vocab_size=64, qkv_bias=True)
    with torch.device("meta"):
        model = Llama(flavor)
    with pytest.raises(ConfigError, match="wq: has a bias"):
        convert_to_float8(model, Float8(enable=True, filter="all", kernels="own"))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"model_type": "gemma3_text"}, "model_type = 'gemma3_text': must be one of llama, mistral, "),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "granite", "residual_multiplier": 0.0}, "residual_multiplier = 0.0"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"original_max_position_embeddings": 20}, "original_max_position_embeddings = 20"),
        ({"hidden_size": 64.0}, "transformers refuses it: .*hidden_size"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, "transformers refuses it: .*layer_types"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 5}, "layer_types: chunked_attention"),
        ({"model_type": "smollm3", "layer_types": MIXED, "sliding_window": 9}, "sliding_attention cannot be run"),
        ({"model_type": "smollm3", "no_rope_layers": [1], "layer_types": MIXED[1:2] * 5}, "no_rope_layers: has 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic': must be"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_parameters": {**YARN, "factor": None}}, "needs a factor"),
        ({"rope_parameters": {**YARN, "mscale": 0.8}}, "mscale = 0.8"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = "),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"model_type": "olmo3", "rope_parameters": {"sliding_attention": YARN}}, "'yarn' of sliding_attention"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_by_name_and_value(edit, said):
    with pytest.raises(ValueError, match=said):
        from_hf_config({"model_type": "llama", "rms_norm_eps": 1e-5, **SHAPE, **edit})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditedConfig(LlamaConfig):
    relu_squared: bool = False


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"relu_squared": True}, "^relu_squared = True: "),
        ({"windows": (8, 16)}, r"^windows = \(8, 16\): "),
        ({"norm_after": True, "qk_norm": "width", "embedding_multiplier": 2.0}, "^embedding_multiplier = 2.0: olmo2"),
    ],
)
def test_an_export_names_the_field_that_no_family_has(monkeypatch, options, named):
    monkeypatch.setattr(llama_hf, "LlamaConfig", EditedConfig)
    flavor = EditedConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=4, hidden_dim=96, vocab_size=64, **options)
    with pytest.raises(ValueError, match=named):
        to_hf_config(flavor, 64, "float32")


@pytest.mark.parametrize(
    "options",
    [
        {"rope_thetas": (5e6, 5e6, 5e6, 0.0)},  # of which three layers have the first three
        {"rope_thetas": (0.0,)},
        {"rope_thetas": (3e4, 3e4)},
        {"windows": (8, 8, 8, 0)},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.25},
    ],
)
def test_a_model_is_exported_however_its_options_are_written(options):
    """The right logits are transformers', of the exported config and the same weights."""
    torch.manual_seed(0)
    flavor = LlamaConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, hidden_dim=96, vocab_size=320, **options)
    ours = Llama(flavor)
    config = to_hf_config(flavor, 64, "float32") | {"pad_token_id": None}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = ours.state_dict()
    theirs.load_state_dict({hf_name: weights[name] for name, hf_name in hf_names(flavor).items()})
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["llama3.2", "llama with biases", "yarn, all set", "mistral", "qwen2 with windows", "qwen3 with biases", "granite",
     "smollm3, chosen layers", "olmo3, two thetas"],
)  # fmt: skip
def test_import_and_export_keep_every_weight_and_the_family(name, tmp_path):
    """From several files. The import itself compares logits with transformers, the export its own."""
    hf = hf_model(name)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    (tmp_path / "hf" / "generation_config.json").unlink()
    path = tmp_path / "hf" / "config.json"
    written = json.loads(path.read_text()) | {"bos_token_id": None, "eos_token_id": None}  # no tokens of this tokenizer
    path.write_text(json.dumps(written))
    train_tokenizer(["the quick brown fox"] * 9, 300).save(tmp_path / "hf")
    import_model(tmp_path / "hf", str(tmp_path / "ours"))
    export_model(str(tmp_path / "ours"), tmp_path / "back", dtype="float32", file_bytes=60_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert len({path.stat().st_mode for path in (tmp_path / "back").iterdir()}) == 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto", attn_implementation="eager")
    assert type(back) is type(hf)
    for key, weight in hf.state_dict().items():
        assert torch.equal(weight, back.state_dict()[key]), key
    tokens = random_tokens(2, 160)
    assert torch.equal(back(tokens).logits, hf(tokens).logits)


def test_a_run_from_before_an_option_is_of_the_same_model():
    """Its record has no such field, and lists in place of tuples."""
    today = dataclasses.asdict(FLAVORS["8B_3.1"])
    before = json.loads(json.dumps(today))
    del before["qk_norm"], before["windows"], before["rope_scaling"]["beta_fast"]
    assert LlamaConfig(**before) == FLAVORS["8B_3.1"]
    assert not model_differences(before, today)
    before["rope_scaling"]["factor"] = 4.0
    assert model_differences(before, today) == "rope_scaling: factor is 4.0 there and 8.0 here"
