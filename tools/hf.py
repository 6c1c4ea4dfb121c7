"""Convert models of any size from and to Hugging Face, piece by piece:

python -m tools.hf import HF_FOLDER CHECKPOINT        # to start from: checkpoint.initial_load=CHECKPOINT
python -m tools.hf export RUN_OR_CHECKPOINT HF_FOLDER

A checkpoint is a folder or s3://bucket/prefix. Both commands end with a test of the result. It compares logits with
transformers' if that is installed and both models fit in memory, else every value with its origin.
"""

import argparse
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem
from tqdm import tqdm

from checkpoint import CheckpointError
from checkpoint.companions import companion_tokenizer, find_companions, read_companions
from checkpoint.files import commit, read_state, write_items
from checkpoint.loading import check_same_names, load_newest, load_place
from checkpoint.manifest import MANIFEST, Manifest, Opened
from checkpoint.planning import plan_pieces, split_rows
from checkpoint.ranks import Ranks
from checkpoint.state import model_tensors
from config import LOCAL_OR_S3, Model, TitaniteError, command_line, tomllib
from data.chat import ChatTemplate
from data.tokenizer import TOKENIZER, Tokenizer, json_object, load_tokenizer
from metrics import quiet_noisy_loggers
from models import MODELS, HuggingFace, build_model, recorded_model
from records import output_path
from storage import Store, StoreError, open_store
from tools import hf_files as files

MODEL_FILE = "model.json"
PIECE_BYTES = 16 << 20  # of an imported tensor, so that each rank reads little more than it needs
SAMPLE = "The quick brown fox jumps over the lazy dog. 0123456789 éß 中文"
LOGITS_TOLERANCE = 1e-4  # of the largest logit: both compute in float32, but in different orders

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- export


def export_model(
    place: str, folder: Path, *, dtype: str, file_bytes: int, tokenizer: Path | None, max_positions: int, check: str
) -> None:
    """Write the newest intact checkpoint at `place` to the new folder `folder`, which appears once it is whole.

    `dtype` is "bfloat16" or "float32". `tokenizer` is a tokenizer.json or its folder; None: the run's own.
    `max_positions` 0: the training's sequence length. `check`: see `check_result`. Raises TitaniteError.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; name a new folder")

    def fill(opened: Opened) -> None:
        adapter, model, flavor = exported_model(opened.manifest)
        names = adapter.hf_names(flavor)
        check_same_names(opened, names)
        origin, companions = find_companions(opened, place, tokenizer)
        check_companions(origin, companions)
        text = companion_tokenizer(origin, companions, flavor.vocab_size)
        logger.info(f"tokenizer from {origin}")
        positions = max_positions or trained_positions(opened.manifest, "--max-positions")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{folder.name}.partial-"
            # Not even a failed removal hides the first error.
            with TemporaryDirectory(dir=folder.parent, prefix=prefix, ignore_cleanup_errors=True) as temporary:
                partial = Path(temporary, folder.name)
                partial.mkdir()
                write_companions(partial, companions, text, adapter.to_hf_config(flavor, positions, dtype))
                write_weights(opened, shapes_of(model), names, partial, getattr(torch, dtype), file_bytes)
                check_result(partial, opened, model, names, check)
                partial.rename(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: not exported: {error}") from error
        logger.info(f"{folder}: step {opened.manifest['step']} of {opened.url}, {dtype}")

    load_place(place, fill)


def write_weights(
    opened: Opened,
    shapes: Mapping[str, torch.Size],
    names: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """Write the checkpoint's weights as safetensors files of about `file_bytes`, with an index if there are several."""
    ours = {hf_name: name for name, hf_name in names.items()}
    sizes = {hf_name: shapes[name].numel() * dtype.itemsize for name, hf_name in names.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=file_bytes
    )
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="export", disable=None, leave=False) as bar:
        for file, held in split.filename_to_tensors.items():
            tensors = {hf_name: torch.empty(shapes[ours[hf_name]], dtype=dtype) for hf_name in held}
            read_state(opened, {"model": {ours[hf_name]: tensor for hf_name, tensor in tensors.items()}})
            files.write_file(folder / file, tensors)
            bar.update(sum(sizes[hf_name] for hf_name in held))
            del tensors  # before the next file's are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_companions(
    folder: Path, companions: Mapping[str, bytes], tokenizer: Tokenizer, config: dict[str, Any]
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files, with all that AutoTokenizer needs."""
    for file, content in companions.items():
        (folder / file).write_bytes(content)
    tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": end_ids(tokenizer)}
    ids = {key: value for key, value in tokens.items() if value is not None}
    declared = json.loads(companions.get("tokenizer_config.json", b"{}"))
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if tokenizer.bos_id is None else tokenizer.raw.id_to_token(tokenizer.bos_id),
        "eos_token": tokenizer.eos_token,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    generation = json.loads(companions.get("generation_config.json", b"null")) or ids
    made = {
        "tokenizer_config.json": {**defaults, **declared},
        "generation_config.json": generation,
        "config.json": {**config, **ids},
    }
    for file, values in made.items():
        (folder / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def end_ids(tokenizer: Tokenizer) -> int | list[int]:
    """The ids at which generation ends: eos, and with a chat template the special token that ends its answers."""
    stops: frozenset[int] = frozenset()
    if tokenizer.chat_template:
        try:
            stops = ChatTemplate(tokenizer.chat_template, tokenizer).stop_ids - {tokenizer.eos_id}
        except TitaniteError as error:  # the model need not be one for chats
            logger.info(f"{error}; so generation ends at {tokenizer.eos_token} alone")
    return [tokenizer.eos_id, *stops] if stops else tokenizer.eos_id


def exported_model(manifest: Manifest) -> tuple[HuggingFace, nn.Module, Any]:
    """The adapter, model (on the meta device) and flavor of a checkpoint.

    Raises TitaniteError if the checkpoint does not name its model, or if that family has no Hugging Face format.
    """
    identity = manifest.get("identity", {})
    spec, flavor = recorded_model(identity)
    if spec.hf is None:
        known = ", ".join(name for name, other in MODELS.items() if other.hf)
        raise CheckpointError(
            f"the checkpoint holds a model {identity['name']!r}, whose ModelSpec has no `hf`: must be one of {known}"
        )
    return spec.hf, build_model(spec, flavor), flavor


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Our name → shape of every parameter."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def trained_positions(manifest: Manifest, option: str) -> int:
    """The sequence length that the model was trained with: config.json's of an import, or the run's.

    Raises CheckpointError that advises to give `option` if the checkpoint does not say.
    """
    if "imported" in manifest:
        return manifest["imported"]["max_position_embeddings"]
    if "config" not in manifest:
        raise CheckpointError(f"the checkpoint does not record its model's context length: give {option}")
    return tomllib.loads(manifest["config"])["training"]["seq_len"]


def check_companions(origin: str, companions: Mapping[str, bytes]) -> None:
    """Raise TitaniteError for a *.json file without a JSON object."""
    for file, content in companions.items():
        if file.endswith(".json"):
            json_object(content, f"{origin}/{file}")


# ---------------------------------------------------------------- import


def import_model(folder: Path, place: str, *, check: str) -> None:
    """Write a Hugging Face model as a checkpoint of step 0 without moments. Values and types stay the same.

    Also copies the tokenizer's files, if there are any. `check`: see `check_result`. Raises CheckpointError.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; `hf download OWNER/NAME --local-dir FOLDER` gets one")
    raw = files.read_json(folder / "config.json")
    try:
        family, adapter = imported_family(raw)
        flavor = adapter.from_hf_config(raw)
        weights = files.find_weights(folder)
        adapter.check_hf_names(weights.keys(), flavor)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{folder / 'config.json'}: {reason}") from None
    companions = read_companions(folder)
    check_companions(str(folder), companions)
    store, name = _new_checkpoint(place)
    model, names = build_model(MODELS[family], flavor), adapter.hf_names(flavor)
    shapes = shapes_of(model)
    dtypes = files.check_shapes(weights, {hf_name: shapes[ours] for ours, hf_name in names.items()})
    pieces = [
        piece
        for ours, hf_name in names.items()
        for piece in split_rows(("model", ours), dtypes[hf_name], shapes[ours], PIECE_BYTES)
    ]
    plan = plan_pieces(pieces)
    total = sum(piece.tensor_storage_size() or 0 for piece in pieces)

    def read(item: WriteItem) -> Tensor:
        assert item.tensor_data is not None
        hf_name, chunk = names[item.index.fqn.removeprefix("model.")], item.tensor_data.chunk
        with files.open_file(weights[hf_name]) as file:
            rows = file.get_slice(hf_name)[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
        bar.update(rows.nbytes)
        return rows

    identity = {"name": family, **dataclasses.asdict(flavor)}
    companions[MODEL_FILE] = (json.dumps(identity, indent=2) + "\n").encode()
    facts = {
        "step": 0,
        "world_size": 1,
        "identity": identity,
        "dataloader": {},
        "imported": raw | {"max_position_embeddings": raw.get("max_position_embeddings", 2048)},
    }
    if TOKENIZER not in companions:
        logger.info(f"{folder}: no {TOKENIZER}, so the checkpoint gets none")
    with store.create(f"{name}/{MODEL_FILE}") as file:  # on a disk refused if another import has begun meanwhile
        file.write(companions[MODEL_FILE])
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="import", disable=None, leave=False) as bar:
            written = write_items(store, name, 0, plan.files, read)
        commit(store, name, plan, [written], facts, companions)
        load_newest([(store, name)], Ranks(), lambda opened: check_result(folder, opened, model, names, check))
    except BaseException:
        try:
            store.remove([f"{name}/{MANIFEST}", *store.sizes(name)])
        except StoreError as error:  # the first error says more
            logger.warning(f"{place}: the unfinished checkpoint could not be removed: {error}")
        raise
    logger.info(f"{place}: {total / 1e9:.2f} GB\n{how_to_start(place, family, flavor)}")


def imported_family(config: Mapping[str, Any]) -> tuple[str, HuggingFace]:
    """The family with a config.json's model_type, and its adapter. Raises ValueError if there is none."""
    known = {spec.hf.MODEL_TYPE: (name, spec.hf) for name, spec in MODELS.items() if spec.hf}
    model_type = config.get("model_type")
    if model_type not in known:
        raise ValueError(f"model_type = {model_type!r}: must be one of {', '.join(known)}")
    return known[model_type]


def _new_checkpoint(place: str) -> tuple[Store, str]:
    """The store and name of a checkpoint to be made at `place`. Raises CheckpointError if something is there."""
    if place not in LOCAL_OR_S3:
        raise CheckpointError(f"{place}: must be a string {LOCAL_OR_S3}")
    parent, _, name = place.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or ("://" in place and parent.endswith("/")):  # in an object store, // is not /
        raise CheckpointError(f"{place}: name a new folder, or a prefix in a bucket after a single slash")
    store = open_store(parent or ("/" if place.startswith("/") else "."))
    if store.sizes(name):
        raise CheckpointError(f"{place}: exists; name a new checkpoint")
    return store, name


def how_to_start(place: str, family: str, flavor: Any) -> str:
    """The options for train.py to start a run from these weights."""
    chosen = "" if family == Model().name else f"--model.name={family} "
    for name, known in MODELS[family].flavors.items():
        if dataclasses.replace(known, vocab_size=flavor.vocab_size) == flavor:
            vocabulary = "" if known.vocab_size == flavor.vocab_size else f" --model.vocab_size={flavor.vocab_size}"
            return f"start from it with {chosen}--model.flavor={name}{vocabulary} --checkpoint.initial_load={place}"
    defaults = {field.name: field.default for field in dataclasses.fields(flavor)}
    values = {key: value for key, value in vars(flavor).items() if value != defaults[key]}
    arguments = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return (
        f"no flavor has this shape; add to FLAVORS in models/{family}/__init__.py:\n"
        f'    "NAME": {type(flavor).__name__}({arguments}),\n'
        f"then start from it with {chosen}--model.flavor=NAME --checkpoint.initial_load={place}"
    )


# ---------------------------------------------------------------- test of the result


def check_result(folder: Path, opened: Opened, model: nn.Module, names: Mapping[str, str], check: str) -> None:
    """Compare the Hugging Face folder with the checkpoint. Raises CheckpointError if they differ.

    `model` is on the meta device. `names`: its parameters' names → Hugging Face's. `check` "logits" compares with
    transformers, in float32; "tensors" every value, in bounded memory; "auto" takes "logits" if transformers is
    installed and both models fit in memory.
    """
    needed = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    if check == "auto":
        check = "logits"
        if find_spec("transformers") is None:
            logger.info("transformers is not installed: comparing tensors instead of logits")
            check = "tensors"
        elif needed > 0.8 * available_bytes():
            logger.info(f"both models need {needed / 1e9:.1f} GB, too much here: comparing tensors instead of logits")
            check = "tensors"
    if check == "tensors":
        check_tensors(folder, opened, names)
    else:
        check_logits(folder, opened, model)
        if (folder / TOKENIZER).is_file():
            check_tokenizer(folder)


def check_tensors(folder: Path, opened: Opened, names: Mapping[str, str]) -> None:
    """Compare every tensor of both sides bit for bit, in the files' type."""
    weights = files.find_weights(folder)
    for ours, hf_name in tqdm(names.items(), desc="compare", disable=None, leave=False):
        with files.open_file(weights[hf_name]) as file:
            theirs = file.get_tensor(hf_name)
        expected = torch.empty_like(theirs)
        read_state(opened, {"model": {ours: expected}})
        if not torch.equal(theirs, expected):
            raise CheckpointError(f"{weights[hf_name]}: {hf_name} differs from that in {opened.url}")
    logger.info(f"{len(names)} tensors compared bit for bit")


def check_logits(folder: Path, opened: Opened, model: nn.Module) -> None:
    """Compare logits of 64 tokens, in float32, with weights rounded as in the files. Allocates `model`'s memory."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    dtype = theirs.dtype
    theirs = theirs.float()
    ours, vocab_size = model.to_empty(device="cpu"), theirs.config.vocab_size
    read_state(opened, {"model": model_tensors([ours])})
    tokens = torch.arange(64)[None] * max(1, vocab_size // 64) % vocab_size
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.to(dtype))
        logits, expected = ours(tokens), theirs(tokens).logits
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= LOGITS_TOLERANCE * largest:
        raise CheckpointError(
            f"{folder}: logits differ from transformers' by {difference:.2e}, allowed are {LOGITS_TOLERANCE} of the "
            f"largest, {largest}"
        )
    logger.info(f"logits equal transformers' within {difference:.1e}, the largest being {largest:.3g}")


def check_tokenizer(folder: Path) -> None:
    """Compare AutoTokenizer's token ids of a sample with ours."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids, expected = (
        ours.raw.encode(SAMPLE, add_special_tokens=False).ids,
        theirs(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"],
    )
    if ids != expected or ours.eos_id != theirs.eos_token_id:
        raise CheckpointError(
            f"{folder}: AutoTokenizer gives {expected}, eos {theirs.eos_token_id}; ours {ids}, eos {ours.eos_id}"
        )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping, by the system and by this process's control groups (v2)."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    assert found
    available = [int(found[1]) * 1024]
    own = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
    group = root / "sys/fs/cgroup" / (own[1] if own else "")
    for folder in (group, *group.parents):
        if (folder / "memory.max").is_file() and (limit := (folder / "memory.max").read_text().strip()) != "max":
            cache = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            used = int((folder / "memory.current").read_text()) - (int(cache[1]) if cache else 0)
            available.append(int(limit) - used)
    return min(available)


# ---------------------------------------------------------------- command line


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.hf", description="Models from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a checkpoint as a folder that transformers and vLLM load")
    out.add_argument("place", metavar="RUN_OR_CHECKPOINT", help="run, checkpoints or one checkpoint; folder or s3://")
    out.add_argument("folder", type=output_path, metavar="HF_FOLDER", help="new folder")
    out.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default %(default)s")
    out.add_argument(
        "--file-gb",
        type=float,
        default=5.0,
        help="10^9 bytes per file, about, held in memory; inf: one file (default %(default)s)",
    )
    out.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; default: the run's own")
    out.add_argument("--max-positions", type=int, default=0, help="longest context; default: the training's seq_len")
    back = commands.add_parser("import", help="a Hugging Face Llama as a checkpoint to start from")
    back.add_argument("folder", type=Path, metavar="HF_FOLDER", help="config.json and safetensors files")
    back.add_argument("place", metavar="CHECKPOINT", help="new folder or s3://bucket/prefix")
    for command in (out, back):
        command.add_argument(
            "--check", choices=["auto", "logits", "tensors"], default="auto", help="how to check the result"
        )
    arguments = parser.parse_args(argv)
    if arguments.check == "logits" and find_spec("transformers") is None:
        raise CheckpointError("--check logits: needs transformers, which is not installed")
    if arguments.command == "import":
        import_model(arguments.folder, arguments.place, check=arguments.check)
        return
    if not arguments.file_gb > 0 or arguments.max_positions < 0:  # `not >` also refuses nan
        parser.error("--file-gb must be above 0, --max-positions at least 0")
    export_model(
        arguments.place,
        arguments.folder,
        dtype=arguments.dtype,
        file_bytes=int(min(arguments.file_gb, 1e9) * 1e9),  # inf: one file
        tokenizer=arguments.tokenizer,
        max_positions=arguments.max_positions,
        check=arguments.check,
    )


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    quiet_noisy_loggers()  # from torchao, which transformers imports
    with command_line():
        main(sys.argv[1:])
