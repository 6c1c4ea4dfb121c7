"""Text from a trained model: continuations of prompts, or a chat.

python generate.py outputs/llama-debug-20260101-120000 --prompt "def main("
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import ConfigError, TitaniteError, command_line, file_errors
from data.chat import chat_of
from data.conversations import read_conversation
from data.tokenizer import Tokenizer
from models.llama.model import KVCache
from models.trained import Trained, add_place_arguments, load_from_arguments

T = TypeVar("T")
PREFILL_TOKENS = 512  # of a prompt per forward: limits the memory of the logits, which go unused
DRAW_BITS = 31  # of random numbers and probabilities: as integers, since a GPU may add floats in any order
DRAWS = 256  # random numbers of a row made at once, since a text may end long before `max_tokens`
GREEDY_BELOW = 1e-5  # the temperature under which the likeliest token is taken, as in vLLM


# ---------------------------------------------------------------- token by token


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
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature}: must be at least 0, and finite")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k}: must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: must be from 0 to {2**63 - 1}")
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens}: must be at least 1")
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
    # Shorter prompts are padded at the end. What padding stores is overwritten before any token sees it.
    prompts_BS = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    for start in range(0, prompts_BS.shape[1] - 1, PREFILL_TOKENS):
        piece_BS = prompts_BS[:, start : start + PREFILL_TOKENS]
        positions_1S = torch.arange(start, start + piece_BS.shape[1], device=device)[None]
        model(piece_BS, positions_1S, caches)
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts], device=device)  # the first whose logits are used
    positions_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    for step in range(request.max_tokens):
        if step % DRAWS == 0:
            drawn = [torch.randint(2**DRAW_BITS, (DRAWS,), generator=seeded[row]) for row in rows]
            draws_BT = torch.stack(drawn).to(device)
        logits_BV = model(tokens_B[:, None], positions_B1, caches)[:, -1].float()
        tokens_B = sample(logits_BV, request, draws_BT[:, step % DRAWS])
        yield tokens_B.tolist()
        left = [i for i, row in enumerate(rows) if row not in finished]
        if not left:
            return
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            tokens_B = tokens_B[left]
            positions_B1 = positions_B1[left]
            draws_BT = draws_BT[left]
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


# ---------------------------------------------------------------- text


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
        certain = len(text)
        if not all_of_it:
            certain -= max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for n in range(len(stop) - 1, 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def stream_texts(trained: Trained, prompts: Sequence[Sequence[int]], request: Request) -> Iterator[tuple[int, str]]:
    """Yield (row, its next text) as tokens come, until all rows are finished."""
    stop_ids = set(request.stop_ids)
    for id, added in trained.tokenizer.raw.get_added_tokens_decoder().items():
        if added.special and added.content in request.stops:  # no text shows it
            stop_ids.add(id)
    streams = [TextStream(trained.tokenizer, ids, frozenset(stop_ids), request.stops) for ids in prompts]
    finished: set[int] = set()
    for tokens in generate(trained.model, prompts, trained.device, request, finished):
        rows = [row for row in range(len(prompts)) if row not in finished]
        for row, token in zip(rows, tokens, strict=True):
            yield row, streams[row].push(token)
            if streams[row].done:
                finished.add(row)
    for row, stream in enumerate(streams):
        yield row, stream.finish()


# ---------------------------------------------------------------- command line


def check_prompt(name: str, prompt: str, tokenizer: Tokenizer, seq_len: float = math.inf) -> int:
    """The tokens of a prompt. Raises ConfigError if there are none, or if they leave no room for one in `seq_len`."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} = {prompt!r}: is not UTF-8") from None
    tokens = len(tokenizer.encode(prompt))
    if tokens >= seq_len:
        raise ConfigError(f"{name}: has {tokens} tokens, must have fewer than training.seq_len = {seq_len}")
    if not tokens:
        raise ConfigError(f"{name} = {prompt!r}: the tokenizer makes no token of it, so there is nothing to continue")
    return tokens


def warn_if_longer(trained: Trained, prompt_tokens: int, request: Request) -> None:
    """Warn if a text may outgrow the sequences that the model was trained on: beyond them it often makes no sense."""
    if 0 < trained.seq_len < prompt_tokens + request.max_tokens:
        asked = f"a prompt of {prompt_tokens} tokens and --max-tokens {request.max_tokens} exceed the {trained.seq_len}"
        print(f"warning: {asked} that the model was trained on; text beyond may be poor", file=sys.stderr, flush=True)


def continue_one(trained: Trained, prompt: Sequence[int], request: Request) -> str:
    """Print what follows the prompt as it comes, and end the line. Returns it."""
    pieces = []
    for _, text in stream_texts(trained, [prompt], request):
        pieces.append(text)
        print(text, end="", flush=True)
    print(flush=True)
    return "".join(pieces)


def continue_many(
    trained: Trained, prompts: Sequence[Sequence[int]], request: Request, batch_size: int
) -> Iterator[str]:
    """Yield what follows each prompt, in their order, batch by batch."""
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        texts = [""] * len(batch)
        seeded = replace(request, seed=request.seed + first)
        for row, text in stream_texts(trained, batch, seeded):
            texts[row] += text
        yield from texts


def print_completions(trained: Trained, prompts: Sequence[str], request: Request, batch_size: int) -> None:
    """Print a JSON line for each prompt."""
    ids = [trained.tokenizer.encode(prompt) for prompt in prompts]
    for prompt, text in zip(prompts, continue_many(trained, ids, request, batch_size), strict=True):
        print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False), flush=True)


def print_answers(trained: Trained, chats: Sequence[list[dict]], request: Request, batch_size: int) -> None:
    """Print a JSON line for each conversation, with the answer at its end. Raises TitaniteError."""
    template = chat_of(trained.tokenizer)
    ids = [template.encode(messages, add_generation_prompt=True) for messages in chats]
    warn_if_longer(trained, max(map(len, ids), default=0), request)
    for messages, text in zip(chats, continue_many(trained, ids, request, batch_size), strict=True):
        answered = [*messages, {"role": "assistant", "content": text}]
        print(json.dumps({"messages": answered}, ensure_ascii=False), flush=True)


def chat(trained: Trained, system: str, request: Request) -> None:
    """Answer each line that is typed, until the end of input."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> ")
            line.encode()  # raises if it is not UTF-8
            turn = [*messages, {"role": "user", "content": line}]
            prompt = chat_of(trained.tokenizer).encode(turn, add_generation_prompt=True)
        except EOFError:
            return
        except (TitaniteError, UnicodeError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        warn_if_longer(trained, len(prompt), request)
        answer = continue_one(trained, prompt, request)
        messages = [*turn, {"role": "assistant", "content": answer}]


def read_lines(file: Path, needed: str, value_of: Callable[[Any], T]) -> list[T]:
    """`value_of` the JSON of every line of a file. Raises ConfigError that names the line."""
    values = []
    with file_errors(), file.open("rb") as lines:  # as bytes, since JSON may hold other line ends
        for number, line in enumerate(lines, start=1):
            try:
                values.append(value_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, TitaniteError) as error:
                raise ConfigError(f"{file}, line {number}: must be an object with {needed}: {error!r}") from None
    if not values:
        raise ConfigError(f"{file}: holds no prompts")
    return values


def prompt_of(record: Any) -> str:
    """The text of a line of `--prompts-file`."""
    prompt = record["prompt"]
    prompt.encode()  # raises if it is no text, or has lone surrogates
    return prompt


def messages_of(record: Any) -> list[dict]:
    """The conversation of a line of `--chats-file`, as data.prepare reads it."""
    messages, *_ = read_conversation(record)
    return messages


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(description="Continue prompts, or chat, with a trained model.")
    add_place_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", help="text to continue; again for a batch of several")
    what.add_argument("--prompts-file", type=Path, help='jsonl with a "prompt" in each line')
    what.add_argument("--chat", action="store_true", help="a conversation by the model's chat template")
    what.add_argument("--chats-file", type=Path, help='jsonl with "messages" in each line, to be answered')
    parser.add_argument("--system", default="", help="system message of the chat")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt or answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among the k likeliest, 0: all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that make p (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt, the next one's is one more")
    parser.add_argument("--stop", action="append", default=[], help="text or special token that ends it; repeatable")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts continued together (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: must be at least 1")
    if arguments.system and not arguments.chat:
        parser.error("--system is for --chat")
    request = Request(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stops=tuple(arguments.stop),
    )
    prompts = arguments.prompt or []
    chats = []
    if arguments.prompts_file:
        prompts = read_lines(arguments.prompts_file, 'a text "prompt"', prompt_of)
    if arguments.chats_file:
        chats = read_lines(arguments.chats_file, '"messages"', messages_of)

    trained = load_from_arguments(arguments)
    stop_ids = {trained.tokenizer.eos_id}
    if arguments.chat or chats:
        stop_ids.update(chat_of(trained.tokenizer).stop_ids)
    request = replace(request, stop_ids=frozenset(stop_ids))
    if prompts:
        lengths = [check_prompt("prompt", prompt, trained.tokenizer) for prompt in prompts]
        warn_if_longer(trained, max(lengths), request)
    if arguments.chat:
        chat(trained, arguments.system, request)
    elif chats:
        print_answers(trained, chats, request, arguments.batch_size)
    elif arguments.prompts_file or len(prompts) > 1:
        print_completions(trained, prompts, request, arguments.batch_size)
    else:
        print(prompts[0], end="", flush=True)
        continue_one(trained, trained.tokenizer.encode(prompts[0]), request)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
