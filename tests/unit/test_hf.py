"""Hugging Face folders to checkpoints and back, through the command line's functions."""

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from checkpoint import CheckpointError
from checkpoint.checks import check_checkpoints
from checkpoint.companions import check_vocabulary, find_companions
from checkpoint.files import commit, write_items
from checkpoint.loading import locate
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import open_checkpoint, read_manifest
from checkpoint.planning import plan_pieces, split_rows
from checkpoint.state import model_tensors
from config import Checkpoint, Config, TitaniteError, from_dict, to_toml
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from models import MODELS
from models.llama import FLAVORS
from models.llama import hf as llama_hf
from models.llama.model import Llama, LlamaConfig, RopeScaling
from storage import DamagedError, LocalStore, StoreError, open_store
from tests.corpus import word_tokenizer
from tests.distributed.checkpoint_runs import Counter, flip_bit
from tests.harness import run_ranks
from tests.unit.test_llama import FAMILIES, SMALL, hf_model
from tools import hf
from tools.hf import export_model, exported_model, import_model
from tools.list_checkpoints import look
from tools.verify import verify_all
from trained import load_trained

CPU = torch.device("cpu")
EXPORT = {"dtype": "float32", "file_bytes": 100_000, "tokenizer": None, "max_positions": 0, "check": "logits"}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the quick brown fox"] * 9, 300).save(folder)
    return folder


def hf_folder(
    folder: Path, family: str, tokenizer_folder: Path, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A random small model of the family, in several files, with a tokenizer."""
    model = hf_model(family).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer_folder / file).read_bytes())
    return model


def assert_same_weights(left: LlamaForCausalLM, right: LlamaForCausalLM) -> None:
    expected = left.state_dict()
    assert right.state_dict().keys() == expected.keys()
    assert [name for name, value in right.state_dict().items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_to_a_checkpoint_and_back_bit_for_bit(tmp_path, tokenizer_folder, family, dtype, caplog):
    caplog.set_level("INFO")
    model = hf_folder(tmp_path / "hf", family, tokenizer_folder, getattr(torch, dtype))
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="logits")
    export_model(str(tmp_path / "ours"), tmp_path / "back", **{**EXPORT, "dtype": dtype})
    assert caplog.text.count("logits equal transformers' within") == 2
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert back.dtype == model.dtype
    assert_same_weights(model, back)
    for key in ("rope_parameters", "tie_word_embeddings", "num_key_value_heads", "max_position_embeddings", "head_dim"):
        assert getattr(back.config, key) == getattr(model.config, key), key
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert len({path.stat().st_mode for path in (tmp_path / "back").iterdir()}) == 1
    tokens = torch.arange(40)[None]
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")  # not `model`: rounded rotary frequencies, too
    torch.testing.assert_close(back.float()(tokens).logits, first.float()(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "llama3.2"])
def test_an_imported_model_loads_on_four_ranks_and_goes_back(tmp_path, tokenizer_folder, family):
    model = hf_folder(tmp_path / "hf", family, tokenizer_folder, torch.bfloat16)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    run_ranks(4, _load_and_save, str(tmp_path / "ours"), str(tmp_path / "trained"))
    run = tmp_path / "run"  # its checkpoints are elsewhere
    shutil.copytree(tokenizer_folder, run)
    (run / "config.toml").write_text(to_toml(from_dict({"checkpoint": {"folder": str(tmp_path / "trained")}})))
    export_model(str(run), tmp_path / "back", **{**EXPORT, "dtype": "bfloat16"})
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 256  # seq_len


def _load_and_save(place: str, folder: str) -> None:
    identity = json.loads((Path(place) / "model.json").read_text())
    model = exported_model({"identity": identity})[1]
    mesh = init_device_mesh("cpu", (4,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    manager = CheckpointManager(
        Config(checkpoint=Checkpoint(initial_load=place, folder=folder)),
        Path("unused"),
        model=[model],
        optimizer=torch.optim.AdamW(model.parameters()),
        dataloader=Counter(),
        identity=identity,
    )
    assert manager.load() == 0
    manager.save(7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwinConfig(LlamaConfig):
    """Of another family, which Hugging Face calls mistral."""

    rope_theta: float = 1e6


def to_twin_config(flavor: TwinConfig, max_positions: int, dtype: str) -> dict:
    llama = llama_hf.to_hf_config(flavor, max_positions, dtype)
    return llama | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


TWIN = SimpleNamespace(
    MODEL_TYPE="mistral",
    hf_names=llama_hf.hf_names,
    check_hf_names=llama_hf.check_hf_names,
    from_hf_config=lambda hf: TwinConfig(**vars(llama_hf.from_hf_config(hf))),
    to_hf_config=to_twin_config,
)


def test_a_family_that_was_added_crosses_by_its_own_module(tmp_path, tokenizer_folder, monkeypatch, caplog):
    caplog.set_level("INFO")
    twin = dataclasses.replace(
        MODELS["llama"], flavors={}, recorded_flavor=lambda fields: TwinConfig(**fields), hf=TWIN
    )
    for module in ("models", "tools.hf"):
        monkeypatch.setattr(f"{module}.MODELS", {**MODELS, "twin": twin})
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    model = MistralForCausalLM(MistralConfig(**SMALL | FAMILIES["llama3"] | {"sliding_window": None}))
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="logits")
    assert 'models/twin/__init__.py:\n    "NAME": TwinConfig(' in caplog.text
    assert "start from it with --model.name=twin --model.flavor=NAME" in caplog.text
    assert json.loads((tmp_path / "ours" / "model.json").read_text())["name"] == "twin"
    export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert isinstance(back, MistralForCausalLM)
    assert_same_weights(model, back)


def test_tensors_are_cut_into_pieces_of_whole_rows():
    pieces = split_rows(("w",), torch.float32, (13, 100), 1000)
    chunks = [piece.tensor_data.chunk for piece in pieces[::6]]
    assert [(chunk.offsets, chunk.sizes) for chunk in chunks] == [((0, 0), (2, 100)), ((12, 0), (1, 100))]
    vector = split_rows(("n",), torch.bfloat16, (700,), 1000)
    assert [piece.tensor_data.chunk.sizes for piece in vector] == [(500,), (200,)]


def test_tokenizer_and_generation_config_load_in_transformers(tmp_path, tokenizer_folder, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    (tmp_path / "hf" / "generation_config.json").unlink()
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT | {"max_positions": 8})
    assert "sequence length is longer" not in caplog.text  # of the sample that the check encodes
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "back"), load_tokenizer(tmp_path / "back")
    assert theirs("the quick fox").input_ids == ours.encode("the quick fox")
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.decode(ours.encode("the quick fox")) == "the quick fox"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.generation_config.eos_token_id == ours.eos_id == model.config.eos_token_id


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}", ["<|endoftext|>", "<|eot|>"]),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "<|endoftext|>"),
        ("{{ raise_exception('not for chats') }}", "<|endoftext|>"),
    ],
)
def test_an_exported_chat_model_stops_where_its_answers_end(tmp_path, tokenizer_folder, template, ends):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    raw = load_tokenizer(tokenizer_folder).raw
    raw.add_special_tokens(["<|eot|>"])
    Tokenizer(raw, "<|endoftext|>", chat_template=template).save(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT)
    expected = raw.token_to_id(ends) if isinstance(ends, str) else [raw.token_to_id(token) for token in ends]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.generation_config.eos_token_id == expected == model.config.eos_token_id


@pytest.mark.parametrize("content", ["{", "[]"])
@pytest.mark.parametrize("file", ["generation_config.json", "special_tokens_map.json"])
def test_a_damaged_companion_is_found_before_anything_is_written(tmp_path, tokenizer_folder, file, content):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    (tmp_path / "hf" / file).write_text(content)
    for make in (
        partial(export_model, str(tmp_path / "ours"), tmp_path / "new", **EXPORT | {"tokenizer": tmp_path / "hf"}),
        partial(import_model, tmp_path / "hf", str(tmp_path / "new"), check="auto"),
    ):
        written = mock.patch.object(Path, "mkdir", side_effect=AssertionError("something is written"))
        with written, pytest.raises(TitaniteError, match=f"hf/{file}: no"):
            make()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_weights_are_not_trained_on_the_tokens_of_another_tokenizer(tmp_path, tokenizer_folder):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    place = str(tmp_path / "ours")
    identity = json.loads((tmp_path / "ours" / "model.json").read_text())

    def check(tokenizer: Tokenizer) -> None:
        fits = partial(check_vocabulary, tokenizer, place)
        config = Config(checkpoint=Checkpoint(initial_load=place, enable=False))
        check_checkpoints(config, identity, tmp_path / "run", fits)

    same = load_tokenizer(tokenizer_folder)
    check(same)
    same.raw.add_special_tokens(["<|eot|>"])
    check(Tokenizer(same.raw, "<|eot|>"))  # more tokens, another eos
    with pytest.raises(
        CheckpointError, match=r"^checkpoint.initial_load: .*ours: 271 of the 300 token ids in the data"
    ):
        check(word_tokenizer(300))
    (tmp_path / "hf" / "tokenizer.json").unlink()
    import_model(tmp_path / "hf", place := str(tmp_path / "bare"), check="tensors")
    check(word_tokenizer(300))
    (tmp_path / "tokenizer.json").write_text("{")  # as if of a run, in whose folder the checkpoint is
    with pytest.raises(TitaniteError, match=f"^checkpoint.initial_load: {tmp_path}/tokenizer.json: not a tokenizer"):
        check(same)


@pytest.mark.parametrize("check", ["logits", "tensors"])
def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path, tokenizer_folder, check, caplog):
    caplog.set_level("INFO")
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check=check)
    assert caplog.text.count("hf: no tokenizer.json, so the checkpoint gets none") == 1
    shutil.copytree(tokenizer_folder, tmp_path / "ours" / "export")  # no part of the checkpoint
    ((store, name),) = locate(tmp_path / "ours")
    opened = open_checkpoint(store, name)
    with pytest.raises(CheckpointError, match=r"ours: no tokenizer\.json found there; name one with --tokenizer"):
        find_companions(opened, str(tmp_path / "ours"), None)


@pytest.mark.parametrize("place", ["s3://bucket", "s3://bucket//x", "s3://bucket/models//x/", "/", "..", ""])
def test_a_place_that_is_none_is_refused(tmp_path, tokenizer_folder, place):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    with pytest.raises(CheckpointError, match="name a new folder"):
        import_model(tmp_path / "hf", place, check="auto")


@pytest.mark.parametrize("place", ["~/x", "s3:/bucket/x"])
def test_a_place_that_would_be_taken_for_another_is_refused(tmp_path, tokenizer_folder, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    with pytest.raises(CheckpointError, match=r"~ written out, or s3://bucket/prefix"):
        import_model(tmp_path / "hf", place, check="auto")


@pytest.mark.parametrize("folder", ["s3://bucket/x", "s3:/bucket/x", "~/x", ""])
def test_an_export_is_written_to_a_folder_here(tmp_path, folder, capsys):
    with pytest.raises(SystemExit):
        hf.main(["export", str(tmp_path), folder])
    assert f"argument HF_FOLDER: {folder}: " in capsys.readouterr().err


def test_a_folder_in_the_root_is_not_one_in_the_working_directory(tmp_path, tokenizer_folder, monkeypatch):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    (tmp_path / "here" / "etc").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(TitaniteError, match=r"^/etc(: exists|/.* denied)"):  # the other is empty
        import_model(tmp_path / "hf", "/etc", check="auto")


def test_of_two_imports_at_once_the_later_leaves_the_earlier_alone(tmp_path, tokenizer_folder, monkeypatch):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    place, check = str(tmp_path / "ours"), hf.files.check_shapes
    (tmp_path / "ours" / "lost+found").mkdir(parents=True)  # there may be an empty folder, as of a disk of its own

    def begin_another(*arguments):
        with monkeypatch.context() as once:
            once.setattr(hf.files, "check_shapes", check)
            import_model(tmp_path / "hf", place, check="tensors")
        return check(*arguments)

    monkeypatch.setattr(hf.files, "check_shapes", begin_another)
    with pytest.raises(StoreError, match=r"ours/model\.json: File exists"):
        import_model(tmp_path / "hf", place, check="tensors")
    assert load_trained(place, device=CPU, dtype=torch.float32).manifest["step"] == 0


def test_an_import_that_fails_leaves_nothing(tmp_path, tokenizer_folder, monkeypatch):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    for failing in ("write_items", "commit", "check_result"):
        with monkeypatch.context() as once:
            once.setattr(hf, failing, mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
        assert not (tmp_path / "ours").exists()


def test_why_an_import_failed_is_said_where_it_cannot_be_removed_either(
    tmp_path, tokenizer_folder, monkeypatch, caplog
):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    monkeypatch.setattr(hf, "check_result", mock.Mock(side_effect=CheckpointError("logits differ")))
    monkeypatch.setattr(LocalStore, "remove", mock.Mock(side_effect=StoreError("not allowed")))
    with pytest.raises(CheckpointError, match="logits differ"):
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    assert "ours: the unfinished checkpoint could not be removed: not allowed" in caplog.text


def test_who_was_not_told_the_length_says_so(tmp_path, tokenizer_folder, monkeypatch):
    """And advises an option that the command has."""
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    manifest = read_manifest(open_store(tmp_path), "ours")
    del manifest["imported"]
    monkeypatch.setattr("checkpoint.manifest.read_manifest", lambda *_: manifest)
    with pytest.raises(CheckpointError, match="give --max-positions"):
        export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT)
    export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT | {"max_positions": 100})


def test_logits_without_transformers_are_refused_before_anything_is_written(tmp_path, tokenizer_folder, monkeypatch):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match="--check logits: needs transformers, which is not installed"):
        hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "new"), "--check=logits"])
    assert not (tmp_path / "new").exists()
    hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "new")])


def test_how_to_start_names_the_flavor_or_gives_it():
    said = hf.how_to_start("there", "llama", FLAVORS["8B_3.1"])
    assert said == "start from it with --model.flavor=8B_3.1 --checkpoint.initial_load=there"
    debug = dataclasses.replace(FLAVORS["debug"], vocab_size=512)
    assert "--model.flavor=debug --model.vocab_size=512 " in hf.how_to_start("there", "llama", debug)
    unknown = dataclasses.replace(FLAVORS["1B"], dim=4096)
    (line,) = re.findall(r'"NAME": (.*),\n', hf.how_to_start("there", "llama", unknown))
    assert eval(line, {"LlamaConfig": LlamaConfig, "RopeScaling": RopeScaling}) == unknown


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral': must be one of llama"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type = 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_hidden_layers": 4}, "missing model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "left over model.layers.2.input_layernorm.weight"),
        (
            {"tie_word_embeddings": True, "vocab_size": 321},
            "shape (320, 64), but config.json requires (321, 64)",
        ),
    ],
)
def test_what_the_model_has_not_is_refused_before_anything_is_written(tmp_path, tokenizer_folder, change, said):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    edit(tmp_path / "hf" / "config.json", **change)
    with pytest.raises(CheckpointError) as caught:
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="auto")
    assert said in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_a_name_on_the_hub_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"meta-llama/Llama-3\.2-1B: no such folder; .*hf download"):
        import_model(Path("meta-llama/Llama-3.2-1B"), str(tmp_path / "ours"), check="auto")


def test_quantized_weights_are_refused(tmp_path, tokenizer_folder):
    model = hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    state = {name: value.to(torch.float8_e4m3fn) for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="is of type F8_E4M3, must be one of BF16, F16, F32"):
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="auto")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "model.bin"])
def test_files_outside_the_folder_are_refused(tmp_path, tokenizer_folder, name):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=weights | {"model.norm.weight": name})
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "hf" / weights["model.norm.weight"]).read_bytes())
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="auto")


def test_a_truncated_file_and_pickled_weights_are_refused(tmp_path, tokenizer_folder):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    file = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{file.name}: not a readable safetensors file"):
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="auto")
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="may run code when read"):
        import_model(tmp_path / "hf", str(tmp_path / "ours"), check="auto")


def test_a_wrong_result_is_found_and_leaves_nothing(tmp_path, tokenizer_folder, monkeypatch):
    """Planted: the two norms of a block change places on their way out."""
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    names = llama_hf.hf_names

    def swapped(config):
        found = names(config)
        first, second = "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"
        return found | {first: found[second], second: found[first]}

    monkeypatch.setattr(llama_hf, "hf_names", swapped)
    with pytest.raises(CheckpointError, match="logits differ from transformers'"):
        export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]
    export_model(str(tmp_path / "ours"), tmp_path / "back", **{**EXPORT, "check": "tensors"})
    file = sorted((tmp_path / "back").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    store = open_store(tmp_path)
    opened = open_checkpoint(store, "ours")
    adapter, _, flavor = exported_model(opened.manifest)
    with pytest.raises(CheckpointError, match="differs from that in"):
        hf.check_tensors(tmp_path / "back", opened, adapter.hf_names(flavor))


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "tokenizer.json"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path, tokenizer_folder, damaged, capsys):
    """Nor one whose tokenizer has a token of other letters."""
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    file = tmp_path / "ours" / damaged
    flip_bit(file, file.stat().st_size // 2 if damaged == "__0_0.distcp" else file.read_bytes().index(b"quick"))
    with pytest.raises(TitaniteError, match=rf"ours/{damaged}: (checksum of|SHA-256)") as caught:
        export_model(str(tmp_path / "ours"), tmp_path / "back", **EXPORT)
    assert ("--tokenizer" in str(caught.value)) == (damaged == "tokenizer.json")
    assert verify_all(open_store(tmp_path / "ours"), [""]) == 1
    assert f"DAMAGED: {file}: " in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:10])
    assert f"{damaged} has 10 bytes, not " in look(open_store(tmp_path / "ours"), "")[1]
    assert not isinstance(caught.value, DamagedError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_an_export_that_the_disk_has_no_room_for_leaves_nothing(tmp_path, tokenizer_folder):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system of its own: {mounted.stderr.decode().strip()}")
    try:
        (said,) = run_ranks(1, _failure, str(tmp_path / "ours"), disk / "out")  # a process that may die
        left = list(disk.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert re.search(r"/model-00001-of-.*: 0.00 GB cannot be written: .*No space left on device", said)
    assert not left


def _failure(place: str, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        export_model(place, folder, **EXPORT)
    return str(caught.value)


def test_an_export_that_was_overtaken_leaves_the_other_its_folder(tmp_path, tokenizer_folder, monkeypatch):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    write, other = hf.write_weights, tmp_path / "out" / "model.safetensors"

    def overtaken(*arguments):
        other.parent.mkdir()
        other.touch()
        return write(*arguments)

    monkeypatch.setattr(hf, "write_weights", overtaken)
    with pytest.raises(CheckpointError, match=r"out: not exported: .* not empty"):
        export_model(str(tmp_path / "ours"), tmp_path / "out", **EXPORT)
    assert other.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours", "out"]


def test_what_an_export_cannot_remove_does_not_hide_why_it_failed(tmp_path, tokenizer_folder, monkeypatch):
    """NFS keeps a file that is removed while it is open, under another name."""
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    monkeypatch.setattr(hf, "check_result", mock.Mock(side_effect=CheckpointError("differs")))
    monkeypatch.setattr(os, "rmdir", mock.Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    with pytest.raises(CheckpointError, match=r"^differs$"):
        export_model(str(tmp_path / "ours"), tmp_path / "out", **EXPORT)


def test_a_model_of_another_version_is_named_in_one_line():
    identity = {"name": "llama", **dataclasses.asdict(FLAVORS["tiny"]), "new_field": 1}
    with pytest.raises(TitaniteError, match=r"holds a model 'llama' of another version of this code: .*new_field"):
        exported_model({"identity": identity})


@pytest.mark.parametrize("size", [320, 321])
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer_folder, size, caplog):
    caplog.set_level("INFO")
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    raw = RawTokenizer(models.WordLevel({"<eos>": 0} | {f"w{i}": i for i in range(1, size)}, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    Tokenizer(raw, "<eos>").save(tmp_path)
    export = {**EXPORT, "check": "tensors"}
    if size == 320:
        export_model(str(tmp_path / "ours"), tmp_path / "back", **{**export, "tokenizer": tmp_path})
        assert f"tokenizer from {tmp_path}\n" in caplog.text
        return
    with pytest.raises(CheckpointError, match="has ids up to 320, the model only 320 rows of embedding"):
        export_model(str(tmp_path / "ours"), tmp_path / "back", **{**export, "tokenizer": tmp_path})
    with pytest.raises(CheckpointError, match="has ids up to 320, the model only 320 rows of embedding"):
        load_trained(str(tmp_path / "ours"), device=CPU, dtype=torch.float32, tokenizer=str(tmp_path))
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'hf2'}: no tokenizer.json found"):  # not that above it
        export_model(str(tmp_path / "ours"), tmp_path / "back", **{**export, "tokenizer": tmp_path / "hf2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("limits", "available"),
    [({}, 1000), ({"a": 900}, 650), ({"a": 900, "a/b": 700}, 450), ({"a/b": 5000, "": 600}, 350), ({"other": 5}, 1000)],
)
def test_the_memory_of_a_control_group_is_what_can_be_had(tmp_path, limits, available):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/old\n0::/a/b\n")
    for group in ("a", "a/b", "", "other"):
        folder = tmp_path / "sys" / "fs" / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limits[group] * 1024}\n" if group in limits else "max\n")
        (folder / "memory.current").write_text(f"{300 * 1024}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {50 * 1024}\nactive_file 7\n")
    assert hf.available_bytes(tmp_path) == available * 1024


def test_imported_weights_are_what_load_trained_gives(tmp_path, tokenizer_folder):
    model = hf_folder(tmp_path / "hf", "llama3.1", tokenizer_folder)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    ours = load_trained(str(tmp_path / "ours"), device=CPU, dtype=torch.float32).model
    tokens = torch.arange(90)[None]
    torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)


BIG = LlamaConfig(dim=1024, n_layers=20, n_heads=8, n_kv_heads=4, hidden_dim=4096, vocab_size=4096)
ALLOWED_MB = 512


def test_memory_is_bounded_by_a_file_not_by_the_model(tmp_path, tokenizer_folder):
    """A float32 model of twice what is allowed, out and in again, in a process of its own."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in model_tensors([Llama(BIG)]).items()}
    total = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    assert total > 2 * ALLOWED_MB * 1e6
    pieces = [
        piece
        for name, shape in shapes.items()
        for piece in split_rows(("model", name), torch.float32, shape, hf.PIECE_BYTES)
    ]
    plan, store = plan_pieces(pieces), open_store(tmp_path)
    values = torch.randn(hf.PIECE_BYTES // 4)

    def resolve(item):
        sizes = item.tensor_data.chunk.sizes
        return values[: sizes.numel()].view(sizes)

    written = write_items(store, "big", 0, plan.files, resolve)
    config = to_toml(from_dict({}))
    identity = json.loads(json.dumps({"name": "llama", **vars(BIG)}))
    facts = {"step": 3, "world_size": 1, "identity": identity, "dataloader": {}, "config": config}
    commit(store, "big", plan, [written], facts)

    def peak_mb(*arguments):
        code = (  # not ru_maxrss, which a process inherits from the one that started it
            "import re, sys; from tools.hf import main; from pathlib import Path\n"
            "kb = lambda key: int(re.search(key + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
            "before = kb('VmRSS'); main(sys.argv[1:]); print((kb('VmHWM') - before) // 1000)"
        )
        command = [sys.executable, "-c", code, *map(str, arguments), "--check=tensors"]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    file_mb = 100
    out = peak_mb("export", tmp_path / "big", tmp_path / "hf", "--file-gb=0.1", f"--tokenizer={tokenizer_folder}")
    back = peak_mb("import", tmp_path / "hf", tmp_path / "ours")
    assert out <= file_mb + ALLOWED_MB
    assert back <= file_mb + ALLOWED_MB


@pytest.mark.parametrize(("gigabytes", "files"), [("inf", 1), ("1e-4", None), ("nan", 0), ("0", 0)])
def test_bytes_per_file_may_be_without_limit(tmp_path, tokenizer_folder, gigabytes, files):
    hf_folder(tmp_path / "hf", "llama3", tokenizer_folder, torch.float32)
    import_model(tmp_path / "hf", str(tmp_path / "ours"), check="tensors")
    with pytest.raises(SystemExit) if files == 0 else nullcontext():
        hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), f"--file-gb={gigabytes}", "--check=tensors"])
    made = len(list((tmp_path / "out").glob("*.safetensors")))
    assert made == files if files is not None else made > 1
