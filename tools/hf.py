"""Convert models of any size from and to Hugging Face, piece by piece:

python -m tools.hf import HF_FOLDER CHECKPOINT        # to start from: checkpoint.initial_load=CHECKPOINT
python -m tools.hf export RUN_OR_CHECKPOINT HF_FOLDER

A checkpoint is a folder or s3://bucket/prefix. Both commands need transformers, and end with a test: they compare the
checkpoint's logits with those of transformers, if both models fit in memory.
"""

import argparse
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint import CheckpointError
from checkpoint.companions import COMPANIONS, GENERATION, declared_by, find_tokenizer
from checkpoint.files import read_state
from checkpoint.loading import check_same_names, load_place
from checkpoint.manifest import Manifest, Opened
from checkpoint.state import model_tensors
from checkpoint.writing import new_checkpoint, write_checkpoint
from config import TitaniteError, command_line, file_errors
from data.chat import chat_of
from data.tokenizer import CONFIG, NEEDED, Tokenizer, content_of, json_object, read_files
from metrics import quiet_noisy_loggers
from models import MODELS, build_model, recorded_model
from models.trained import longest_sequence
from storage.records import output_path
from tools.weights import DTYPES, FILE_BYTES, find_weights, open_weights, read_rows, write_weights

LOGITS_TOLERANCE = 1e-4  # of the largest logit: both compute in float32, but in different orders

logger = logging.getLogger(__name__)


def export_model(
    place: str, folder: Path, *, dtype: str = "bfloat16", tokenizer: str | Path = "", file_bytes: int = FILE_BYTES
) -> None:
    """Write the newest intact checkpoint at `place` to the new folder `folder`, which appears once it is whole.

    A file of about `file_bytes` at a time is in memory. `tokenizer` is a tokenizer.json or its folder; "": the run's
    own. Raises TitaniteError.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; name a new folder")
    export = partial(export_opened, place=place, folder=folder, dtype=dtype, tokenizer=tokenizer, file_bytes=file_bytes)
    load_place(place, export)


def export_opened(
    opened: Opened, place: str, folder: Path, *, dtype: str, tokenizer: str | Path, file_bytes: int = FILE_BYTES
) -> None:
    """`export_model` of one checkpoint, found by `place`. Raises DamagedError if it is damaged or removed meanwhile."""
    adapter, model, flavor = exported_model(opened.manifest)
    names = adapter.hf_names(flavor)
    check_same_names(opened, names)
    text, companions = find_tokenizer(opened, place, tokenizer, flavor.vocab_size)
    declared = declared_by(opened)
    model_type = declared.get("imported", {}).get("model_type", "llama")
    try:
        config = adapter.to_hf_config(flavor, longest_sequence(opened.manifest), dtype, model_type)
    except ValueError as error:
        raise CheckpointError(f"{opened.url}: {error}") from None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{folder.name}.partial-"
        with TemporaryDirectory(dir=folder.parent, prefix=prefix, ignore_cleanup_errors=True) as made:
            half = Path(made, folder.name)
            half.mkdir()
            write_companions(half, companions, text, config, declared)
            kind = getattr(torch, dtype)
            write_weights(half, model, names, kind, lambda own: read_state(opened, {"model": own}), file_bytes)
            compare_logits(half, opened, model)
            half.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: not exported: {error}") from error
    logger.info(f"{folder}: step {opened.manifest['step']} of {opened.url}, {dtype}")


def write_companions(
    folder: Path,
    given: Mapping[str, bytes],
    tokenizer: Tokenizer,
    config: dict[str, Any],
    declared: Mapping[str, Any],
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    `declared` is what an import declared: its files stay as they are, byte for byte, and its ids and settings are kept.
    Others get all that AutoTokenizer needs.
    """
    files = dict(given)
    tokens = json_object(given.get(CONFIG, b"{}"), CONFIG)
    generation = declared.get("generation_config") or json_object(given.get(GENERATION, b"{}"), GENERATION)
    first = _first_token(tokenizer)
    if not declared:
        made = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        }
        if first:
            made["bos_token"] = first
        tokens = made | {key: value for key, value in tokens.items() if value is not None}
        files[CONFIG] = _json_bytes(tokens)
    known = {**declared.get("imported", {}), **generation}
    ids = {
        "eos_token_id": _end_ids(known.get("eos_token_id"), tokenizer),
        "bos_token_id": _token_id("bos_token", known, tokens, tokenizer, first),
        "pad_token_id": _token_id("pad_token", known, tokens, tokenizer, None),
    }
    files["config.json"] = _json_bytes(config | ids)
    files[GENERATION] = _json_bytes(generation | ids)
    for file, content in files.items():
        (folder / file).write_bytes(content)


def _first_token(tokenizer: Tokenizer) -> str | None:
    """A bos for a tokenizer that declares none: what it puts before a text, or its eos, as in GPT-2.

    ctranslate2 takes no null. None if the chat template mentions a bos, which it would then print.
    """
    if tokenizer.prefix:
        return tokenizer.raw.id_to_token(tokenizer.prefix[0])
    if "bos_token" in tokenizer.chat_template:
        return None
    return tokenizer.eos_token


def _end_ids(declared: list[int] | int | None, tokenizer: Tokenizer) -> list[int] | int:
    """The declared ids at which a text ends, then those of the tokenizer and its chat template."""
    if declared is None:
        declared = []
    if isinstance(declared, int):
        declared = [declared]
    ids = list(dict.fromkeys([*declared, *sorted({tokenizer.eos_id, *_answer_ends(tokenizer)})]))
    if len(ids) > 1:
        return ids
    return ids[0]


def _token_id(
    name: str, known: Mapping[str, Any], tokens: Mapping[str, Any], tokenizer: Tokenizer, default: str | None
) -> int | None:
    """The id of a special token, as declared by a number or a text. None if there is none: transformers assumes 1."""
    declared = known.get(f"{name}_id")
    if declared is not None:
        return declared
    for text in (content_of(tokens.get(name)), default):
        id = tokenizer.raw.token_to_id(text or "")
        if id is not None:
            return id
    return None


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(values, indent=2)}\n".encode()


def _answer_ends(tokenizer: Tokenizer) -> frozenset[int]:
    if not tokenizer.chat_template:
        return frozenset()
    try:
        return chat_of(tokenizer).stop_ids
    except TitaniteError:  # a template that is not for chats
        return frozenset()


def exported_model(manifest: Manifest) -> tuple[ModuleType, nn.Module, Any]:
    """The adapter, model (on the meta device) and flavor that a checkpoint names. Raises TitaniteError."""
    spec, flavor = recorded_model(manifest.get("identity", {}))
    if not spec.hf:
        raise CheckpointError("the checkpoint's model has no Hugging Face format: its ModelSpec has no `hf`")
    return load_adapter(spec.hf), build_model(spec, flavor), flavor


def load_adapter(name: str) -> ModuleType:
    """The module that a ModelSpec names as its `hf`. Raises TitaniteError without transformers."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise TitaniteError(NEEDED) from None
        raise


def import_model(folder: Path, place: str) -> None:
    """Write a Hugging Face model as a checkpoint of step 0 without moments. Values and types stay the same.

    Tensors whose values follow from others or config.json are left out. The tokenizer's files, if any, are copied.
    Raises TitaniteError.
    """
    check_importable(folder)
    new_checkpoint(place)
    weights = find_weights(folder)
    family, flavor, raw = imported_flavor(folder, weights)
    adapter = load_adapter(MODELS[family].hf)
    model = build_model(MODELS[family], flavor)
    names = adapter.hf_names(flavor)
    typed = typed_like_files(model, names, weights)
    companions = read_files(folder, COMPANIONS)
    facts: dict[str, Any] = {
        "step": 0,
        "identity": {"name": family, **dataclasses.asdict(flavor)},
        "imported": raw | {"max_position_embeddings": adapter.read_config(raw).max_position_embeddings},
    }
    if GENERATION in companions:
        facts["generation_config"] = json_object(companions[GENERATION], f"{folder}/{GENERATION}")

    def read(ours: str, rows: slice) -> Tensor:
        return read_rows(weights, names[ours], rows)

    def check() -> None:
        load_place(place, lambda opened: compare_logits(folder, opened, model))

    write_checkpoint(place, typed, read, companions, facts, check)
    logger.info(f"  data:   python -m data.prepare --source TEXT --tokenizer {folder} --output datasets/NAME")
    logger.info("          for pairs and chats with --format sft or chat, which prints what the run needs beside this:")
    train = "./run_llama_train.sh train_configs/pretrained.toml"
    logger.info(f"  train:  {train} --checkpoint.initial_load={place} --data.datasets=datasets/NAME")


def check_importable(folder: Path) -> None:
    """Raise CheckpointError if a folder holds no whole model."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; `hf download OWNER/NAME --local-dir FOLDER` gets one")
    if (folder / "adapter_config.json").is_file():
        way = "PeftModel.from_pretrained(MODEL, FOLDER).merge_and_unload().save_pretrained(NEW) merges it"
        raise CheckpointError(f"{folder}: holds an adapter of PEFT, no model; {way}")


def imported_flavor(folder: Path, weights: Mapping[str, Path]) -> tuple[str, Any, dict[str, Any]]:
    """(name of the model, its flavor, config.json) of a Hugging Face folder. Raises TitaniteError.

    config.json says what is true: without tied embeddings, if the file has another output than the embedding.
    """
    path = folder / "config.json"
    with file_errors():
        raw = json_object(path.read_bytes(), str(path))
    adapters = {name: load_adapter(spec.hf) for name, spec in MODELS.items() if spec.hf}
    of_type = [name for name in adapters if raw.get("model_type") in adapters[name].FAMILIES]
    family = [*adapters, *of_type][-1]  # if none is of this type, one that names the types that it knows
    adapter = adapters[family]
    try:
        flavor = adapter.from_hf_config(raw)
        adapter.check_hf_names(weights.keys(), flavor)
        names = adapter.hf_names(flavor)
        left_out = [name for name in weights if name not in names.values() and not name.endswith(adapter.FREQUENCIES)]
        for name in left_out:  # an output, where config.json ties it to the embedding
            embedding = read_rows(weights, names["tok_embeddings.weight"]).float()
            if not torch.equal(read_rows(weights, name).float(), embedding):
                logger.info(f"{name} is not the embedding, so it is imported, although config.json ties them")
                raw = raw | {"tie_word_embeddings": False}
                flavor = adapter.from_hf_config(raw)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    ignored = [f"{key} = {raw[key]!r}" for key in adapter.ignored_keys(raw)]
    if ignored:
        neither = f"which transformers does not read for a {raw['model_type']}"
        logger.warning(f"warning: {path}: {', '.join(ignored)}, {neither}; a model trained with it is another one")
    return family, flavor, raw


def typed_like_files(model: nn.Module, names: Mapping[str, str], weights: Mapping[str, Path]) -> dict[str, Tensor]:
    """The model's weights, on the meta device, in the types of the files. Raises CheckpointError for other shapes."""
    typed = dict[str, Tensor]()
    for ours, weight in model.named_parameters():
        file = weights[names[ours]]
        with open_weights(file) as tensors:
            part = tensors.get_slice(names[ours])
            kind = part.get_dtype()
            shape = part.get_shape()
        if kind not in DTYPES or shape != list(weight.shape):
            wanted = f"{list(weight.shape)} by config.json, in {', '.join(DTYPES)}"
            raise CheckpointError(f"{file}: {names[ours]} has shape {shape} in {kind}, must be {wanted}")
        typed[ours] = weight.detach().to(DTYPES[kind])
    return typed


def compare_logits(folder: Path, opened: Opened, model: nn.Module) -> None:
    """Compare logits of 64 tokens, in float32, of the checkpoint and of the Hugging Face folder.

    `model` is on the meta device, and afterwards on the host, with weights rounded as in the folder. Only logs it if
    memory is too small. Raises CheckpointError if they differ.
    """
    needed = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if found and needed > 0.8 * 1024 * int(found[1]):
        logger.info(f"logits not compared: both models need {needed / 1e9:.1f} GB of memory")
        return
    from transformers import AutoModelForCausalLM

    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    except Exception as error:  # of any kind, from any of its checks
        raise CheckpointError(f"{folder}: transformers refuses it: {' '.join(str(error).split())}") from None
    ours, vocab_size = model.to_empty(device="cpu"), theirs.config.vocab_size
    read_state(opened, {"model": model_tensors([ours])})
    tokens = torch.arange(64)[None] * max(1, vocab_size // 64) % vocab_size
    with torch.no_grad():
        logits, expected = ours.to(theirs.dtype).float()(tokens), theirs.float()(tokens).logits
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= LOGITS_TOLERANCE * largest:
        differ = f"logits differ from those of transformers by {difference:.2e}, of {largest:g}"
        edited = f"if {type(model).__module__} was edited, transformers computes what it was before"
        raise CheckpointError(f"{folder}: {differ}; {edited}")
    logger.info(f"logits equal those of transformers within {difference:.1e}, the largest being {largest:.3g}")


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.hf", description="Models from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a checkpoint as a folder that transformers and vLLM load")
    out.add_argument("place", metavar="RUN_OR_CHECKPOINT", help="run, checkpoints or one; RUN@STEP")
    out.add_argument("folder", type=output_path, metavar="HF_FOLDER", help="new folder")
    out.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(%(default)s)")
    out.add_argument("--tokenizer", default="", help="tokenizer.json or its folder; default: the run's own")
    back = commands.add_parser("import", help="a Hugging Face model as a checkpoint to start from")
    back.add_argument("folder", type=Path, metavar="HF_FOLDER", help="config.json and safetensors files")
    back.add_argument("place", metavar="CHECKPOINT", help="new folder or s3://bucket/prefix")
    options = vars(parser.parse_args(argv))
    if options.pop("command") == "export":
        export_model(**options)
    else:
        import_model(**options)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    quiet_noisy_loggers()  # from torchao, which transformers imports
    with command_line():
        main(sys.argv[1:])
