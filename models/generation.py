"""Text token by token: what follows a prompt, by a model with a KV cache. generate.py is its command line."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import ConfigError, Count, NonNegative, Positive, TitaniteError
from data.tokenizer import Tokenizer
from models.llama.model import KVCache

PREFILL_TOKENS = 512  # of a prompt per forward: limits the memory of the logits, which go unused
GREEDY_BELOW = 1e-5  # the temperature under which the likeliest token is taken, as in vLLM


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate for each prompt. Temperature 0 takes the likeliest token; `top_k` 0, `top_p` 1 exclude none."""

    temperature: NonNegative = 0.8
    top_k: Count = 50
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    seed: Count = 0
    max_tokens: Positive = 128
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()  # texts; a special token is named by its text


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device, request: Request
) -> Iterator[list[int]]:
    """Yield the next token of every row, `request.max_tokens` times. Each takes one forward with a KV cache.

    Prompts may differ in length. A row gets the same tokens as alone: it has its own positions, and its own random
    numbers, of the seed `request.seed` + row.
    """
    generators = [torch.Generator().manual_seed(request.seed + row) for row in range(len(prompts))]
    caches = [KVCache() for _ in model.layers]  # type: ignore[union-attr]
    # Shorter prompts are padded at the end, at the place of their last token: it is stored again before any sees it.
    prompts_BS = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts], device=device)  # the first whose logits are used
    positions_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    for start in range(0, prompts_BS.shape[1] - 1, PREFILL_TOKENS):
        piece_BS = prompts_BS[:, start : start + PREFILL_TOKENS]
        positions_S = torch.arange(start, start + piece_BS.shape[1], device=device)
        model(piece_BS, positions_S.minimum(positions_B1), caches)
    for _ in range(request.max_tokens):
        logits_BV = model(tokens_B[:, None], positions_B1, caches)[:, -1]
        tokens_B = sample(logits_BV.float(), request, generators).to(device)
        yield tokens_B.tolist()
        positions_B1 = positions_B1 + 1


def sample(logits_BV: Tensor, request: Request, generators: Sequence[torch.Generator]) -> Tensor:
    """Token ids [B] from softmax(logits / temperature), limited to the `top_k` likeliest, then by `top_p`.

    Top-p (Holtzman et al. 2020) keeps the fewest likeliest tokens whose probabilities add up to `top_p`. Each row
    draws by its own CPU generator. Raises TitaniteError for logits that are not finite.
    """
    if not logits_BV.isfinite().all():
        advice = "see the loss and grad_norm in metrics.jsonl, try an earlier checkpoint, or --dtype float32"
        raise TitaniteError(f"the model's logits are not finite, so its weights are damaged or too large: {advice}")
    if request.temperature < GREEDY_BELOW:
        return logits_BV.argmax(-1)
    vocab_size = logits_BV.shape[-1]
    likeliest_BK, ids_BK = logits_BV.topk(min(request.top_k or vocab_size, vocab_size))
    likeliest_BK = likeliest_BK.cpu()  # a GPU may add floats in any order
    below_BK = likeliest_BK - likeliest_BK[:, :1]  # so that no quotient overflows, except to -inf
    probabilities_BK = (below_BK / request.temperature).softmax(-1)
    beyond_BK = probabilities_BK.cumsum(-1) - probabilities_BK >= request.top_p
    beyond_BK[:, 0] = False  # a tiny top_p is 0 in float32
    if request.top_p < 1:
        probabilities_BK = probabilities_BK.masked_fill(beyond_BK, 0.0)
    drawn = [row.multinomial(1, generator=own) for row, own in zip(probabilities_BK, generators, strict=True)]
    return ids_BK.cpu().gather(1, torch.stack(drawn))[:, 0]


def check_prompt(name: str, prompt: str, tokenizer: Tokenizer, seq_len: float = math.inf) -> list[int]:
    """The tokens of a prompt. Raises ConfigError if there are none, or if they leave no room for one in `seq_len`."""
    tokens = tokenizer.encode(prompt)
    if len(tokens) >= seq_len:
        raise ConfigError(f"{name}: has {len(tokens)} tokens, must have fewer than training.seq_len = {seq_len}")
    if not tokens:
        raise ConfigError(f"{name} = {prompt!r}: the tokenizer makes no token of it, so there is nothing to continue")
    return tokens


class TextStream:
    """Turns the tokens of one row into text as they come. Ends at a stop token, or before a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop_ids: frozenset[int], stops: Sequence[str]):
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.stops = stops
        # From the prompt on: a text depends on what is before it, and may begin in the middle of a character.
        self.tokens = list(prompt)
        self.begin = len(tokenizer.decode(self.tokens))
        self.shown = 0  # characters
        self.done = False

    def push(self, token: int) -> str:
        """Add a token. Returns the text that has become certain."""
        if token in self.stop_ids:
            return self.finish()
        self.tokens.append(token)
        held = max(map(len, self.stops), default=1) - 1  # characters that may begin a stop string
        return self._show(held)

    def finish(self) -> str:
        """End the text. Returns what was still held back."""
        if self.done:
            return ""
        text = self._show(0, whole=True)
        self.done = True
        return text

    def _show(self, held: int, whole: bool = False) -> str:
        text = self.tokenizer.decode(self.tokens)[self.begin :]
        end = len(text) - held
        if text.endswith("\ufffd") and not whole:  # within a character
            end = 0
        stops = [text.index(stop) for stop in self.stops if stop in text]
        if stops:
            self.done = True
            end = min(stops)
        new = text[self.shown : end]
        self.shown += len(new)
        return new
