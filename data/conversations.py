"""Records of other projects as conversations and pairs: OpenAI's, ShareGPT's, Alpaca's, TRL's. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.shards import DataError

Message = dict[str, Any]
Record = Mapping[str, Any]

# What others call the roles. A message of ShareGPT's is from one of these or those.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "developer": "system",
}
SHAREGPT = {"from": "role", "value": "content"}
PAIR = ("prompt", "response")
# Columns that may stand in place of "messages", or of "prompt" and "response", and those beside them that count.
IN_PLACE_OF_MESSAGES = ("conversations", "prompt", "completion", "instruction", "input", "output", "history")
IN_PLACE_OF_PAIRS = ("instruction", "input", "output")
BESIDE_MESSAGES = ("tools", "system")


def without_nulls(value: Any) -> Any:
    """Drop keys that hold None, as TRL does: a table gives each object the keys of all, and templates print nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def read_conversation(record: Record, key: str = "messages") -> list[Any]:
    """[messages] or [messages, tools] of a record. Raises DataError for what is no conversation."""
    record = without_nulls(dict(record))
    found = _find_messages(record, key)
    if found is None:
        return [None]
    if not isinstance(found, list) or not found:
        raise DataError(f"messages = {repr(found)[:80]}: must be a list of messages, at least one")
    messages = _with_system(record, [_message(message) for message in found])
    tools = _tools(record.get("tools"))
    return [messages, tools] if tools else [messages]


def _find_messages(record: Record, key: str) -> Any:
    """What a record holds under `key`, or in place of "messages" in another project's columns."""
    if key != "messages" or "messages" in record:
        return record.get(key)
    if "conversations" in record:
        return record["conversations"]
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        prompt = [_message(message) for message in record["prompt"]]
        for message in prompt:
            if message["role"] == "assistant":
                message["weight"] = 0
        return prompt + record["completion"]
    if "instruction" in record and "output" in record:
        return _alpaca(record)
    return None


def _alpaca(record: Record) -> list[Message]:
    """A record of Alpaca's, with the earlier turns of LlamaFactory's `history`."""
    turns = [*record.get("history", []), [alpaca_question(record), record["output"]]]
    messages = []
    for turn in turns:
        if not (isinstance(turn, list) and len(turn) == 2):
            raise DataError(f"history: {repr(turn)[:80]}: must be a list of [question, answer]")
        question, answer = turn
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def alpaca_question(record: Record) -> Any:
    """The instruction of Alpaca's and, below it, any input."""
    if not record.get("input"):
        return record["instruction"]
    return f"{record['instruction']}\n{record['input']}"


def read_pair(record: Record, keys: Sequence[str]) -> list[Any]:
    """[prompt, response] of a record, by its keys or Alpaca's three."""
    keys = tuple(keys)
    in_place = keys == PAIR and not any(key in record for key in PAIR)
    if "instruction" in record and (in_place or keys == ("instruction", "output")):
        question = alpaca_question(record)
        if isinstance(question, str):
            question += "\n"
        return [question, record.get("output")]
    return [record.get(key) for key in keys]


def _with_system(record: Record, messages: list[Message]) -> list[Message]:
    """The messages, begun by the system prompt of the record's own column."""
    system = record.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise DataError(f"system = {repr(system)[:80]}: must be a text")
    own = [message["content"] for message in messages if message["role"] == "system"]
    if own == [system]:
        return messages
    if own:
        raise DataError("has a system message and another text in its column `system`")
    return [{"role": "system", "content": system}, *messages]


def _tools(tools: Any) -> Any:
    """Tools as objects. A table whose rows cannot differ in their keys holds their JSON."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = without_nulls(json.loads(tools))
        except ValueError:
            raise DataError(f"tools = {tools[:80]!r}: must be a list of objects, or its JSON") from None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"tools = {repr(tools)[:80]}: must be a list of objects")
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates expect it. ShareGPT's are bare functions."""
    if "name" in tool and "function" not in tool and "type" not in tool:
        return {"type": "function", "function": tool}
    return tool


def _message(given: Any) -> Message:
    """A message as templates expect it: role and content, its parts as one text, "" if there is only a call."""
    message = given if isinstance(given, dict) else {}
    if "from" in message and "role" not in message:
        message = {SHAREGPT.get(key, key): value for key, value in message.items()}
        known = {*ROLES, *ROLES.values(), "function"}
        if message["role"] not in known:
            raise DataError(f"a message is from {message['role']!r}, not from one of {', '.join(sorted(known))}")
    role = message.get("role")
    message = message | {"role": ROLES.get(str(role), role)}
    if "train" in message:
        message["weight"] = _weight(message.pop("train"), message["role"])
    if role == "function_call":
        message |= _call(message.get("content"))
    elif message.get("tool_calls"):
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_text_of_part(part) for part in message["content"])
    if not (isinstance(role, str) and isinstance(message.get("content"), str)):
        raise DataError(f'message {repr(given)[:80]}: must have a "role" and a string "content"')
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"weight = {message['weight']!r}: must be 1, or 0 for an answer not to be trained")
    return message


def _weight(train: Any, role: Any) -> int:
    """Axolotl's `train` as OpenAI's `weight`."""
    if not isinstance(train, bool):
        raise DataError(f"train = {train!r}: must be true or false")
    if train and role != "assistant":
        raise DataError(f"train = true: is for the assistant's messages, not for those of {role!r}")
    return int(train)


def _call(content: Any) -> Message:
    """The calls that a message of ShareGPT's from `function_call` holds as JSON, one or a list."""
    try:
        calls = json.loads(content)
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    except (ValueError, TypeError, KeyError):
        asked = 'must be JSON with "name" and "arguments"'
        raise DataError(f"function_call {repr(content)[:80]}: {asked}") from None
    return {"content": "", "tool_calls": [{"type": "function", "function": function} for function in functions]}


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"a part of a message is no text: {repr(part)[:80]}")
    return part["text"]
