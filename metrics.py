"""What a run reports: metrics.jsonl, TensorBoard and a readable line per log step."""

import importlib
import json
import logging
import math
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import Config, ConfigError, TitaniteError, file_errors
from records import open_records

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

FIELDS = (
    "step", "loss", "validation_loss", "grad_norm", "lr", "tokens", "tps", "mfu", "tflops", "memory_gib",
    "data_wait_pct", "step_seconds", "interval_steps", "skipped", "time",
)  # fmt: skip
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
    return next((peak for key, peak in PEAK_FLOPS if key in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far, GiB: on an accelerator what the allocator reserved, on CPU the resident memory.

    A CPU process inherits the peak of the one that started it.
    """
    if device.type != "cpu":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def configure_logging(log_ranks: tuple[int, ...], rank: int) -> None:
    """Log progress on the chosen ranks, of which some may not exist; if several, each line names its rank."""
    prefix = f"[rank {rank}] " if len(log_ranks) > 1 else ""
    level = logging.INFO if rank in log_ranks else logging.ERROR
    logging.basicConfig(level=level, format=f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S", force=True)
    quiet_noisy_loggers()


def quiet_noisy_loggers() -> None:
    """Let only errors of NOISY_LOGGERS pass. A filter, unlike a level, spares the loggers below them."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def find_hook(name: str) -> Callable[[dict[str, Any]], object] | None:
    """Import the function that `metrics.hook` names; None for "". Raises ConfigError."""
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"metrics.hook = {name!r}: must be of the form package.module:function; {error}") from None


class MetricsLogger:
    """Writes rows on rank 0 and measures the time between them."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        rank: int,
        device: torch.device,
        first_step: int,
        flops_per_token: int,
        tokens_per_step: float,
        writing: Callable[[object], AbstractContextManager[None]] = file_errors,
    ):
        """`tokens_per_step`: of the whole run, divided by its ranks. `writing(file)` surrounds each write."""
        self.device, self.steps, self.flops_per_token = device, config.training.steps, flops_per_token
        self.tokens_per_step, self.writing = tokens_per_step, writing
        self.waiting: dict[int, Tensor] = {}  # step → loss and gradient norm that the host has not fetched yet
        self.loss = self.grad_norm = self.lr = math.nan  # of the last step that was trained and fetched
        self.peak = peak_flops(device)
        self.file = open_records(run_folder / "metrics.jsonl") if rank == 0 else None
        self.hook = find_hook(config.metrics.hook) if rank == 0 else None
        self.board: Any = None
        if rank == 0 and config.metrics.tensorboard:
            # Imported here: TensorBoard takes a second to load.
            from torch.utils.tensorboard import SummaryWriter

            with file_errors(run_folder / "tensorboard"):
                self.board = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step + 1)
        self.last: dict[str, Any] = {}  # row
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new interval, so that the time of a validation, say, counts for no step."""
        self.since = time.perf_counter()
        self.interval_steps = 0
        self.interval_tokens = self.data_wait_seconds = 0.0

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, data_wait_seconds: float) -> None:
        """Count a trained step. Its figures stay on the device until something is due."""
        self.waiting[step] = torch.stack((loss, grad_norm))
        self.lr = lr
        self.interval_steps += 1
        self.interval_tokens += self.tokens_per_step
        self.data_wait_seconds += data_wait_seconds

    def check_finite(self) -> None:
        """Fetch the figures of the steps since the last call from the device. Call it before writing anything.

        Raises TitaniteError for a loss or norm that is not finite, on all ranks, since both are sums over them.
        """
        history = torch.stack(list(self.waiting.values())).tolist() if self.waiting else []
        for step, (loss, grad_norm, *_) in zip(self.waiting, history, strict=True):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                advice = "resume from the last checkpoint, with a lower optimizer.lr or another run.seed"
                said = f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite, so nothing of it is saved"
                raise TitaniteError(f"{said}; {advice}", agreed=True)
            self.loss, self.grad_norm = loss, grad_norm
        self.waiting.clear()

    def log(self, step: int, tokens: int) -> None:
        """Write a row and a log line, with the rates of this interval, and begin the next.

        The figures are those of the last trained step. Nothing is written if all of the interval's were left out.
        """
        self.check_finite()
        if not self.interval_steps:
            return
        seconds = time.perf_counter() - self.since
        tps = self.interval_tokens / seconds
        flops = self.flops_per_token * tps
        row: dict[str, float | None] = {
            "step": step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": tokens,
            "tps": tps,
            "mfu": flops / self.peak if self.peak else None,
            "tflops": flops / 1e12,
            "memory_gib": (memory := peak_memory_gib(self.device)),
            "data_wait_pct": (waited := 100 * self.data_wait_seconds / seconds),
            "step_seconds": (step_seconds := seconds / self.interval_steps),
            "interval_steps": self.interval_steps,
        }
        mfu = f"{100 * flops / self.peak:.1f}%" if self.peak else "unknown"
        eta = timedelta(seconds=round(step_seconds * (self.steps - step)))
        logger.info(
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2e}  {tps:,.0f} tokens/s/device  MFU {mfu}  "
            f"memory {memory:.2f} GiB  data wait {waited:.1f}%  ETA {eta}"
        )
        self._write(row)
        self.restart_clock()

    def log_validation(self, step: int, losses: Mapping[str, float], tokens: int) -> None:
        """Write a row and a log line for the held-out sets: name → loss; the training data's own set is named "".

        Begins a new interval.
        """
        self.restart_clock()
        if not losses:
            return
        named = {f"validation_loss/{name}" if name else "validation_loss": loss for name, loss in losses.items()}
        shown = "  ".join(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in named.items())
        logger.info(f"step {step:>{len(str(self.steps))}}/{self.steps}  {shown}")
        self._write({"step": step, **named, "tokens": tokens})

    def log_skipped(self, step: int, tokens: int) -> None:
        """Write a row for a step whose update was left out, see run.failures."""
        self._write({"step": step, "skipped": 1, "tokens": tokens})

    def _write(self, row: dict[str, Any]) -> None:
        row = dict.fromkeys(FIELDS) | row | {"time": time.time()}
        self.last = dict(row)
        if self.file is None:
            return
        with self.writing(self.file.name):
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        if self.board:
            with self.writing(self.board.log_dir):
                for name, value in row.items():
                    if value is not None and name not in ("step", "interval_steps", "time"):
                        self.board.add_scalar(name, value, row["step"])
                self.board.flush()
        if self.hook:  # last: it may take the row apart, such as by row.pop("step")
            self.hook(row)

    def close(self) -> None:
        """Flush and close the files."""
        if self.file:
            with self.writing(self.file.name):
                self.file.close()
        if self.board:
            with self.writing(self.board.log_dir):
                self.board.close()


if __name__ == "__main__":
    raise SystemExit("error: moved: python -m tools.compare, see docs/migration.md")
