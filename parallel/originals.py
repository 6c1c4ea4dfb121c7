"""Code that stands in for a piece of the model or the loss knows its original, and refuses an edited one.

A fork edits `FeedForward.forward`, say, and trains with kernels that compute the SwiGLU of before. So each replacement
keeps the digest of what it replaces, and compares it at the start.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from config import ConfigError

DIGITS = 12  # of a digest


def digest(function: Callable[..., Any]) -> str:
    """Hex digits that change with a function's code, but not with its name, comments, docstring or layout.

    Raises OSError, TypeError or SyntaxError if the function has no source of its own, such as one in C.
    """
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    if isinstance(definition, ast.FunctionDef):  # not a lambda
        definition.name = ""
        if ast.get_docstring(definition) is not None:
            del definition.body[0]
    canonical = repr(_canonical(definition))
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]


def _canonical(node: Any) -> Any:
    """A syntax tree as tuples, without empty fields: which of those exist differs between versions of Python."""
    if isinstance(node, list):
        return tuple(_canonical(child) for child in node)
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _canonical(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return type(node).__name__, *fields


def check_original(function: Callable[..., Any], known: Collection[str], stand_in: str, instead: str) -> None:
    """Refuse a function whose digest is none of `known`, those that `stand_in` computes. Raises ConfigError.

    `instead` is the setting without the stand-in.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        found = digest(function)
    except (OSError, TypeError, SyntaxError):
        found = "no source"
    if found not in known:
        raise ConfigError(
            f"{name}: is not what {stand_in} was written for, which would compute the old code in its place: "
            f"set {instead}; or change {stand_in} alike, and write {found} where {next(iter(known))} stands"
        )


def check_forward(module: Any, known: Collection[str], stand_in: str, instead: str) -> None:
    """Refuse a module whose forward is none of `known`, or that has hooks. Raises ConfigError."""
    own = vars(module).get("forward", type(module).forward)
    check_original(own, known, stand_in, instead)
    if module._forward_hooks or module._forward_pre_hooks:
        raise ConfigError(f"{type(module).__qualname__}: has hooks, which {stand_in} would drop: set {instead}")
