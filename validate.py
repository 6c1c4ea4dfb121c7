"""Loss on the held-out documents, and a sample of what the model writes."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import Batch
from data.tokenizer import Tokenizer
from generate import generate
from loss import IGNORED
from parallel.fsdp import reshard


@torch.no_grad()
def validate(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Batch], device: torch.device
) -> float:
    """Mean loss per token over the batches of all ranks, nats. Every rank must have as many batches."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for batch in batches:
        tokens, labels, positions = batch.to(device)
        total[0] += loss_fn(model(tokens, positions), labels)
        total[1] += labels.ne(IGNORED).sum()
    dist.all_reduce(total)
    reshard(model)
    summed, count = total.tolist()
    return summed / count


def sample_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, max_tokens: int, device: torch.device) -> str:
    """`prompt` continued by a sharded model. All ranks take part, and all take every step."""
    with torch.compiler.set_stance("force_eager"):  # its lengths change at each token: not worth compiling
        tokens = list(generate(model, tokenizer.encode(prompt), max_tokens, device=device))
    reshard(model)
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    return prompt + tokenizer.decode(tokens)
