"""The models that train.py knows. To add one, add a folder beside `llama` and a line to MODELS."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn

import config as settings
from checkpoint.loading import load_place
from config import Config, ConfigError, close_match
from models.llama import FLAVORS
from models.llama.model import Llama, LlamaConfig
from models.llama.parallelize import apply_parallelism, check_parallelism, check_replacements


@dataclass(frozen=True)
class ModelSpec:
    """What train.py needs of a model family.

    `model(flavor)` builds a module with `init_weight(name, weight, generator)` and `flops_per_token(seq_len)`. Flavors
    are dataclasses of the type `shape` with `vocab_size`, `dim` and `n_layers`, and take what JSON makes of a field.
    `check_parallelism(flavor, config)` raises ConfigError if the two do not fit, `check_replacements(model, config,
    chunks)` if a parallelism or the loss in chunks would ignore an edit of the model. `apply_parallelism(model, mesh,
    config)` shards the model and returns the parts this rank holds. `hf` names the module with the functions of
    models/llama/hf.py, for tools.hf; "": the family does not cross to Hugging Face.
    """

    model: Callable[[Any], nn.Module]
    flavors: Mapping[str, Any]
    shape: type
    check_parallelism: Callable[..., None]
    check_replacements: Callable[..., None]
    apply_parallelism: Callable[..., list[nn.Module]]
    hf: str = ""


LLAMA = ModelSpec(
    model=Llama,
    flavors=FLAVORS,
    shape=LlamaConfig,
    check_parallelism=check_parallelism,
    check_replacements=check_replacements,
    apply_parallelism=apply_parallelism,
    hf="models.llama.hf",
)
MODELS = MappingProxyType({"llama": LLAMA})


def find_model(model: settings.Model, data_vocab_size: int) -> tuple[ModelSpec, Any]:
    """The model family and flavor that `model` names, with its layers and room for the data. Raises ConfigError."""
    spec = _look_up("model.name", model.name, MODELS)
    flavor = _changed_flavor(model, spec)
    # A multiple of 64 keeps the output matmul on the fast path of GPUs, and 16 divides it for float8.
    vocab_size = flavor.vocab_size or -(-data_vocab_size // 64) * 64
    if vocab_size < data_vocab_size:
        needed = f"must be at least {data_vocab_size}, for the data's tokenizer"
        raise ConfigError(f"model.vocab_size = {vocab_size}, of model.flavor = {model.flavor!r}: {needed}")
    return spec, dataclasses.replace(flavor, vocab_size=vocab_size)


def _changed_flavor(model: settings.Model, spec: ModelSpec) -> Any:
    """The flavor that `model` names, with the fields that it sets. Raises ConfigError."""
    changes = set_fields(model)
    fields = {}
    if model.flavor != settings.FROM_CHECKPOINT:
        fields = dataclasses.asdict(_look_up("model.flavor", model.flavor, spec.flavors))
        head_dim = fields.get("head_dim")
        if head_dim and head_dim * fields["n_heads"] == fields["dim"]:
            fields["head_dim"] = 0  # it follows from the other two
    elif not changes:
        raise ConfigError(f'model.flavor = "{model.flavor}": needs checkpoint.initial_load, whose shape it takes')
    for field in dataclasses.fields(spec.shape):
        if f"model.{field.name}" not in settings.KINDS:
            where = f"{spec.shape.__name__}.{field.name}"
            raise ConfigError(f"{where}: is no setting yet; add it to the class Model in config.py")
    try:
        return spec.shape(**fields | changes)
    except (TypeError, ValueError) as error:
        asked = [f"{name} = {value!r}" for name, value in changes.items()]
        raise ConfigError(f"model.flavor = {model.flavor!r} with {', '.join(asked)}: {error}") from None


def set_fields(model: settings.Model) -> dict[str, Any]:
    """The fields of the flavor that `model` sets."""
    entries = msgspec.to_builtins(model)
    return {name: value for name, value in entries.items() if value is not None and name not in ("name", "flavor")}


def settle_model(config: Config) -> Config:
    """`config` with the model and shape of checkpoint.initial_load as settings, if model.flavor asks for them.

    A run that exists has its own, which need no such place any more. Raises TitaniteError.
    """
    model = config.model
    place = config.checkpoint.initial_load
    own = Path(config.run.folder, "model.json")
    if model.flavor != settings.FROM_CHECKPOINT:
        return config
    if config.run.folder and own.is_file():
        try:
            identity = json.loads(own.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{own}: is damaged: {error}") from None
    elif place:
        identity = load_place(place, lambda opened: opened.manifest["identity"])
    else:
        return config  # find_model says what is missing
    recorded = {name: value for name, value in identity.items() if value is not None}
    entries = {"flavor": settings.FROM_CHECKPOINT, **recorded, **set_fields(model)}
    return dataclasses.replace(config, model=settings.from_dict({"model": entries}).model)


def recorded_model(identity: Mapping[str, Any]) -> tuple[ModelSpec, Any]:
    """The model family and flavor that a run recorded in its checkpoints. Raises ConfigError."""
    fields = dict(identity)
    name = fields.pop("name", None)
    spec = _look_up("model of the checkpoint", name, MODELS)
    try:
        return spec, spec.shape(**fields)
    except TypeError as error:
        raise ConfigError(f"the checkpoint holds a model {name!r} of another version of this code: {error}") from None


def build_model(spec: ModelSpec, flavor: Any) -> nn.Module:
    """Build the model on the meta device, without memory.

    Raises ConfigError for what would not be there after sharding: buffers, weights with two names, and initial values
    that are not those of `init_weight`.
    """
    with torch.device("meta"):
        model = spec.model(flavor)
    for name, _ in model.named_buffers():
        raise ConfigError(
            f"buffer {name}: would stay empty, since only parameters get initial values; "
            "compute it in forward, or make it a parameter"
        )
    for name, weight in model.named_parameters():
        _check_initial_values(model, name, weight)
    names = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in names:
            raise ConfigError(
                f"{name}: second name of a weight, would get a weight of its own if sharded; "
                "let forward use one module in both places, as Llama does for tied embeddings"
            )
    return model


def _check_initial_values(model: Any, name: str, weight: nn.Parameter) -> None:
    if weight._version > 1:  # torch's own layers fill a weight once, without effect on the meta device
        raise ConfigError(
            f"{name}: is filled in __init__, which has no effect, since the model is built without memory; "
            f"give its initial values in {type(model).__name__}.init_weight"
        )
    try:
        model.init_weight(name, torch.empty_like(weight), None)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _look_up(key: str, name: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{key} = {name!r}: must be one of {', '.join(known)}{close_match(str(name), known)}")
    return known[name]
