"""Text from a trained model: continuations of prompts, or a chat.

python generate.py outputs/llama-debug-20260101-120000 --prompt "def main("
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import ConfigError, TitaniteError, command_line
from data.chat import chat_of
from data.conversations import read_conversation
from data.tokenizer import Tokenizer
from models.llama.model import KVCache
from models.trained import Trained, add_place_arguments, load_from_arguments
from storage.records import read_lines

Record = dict[str, Any]  # {"prompt": text}, or {"messages": conversation}, perhaps with "tools"
PREFILL_TOKENS = 512  # of a prompt per forward: limits the memory of the logits, which go unused
DRAW_BITS = 31  # of random numbers and probabilities: as integers, since a GPU may add floats in any order
GREEDY_BELOW = 1e-5  # the temperature under which the likeliest token is taken, as in vLLM
# Fields of Request that are options of the same name.
OPTIONS: Mapping[str, str] = {
    "max_tokens": "tokens per prompt or answer (%(default)s)",
    "temperature": "0: the likeliest token (default %(default)s)",
    "top_k": "draw among the k likeliest, 0: all (%(default)s)",
    "top_p": "draw among the likeliest that make p (%(default)s)",
    "seed": "seed of the first prompt, the next one's is one more",
}


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
        stops = [] if all_of_it else self.stops
        certain = 0  # all before what may be the beginning of a stop string
        while not any(stop.startswith(text[certain:]) for stop in ["", *stops]):
            certain += 1
        self.held = text[certain:]
        return text[:certain]


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


def answer_all(trained: Trained, records: Sequence[Record], request: Request, batch_size: int) -> None:
    """Print each record as a JSON line with what follows it, batch by batch. Raises TitaniteError."""
    prompts = [encode_record(trained.tokenizer, record) for record in records]
    warn_if_longer(trained, max(map(len, prompts)), request)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        texts = [""] * len(batch)
        seeded = replace(request, seed=request.seed + first)
        for row, text in stream_texts(trained, batch, seeded):
            texts[row] += text
        for record, text in zip(records[first:], texts, strict=False):
            answered = record | {"completion": text}
            if "messages" in record:
                answered = record | {"messages": [*record["messages"], {"role": "assistant", "content": text}]}
            print(json.dumps(answered, ensure_ascii=False), flush=True)


def encode_record(tokenizer: Tokenizer, record: Record) -> list[int]:
    """The tokens of a prompt, or of a conversation up to where its answer begins. Raises TitaniteError."""
    if "prompt" in record:
        return check_prompt("prompt", record["prompt"], tokenizer)
    return chat_of(tokenizer).encode(record["messages"], record.get("tools"), add_generation_prompt=True)


def chat(trained: Trained, system: str, request: Request) -> None:
    """Answer each line that is typed, until the end of input."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> ")
            line.encode()  # raises if it is not UTF-8
            turn = [*messages, {"role": "user", "content": line}]
            prompt = encode_record(trained.tokenizer, {"messages": turn})
        except EOFError:
            return
        except (TitaniteError, UnicodeError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        warn_if_longer(trained, len(prompt), request)
        answer = continue_one(trained, prompt, request)
        messages = [*turn, {"role": "assistant", "content": answer}]


def prompt_of(record: Any) -> Record:
    """The prompt of a line of `--prompts-file`."""
    record["prompt"].encode()  # raises if it is no text, or has lone surrogates
    return {"prompt": record["prompt"]}


def messages_of(record: Any) -> Record:
    """The conversation of a line of `--chats-file`, as data.prepare reads it."""
    return dict(zip(("messages", "tools"), read_conversation(record), strict=False))


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
    for name, about in OPTIONS.items():
        default = getattr(Request, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=about)
    parser.add_argument("--stop", action="append", default=[], help="text or special token that ends it; repeatable")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts continued together (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: must be at least 1")
    if arguments.system and not arguments.chat:
        parser.error("--system is for --chat")
    options = {name: getattr(arguments, name) for name in OPTIONS}
    request = Request(**options, stops=tuple(arguments.stop))
    records = [{"prompt": prompt} for prompt in arguments.prompt or []]
    if arguments.prompts_file:
        records = read_lines(arguments.prompts_file, 'a text "prompt"', prompt_of)
    if arguments.chats_file:
        records = read_lines(arguments.chats_file, '"messages"', messages_of)

    trained = load_from_arguments(arguments)
    stop_ids = {trained.tokenizer.eos_id}
    if arguments.chat or arguments.chats_file:
        stop_ids |= chat_of(trained.tokenizer).stop_ids
    request = replace(request, stop_ids=frozenset(stop_ids))
    if arguments.chat:
        chat(trained, arguments.system, request)
    elif arguments.prompt and len(records) == 1:
        prompt = encode_record(trained.tokenizer, records[0])
        warn_if_longer(trained, len(prompt), request)
        print(arguments.prompt[0], end="", flush=True)
        continue_one(trained, prompt, request)
    else:
        answer_all(trained, records, request, arguments.batch_size)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
