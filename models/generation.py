"""Text token by token: what follows a prompt, by a model with a KV cache. generate.py is its command line."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import ConfigError, TitaniteError
from data.tokenizer import Tokenizer
from models.llama.model import KVCache

PREFILL_TOKENS = 512  # of a prompt per forward: limits the memory of the logits, which go unused
DRAW_BITS = 31  # of random numbers and probabilities: as integers, since a GPU may add floats in any order
GREEDY_BELOW = 1e-5  # the temperature under which the likeliest token is taken, as in vLLM


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate for each prompt. Temperature 0 takes the likeliest token; `top_k` 0, `top_p` 1 exclude none.

    Raises ConfigError for numbers that mean nothing.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()  # texts; a special token is named by its text

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0, and finite"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (0 <= self.seed < 2**63, f"from 0 to {2**63 - 1}"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (holds, what) in allowed.items():
            if not holds:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {what}")
        if "" in self.stops:
            raise ConfigError("--stop: must not be empty")


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    request: Request,
    finished: Collection[int] = (),
) -> Iterator[list[int]]:
    """Yield the next token of every row, `request.max_tokens` times. Each takes one forward with a KV cache.

    Between two tokens the caller may add to `finished`: these rows leave the batch, and the list has no place for them.
    Prompts may differ in length. A row gets the same tokens as alone: it has its own positions, and its own random
    numbers, of the seed `request.seed` + row.
    """
    rows = list(range(len(prompts)))
    seeded = [torch.Generator().manual_seed(request.seed + row) for row in rows]
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
        logits_BV = model(tokens_B[:, None], positions_B1, caches)[:, -1].float()
        draws = [torch.randint(2**DRAW_BITS, (1,), generator=seeded[row]) for row in rows]
        tokens_B = sample(logits_BV, request, torch.cat(draws).to(device))
        yield tokens_B.tolist()
        left = [i for i, row in enumerate(rows) if row not in finished]
        if not left:
            return
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            tokens_B = tokens_B[left]
            positions_B1 = positions_B1[left]
            for cache in caches:
                cache.kv = cache.kv[left]
        positions_B1 = positions_B1 + 1


def sample(logits_BV: Tensor, request: Request, draws_B: Tensor) -> Tensor:
    """Token ids [B] from softmax(logits / temperature), limited to the `top_k` likeliest, then by `top_p`.

    Top-p (Holtzman et al. 2020) keeps the fewest likeliest tokens whose probabilities add up to `top_p`. `draws_B` are
    integers below 2**DRAW_BITS: the token is where the draw falls in the running sum of the probabilities. Raises
    TitaniteError for logits that are not finite.
    """
    if not logits_BV.isfinite().all():
        advice = "see the loss and grad_norm in metrics.jsonl, try an earlier checkpoint, or --dtype float32"
        raise TitaniteError(f"the model's logits are not finite, so its weights are damaged or too large: {advice}")
    if request.temperature < GREEDY_BELOW:
        return logits_BV.argmax(-1)
    below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # so that no quotient overflows, except to -inf
    logits_BV = below_BV / request.temperature
    if request.top_k:
        threshold_B1 = logits_BV.topk(min(request.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, -torch.inf)
    probabilities_BV = logits_BV.softmax(-1)
    if request.top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(descending=True)
        beyond_BV = sorted_BV.cumsum(-1) - sorted_BV >= request.top_p
        beyond_BV[:, 0] = False  # a tiny top_p is 0 in float32
        sorted_BV = sorted_BV.masked_fill(beyond_BV, 0.0)
        probabilities_BV = torch.zeros_like(sorted_BV).scatter(-1, order_BV, sorted_BV)
    sums_BV = (probabilities_BV * 2**DRAW_BITS).long().cumsum(-1)
    drawn_B1 = draws_B[:, None] * sums_BV[:, -1:] >> DRAW_BITS
    return torch.searchsorted(sums_BV, drawn_B1, right=True)[:, 0]


def check_prompt(name: str, prompt: str, tokenizer: Tokenizer, seq_len: float = math.inf) -> list[int]:
    """The tokens of a prompt. Raises ConfigError if there are none, or if they leave no room for one in `seq_len`."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} = {prompt!r}: is not UTF-8") from None
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
        # Tokens whose text is out, on which the next text may depend. All of the prompt, since its last few may begin
        # in the middle of a character: a decoder of bytes would then decode none of the whole run.
        self.shown = list(prompt)
        self.pending: list[int] = []  # tokens that end within a character
        self.held = ""  # text that may be the beginning of a stop string
        self.done = False

    def push(self, token: int) -> str:
        """Add a token. Returns the text that has become certain."""
        if token in self.stop_ids:
            return self.finish()
        self.pending.append(token)
        return self._release()

    def finish(self) -> str:
        """End the text. Returns what was still held back."""
        if self.done:
            return ""
        text = self._release(all_of_it=True)
        self.done = True
        return text

    def _release(self, all_of_it: bool = False) -> str:
        """The text, held or pending, that ends a character and neither is nor can become part of a stop string."""
        before = self.tokenizer.decode(self.shown)
        text = self.tokenizer.decode(self.shown + self.pending)[len(before) :]
        if text.endswith("\ufffd") and not all_of_it:
            return ""
        if text:
            self.shown = self.pending
        else:  # tokens without text (special tokens) join `shown`: the next word follows what came before
            self.shown = self.shown + self.pending
        self.pending = []
        text = self.held + text
        ends = [text.index(stop) for stop in self.stops if stop in text]
        if ends:
            self.done = True
            return text[: min(ends)]
        stops = [] if all_of_it else self.stops
        certain = 0  # all before what may be the beginning of a stop string
        while not any(stop.startswith(text[certain:]) for stop in ["", *stops]):
            certain += 1
        self.held = text[certain:]
        return text[:certain]
