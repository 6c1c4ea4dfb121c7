"""Text from a trained model: continuations of prompts, or a chat.

python generate.py outputs/llama-debug-20260101-120000 --prompt "def main("
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from config import Positive, TitaniteError, command_line, convert
from data.chat import chat_of, read_conversation
from data.tokenizer import Tokenizer
from models.generation import Request, TextStream, check_prompt, generate
from models.trained import Trained, add_place_arguments, load_from_arguments, longest_sequence
from storage.records import read_lines

Record = dict[str, Any]  # {"prompt": text}, or {"messages": conversation}, perhaps with "tools"
# Fields of Request that are options of the same name.
OPTIONS: Mapping[str, str] = {
    "max_tokens": "tokens per prompt or answer (%(default)s)",
    "temperature": "0: the likeliest token (default %(default)s)",
    "top_k": "draw among the k likeliest, 0: all (%(default)s)",
    "top_p": "draw among the likeliest that make p (%(default)s)",
    "seed": "seed of the first prompt, the next one's is one more",
}


def stream_texts(trained: Trained, prompts: Sequence[Sequence[int]], request: Request) -> Iterator[tuple[int, str]]:
    """Yield (row, its next text) as tokens come, until all rows are finished."""
    stop_ids = set(request.stop_ids)
    for id, added in trained.tokenizer.raw.get_added_tokens_decoder().items():
        if added.special and added.content in request.stops:  # no text shows it
            stop_ids.add(id)
    streams = [TextStream(trained.tokenizer, ids, frozenset(stop_ids), request.stops) for ids in prompts]
    for tokens in generate(trained.model, prompts, trained.device, request):
        for row, stream in enumerate(streams):
            if not stream.done:
                yield row, stream.push(tokens[row])
        if all(stream.done for stream in streams):
            break
    for row, stream in enumerate(streams):
        yield row, stream.finish()


def warn_if_longer(trained: Trained, prompt_tokens: int, request: Request) -> None:
    """Warn if a text may outgrow the sequences that the model was trained on: beyond them it often makes no sense."""
    longest = longest_sequence(trained.manifest)
    if 0 < longest < prompt_tokens + request.max_tokens:
        asked = f"a prompt of {prompt_tokens} tokens and --max-tokens {request.max_tokens} exceed the {longest}"
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
    messages, tools = read_conversation(record)
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


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
    convert("--batch-size", arguments.batch_size, Positive)
    if "" in arguments.stop:
        parser.error("--stop: must not be empty")
    if arguments.system and not arguments.chat:
        parser.error("--system is for --chat")
    kinds = get_type_hints(Request, include_extras=True)
    options = {name: convert(f"--{name.replace('_', '-')}", getattr(arguments, name), kinds[name]) for name in OPTIONS}
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
