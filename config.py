"""Every setting of a run, documented, and how it is read: field default < `base` < TOML < `--section.field=value`.

Each value is checked here by itself, without torch, so that a mistake is reported at once. Which values fit together
is known to the modules that use them; start.py asks them.

    python -m config train_configs/debug.toml --training.steps=100
"""

import difflib
import inspect
import json
import logging
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

FROM_CHECKPOINT = "checkpoint"  # as model.flavor: the shape of checkpoint.initial_load
# Keys of settings that nobody should write into a config. `sample_token` is none, but a misspelt setting.
CREDENTIALS = r"secret|password|credential|access_key|api_key|(^|\.|auth_|access_|api_|hf_|session_)token$"
PATIENCE = 0.8  # share of a collective's timeout after which the watchdog declares the job hung


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
def command_line(exit_code: int = 1) -> Iterator[None]:
    """Wrap the work of a command: a mistake of the user's ends it with one line and `exit_code`, Ctrl-C with 130."""
    try:
        with file_errors():
            yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (TitaniteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code)


@contextmanager
def file_errors(written: object = None) -> Iterator[None]:
    """Turn an OSError that names a file, or any while the file `written` is written, into a one-line TitaniteError."""
    try:
        yield
    except OSError as error:
        if written is not None:
            raise TitaniteError(f"{written}: cannot be written: {error.strerror or error}") from None
        if error.filename is None:
            raise
        raise TitaniteError(f"{error.filename}: {error.strerror}") from None


UNITS = str.maketrans({"k": "e3", "M": "e6", "B": "e9", "T": "e12"})


def parse_schedule(value: int | str) -> list[tuple[int, int]]:
    """(tokens seen by the run, number from there on), ... of a plain number, or of text such as "128 @ 0, 256 @ 2B".

    Tokens may end with k, M, B or T: 10^3, 10^6, 10^9 or 10^12.
    """
    schedule = []
    for entry in str(value).split(","):
        number, _, tokens = entry.partition("@")
        exact = tokens.translate(UNITS)
        schedule.append((round(float(exact or 0)), int(number)))
    return schedule


LARGEST = 2**63 - 1
# What a value may be; `description` says it in errors and in --help. The upper bounds keep out what is not finite.
LOCAL = Meta(
    pattern=r"^(?!~|\w+:/)",
    description="a string that names a folder or file, not a URL, with ~ written out",
)
LOCAL_OR_S3 = Meta(
    pattern=r"^(s3://[^/@]+(/|$)|(?!~|\w+:/))",
    description="a string that names a folder, with ~ written out, or s3://bucket/prefix, without credentials, which "
    "are taken from the environment",
)
BY_TOKENS = Meta(
    pattern=r"^\s*[1-9]\d*\s*@\s*0\s*(,\s*[1-9]\d*\s*@\s*\d[\d_]*(\.\d+)?[kMBT]?\s*)*$",
    description='such numbers by the tokens seen, from 0 on: "128 @ 0, 256 @ 1.5B"',
)
Count = Annotated[int, Meta(ge=0, le=LARGEST, description="an integer >= 0")]
Positive = Annotated[int, Meta(ge=1, le=LARGEST, description="an integer >= 1")]
CountByTokens = Count | Annotated[str, BY_TOKENS]
LengthByTokens = Annotated[int, Meta(ge=2, le=LARGEST, description="an integer >= 2")] | Annotated[str, BY_TOKENS]
NonNegative = Annotated[float, Meta(ge=0, le=1e30, description="a number >= 0")]
AboveZero = Annotated[float, Meta(gt=0, le=1e30, description="a number above 0")]
Fraction = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Decay = Annotated[float, Meta(ge=0, le=0.99999, description="a number from 0 to 0.99999")]
Folder = Annotated[str, LOCAL]
FolderOrS3 = Annotated[str, LOCAL_OR_S3]


def is_form(text: str, form: Meta) -> bool:
    """Whether `text` begins as LOCAL or LOCAL_OR_S3 says."""
    return re.search(form.pattern or "", text) is not None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where the run is stored and what makes it repeatable."""

    folder: Folder = ""
    """Folder of this run; an existing run is resumed. Empty: a new folder under `outputs`."""
    outputs: Folder = "outputs"
    """Parent folder of automatically named run folders."""
    seed: Count = 0
    """Seed of the initial weights, the data order and sampling."""
    deterministic: bool = False
    """Use torch's deterministic kernels: the same bits from run to run on a GPU, at some cost in speed."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How rotary angles change for contexts longer than the original. None: as models/llama/model.py has it."""

    kind: Literal["", "llama3", "yarn", "linear"] | None = None
    factor: AboveZero | None = None
    original_seq_len: Positive | None = None
    low_freq_factor: AboveZero | None = None
    high_freq_factor: AboveZero | None = None
    beta_slow: NonNegative | None = None
    beta_fast: NonNegative | None = None
    exact_bounds: bool | None = None
    attention_factor: NonNegative | None = None
    full_layers_only: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model: a name in `models.MODELS`, one of its flavors, and fields that differ from the flavor's."""

    # Each field of a family's own config, such as LlamaConfig, is also a line here. None: as the flavor has it.
    name: str = "llama"
    """Model family, a key of `models.MODELS`."""
    flavor: str = "debug"
    """Size within the family: tiny, 2M, debug, 124M, 350M, 1B, 3B, 8B, 8B_3.1, 70B, 70B_3.1, 405B, 1.8B, llama2_7B,
    llama2_13B, granite_7B, granite3.3_2B, granite3.3_8B, granite4.1_3B, qwen3_0.6B, qwen3_1.7B, qwen3_4B, qwen3_8B,
    mistral_7B, smollm3_3B, olmo2_7B, 11B. `checkpoint`: model and shape of checkpoint.initial_load. That is also what
    --checkpoint.initial_load=PLACE means on a command line that names no flavor."""
    vocab_size: Count | None = None
    """Rows of the embedding. 0, as most small flavors have it: the tokenizer's, rounded up to a multiple of 64."""
    dim: Positive | None = None
    """Width of the hidden states."""
    n_layers: Positive | None = None
    """Number of layers. Fewer try a large model's shapes on few devices."""
    n_heads: Positive | None = None
    """Query heads of a layer."""
    n_kv_heads: Positive | None = None
    """Heads of keys and values of a layer. Must divide n_heads."""
    hidden_dim: Positive | None = None
    """Width inside the feed-forward."""
    head_dim: Count | None = None
    """Width of a head, an even number. 0: dim / n_heads, also where the flavor's is that."""
    norm_eps: AboveZero | None = None
    """Added to the mean square in RMSNorm."""
    rope_theta: AboveZero | None = None
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary angles change for long contexts: {kind = "yarn", factor = 4.0, original_seq_len = 8192}. Kinds:
    llama3, yarn, linear. `RopeScaling` in models/llama/model.py says what the keys are."""
    tie_embeddings: bool | None = None
    """Use one weight as embedding and output layer."""
    qkv_bias: bool | None = None
    """Biases of the projections to queries, keys and values."""
    o_bias: bool | None = None
    """Bias of attention's output projection."""
    mlp_bias: bool | None = None
    """Biases of the feed-forward."""
    qk_norm: Literal["", "head", "width"] | None = None
    """RMSNorm of queries and keys: of each head, of all heads together (`width`), or none ("")."""
    norm_after: bool | None = None
    """Norms on what attention and feed-forward return, in place of norms on what they get."""
    windows: tuple[Count, ...] | None = None
    """Tokens that a token sees, itself included, by layer, repeated if there are more layers. 0: all before it."""
    rope_thetas: tuple[NonNegative, ...] | None = None
    """rope_theta by layer, repeated if there are more layers. 0: no rotary embedding."""
    embedding_multiplier: NonNegative | None = None
    """Factor of the embeddings. 0: none."""
    attention_multiplier: NonNegative | None = None
    """Factor of the products of queries and keys, in place of 1 / sqrt(head_dim). 0: none."""
    residual_multiplier: NonNegative | None = None
    """Factor of what attention and feed-forward return. 0: none."""
    logits_divisor: NonNegative | None = None
    """Divisor of the logits. 0: none."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which prepared datasets to read (see `python -m data.prepare`), and in which order."""

    datasets: tuple[FolderOrS3, ...] = ("datasets/stdlib",)
    """Folders of prepared datasets, or URLs such as `s3://bucket/folder`."""
    weights: tuple[AboveZero, ...] = ()
    """Relative share of the samples drawn from each dataset. Empty: in proportion to their tokens."""
    window_blocks: Positive = 16
    """Blocks (4-16 MB each) whose documents are shuffled together. More mix better and need more memory."""
    prefetch_steps: Count = 2
    """Steps that a background thread reads ahead. 0: read each step when it is needed."""
    mask_documents: bool = False
    """Restart positions and attention at every document, so that no token sees another document."""
    cache_folder: Folder = ""
    """Folder on the node's own disk to cache blocks of remote datasets. Empty: one per user in the temporary folder."""
    cache_gb: NonNegative = 50.0
    """Size of that cache in 10^9 bytes. The least recently used blocks are removed first."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length and shape of the training."""

    steps: Positive = 400
    """Optimizer steps of the whole run, including those before a resume."""
    epochs: NonNegative = 0.0
    """Passes over the training data, in place of `steps`. 0: by `steps`."""
    seq_len: LengthByTokens = 256
    """Tokens per sequence. "1024 @ 0, 4096 @ 2B": the longest, cut into sequences of 1024 until the run has seen 2
    billion tokens. Batch sizes count the longest."""
    local_batch_size: Positive = 8
    """Sequences per microbatch on each data-parallel rank."""
    global_batch_size: CountByTokens = 0
    """Sequences per optimizer step, over all ranks and microbatches. 0: one microbatch on every rank. "128 @ 0,
    256 @ 2B": 128, and 256 from the first step on that begins when the run has seen 2 billion tokens."""
    max_norm: NonNegative = 1.0
    """Clip gradients to this norm. 0: no clipping, the norm is only reported."""
    param_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type in which blocks compute. The weights and the optimizer's arithmetic stay in float32. `auto`: bfloat16,
    or float32 on a CPU that has no instructions for it. A resumed run keeps its own."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Data type in which gradients are summed over the ranks."""
    z_loss: NonNegative = 0.0
    """Factor of the squared log-sum-exp of a token's logits in the loss, such as 1e-5. 0: none. Logged as z_loss."""
    loss_chunks: Count = 1
    """Pieces of the output layer and loss; only one piece's logits exist at a time. 0: 4 pieces, or 1 with tp or pp."""

    def __post_init__(self) -> None:
        for name, value in (("seq_len", self.seq_len), ("global_batch_size", self.global_batch_size)):
            begins = [tokens for tokens, _ in parse_schedule(value)]
            if begins != sorted(set(begins)):
                raise ConfigError(f"training.{name} = {value!r}: the tokens seen must rise from 0 on")

    @property
    def seq_lens(self) -> list[int]:
        """Tokens per sequence, in the order of the schedule."""
        return [length for _, length in parse_schedule(self.seq_len)]

    def seq_len_at(self, tokens: int) -> int:
        """Tokens per sequence in a step that begins when the run has seen `tokens`."""
        return [length for begin, length in parse_schedule(self.seq_len) if begin <= tokens][-1]

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequences."""
        return max(self.seq_lens)


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the weights whose name, such as `layers.0.attention.wq.weight`, is like `pattern` (*, ?, [abc])."""

    pattern: str = "*"
    kind: Literal["", "adamw", "muon"] = ""  # "": as optimizer.name has it
    lr: NonNegative = 1.0  # times optimizer.lr
    weight_decay: NonNegative | None = None  # None: as without the group
    betas: tuple[Decay, ...] = ()  # AdamW's two, or Muon's momentum; none: as without the group


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW or Muon. Weight decay skips norms and biases (tensors of one dimension)."""

    name: Literal["adamw", "muon"] = "adamw"
    """Kind of optimizer. `muon` is for the matrices of the layers, the other weights then have AdamW."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running mean of the squared gradient."""
    eps: AboveZero = 1e-8
    """Added to AdamW's denominator."""
    momentum: Decay = 0.95
    """Decay of Muon's running mean of the gradient."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the stored running means. bfloat16 halves their memory and needs decays of at most 0.98."""
    groups: tuple[ParameterGroup, ...] = ()
    """Tables of other settings for some weights, by name: [{pattern = "*norm*", lr = 0.5}]. The first match counts.
    Keys: pattern, kind, lr (a factor), weight_decay, betas."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The learning rate as a function of the step alone."""

    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Shape. `wsd`: warm up, hold, decay at the end. `cosine`: warm up, half a cosine to the end. `constant`: hold."""
    warmup_steps: Count = 20
    """Steps of linear warm-up from 0."""
    decay_fraction: Fraction = 0.2
    """Share of all steps, at the end of the run, over which `wsd` decays."""
    decay_steps: Count = 0
    """Steps over which `wsd` decays, in place of a share. 0: by `decay_fraction`."""
    decay: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay of `wsd`. `sqrt`: fast at first, 1 - the root of the decay's share."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a share of the peak."""
    follow_batch: Count = 0
    """The global batch size for which optimizer.lr is: at others it is multiplied by the square root of their ratio.
    0: it does not follow the batch."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the ranks share the work. The product of the degrees must be the world size."""

    dp_replicate: Positive = 1
    """Replicas of the model (DDP, or HSDP when `dp_shard` is above 1)."""
    dp_shard: Annotated[int, Meta(ge=-1, le=LARGEST, description="an integer >= -1")] = -1
    """Ranks that share one copy of the model (FSDP2). -1: all remaining ranks."""
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
    """With reshard_after_forward: until backward, shard weights over groups of this many ranks. 0: over all ranks."""
    sync_every_microbatch: bool = True
    """Sum gradients over the shards after each microbatch. False: after the last: less traffic, more memory."""
    reduce_scatter: Literal["backend", "all_to_all"] = "backend"
    """How FSDP2 sums gradients. `all_to_all` exchanges pieces and sums in float32: half the bytes of gloo's on CPU."""
    local_steps: Count = 0
    """Steps that each of the dp_replicate replicas, an island, trains alone between two meetings (DiLoCo). 0: off."""
    outer_lr: NonNegative = 0.7
    """With local_steps: rate of the outer optimizer, which follows the islands' mean change since the last meeting."""
    outer_momentum: Decay = 0.9
    """With local_steps: the outer Nesterov momentum. For short runs set 0, and outer_lr = 1: the islands' mean."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory, and run the optimizer there."""
    cp_method: Literal["allgather", "ring"] = "allgather"
    """How keys and values of other ranks arrive: all at once (`allgather`), or rank by rank in less memory (`ring`)."""
    pp_schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B"
    """Order of the pipeline's forwards and backwards. `Interleaved1F1B` gives each rank more than one stage."""
    pp_stages_per_rank: Annotated[int, Meta(ge=2, le=LARGEST, description="an integer >= 2")] = 2
    """Stages per rank with `Interleaved1F1B`."""
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
    """One scale per tensor, per row, or per row with weight gradients in high precision."""
    kernels: Literal["compiler", "own"] = "compiler"
    """What casts: the compiler, from torchao's code, or Triton kernels fused with SwiGLU."""
    fsdp_all_gather: Literal["auto", "off"] = "auto"
    """Gather weights in float8, half bfloat16's bytes. `auto`: with `tensorwise`, if rows divide over the ranks."""
    filter: Literal["auto", "all"] = "auto"
    """Layers to convert. `auto`: those that gain by torchao's thresholds. `all`: all whose sizes 16 divides."""
    skip: tuple[str, ...] = ("output",)
    """Layers whose name contains one of these stay in high precision."""
    always: tuple[str, ...] = ()
    """Layers whose name contains one of these are converted whatever `filter` and `skip` say: wk, wv, output."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are written."""

    enable: bool = True
    """Write checkpoints, including one at the end of the run, and resume from them."""
    folder: FolderOrS3 = ""
    """Folder or s3:// URL of the checkpoints. Empty: `checkpoints` in the run folder."""
    interval: Positive = 200
    """Steps between two checkpoints."""
    mode: Literal["sync", "async"] = "sync"
    """How to save. `async`: training goes on while a background thread copies the state to host memory and saves it."""
    keep: Count = 2
    """Newest checkpoints to keep. Older ones are removed after the next commit. 0: keep all."""
    keep_every: Count = 0
    """Keep checkpoints whose step is a multiple of this forever. 0: none."""
    initial_load: FolderOrS3 = ""
    """Checkpoint or output of `tools.hf import` from whose weights a new run starts, with fresh moments."""
    branch_from: FolderOrS3 = ""
    """Run, `PLACE@STEP` or just `PLACE` for its newest checkpoint, which a new run continues with its own settings."""
    timeout_seconds: Positive = 1800
    """Longest time a rank waits for the others while a checkpoint is written or read."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on held-out documents, and a sample of text."""

    enable: bool = True
    """Measure the validation loss, also at the end of the run."""
    interval: Positive = 100
    """Steps between two validations."""
    max_samples: Count = 256
    """Sequences to measure, always the same ones: of each of `datasets`, or of all training data. 0: all."""
    datasets: tuple[FolderOrS3, ...] = ()
    """Prepared datasets whose held-out documents to measure, reported by folder name. Empty: `data.datasets`."""
    answers: tuple[FolderOrS3, ...] = ()
    """Files of JSON lines with `prompt` and `answer`, whose answers' bits per byte to measure, all of them. Reported by
    the name of the file."""
    average: Count = 0
    """Also measure the mean of the weights in the last so many checkpoints, or as many as there are, as NAME/average.
    0: do not."""
    sample_prompt: str = ""
    """Text that the model continues every `interval` steps, and at the end of the run. Empty: the first words of a
    held-out document."""
    sample_tokens: Count = 0
    """Tokens to generate for that sample, at most up to training.seq_len. 0: no sample."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What to report. `metrics.jsonl` in the run folder is always written."""

    log_interval: Positive = 10
    """Steps between two log lines."""
    per_layer: bool = False
    """Report norms of the gradients, weights and updates of every layer. In logged steps only, which take longer and
    hold a second copy of the weights."""
    log_ranks: tuple[Count, ...] = (0,)
    """Ranks that print progress. Every rank prints errors."""
    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard` in the run folder."""
    hook: str = ""
    """`package.module:function` to call on rank 0 with each row of metrics.jsonl, as a dict. Empty: none."""
    wandb_project: str = ""
    """Project of Weights & Biases to report to, by the package wandb. Empty: none."""


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
    """Record CUDA allocations and write a snapshot when the run ends, even if it ran out of memory."""


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
    spike_sigmas: NonNegative = 0.0
    """Also treat as bad a loss or gradient norm above the mean of the 128 steps before by so many of their standard
    deviations, such as 6. 0: off."""
    restarts_without_progress: Count = 3
    """Restarts of a job in a row without a new checkpoint. One more is refused."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    failures: Failures = Failures()


SECTIONS: types.MappingProxyType[str, type] = types.MappingProxyType(get_type_hints(Config))


def _find_kinds() -> dict[str, Any]:
    kinds = {}
    for section, fields in SECTIONS.items():
        for name, kind in get_type_hints(fields, include_extras=True).items():
            kinds[f"{section}.{name}"] = kind
    return kinds


KINDS = types.MappingProxyType(_find_kinds())  # dotted key → type of its value, with its range or form
OTHER_NAMES = types.MappingProxyType(  # setting → what other projects call it
    {
        "optimizer.lr": ("learning_rate",),
        "training.local_batch_size": ("batch_size", "micro_batch_size"),
        "training.global_batch_size": ("gbs",),
        "training.steps": ("max_steps", "num_steps", "max_iters"),
        "training.seq_len": ("seq_length", "sequence_length", "context_length"),
        "training.max_norm": ("grad_clip",),
        "lr_scheduler.warmup_steps": ("warmup", "warmup_iters"),
        "data.datasets": ("dataset", "data_path"),
        "run.folder": ("output_dir", "out_dir"),
        "resume": ("resume_from",),
    }
)


# ---------------------------------------------------------------- from files and the command line to a Config


def load_config(argv: Sequence[str]) -> Config:
    """The Config of `FILE.toml --section.field=value ...`, or of `--resume=RUN_FOLDER ...`. Raises ConfigError.

    A branch without a FILE has its trunk's recorded config. With `--help [WORD ...]` it prints the settings, and exits.
    """
    asked = [index for index, word in enumerate(argv) if word in ("-h", "--help")]
    if asked:
        words = [word for word in argv[asked[0] :] if not word.startswith("-")]
        print(help_text(load_config(argv[: asked[0]]), words))
        raise SystemExit(0)
    typed = _parse_command_line(argv)
    file = typed.pop("config", "")
    folder = typed.pop("resume", "")
    trunk = typed.get("checkpoint.branch_from", "")
    if folder and (file or "run.folder" in typed):
        raise ConfigError(f"--resume={_redact(folder)}: is itself config and run.folder; leave those out")
    if typed.get("training.epochs") and "training.steps" in typed:
        raise ConfigError("training.steps and training.epochs: each says how long the run is; set one of them")
    if "checkpoint.initial_load" in typed and not folder and not trunk:
        typed = {"model.flavor": FROM_CHECKPOINT} | typed
    values: dict[str, Any] = {}
    if folder:
        values = overlay(_recorded_values(f"--resume={folder}", folder), {"run": {"folder": folder}})
    elif file:
        values = read_toml(Path(file))
    elif trunk:
        values = _trunk_values(trunk)
    return from_dict(overlay(values, nest(typed)))


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Section → name → value of dotted keys."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def overlay(values: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with those of `layer`, which count, over them."""
    merged = {section: dict(entries) for section, entries in values.items()}
    for section, entries in layer.items():
        merged.setdefault(section, {}).update(entries)
    # Steps typed for a run of epochs are meant; a recorded config has both, the steps made of the epochs.
    length = layer.get("training", {})
    if "steps" in length and not length.get("epochs"):
        merged["training"]["epochs"] = 0.0
    return merged


# Settings → the switch that they depend on → its values with which they do nothing.
WITHOUT_EFFECT = (
    ("lr_scheduler.decay", "lr_scheduler.schedule", ("cosine", "constant")),
    ("lr_scheduler.decay_steps", "lr_scheduler.schedule", ("cosine", "constant")),
    ("lr_scheduler.decay_fraction", "lr_scheduler.schedule", ("cosine", "constant")),
    ("lr_scheduler.min_lr_factor", "lr_scheduler.schedule", ("constant",)),
    ("parallelism.outer_lr", "parallelism.local_steps", (0,)),
    ("parallelism.outer_momentum", "parallelism.local_steps", (0,)),
    ("parallelism.cp_method", "parallelism.cp", (1,)),
    ("parallelism.pp_schedule", "parallelism.pp", (1,)),
    ("parallelism.pp_microbatch_size", "parallelism.pp", (1,)),
    ("parallelism.pp_stages_per_rank", "parallelism.pp_schedule", ("1F1B",)),
    ("activation_checkpoint.every_n_layers", "activation_checkpoint.mode", ("none", "budget")),
    ("activation_checkpoint.memory_budget", "activation_checkpoint.mode", ("none", "full", "selective")),
    ("failures.bad_step_budget", "failures.on_bad_step", ("stop",)),
)


def check_effects(config: Config) -> None:
    """Refuse settings that would do nothing, as others are. A section that is switched off may keep its settings.

    Raises ConfigError.
    """
    rows = list(WITHOUT_EFFECT)
    if all(group.kind != "muon" for group in config.optimizer.groups):
        rows.append(("optimizer.momentum", "optimizer.name", ("adamw",)))
    values = flatten(config)
    defaults = flatten(Config())
    for key, switch, off in rows:
        if values[key] != defaults[key] and values[switch] in off:
            shown = f"{key} = {value_text(values[key])}"
            needed = f"{switch} = {value_text(values[switch])}"
            raise ConfigError(f"{shown}: has no effect with {needed}; its default is {defaults[key]!r}")


def _recorded_values(option: str, folder: str) -> dict[str, Any]:
    """The settings that the run in `folder`, which `option` names, recorded. Raises ConfigError."""
    file = Path(folder, "config.toml")
    if not file.is_file():
        runs = [str(other.parent) for other in file.parent.parent.glob("*/config.toml")]
        raise ConfigError(f"{_redact(option)}: no run is there, {file} does not exist{close_match(folder, runs)}")
    with file_errors():
        return read_recorded(file.read_bytes(), file)


def _trunk_values(place: str) -> dict[str, Any]:
    """The settings that a branch takes from the run it begins from, a folder. Raises ConfigError."""
    trunk = re.sub(r"@\d+$", "", place)
    folder = re.sub(r"/checkpoints(/[^/]+)?/?$", "", trunk)  # PLACE may be the run's checkpoints, or one of them
    values = _recorded_values(f"--checkpoint.branch_from={place} without FILE.toml", folder)
    for section, name in (("run", "folder"), ("checkpoint", "branch_from"), ("checkpoint", "initial_load")):
        values.get(section, {}).pop(name, None)
    return values


def from_dict(values: Mapping[str, Any]) -> Config:
    """Build a Config from nested dicts and check each key and value. Raises ConfigError."""
    sections: dict[str, Any] = {}
    for section, entries in values.items():
        if section not in SECTIONS or not isinstance(entries, dict):
            raise ConfigError(f"[{section}]: must be a section: {', '.join(SECTIONS)}{close_match(section, SECTIONS)}")
        checked = {}
        for name, value in entries.items():
            key = f"{section}.{name}"
            checked[name] = convert(key, value, _kind_of(key))
        sections[section] = SECTIONS[section](**checked)
    return Config(**sections)


def read_toml(path: Path, others: Sequence[str] = (), above: Sequence[Path] = ()) -> dict[str, Any]:
    """Read a TOML file as nested dicts, over the file that its `base` names, relative to it. Raises ConfigError.

    Entries with one of the names `others` are no settings, and stay as they are. `above`: files of which it is a base.
    """
    file = path.resolve()
    if file in above:
        raise ConfigError(f"{path}: is its own base, or that of its base")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors put a mark before the text
        base = values.pop("base", "")
        more = {key: values.pop(key) for key in others if key in values}
        from_dict(values)
    except OSError as error:
        nearby = map(str, [*path.parent.glob("*.toml"), *Path("train_configs").glob("*.toml")])
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{close_match(str(path), nearby)}") from None
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    below = read_toml(path.parent / str(base), above=[*above, file]) if base else {}
    return overlay(below, values) | more


def read_recorded(text: bytes, place: object) -> dict[str, Any]:
    """The settings that a run recorded, as nested dicts. Leaves out, and names, unknown ones. Raises ConfigError."""
    try:
        recorded = tomllib.loads(text.decode())
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{place}: its config is not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    unknown = []
    for section, entries in recorded.items():
        for name, value in entries.items():
            if f"{section}.{name}" in KINDS:
                values.setdefault(section, {})[name] = value
            else:
                unknown.append(f"{section}.{name} = {_redact(repr(value))}")
    if unknown:
        logger.warning(f"{place}: settings that this version does not know, left out: {', '.join(unknown)}")
    return values


def recorded_config(folder: Path) -> Config | None:
    """The config that a run recorded in its folder, None if there is none. Raises ConfigError."""
    file = folder / "config.toml"
    return from_dict(read_recorded(file.read_bytes(), file)) if file.is_file() else None


def _parse_command_line(argv: Sequence[str]) -> dict[str, Any]:
    """Dotted key → value as in TOML, and `config` and `resume`. The last one counts. FILE.toml may stand alone."""
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.endswith(".toml") and not word.startswith("-"):
            word = f"--config={word}"
        if not word.startswith("--"):
            raise ConfigError(f"{_redact(word)}: expected FILE.toml, --section.field=value or --resume=FOLDER")
        key, equals, text = word[2:].partition("=")
        is_place = key in ("config", "resume")
        kind = str if is_place else _kind_of(key, "--")
        if not equals and bool in (kind, *get_args(kind)):
            text = "true"
        elif not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        if not text and (is_place or not equals):
            raise ConfigError(f"--{key}: needs a value, as in --{key}={'PATH' if is_place else '...'}")
        given[key] = text if is_place else _parse(key, text)
    return given


def _parse(key: str, text: str) -> Any:
    """The value of a setting that `text` stands for: as in TOML, as it is, or a list of parts. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for value in (_as_toml(text), text, parts, [_as_toml(part) for part in parts]):
        with suppress(ConfigError):
            convert(key, value, KINDS[key])
            return value
    return convert(key, _as_toml(text), KINDS[key])  # says what is wrong


def _as_toml(text: str) -> Any:
    """The value that `text` is in TOML, or a number such as .5; otherwise `text`."""
    with suppress(ValueError):
        return tomllib.loads(f"value = {text}")["value"]
    with suppress(ValueError):
        return float(text)
    return text


def convert(key: str, value: Any, kind: Any) -> Any:
    """`value`, of `key`, as a `kind`. Raises a ConfigError that says what is allowed."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        allowed = kind_name(kind)
        hint = close_match(value, re.findall(r"\w+", allowed)) if isinstance(value, str) else ""
        if "`$" in str(error):  # inside a list or table
            hint += ": " + str(error).replace("`$", f"`{key}")
        raise ConfigError(f"{key} = {_redact(json.dumps(value, default=str))}: must be {allowed}{hint}") from None


def kind_name(kind: Any) -> str:
    """What a value of `kind` may be, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return get_args(kind)[1].description
    if origin is Literal:
        return "one of " + ", ".join(word or '""' for word in get_args(kind))
    if kind in NAMES:
        return NAMES[kind]
    parts = [kind_name(part) for part in get_args(kind) if part not in (..., types.NoneType)]
    if origin is tuple:
        return f"a list, each {parts[0]}"
    return ", or ".join(parts) or f"a table of {', '.join(kind.__struct_fields__)}"


NAMES: Mapping[Any, str] = types.MappingProxyType({str: "a string", bool: "true or false"})


def _kind_of(key: str, dashes: str = "") -> Any:
    """The type of the values of a setting. Raises ConfigError if there is none of that name."""
    if key in KINDS:
        return KINDS[key]
    if re.search(CREDENTIALS, key, re.IGNORECASE):
        raise ConfigError(f"{key}: credentials are never part of a config; they are taken from the environment")
    raise ConfigError(f"{key}: unknown key{_hint(key, dashes)}")


def _hint(key: str, dashes: str = "") -> str:
    """The settings that `key` may mean, to end an error with: by the last part, another project's name or likeness."""
    last = key.rpartition(".")[2].replace("-", "_").lower()
    known = [*KINDS, "config", "resume"]
    meant = [name for name in known if last in (name.rpartition(".")[2], *OTHER_NAMES.get(name, ()))]
    nearest = difflib.get_close_matches(key, known, n=1)
    if meant:
        nearest = difflib.get_close_matches(key, meant, n=3, cutoff=0)
    found = " or ".join(dashes + name for name in nearest)
    return f"; did you mean {found}?" if found else "; --help WORD prints the settings about a word"


def close_match(name: str, names: Iterable[str]) -> str:
    """A hint to end an error with: the nearest of `names`, or "" if none is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _redact(text: str) -> str:
    """`text` with user and password hidden in any URL."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)


# ---------------------------------------------------------------- from a Config to text


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key → value, as plain values that JSON can hold; None: as the model's flavor has it."""
    values = msgspec.to_builtins(config)
    return {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in KINDS}


def to_toml(config: Config) -> str:
    """The resolved config as TOML with every setting that has a value. Reading it gives the same Config."""
    lines = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {value_text(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def value_text(value: Any) -> str:
    """A value of `flatten` as TOML, which has no None."""
    if value is None:
        return "the flavor's"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        entries = [f"{name} = {value_text(entry)}" for name, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) of the settings that differ, as plain values that JSON can hold."""
    after = flatten(new)
    return {key: (value, after[key]) for key, value in flatten(old).items() if value != after[key]}


def help_text(config: Config, words: Sequence[str] = ()) -> str:
    """The settings with all `words` in name or text: type, value in `config`, text. Raises ConfigError if none has."""
    usage = "usage: train.py [FILE.toml | --resume=RUN_FOLDER] [--section.field=value ...] [--help [WORD ...]]"
    parts = [] if words else [usage]
    defaults = flatten(Config())
    values = flatten(config)
    for section, kind in SECTIONS.items():
        lines = [f"[{section}]  {inspect.getdoc(kind)}"]
        docs = field_docs(kind)
        for key in [key for key in KINDS if key.startswith(f"{section}.")]:
            text = docs.get(key.removeprefix(f"{section}."), "")
            if all(word.lower() in f"{key} {text}".lower() for word in words):
                shown = f"default {value_text(defaults[key])}"
                if values[key] != defaults[key]:
                    shown = f"here {value_text(values[key])}; {shown}"
                lines += [f"  --{key}=...  {kind_name(KINDS[key])}; {shown}", textwrap.indent(text, " " * 6)]
        if len(lines) > 1:
            parts.append("\n".join(lines))
    if not parts:
        raise ConfigError(f"--help {' '.join(words)}: no setting has this in its name or text{_hint(words[0], '--')}")
    return "\n\n".join(parts)


def field_docs(section: type) -> dict[str, str]:
    """Field of `section` → the string literal under it in its source."""
    fields = re.findall(r'^    (\w+): .*\n    r?"""((?s:.*?))"""', inspect.getsource(section), re.MULTILINE)
    return {name: inspect.cleandoc(text) for name, text in fields}


if __name__ == "__main__":
    with command_line(exit_code=2):
        resolved = load_config(sys.argv[1:])
        check_effects(resolved)
        print(to_toml(resolved))
