"""Every setting of a run: typed, documented, checked before anything starts.

One TOML file describes a run. It may name a `base` to start from, and the command line
overrides it: field default < base < TOML < `--section.field=value`. A section is a frozen
dataclass; `--help` prints the text under each field. Nothing here imports torch, so a
mistake is reported at once:

    python -m config train_configs/debug.toml --training.steps=100
"""

import ast
import dataclasses
import difflib
import inspect
import io
import itertools
import json
import logging
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)


class TitaniteError(Exception):
    """A mistake that the user can fix. The message says what, where and how; no traceback is shown.

    `agreed`: every rank raises the same error, so only one needs to print it.
    """

    def __init__(self, message: str, agreed: bool = False):
        super().__init__(message)
        self.agreed = agreed


class ConfigError(TitaniteError):
    """A setting, or a combination of settings, that cannot be run."""


@contextmanager
def command_line(mistake: int = 1) -> Iterator[None]:
    """Wrap the whole work of a command: an error of the user is one line, without a traceback.

    A TitaniteError exits with `mistake`, Ctrl-C with 130, a reader that stops early, such as `| head`, with 1.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some locales cannot encode every letter
    try:
        with file_errors():
            yield
        if sys.stdout:  # None if it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again when it exits
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except TitaniteError as error:
        if mistake == 1:
            sys.exit(f"error: {error}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(mistake)


@contextmanager
def file_errors(written: object = None) -> Iterator[None]:
    """Turn an OSError raised inside into a one-line TitaniteError.

    With `written`, the file being written, covers every OSError, such as a full disk. Otherwise covers only errors that
    name a file, such as a folder without access.
    """
    try:
        yield
    except OSError as error:
        if written is not None:
            raise TitaniteError(f"{written}: cannot be written: {error.strerror or error}") from None
        if error.filename is None:
            raise
        raise TitaniteError(f"{error.filename}: {error.strerror}") from None


@dataclass(frozen=True)
class Range:
    """Allowed numbers, all of them finite. `min` and `max` are included, `below` is not."""

    min: float = -math.inf
    max: float = math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.min <= number <= self.max and number < self.below

    def __str__(self) -> str:
        if self.below < math.inf:
            return f"from {self.min:g} to below {self.below:g}"
        if self.max == math.inf:
            return f">= {self.min:g}"
        return f"from {self.min:g} to {self.max:g}"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0.0)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Decay = Annotated[float, Range(0.0, below=1.0)]

SLOWEST_BFLOAT16 = 0.98  # decay of a bfloat16 mean: it comes within 24 % of its input; at 0.999 it may never move
PATIENCE = 0.8  # share of a collective's timeout after which the watchdog declares the job hung


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where the run is stored and what makes it repeatable."""

    folder: str = ""
    """Folder of this run; an existing run is resumed. Empty: a new folder under `outputs`."""
    outputs: str = "outputs"
    """Parent folder of automatically named run folders."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the initial weights, the data order and sampling."""
    deterministic: bool = False
    """Use torch's deterministic kernels: the same bits from run to run on a GPU, at some cost in speed."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model: a name in `models.MODELS` and one of its flavors."""

    name: str = "llama"
    """Model family, a key of `models.MODELS`."""
    flavor: str = "debug"
    """Size within the family, such as `8B`."""
    vocab_size: Count = 0
    """Rows of the embedding. 0: the flavor's, or if it has none the tokenizer's rounded up to a multiple of 64."""
    n_layers: Count = 0
    """Number of layers. 0: the flavor's. Fewer try a large model's shapes on few devices."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which prepared datasets to read (see `python -m data.prepare`), and in which order."""

    datasets: tuple[str, ...] = ("datasets/stdlib",)
    """Folders of prepared datasets, or URLs such as `s3://bucket/folder`."""
    weights: tuple[float, ...] = ()
    """Relative share of the samples drawn from each dataset. Empty: in proportion to their tokens."""
    tokenizer: str = ""
    """Path of the tokenizer.json that the data must have been made with. Empty: the datasets' own."""
    window_blocks: Positive = 16
    """Blocks (4-16 MB each) whose documents are shuffled together. More mix better and need more memory."""
    shuffle_samples: bool = False
    """Also shuffle the samples within a window, to spread out the samples of a long document."""
    prefetch_steps: Count = 2
    """Steps that a background thread reads ahead. 0: read each step when it is needed."""
    on_bad_block: Literal["stop", "mask"] = "stop"
    """On a missing or damaged block: `stop` the run and name it, or `mask` its tokens in place."""
    mask_documents: bool = False
    """Restart positions and attention at every document, so that no token sees another document."""
    cache_folder: str = ""
    """Folder on the node's own disk to cache blocks of remote datasets. Empty: your own in the temporary folder."""
    cache_gb: NonNegative = 50.0
    """Size of that cache in 10^9 bytes. The least recently used blocks are removed first."""
    retry_seconds: Count = 180
    """How long to retry a failing request for remote data before the run stops. Well below comm's timeouts."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length and shape of the training."""

    steps: Positive = 400
    """Optimizer steps of the whole run, including those before a resume."""
    seq_len: Annotated[int, Range(2)] = 256
    """Tokens per sequence."""
    local_batch_size: Positive = 8
    """Sequences per microbatch on each data-parallel rank."""
    global_batch_size: Count = 0
    """Sequences per optimizer step, over all ranks and microbatches. 0: one microbatch on every rank."""
    max_norm: NonNegative = 1.0
    """Clip gradients to this norm. 0: no clipping, the norm is only reported."""
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type in which blocks compute. The weights and the optimizer's arithmetic stay in float32."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Data type in which gradients are summed over the ranks."""
    loss_chunks: Count = 1
    """Pieces of the output layer and loss; only one piece's logits exist at a time. 0: 4 pieces, or 1 with tp or pp."""
    gc_interval: Positive = 50
    """Steps between two runs of Python's garbage collector, on all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. Weight decay skips norms and biases (tensors of one dimension)."""

    name: Literal["adamw"] = "adamw"
    """Kind of optimizer."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: Annotated[float, Range(1e-30)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the two running means are stored. They are computed in float32. bfloat16 halves their memory
    and needs decays of at most 0.98: it would round away the changes of slower means."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The learning rate as a function of the step alone."""

    schedule: Literal["wsd", "cosine"] = "wsd"
    """Shape. `wsd`: warm up, hold, then decay linearly at the end. `cosine`: warm up, then half a cosine to the end."""
    warmup_steps: Count = 20
    """Steps of linear warm-up from 0."""
    decay_fraction: Fraction = 0.2
    """Share of all steps, at the end of the run, over which `wsd` decays."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the ranks share the work. The product of the degrees must be the world size."""

    dp_replicate: Positive = 1
    """Replicas of the model (DDP, or HSDP when `dp_shard` is above 1)."""
    dp_shard: Annotated[int, Range(-1)] = -1
    """Ranks that share one copy of the model (FSDP2). -1: all that are left."""
    cp: Positive = 1
    """Context parallelism: ranks that share each sequence. FSDP2 also shards the weights over them."""
    tp: Positive = 1
    """Tensor parallelism: ranks that share each matmul, with the sequence split between matmuls."""
    pp: Positive = 1
    """Pipeline parallelism: groups of ranks that each hold consecutive layers."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward: less memory, one more all-gather in backward. No effect with
    pp. On a single rank: cast weights where they are used; false casts once a step and takes 2 bytes per weight."""
    reshard_group_size: Count = 0
    """With reshard_after_forward: until backward, shard weights over groups of this size, say a node. 0: over all."""
    sync_every_microbatch: bool = True
    """Sum gradients over the shards after each microbatch. False: only after the last, with less traffic and more
    memory, as always in a pipeline and on a single rank."""
    prefetch_layers: Count = 0
    """Blocks to gather ahead of the one that computes. 0: FSDP2's default, one block ahead, in backward only."""
    reduce_scatter: Literal["backend", "all_to_all"] = "backend"
    """How FSDP2 sums gradients. `all_to_all` exchanges pieces and sums in float32: half the bytes of gloo's on CPU."""
    local_steps: Count = 0
    """Steps that each of the dp_replicate replicas (an island) trains alone between two meetings (DiLoCo). 0: off."""
    outer_lr: NonNegative = 0.7
    """With local_steps: rate of the outer optimizer, which follows the islands' mean change since the last meeting."""
    outer_momentum: Decay = 0.9
    """With local_steps: the outer Nesterov momentum. For short runs set 0, and outer_lr = 1: the islands' mean."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory, and run the optimizer there."""
    async_tp: bool = False
    """Overlap tensor parallelism's communication with its matmuls. Needs CUDA and compile."""
    cp_method: Literal["allgather", "ring"] = "allgather"
    """How keys and values of other ranks arrive: all at once (`allgather`), or rank by rank in less memory (`ring`)."""
    pp_schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"] = "1F1B"
    """Order of the pipeline's forwards and backwards. Interleaved schedules give each rank more than one stage."""
    pp_stages_per_rank: Annotated[int, Range(2)] = 2
    """Stages per rank in the interleaved schedules."""
    pp_microbatch_size: Positive = 1
    """Sequences per pipeline microbatch. Must divide training.local_batch_size."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute activations in backward instead of keeping them."""

    mode: Literal["none", "full", "selective", "budget"] = "none"
    """What to keep. `full`: a block's input. `selective`: also attention, every second matmul. `budget`: a share."""
    every_n_layers: Positive = 1
    """With `full` and `selective`: recompute every n-th block. The others keep everything."""
    memory_budget: Fraction = 0.8
    """With `budget`: share of the activations, besides attention's, that the compiler may keep. Needs compile."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile, per transformer block and for the loss."""

    enable: bool = False
    """Compile every block as one full graph, and the loss."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. `aot_eager` and `eager` help to find a fault of the compiler."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Float8 matmuls by torchao, with dynamic scales."""

    enable: bool = False
    """Convert the linear layers of the blocks to float8 training."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """torchao's recipe: one scale per tensor, per row, or per row with weight gradients in high precision."""
    fsdp_all_gather: Literal["auto", "on", "off"] = "auto"
    """Gather weights in float8, half the bytes of bfloat16. `auto`: with `tensorwise`, those whose rows divide evenly
    over the ranks."""
    tp_all_gather: Literal["auto", "on", "off"] = "auto"
    """Gather activations of tensor parallelism in float8. `auto`: with `tensorwise`."""
    precompute_scale: Literal["auto", "on", "off"] = "auto"
    """Compute the scales of all gathered weights by one all-reduce a step, not one each. `auto`: as `fsdp_all_gather`,
    but not with `parallelism.cpu_offload`."""
    filter: Literal["auto", "all"] = "auto"
    """Layers to convert. `auto`: those that gain by torchao's thresholds. `all`: those whose sizes 16 divides."""
    skip: tuple[str, ...] = ("output",)
    """Layers whose name contains one of these stay in high precision."""
    emulate: bool = False
    """For devices without float8 matmul: compute in high precision on values rounded to float8."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are written."""

    enable: bool = True
    """Write checkpoints, including one at the end of the run, and resume from them."""
    folder: str = ""
    """Folder or s3:// URL of the checkpoints. Empty: `checkpoints` in the run folder."""
    interval: Positive = 200
    """Steps between two checkpoints."""
    mode: Literal["sync", "async"] = "sync"
    """How to save. `async`: training goes on while a background thread copies the state to host memory and saves it."""
    upload: str = ""
    """Second place, such as s3://bucket/prefix, to copy each checkpoint to in the background. Empty: none."""
    keep: Count = 2
    """Newest checkpoints to keep. Older ones are removed after the next commit. 0: keep all."""
    keep_every: Count = 0
    """Keep checkpoints whose step is a multiple of this for ever. 0: none."""
    save_initial: bool = False
    """Also write a checkpoint of step 0, before the first step, as a common start for other runs."""
    save_model: bool = False
    """At the last step, also write the model alone, as `model-STEP-...` beside the checkpoints."""
    initial_load: str = ""
    """Checkpoint, or output of `tools.hf import`, whose weights a new run starts from, with fresh moments."""
    timeout_seconds: Positive = 1800
    """Longest time a rank waits for the others while a checkpoint is written or read."""
    visibility_seconds: NonNegative = 10.0
    """Longest wait for an object that was written but that object storage does not show yet."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on held-out documents, and a sample of text."""

    enable: bool = True
    """Measure the validation loss, also at the end of the run."""
    interval: Positive = 100
    """Steps between two validations."""
    max_samples: Count = 256
    """Sequences to measure, always the same: in each of `datasets`, or if empty in all training data. 0: all."""
    datasets: tuple[str, ...] = ()
    """Prepared datasets whose held-out documents to measure, reported by folder name. Empty: `data.datasets`."""
    sample_prompt: str = ""
    """Text that the model continues at the end of the run."""
    sample_tokens: Count = 0
    """Tokens to generate for that sample, fewer if training.seq_len ends it. 0: no sample. Needs sample_prompt."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What to report. `metrics.jsonl` in the run folder is always written."""

    log_interval: Positive = 10
    """Steps between two log lines."""
    log_ranks: tuple[Count, ...] = (0,)
    """Ranks that print progress. Every rank prints errors."""
    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard` in the run folder."""
    hook: str = ""
    """`package.module:function` to call on rank 0 with each row of metrics.jsonl, as a dict. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Torch profiler traces and memory snapshots, in `profile` in the run folder."""

    trace: bool = False
    """Write a Chrome trace of some steps on every rank."""
    trace_start: Positive = 10
    """First step to trace. The step before it warms the profiler up."""
    trace_steps: Positive = 3
    """Number of steps to trace."""
    memory_snapshot: bool = False
    """Record CUDA allocations and write a snapshot when the run ends, also if it runs out of memory."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Timeouts of process groups and of requests to object storage."""

    init_timeout_seconds: Positive = 600
    """Longest wait in a collective until the end of the first step, which includes compilation."""
    train_timeout_seconds: Positive = 300
    """Longest wait in a collective after the first step."""
    store_retry_seconds: Count = 180
    """How long a request that a store of data or checkpoints refuses, fails or does not answer is repeated."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What a run does when something goes wrong."""

    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """On a loss that spikes, or a loss or gradient norm that is not finite: `stop`, `skip` the update, or `rollback`:
    start again from the last checkpoint and skip all updates since. That needs torchrun's --max-restarts."""
    bad_step_budget: Positive = 10
    """Bad steps skipped or rolled back in the whole run. One more stops it."""
    spike_factor: NonNegative = 0.0
    """Also treat a loss above this multiple of the median of the 32 steps before as bad. 0: off."""
    restarts_without_progress: Count = 3
    """Restarts of a job in a row without a new checkpoint. One more is refused."""
    straggler_interval: Count = 0
    """Steps between two timings of the same small computation on all ranks, to name slow ranks. 0: never."""
    replay_interval: Count = 0
    """Steps between two that are computed twice and compared bit for bit. 0: none. Needs run.deterministic."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    failures: Failures = field(default_factory=Failures)


SECTIONS: types.MappingProxyType[str, type] = types.MappingProxyType(get_type_hints(Config))
KINDS = types.MappingProxyType(  # dotted key → type of its value, with its Range
    {
        f"{section}.{name}": kind
        for section, fields in SECTIONS.items()
        for name, kind in get_type_hints(fields, include_extras=True).items()
    }
)


# ---------------------------------------------------------------- reading


def load_config(argv: Sequence[str]) -> Config:
    """The Config that `FILE.toml --section.field=value ...` describes, or `--resume=RUN_FOLDER ...`.

    Raises ConfigError naming the dotted key, its value, what is allowed and the nearest name.
    """
    asked = next((index for index, word in enumerate(argv, 1) if word in ("-h", "--help")), 0)
    if asked:
        text = help_text(list(itertools.takewhile(lambda word: not word.startswith("-"), argv[asked:])))
        with command_line():
            print(text)
        raise SystemExit(0)
    overrides = _parse_command_line(argv)
    file, folder = overrides.pop("config", ""), overrides.pop("resume", "")
    if folder and (file or "run.folder" in overrides):
        other = f"--config={file}" if file else "--run.folder"
        raise ConfigError(_redact(f"--resume={folder}: is itself config and run.folder; leave {other} out"))
    values = _read_run(folder) if folder else read_toml(Path(file)) if file else {}
    for key, text in overrides.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = _parse_value(text, KINDS[key])
    config = from_dict(values)
    check_config(config)
    return config


def with_defaults(defaults: Sequence[str], options: Sequence[str]) -> list[str]:
    """`options`, after those of `defaults` whose key they do not set; each is `--section.field=value`."""
    given = {option.partition("=")[0] for option in options}
    return [*(default for default in defaults if default.partition("=")[0] not in given), *options]


def from_dict(values: dict[str, Any]) -> Config:
    """Build a Config from nested dicts and check each key and value. Raises ConfigError."""
    sections: dict[str, Any] = {}
    for section, entries in values.items():
        if section not in SECTIONS:
            raise ConfigError(f"[{section}]: unknown section{_nearest(section, SECTIONS)}")
        if not isinstance(entries, dict):
            raise ConfigError(f"{section} = {_redact(repr(entries))}: must be a section, [{section}]")
        checked = {}
        for name, value in entries.items():
            key = f"{section}.{name}"
            if key not in KINDS:
                raise _unknown_key(key)
            checked[name] = _check_value(key, value, KINDS[key])
        sections[section] = SECTIONS[section](**checked)
    return Config(**sections)


def read_toml(path: Path, _children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file as nested dicts, over the file that its top-level `base` names, if any.

    `base` is relative to the file that names it. Raises ConfigError.
    """
    if path.resolve() in _children:
        raise ConfigError(f"{path}: its `base` leads back to itself")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        folders = {path.parent if path.parent.is_dir() else Path("."), Path("train_configs")}
        found = sorted(file for folder in folders for file in folder.glob("*.toml"))
        nearby = [str(file) for file in found if file.name != "pyproject.toml"]
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{_nearest(str(path), nearby)}") from None
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    base = values.pop("base", None)
    try:
        from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r}: must be the path of a TOML file")
    merged = read_toml(path.parent / base, (*_children, path.resolve()))
    for section, entries in values.items():
        merged.setdefault(section, {}).update(entries)
    return merged


def read_recorded(text: bytes, place: object) -> dict[str, Any]:
    """The settings that a run at `place` recorded as TOML, perhaps with another version, as nested dicts.

    Leaves out settings that this version does not know and names them in a warning. Raises ConfigError.
    """
    try:
        recorded = tomllib.loads(text.decode())
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{place}: its config is not valid TOML: {error}") from None
    values: dict[str, dict[str, Any]] = {}
    unknown = []
    for section, entries in recorded.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{place}: {section} = {_redact(repr(entries))}: must be in a section")
        for name, value in entries.items():
            try:
                from_dict({section: {name: value}})
                values.setdefault(section, {})[name] = value
            except ConfigError:
                unknown.append(f"{section}.{name} = {_redact(repr(value))}")
    if unknown:
        logger.warning(f"{place}: settings that this version does not know, left out: {', '.join(unknown)}")
    return values


def _read_run(folder: str) -> dict[str, Any]:
    """The settings that the run in `folder` recorded, to go on with it there. Raises ConfigError."""
    file = Path(folder, "config.toml")
    try:
        values = read_recorded(file.read_bytes(), file)
    except OSError as error:
        runs = [str(found.parent) for found in Path(folder).parent.glob("*/config.toml")]
        raise ConfigError(
            f"--resume={_redact(folder)}: not the folder of a run, its config.toml cannot be read: {error.strerror}"
            f"{close_match(folder, runs)}"
        ) from None
    values.setdefault("run", {})["folder"] = folder
    return values


def _parse_command_line(argv: Sequence[str]) -> dict[str, str]:
    """`--key=value`, `--key value`, bare `--flag` and FILE.toml words as dotted key, `config` or `resume` → text."""
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.endswith(".toml") and not word.startswith("-"):
            word = f"--config={word}"
        if not word.startswith("--"):
            raise ConfigError(f"{_redact(word)}: expected FILE.toml, --section.field=value or --resume=FOLDER")
        key, equals, text = word[2:].partition("=")
        is_place = key in ("config", "resume")
        if not is_place and key not in KINDS:
            raise _unknown_key(key, "--")
        if not equals and words and not words[0].startswith("--") and (is_place or not words[0].endswith(".toml")):
            equals, text = "=", words.pop(0)
        if not equals and KINDS.get(key) is bool:
            equals, text = "=", "true"
        if not equals or (is_place and not text):
            raise ConfigError(f"--{key}: needs a value, as in --{key}={'PATH' if is_place else '...'}")
        if key in given:
            raise ConfigError(f"--{key}: given twice, {_redact(f'{given[key]!r} and {text!r}')}")
        given[key] = text
    return given


def _parse_value(text: str, kind: Any) -> Any:
    """The value that `text` stands for: itself for a string, else parsed as TOML."""
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [_parse_value(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip()]
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text  # further lines of the text could add more keys
    except ValueError:
        if float in (kind, *get_args(kind)):  # TOML refuses .5 and 1.
            with suppress(ValueError):
                return float(text)
        return text  # the type check says what was expected


def _check_value(key: str, value: Any, kind: Any) -> Any:
    """Return `value` as `kind`. Raises a ConfigError that says what is allowed."""
    base, allowed = get_args(kind) if get_origin(kind) is Annotated else (kind, Range())
    if get_origin(base) is Literal:
        choices = get_args(base)
        if value not in choices:
            raise _bad_value(key, value, _kind_name(base) + close_match(str(value), choices))
        return value
    if get_origin(base) is tuple:
        if not isinstance(value, (list, tuple)):
            raise _bad_value(key, value, _kind_name(kind))
        return tuple(_check_value(key, item, get_args(base)[0]) for item in value)
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not base or (base in (int, float) and value not in allowed):
        raise _bad_value(key, value, _kind_name(kind))
    if base is str and re.search(r"://[^/@]*@", value):
        raise ConfigError(f"{key} = {_redact(value)!r}: credentials in a URL; they are taken from the environment only")
    return value


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        base, allowed = get_args(kind)
        return f"{_kind_name(base)} {allowed}"
    if get_origin(kind) is tuple:
        return f"a list, each {_kind_name(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[kind]


def _bad_value(key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{key} = {_redact(json.dumps(value, default=str))}: must be {allowed}")


OTHER_NAMES = {  # setting → what other projects call it
    "optimizer.lr": "learning_rate",
    "training.local_batch_size": "batch_size micro_batch_size",
    "training.global_batch_size": "gbs",
    "training.steps": "max_steps num_steps iters max_iters",
    "training.seq_len": "seq_length sequence_length context_length",
    "training.max_norm": "grad_clip clip_grad",
    "lr_scheduler.warmup_steps": "warmup warmup_iters",
    "data.datasets": "dataset data_path",
    "run.folder": "output_dir out_dir",
    "--resume": "resume_from",
}


def _unknown_key(key: str, dashes: str = "") -> ConfigError:
    if re.search(r"secret|password|token$|credential|access_key|api_key", key, re.IGNORECASE):
        return ConfigError(f"{key}: credentials are never part of a config; they are taken from the environment")
    return ConfigError(f"{key}: unknown key{_hint(key, dashes)}")


def _hint(key: str, dashes: str = "") -> str:
    """The settings that `key` may mean, to end an error with: by the last part, another project's name or likeness."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    last = {known: known.rpartition(".")[2] for known in KINDS}
    close = [] if "." in key else difflib.get_close_matches(name, last.values(), n=1)
    found = (
        [known for known in KINDS if last[known] == name]
        or [known for known, names in OTHER_NAMES.items() if name in names.split()]
        or [known for known in KINDS if last[known] in close]
    )
    nearest = [dashes + known.removeprefix(dashes) for known in difflib.get_close_matches(key, found, n=3, cutoff=0)]
    if nearest:
        return f"; did you mean {' or '.join(nearest)}?"
    return close_match(key, (*KINDS, "--config", "--resume")) or "; --help WORD prints the settings about a word"


def _nearest(name: str, names: Collection[str]) -> str:
    known = ", ".join(itertools.islice(names, 20))
    return close_match(name, names) or (f"; known are {known}" if known else "")


def close_match(name: str, names: Iterable[str]) -> str:
    """A hint to end an error with: the nearest of `names`, or "" if none is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _redact(text: str) -> str:
    """`text` with user and password hidden in any URL."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)


# ---------------------------------------------------------------- checks across fields


def check_config(config: Config) -> None:
    """Refuse combinations that cannot run with any number of processes. Raises ConfigError."""
    for key, reason in _refusals(config):
        raise ConfigError(f"{key} = {json.dumps(_get(config, key), ensure_ascii=False)}: {reason}")


def _refusals(config: Config) -> Iterator[tuple[str, str]]:
    """The key of each setting that cannot be what it is beside the others, and why not."""
    data, held_out, parallelism = config.data, config.validation.datasets, config.parallelism
    schedule, steps, local_steps = config.lr_scheduler, config.training.steps, parallelism.local_steps
    optimizer, chunks = config.optimizer, config.training.loss_chunks
    mode, every = config.activation_checkpoint.mode, config.activation_checkpoint.every_n_layers
    # -- places that would be misread as something else
    folders = ("run.folder", "run.outputs", "data.cache_folder")
    for_checkpoints = ("checkpoint.folder", "checkpoint.upload", "checkpoint.initial_load")
    for key in (*folders, *for_checkpoints, "data.datasets", "validation.datasets"):
        value = _get(config, key)
        for place in (value,) if isinstance(value, str) else value:
            if mistake := misread(place):
                yield key, mistake
            if key in folders and "://" in place:
                hint = "; checkpoint.folder and checkpoint.upload may be one" if key.startswith("run") else ""
                yield key, f"must be a folder, not a URL{hint}"
            if key in for_checkpoints and "://" in place and not re.match("s3://[^/]", place):
                yield key, "must be a folder or s3://bucket/prefix"

    # -- datasets that cannot be told apart or mixed
    if not data.datasets:
        yield "data.datasets", "name at least one folder made by `python -m data.prepare`"
    if len(set(map(Path, data.datasets))) < len(data.datasets):  # a/b and a/b/ are one
        yield "data.datasets", "a dataset is named twice"
    if data.weights and len(data.weights) != len(data.datasets):
        yield "data.weights", f"must have an entry for each of data.datasets = {list(data.datasets)}"
    if any(weight <= 0 for weight in data.weights):
        yield "data.weights", "every weight must be above 0"
    if len({url.rstrip("/").rpartition("/")[2] for url in held_out}) < len(held_out):
        yield "validation.datasets", "two have the same last name"

    # -- settings that would have no effect without another
    saving, inductor = config.checkpoint.enable, config.compile.enable and config.compile.backend == "inductor"
    compiled = 'compile.enable = true and compile.backend = "inductor"'
    unsplit = parallelism.tp == parallelism.pp == 1
    for key, met, need in (  # `key=choice`: only that choice has the need
        ("failures.replay_interval", config.run.deterministic, "run.deterministic = true, for the same bits twice"),
        ("failures.on_bad_step=rollback", saving, "checkpoint.enable = true"),
        ("checkpoint.save_initial", saving, "checkpoint.enable = true"),
        ("checkpoint.save_model", saving, "checkpoint.enable = true"),
        ("checkpoint.upload", saving, "checkpoint.enable = true"),
        ("activation_checkpoint.mode=budget", inductor, compiled),
        ("activation_checkpoint.every_n_layers", every == 1 or mode in ("full", "selective"), "mode full or selective"),
        ("parallelism.async_tp", inductor, compiled),
        ("parallelism.async_tp", parallelism.tp > 1, "parallelism.tp above 1"),
        ("parallelism.reshard_group_size", parallelism.reshard_after_forward, "reshard_after_forward = true"),
        # With pp, weights stay gathered. FSDP2's groups support neither tp's DTensors nor islands' ranks.
        ("parallelism.reshard_group_size", unsplit and not local_steps, "parallelism.pp = 1, tp = 1, local_steps = 0"),
        ("parallelism.local_steps", parallelism.dp_replicate > 1, "parallelism.dp_replicate above 1, the islands"),
        ("training.loss_chunks", chunks < 2 or unsplit, "parallelism.tp = 1 and pp = 1, which split logits and batch"),
        ("validation.sample_tokens", config.validation.sample_prompt, "validation.sample_prompt, the text to continue"),
    ):
        key, _, choice = key.partition("=")
        if (value := _get(config, key)) and choice in ("", value) and not met:
            yield key, f"needs {need}"

    # -- waits that other ranks would take for a hang
    shortest = min(("train_timeout_seconds", "init_timeout_seconds"), key=lambda name: getattr(config.comm, name))
    patience = round(PATIENCE * getattr(config.comm, shortest))
    retries, saves = config.comm.store_retry_seconds, config.checkpoint
    if any("://" in url for url in (*data.datasets, *held_out)) and data.retry_seconds >= patience:
        yield "data.retry_seconds", f"must be below {patience}, {PATIENCE:g} x comm.{shortest}, a hang to other ranks"
    if any("://" in url for url in (saves.folder, saves.upload)) and retries >= patience:
        yield "comm.store_retry_seconds", f"must be below {patience}, {PATIENCE:g} x comm.{shortest}, a hang to others"
    if retries + saves.visibility_seconds >= saves.timeout_seconds:
        longest = f"{retries + saves.visibility_seconds:g} = comm.store_retry_seconds + visibility_seconds"
        yield "checkpoint.timeout_seconds", f"must exceed {longest}, the longest wait for an object"
    first = saves.folder or (config.run.folder and f"{config.run.folder}/checkpoints")
    if saves.upload and first and Path(saves.upload).resolve() == Path(first).resolve():
        yield "checkpoint.upload", "is checkpoint.folder itself; name a second place"

    # -- what does not fit the steps of the run
    decay_steps = round(schedule.decay_fraction * steps) if schedule.schedule == "wsd" else 0
    if schedule.warmup_steps + decay_steps > steps:
        taken = f"of which lr_scheduler.decay_fraction = {schedule.decay_fraction} takes {decay_steps}"
        yield "lr_scheduler.warmup_steps", f"does not fit in training.steps = {steps}, {taken}"
    first_traced = max(2, config.profiling.trace_start)  # the step before warms the profiler up
    if config.profiling.trace and first_traced > steps:
        yield "profiling.trace_start", f"the first step traced, {first_traced}, exceeds training.steps = {steps}"
    for name in ("checkpoint", "validation"):
        section = getattr(config, name)
        if local_steps and section.enable and section.interval % local_steps:
            yield f"{name}.interval", f"must be a multiple of parallelism.local_steps = {local_steps}, the meetings"

    # -- steps that cannot be judged or computed
    if 0 < config.failures.spike_factor <= 1:
        yield "failures.spike_factor", "must be above 1, a multiple of the usual loss, or 0 for off"
    slow = "beta1" if optimizer.beta1 >= optimizer.beta2 else "beta2"
    if optimizer.state_dtype == "bfloat16" and getattr(optimizer, slow) > SLOWEST_BFLOAT16:
        limit = f'at most {SLOWEST_BFLOAT16} with optimizer.state_dtype = "bfloat16", where slower means do not move'
        yield f"optimizer.{slow}", f"must be {limit}"
    if loss_chunks(config) > 1 and config.float8.enable and not any(part in "output" for part in config.float8.skip):
        yield "training.loss_chunks", 'must be 1 unless float8.skip names "output"'
    if not parallelism.sync_every_microbatch and parallelism.pp > 1:
        yield "parallelism.sync_every_microbatch", f"has no effect with parallelism.pp = {parallelism.pp}; set true"


def misread(place: str) -> str:
    """Why a folder or URL would be misread as something else, to end an error with; "" if it would not."""
    if place.startswith("~"):
        return "~ is not expanded here; write the whole path"
    cut = re.match(r"(\w+):/(?!/)", place)
    return f"a URL has two slashes, {cut[1]}://{place[cut.end() :]}" if cut else ""


def misplaced(output: str) -> str:
    """Why a command cannot write to its `--output`, to end an error with; "" if it can."""
    if not output:
        return "must not be empty"
    if "://" in output:
        return "must be on this machine; copy it from there when it is finished"
    return misread(output)


def loss_chunks(config: Config) -> int:
    """Number of pieces in which the loss is computed."""
    shared = config.parallelism.tp > 1 or config.parallelism.pp > 1
    return config.training.loss_chunks or (1 if shared else 4)


ONE_SCALE = "tensorwise"  # the float8 recipe with one scale per tensor, independent of which rank holds which rows


def gathers_float8(float8: Float8) -> bool:
    """Whether FSDP2 gathers the converted weights in float8."""
    return float8.enable and float8.fsdp_all_gather != "off" and float8.recipe == ONE_SCALE


def precomputes_scales(config: Config) -> bool:
    """Whether one all-reduce per step computes the scales of the gathered weights ahead.

    Not for weights on the host, which lose their scales on the way to the device (torch 2.13).
    """
    float8 = config.float8
    return gathers_float8(float8) and float8.precompute_scale != "off" and not config.parallelism.cpu_offload


def gathers_activations(float8: Float8) -> bool:
    """Whether tensor parallelism gathers the inputs of the converted layers in float8."""
    return float8.enable and float8.tp_all_gather != "off" and float8.recipe == ONE_SCALE


def grad_accum_steps(training: Training, dp: int) -> int:
    """Number of microbatches per optimizer step, given `dp` data-parallel ranks. Raises ConfigError."""
    per_microbatch = training.local_batch_size * dp
    accumulation, rest = divmod(training.global_batch_size or per_microbatch, per_microbatch)
    if rest or not accumulation:
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size}: must be a multiple of "
            f"training.local_batch_size x data-parallel ranks = {training.local_batch_size} x {dp} = {per_microbatch}"
        )
    return accumulation


# ---------------------------------------------------------------- writing


def to_toml(config: Config) -> str:
    """The resolved config as TOML with every field. Reading it gives the same Config."""
    lines = []
    for section, fields in dataclasses.asdict(config).items():
        lines += [f"[{section}]"]
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()] + [""]
    return "\n".join(lines)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) of the settings that differ."""
    pairs = {key: (_get(old, key), _get(new, key)) for key in KINDS}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def help_text(words: Sequence[str] = ()) -> str:
    """The text of `--help WORD ...`: fields with type, default and documentation, if their name or text has all words.

    Raises ConfigError if there is none.
    """
    usage = "usage: train.py [FILE.toml | --resume=RUN_FOLDER] [--section.field=value ...] [--help [WORD ...]]"
    lines = [] if words else [usage, ""]
    for section, kind in SECTIONS.items():
        docs, found = field_docs(kind), []
        for item in dataclasses.fields(kind):
            key, default = f"{section}.{item.name}", json.dumps(item.default)
            if all(word.lower() in " ".join(f"{key} {docs[item.name]}".lower().split()) for word in words):
                found += [f"  --{key}=...  {_kind_name(KINDS[key])}; default {default}"]
                found += [textwrap.indent(docs[item.name], " " * 6)]
        if found:
            lines += ["", f"[{section}]  {inspect.getdoc(kind)}", *found]
    if not lines:
        raise ConfigError(f"--help {' '.join(words)}: no setting has this in its name or text{_hint(words[0], '--')}")
    return "\n".join(lines).lstrip()


def field_docs(section: type) -> dict[str, str]:
    """Field of `section` → the string literal under it in this file's source."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    return {
        field.target.id: inspect.cleandoc(str(text.value.value))
        for field, text in itertools.pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _get(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


if __name__ == "__main__":
    with command_line(mistake=2):
        text = to_toml(load_config(sys.argv[1:]))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # TOML is UTF-8 in any locale
        print(text)
