"""Hugging Face folders to checkpoints and back, through the command line's functions."""

import json
import shutil
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from checkpoint import CheckpointError
from checkpoint.checks import check_checkpoints
from checkpoint.manifest import read_manifest
from config import Checkpoint, Config, TitaniteError
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from models.llama import hf as llama_hf
from storage import open_store
from tests.corpus import word_tokenizer
from tests.unit.test_families import hf_model
from tools import hf
from tools.average import average
from tools.hf import export_model, import_model


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the quick brown fox"] * 9, 300).save(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer_folder):
    """A folder with a Llama 3 in several files of Hugging Face's, `hf`, and the checkpoint that it became, `ours`."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tokenizer_folder, folder / "hf")
    hf_model("llama3").bfloat16().save_pretrained(folder / "hf", max_shard_size="100KB")
    (folder / "hf" / "generation_config.json").unlink()
    # Defaults of transformers, which are no tokens of this tokenizer's.
    edit(folder / "hf", bos_token_id=None, eos_token_id=None)
    import_model(folder / "hf", str(folder / "ours"))
    return folder


@pytest.fixture
def llama(tmp_path, made):
    """A copy of `made`, to be changed."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def assert_same_weights(left, right):
    expected = left.state_dict()
    assert right.state_dict().keys() == expected.keys()
    assert [name for name, value in right.state_dict().items() if not torch.equal(value, expected[name])] == []


ENDED = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "declared", "bos", "ends"),
    [
        # ctranslate2 reads no null, and transformers takes 1 for a missing id.
        ("", None, "<|endoftext|>", "<|endoftext|>"),
        ("{{ raise_exception('not for chats') }}", None, "<|endoftext|>", "<|endoftext|>"),
        (ENDED, None, None, ["<|endoftext|>", "<|eot|>"]),
        (ENDED, "<|begin|>", "<|begin|>", ["<|endoftext|>", "<|eot|>"]),
    ],
)
def test_an_export_has_the_tokens_that_are_declared_and_stops_where_answers_end(llama, template, declared, bos, ends):
    raw = load_tokenizer(llama / "hf").raw
    raw.add_special_tokens(["<|eot|>", "<|begin|>", "<|pad|>"])
    ours = Tokenizer(raw, "<|endoftext|>", chat_template=template)
    ours.save(llama / "hf")
    pad = {"__type": "AddedToken", "content": "<|pad|>"}
    tokens = {"bos_token": declared, "eos_token": "<|endoftext|>", "pad_token": pad, "padding_side": "left"}
    (llama / "hf" / "tokenizer_config.json").write_text(json.dumps(tokens))
    export_model(str(llama / "ours"), llama / "back", tokenizer=llama / "hf")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (llama / "back" / file).read_bytes() == (llama / "hf" / file).read_bytes()
    theirs = AutoTokenizer.from_pretrained(llama / "back")
    assert theirs("the quick fox").input_ids == ours.encode("the quick fox")
    assert (theirs.chat_template or "") == template
    model = LlamaForCausalLM.from_pretrained(llama / "back", dtype="auto")
    assert_same_weights(hf_model("llama3").bfloat16(), model)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == theirs.convert_tokens_to_ids(ends)
        assert config.bos_token_id == (bos and raw.token_to_id(bos))
        assert config.pad_token_id == raw.token_to_id("<|pad|>")


def test_two_ends_of_a_config_without_generation_config_are_exported(llama, caplog):
    """And a pad of id 0, and the length that transformers takes where none is said; by way of an average, too."""
    caplog.set_level("INFO")
    edit(llama / "hf", eos_token_id=[3, 5], pad_token_id=0, max_position_embeddings=None)
    import_model(llama / "hf", str(llama / "new"))
    train = f"train_configs/pretrained.toml --checkpoint.initial_load={llama / 'new'}"
    assert f"./run_llama_train.sh {train} --data.datasets=datasets/NAME" in caplog.text
    average([str(llama / "new"), str(llama / "new")], str(llama / "mean"))
    export_model(str(llama / "mean"), llama / "back")
    model = LlamaForCausalLM.from_pretrained(llama / "back")
    own = load_tokenizer(llama / "hf").eos_id
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [3, 5, own]
    assert (model.config.pad_token_id, model.config.max_position_embeddings) == (0, 2048)


def test_a_weight_too_large_for_float16_is_refused(llama):
    state = hf_model("llama3").state_dict()
    state["model.norm.weight"][3] = 70_000.0
    rewrite(llama / "hf", state)
    import_model(llama / "hf", str(llama / "large"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not finite in torch.float16"):
        hf.main(["export", str(llama / "large"), str(llama / "new"), "--dtype=float16"])
    assert not (llama / "new").exists()


def test_weights_are_not_trained_on_the_tokens_of_another_tokenizer(llama):
    place = str(llama / "ours")
    identity = read_manifest(open_store(llama), "ours")["identity"]

    def check(tokenizer):
        config = Config(checkpoint=Checkpoint(initial_load=place, enable=False))
        check_checkpoints(config, identity, llama / "run", mock.Mock(tokenizer=tokenizer))

    same = load_tokenizer(llama / "hf")
    check(same)
    same.raw.add_special_tokens(["<|eot|>"])
    check(Tokenizer(same.raw, "<|eot|>"))  # more tokens, another eos
    with pytest.raises(
        CheckpointError, match=r"^checkpoint.initial_load: .*ours: 271 of the 300 token ids in the data"
    ):
        check(word_tokenizer(300))
    (llama / "hf" / "tokenizer.json").unlink()
    import_model(llama / "hf", place := str(llama / "bare"))
    check(word_tokenizer(300))
    with pytest.raises(CheckpointError, match=r"bare: no tokenizer\.json found there; name one with --tokenizer"):
        export_model(place, llama / "back")


def edit(folder, **changes):
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def remove_weights(folder):
    for file in folder.glob("model*safetensors*"):
        file.unlink()


def rewrite(folder, state):
    remove_weights(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def cut(folder):
    first = min(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-10])


def quantize(folder):
    rewrite(folder, {name: value.to(torch.float8_e4m3fn) for name, value in hf_model("llama3").state_dict().items()})


def keep_old_frequencies(folder):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(folder, hf_model("llama3").state_dict() | frequencies)


def save_pickled(file, folder):
    remove_weights(folder)
    torch.save({}, folder / file)


@pytest.mark.parametrize(
    "change",
    [
        partial(edit, tie_word_embeddings=True),  # but lm_head is another one
        partial(edit, rope_theta=123.0, rope_parameters={"rope_type": "default"}),
        partial(edit, rms_norm_eps=None),
        partial(edit, hidden_act="swish"),
        keep_old_frequencies,
    ],
)
def test_unusual_folders_are_read_as_transformers_reads_them(llama, monkeypatch, change):
    """Without our own comparison."""
    monkeypatch.setattr(hf, "compare_logits", lambda *_: None)
    change(llama / "hf")
    import_model(llama / "hf", str(llama / "new"))
    export_model(str(llama / "new"), llama / "back", dtype="float32")
    theirs = LlamaForCausalLM.from_pretrained(llama / "hf", dtype=torch.float32)
    back = LlamaForCausalLM.from_pretrained(llama / "back", dtype=torch.float32)
    assert_same_weights(theirs, back)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(back(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (partial(edit, quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (partial(edit, num_hidden_layers=6), r"missing model\.layers\.5\.input_layernorm\.weight"),
        (partial(edit, num_hidden_layers=4), r"left over model\.layers\.4\.input_layernorm\.weight"),
        (
            lambda folder: rewrite(folder, hf_model("llama3").model.state_dict()),
            r"missing lm_head\.weight, model\.embed",
        ),
        (partial(edit, vocab_size=321), r"has shape \[320, 64\] in BF16, must be \[321, 64\] by config\.json"),
        (cut, "00001-of-.*cannot be read as safetensors"),
        (lambda folder: min(folder.glob("*.safetensors")).unlink(), "00001-of-.*cannot be read .*No such file"),
        (partial(save_pickled, "pytorch_model.bin"), r"hf: has neither .*; convert them by python -c .*hf'\)\""),
        (partial(save_pickled, "consolidated.00.pth"), "Meta's own; download the model in Hugging Face's"),
        (lambda folder: (folder / "adapter_config.json").touch(), "holds an adapter of PEFT, no model"),
        (quantize, "in F8_E4M3, must be .* in BF16, F16, F32"),
    ],
)
def test_a_model_that_cannot_be_run_or_read_is_refused_before_anything_is_written(llama, change, message):
    change(llama / "hf")
    with pytest.raises(TitaniteError, match=message):
        import_model(llama / "hf", str(llama / "new"))
    assert not (llama / "new").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["import", "nowhere", "new"], "no such folder; `hf download"),
        (["import", "hf", "ours"], "ours: exists"),
        (["import", "hf", "s3:/bucket/x"], "~ written out, or s3://bucket/prefix"),
        (["export", "ours", "hf"], "hf: exists; name a new folder"),
        (["export", "our", "new"], "our: does not exist; did you mean ours"),
        (["export", "ours", "new", "--tokenizer=nowhere"], r"nowhere: no tokenizer\.json found"),
        (["export", "ours", "s3://bucket/x"], None),
    ],
)
def test_mistakes_on_the_command_line(llama, monkeypatch, command, message):
    monkeypatch.chdir(llama)
    with pytest.raises(TitaniteError, match=message) if message else pytest.raises(SystemExit):
        hf.main(command)
    assert sorted(path.name for path in llama.iterdir()) == ["hf", "ours"]


def test_an_import_that_fails_leaves_nothing(llama, monkeypatch):
    monkeypatch.setattr(hf, "compare_logits", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        import_model(llama / "hf", str(llama / "new"))
    assert not (llama / "new").exists()


def test_a_wrong_result_is_found_and_leaves_nothing(llama, monkeypatch):
    """Planted: the two norms of a block change places on their way out."""
    names = llama_hf.hf_names

    def swapped(config):
        found = names(config)
        first, second = "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"
        return found | {first: found[second], second: found[first]}

    monkeypatch.setattr(llama_hf, "hf_names", swapped)
    with pytest.raises(CheckpointError, match="logits differ from those of transformers"):
        export_model(str(llama / "ours"), llama / "back", dtype="float32")
    monkeypatch.undo()
    rewrite(llama / "hf", {name: weight * torch.nan for name, weight in hf_model("llama3").state_dict().items()})
    with pytest.raises(CheckpointError, match="by nan"):
        import_model(llama / "hf", str(llama / "new"))
    assert sorted(path.name for path in llama.iterdir()) == ["hf", "ours"]


def test_keys_that_nobody_reads_are_warned_of(llama, caplog):
    edit(llama / "hf", clip_qkv=8.0, auto_map={"AutoModel": "code.Model"}, use_mrope=False, sep_token_id=3)
    import_model(llama / "hf", str(llama / "new"))
    assert "clip_qkv = 8.0, auto_map = {'AutoModel': 'code.Model'}, which transformers does not read" in caplog.text
