"""What a run reports: metrics.jsonl, TensorBoard and a readable line per log step."""

import dataclasses
import importlib
import json
import logging
import math
import resource
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm

from config import Config, ConfigError, TitaniteError, file_errors, to_toml
from storage.records import append_record, open_records, write_atomically

logger = logging.getLogger(__name__)

# Dense bf16 FLOP/s, without sparsity, from NVIDIA's and AMD's data sheets. The first name found counts.
PEAK_FLOPS = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1300e12),
)

# Field of a row → its group in trackers, which sort groups by name; "" for none. Other fields, such as terms of the
# loss, are in train/.
FIELDS = {
    "step": "",
    "loss": "train/",
    "validation_loss": "valid/",
    "bits_per_byte": "valid/",
    "grad_norm": "train/",
    "lr": "train/",
    "tokens": "train/",
    "tps": "train_speed/",
    "mfu": "train_speed/",
    "tflops": "train_speed/",
    "memory_gib": "train_speed/",
    "data_wait_pct": "train_speed/",
    "step_seconds": "train_speed/",
    "interval_steps": "",
    "skipped": "train/",
    "time": "",
}
WANDB_ID = ".wandb_id"  # in the run's folder: its id at Weights & Biases
# Loggers whose warnings are of no use here, most on every rank: that a gradient norm over two axes takes two messages,
# that a checkpointed region must not change anything in place, that a later torch will refuse one of torchao's calls,
# that parts of torchao are missing, which nothing here uses.
NOISY_LOGGERS = (
    "torch.distributed.tensor._redistribute",
    "torch._higher_order_ops.wrap",
    "torch.utils._pytree",
    "torchao",
    "torchao.kernel.intmm",
    "aiobotocore.credentials",  # a traceback for a request that is tried again
    "botocore.credentials",
    "botocore.configprovider",  # where it found each client's endpoint
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device; None if unknown, never a guess."""
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    for key, peak in PEAK_FLOPS:
        if key in name:
            return peak
    return None


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far, GiB: on an accelerator what the allocator reserved, on CPU the resident memory.

    A CPU process inherits the peak of the one that started it.
    """
    if device.type != "cpu":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def configure_logging(log_ranks: tuple[int, ...], rank: int) -> None:
    """Log progress on the chosen ranks, of which some may not exist; if several, each line names its rank."""
    level = logging.INFO if rank in log_ranks else logging.ERROR
    form = "%(asctime)s %(message)s"
    if len(log_ranks) > 1:
        form = f"%(asctime)s [rank {rank}] %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S", force=True)
    quiet_noisy_loggers()


def quiet_noisy_loggers() -> None:
    """Let only errors of NOISY_LOGGERS pass. A filter, unlike a level, spares the loggers below them."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


@dataclasses.dataclass
class Tracker:
    """Functions that get the config, each row, and the end of the run, or None; `name` is the setting that names them.

    What goes wrong there ends no run: it is said the first time, counted, and named again at the end.
    """

    name: str
    start: Any
    log: Any
    close: Any
    failed: int = 0
    last_error: str = ""

    def call(self, function: Callable[..., object] | None, *arguments: object) -> None:
        """Call one of the functions."""
        try:
            if function:
                function(*arguments)
        except (Exception, SystemExit) as error:
            self.failed += 1
            self.last_error = repr(error)
            if self.failed == 1:
                logger.error(f"warning: {self.name}: {error!r}; training goes on, failures are counted")


def find_trackers(config: Config) -> list[Tracker]:
    """Import what `metrics.hook` and `metrics.wandb_project` name. Raises ConfigError."""
    trackers = []
    hook = config.metrics.hook
    if hook:
        name = f"metrics.hook = {hook!r}"
        module, _, function = hook.partition(":")
        try:
            code = importlib.import_module(module)
            log = getattr(code, function)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"{name}: must be of the form package.module:function; {error}") from None
        trackers.append(Tracker(name, getattr(code, "start", None), log, getattr(code, "close", None)))
    if config.metrics.wandb_project:
        trackers.append(_wandb_tracker(config.metrics.wandb_project))
    return trackers


def _wandb_tracker(project: str) -> Tracker:
    """Weights & Biases. Raises ConfigError if it is not installed.

    Rows carry our step beside W&B's own, which only grows: it would refuse the steps that a resume trains again.
    """
    name = f"metrics.wandb_project = {project!r}"
    try:
        import wandb
        from wandb import init  # a folder `wandb`, as a run elsewhere may have left it, has none
    except ImportError as error:
        raise ConfigError(f"{name}: needs Weights & Biases: pip install wandb; {error}") from None

    def start(config: dict[str, Any]) -> None:
        folder = Path(config["run"]["folder"])
        logger.info(f"{name}: asking Weights & Biases, which may take as long as WANDB_INIT_TIMEOUT, 90 s by default")
        run = init(project=project, id=wandb_id(folder), name=folder.name, dir=folder, config=config, resume="allow")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(row: dict[str, Any]) -> None:
        wandb.log({"step": row["step"], **grouped(row)})  # another function after `init`

    return Tracker(name, start, log, wandb.finish)


def wandb_id(folder: Path) -> str:
    """The id of a run at Weights & Biases. Its folder keeps it, so that a resume continues the curves."""
    file = folder / WANDB_ID
    if not file.is_file():
        write_atomically(file, json.dumps({"id": secrets.token_hex(8)}).encode())
    return json.loads(file.read_text())["id"]


def grouped(row: Mapping[str, float | None]) -> dict[str, float]:
    """The known figures of a row, under groups of trackers: `train/`, `train_layers/`, `train_speed/`, `valid/`."""
    figures = {}
    for name, value in row.items():
        group = FIELDS.get(name.partition("/")[0], "train/")
        if "_norm/" in name:
            group = "train_layers/"
        if group and value is not None:
            figures[group + name.removeprefix("validation_")] = value
    return figures


def _board_tracker(config: Config, folder: Path, first_step: int) -> Tracker:
    """TensorBoard, with the config. Rows of a resume hide those of later steps."""
    # Imported here: TensorBoard takes a second to load.
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def start(_: dict[str, Any]) -> None:
        board.add_text("config", f"```toml\n{to_toml(config)}```", first_step)

    def log(row: dict[str, Any]) -> None:
        for name, value in grouped(row).items():
            board.add_scalar(name, value, row["step"])
        board.flush()

    return Tracker("metrics.tensorboard = true", start, log, board.close)


@dataclasses.dataclass
class MetricsLogger:
    """Writes rows on rank 0 and measures the time between them."""

    config: Config
    folder: Path  # of the run
    rank: int
    world_size: int
    device: torch.device
    first_step: int

    def __post_init__(self) -> None:
        self.steps = self.config.training.steps
        self.waiting: dict[int, Tensor] = {}  # step → loss, gradient norm, terms that the host has not fetched yet
        self.losses: list[tuple[float, ...]] = []  # with other terms, of the steps since the last row
        self.terms: tuple[str, ...] = ()
        self.grad_norm = math.nan  # of the last step that was trained and fetched
        self.rates: Mapping[str, float] = {}
        self.layer_norms: Mapping[str, Tensor] = {}
        self.validation = ""  # the last one, in words
        self.totals: list[float] = []  # tokens/s of each interval
        self.last: dict[str, Any] = {}  # row
        self.peak = peak_flops(self.device)
        self.file: Any = None
        self.trackers: list[Tracker] = []
        if self.rank == 0:
            self._open()
        self.restart_clock()

    def _open(self) -> None:
        """Open the file and the trackers."""
        run = dataclasses.replace(self.config.run, folder=str(self.folder))
        config = dataclasses.replace(self.config, run=run)
        self.file = open_records(self.folder / "metrics.jsonl")
        self.trackers = find_trackers(config)
        if config.metrics.tensorboard:
            board = self.folder / "tensorboard"
            with file_errors(board):
                self.trackers.append(_board_tracker(config, board, self.first_step))
        for tracker in self.trackers:
            tracker.call(tracker.start, msgspec.to_builtins(config))

    def restart_clock(self) -> None:
        """Begin a new interval, so that the time of a validation, say, counts for no step."""
        self.since = time.perf_counter()
        self.interval_steps = 0
        self.interval_tokens = 0
        self.interval_flops = 0
        self.data_wait_seconds = 0.0

    def add(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        rates: Mapping[str, float],
        tokens: int,
        flops: int,
        data_wait_seconds: float,
        terms: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Count a trained step. Its figures stay on the device until something is due.

        `rates`: `lr`, and of groups. `tokens`, `flops`: of all ranks. `terms`: name → another term of the loss, logged
        as its mean.
        """
        self.terms = tuple(terms)
        self.waiting[step] = torch.stack((loss, grad_norm, *terms.values()))
        self.rates = rates
        self.interval_steps += 1
        self.interval_tokens += tokens
        self.interval_flops += flops
        self.data_wait_seconds += data_wait_seconds

    def add_layers(self, norms: Mapping[str, Tensor]) -> None:
        """Keep the norms of layers, of the step just trained, for its row."""
        self.layer_norms = norms

    def check_finite(self) -> None:
        """Fetch the figures of the steps since the last call from the device. Call it before writing anything.

        Raises TitaniteError for a loss or norm that is not finite, on all ranks, since both are sums over them.
        """
        if not self.waiting:
            return
        history = torch.stack(list(self.waiting.values())).tolist()
        for step, (loss, grad_norm, *terms) in zip(self.waiting, history, strict=True):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                advice = "resume from the last checkpoint, with a lower optimizer.lr or another run.seed"
                found = f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite, so nothing of it is saved"
                raise TitaniteError(f"{found}; {advice}", agreed=True)
            if loss or grad_norm:  # otherwise no token of the step was trained
                self.losses.append((loss, *terms))
            self.grad_norm = grad_norm
        self.waiting.clear()

    def log(self, step: int, tokens: int) -> None:
        """Write a row and a log line, with the rates of this interval, and begin the next.

        The loss is the mean of the steps trained since the last row, whatever came between; gradient norm and rate are
        those of the last. Nothing is written if all of the interval's steps were left out or had no trained token.
        """
        self.check_finite()
        layer_norms = self.layer_norms
        self.layer_norms = {}
        if not (self.interval_steps and self.losses):
            return
        seconds = time.perf_counter() - self.since
        total = self.interval_tokens / seconds
        self.totals.append(total)
        flops = self.interval_flops / seconds / self.world_size
        means = [math.fsum(values) / len(values) for values in zip(*self.losses, strict=True)]
        row: dict[str, float | None] = {
            "step": step,
            "loss": means[0],
            "grad_norm": self.grad_norm,
            **dict(zip(self.terms, means[1:], strict=True)),
            **self.rates,
            "tokens": tokens,
            "tps": total / self.world_size,
            "mfu": flops / self.peak if self.peak else None,
            "tflops": flops / 1e12,
            "memory_gib": peak_memory_gib(self.device),
            "data_wait_pct": 100 * self.data_wait_seconds / seconds,
            "step_seconds": seconds / self.interval_steps,
            "interval_steps": self.interval_steps,
        }
        if layer_norms:
            values = torch.stack(list(layer_norms.values())).tolist()
            row.update(zip(layer_norms, values, strict=True))
        self._print(row, total)
        self._write(row)
        self.losses = []
        self.restart_clock()

    def _print(self, row: Mapping[str, Any], total: float) -> None:
        """Log a row in words. `total`: tokens/s of the whole run."""
        rate = f"{tqdm.format_sizeof(total)} tokens/s  {tqdm.format_sizeof(row['tokens'])} seen"
        line = f"loss {row['loss']:.4f}  norm {row['grad_norm']:#.3g}  lr {row['lr']:.1e}  {rate.replace('G', 'B')}"
        remaining = timedelta(seconds=round(row["step_seconds"] * (self.steps - row["step"])))
        if remaining:
            line += f"  ETA {remaining}"
        if row["mfu"]:
            line += f"  MFU {100 * row['mfu']:.0f}%"
        if row["data_wait_pct"] >= 1:
            line += f"  data wait {row['data_wait_pct']:.0f}%"
        logger.info(f"{self._step_of(row['step'])}  {line}  {row['memory_gib']:.2f} GiB")

    def _step_of(self, step: int) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}"

    def log_validation(self, step: int, figures: Mapping[str, float], tokens: int) -> None:
        """Write a row and a log line with the figures of the held-out sets, if there are any. Begins a new interval."""
        self.restart_clock()
        if not figures:
            return
        self.validation = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())
        logger.info(f"{self._step_of(step)}  {self.validation}")
        self._write({"step": step, **figures, "tokens": tokens})

    def log_skipped(self, step: int, tokens: int) -> None:
        """Write a row for a step whose update was left out, see run.failures."""
        self._write({"step": step, "skipped": 1, "tokens": tokens})

    def _write(self, row: dict[str, Any]) -> None:
        row = dict.fromkeys(FIELDS) | row | {"time": time.time()}
        self.last = row
        if self.file:
            with file_errors(self.file.name):
                append_record(self.file, row)
        for tracker in self.trackers:
            tracker.call(tracker.log, dict(row))  # a copy: it may take it apart, such as by row.pop("step")

    def summary(self) -> str:
        """The last validation and the usual rate, in words."""
        parts = [self.validation] if self.validation else []
        if self.totals:
            parts.append(f"{tqdm.format_sizeof(median(self.totals))} tokens/s")
        return "  ".join(parts)

    def close(self) -> None:
        """Flush and close the files and trackers."""
        if self.file:
            with file_errors(self.file.name):
                self.file.close()
        for tracker in self.trackers:
            tracker.call(tracker.close)
            if tracker.failed:
                count = f"calls failed: {tracker.failed}, the last by {tracker.last_error}"
                logger.error(f"warning: {tracker.name}: {count}")
