"""One value in and out of text: TOML inline form, the literals of ``--set`` and the environment, spelling of keys."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, cast

from unisono.sanitize import shorten

NONE = "none"  # stands for None, because TOML has no null
CALLABLE = "python:"  # prefix of the label that stands for a callable of a Python file
SET = "--set"
ENV = "UNISONO__"


def toml_value(value: Any) -> str:
    """The value on one line, as TOML writes it after ``=``. Raises TypeError for a value that TOML cannot write."""
    import tomli_w

    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, cast("list[Any]", value))) + "]"
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{toml_key(name)} = {toml_value(item)}" for name, item in pairs) + "}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def toml_key(name: str) -> str:
    """The name as TOML writes it before ``=``."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_value(name)


def literal(text: str) -> Any:
    """The TOML value that ``text`` writes, or ``text`` itself: ``3`` → 3, ``"3"`` → '3', ``runs/a`` → 'runs/a'."""
    try:  # inside an array, so that a trailing comment or a second statement is no value but plain text
        document = tomllib.loads(f"value = [{text}]")
    except (ValueError, RecursionError):
        return text
    items = cast("list[Any]", document["value"])
    is_one_value = len(document) == 1 and len(items) == 1 and not text.rstrip().endswith(",")
    return items[0] if is_one_value else text


def is_code(value: Any) -> bool:
    """Whether only Python can give the value: a callable, or callables by name."""
    if isinstance(value, Mapping) and value:
        return all(map(callable, cast("Mapping[Any, Any]", value).values()))
    return callable(value)


def encode(value: Any) -> Any:
    """The value as TOML and JSON hold it: ``none`` for None, a label for code, lists for tuples."""
    if value is None:
        return NONE
    if is_code(value):
        return CALLABLE + _code_name(value)
    if isinstance(value, list | tuple):
        return [encode(item) for item in cast("list[Any]", value)]
    return value


def _code_name(value: Any) -> str:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return ", ".join(f"{name}: {_code_name(item)}" for name, item in items)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def shown(value: Any) -> str:
    """The value for an error text, at most 80 characters: TOML where TOML can say it, else its ``repr``.

    A number of some array library is shown by its ``repr``, or the reader could not tell it from a plain one.
    """
    try:
        encoded = encode(value)
        native = type(encoded).__module__ in ("builtins", "datetime")
        return shorten(toml_value(encoded) if native else repr(value))
    except TypeError:
        return shorten(repr(value))
    except ValueError:  # Python refuses to write out such integers
        return "thousands of digits"


def env_name(key: str) -> str:
    """The environment variable of a dotted key."""
    return ENV + key.upper().replace(".", "__")


def assignment(origin: str, key: str, value: Any) -> str:
    """How to set ``key`` in the place that ``origin`` names: a file, ``--set`` or the environment."""
    text = toml_value(encode(value))
    if origin == SET:
        return f"{SET} {shlex.quote(f'{key}={text}')}"
    if origin.startswith("env "):
        return f"{env_name(key)}={shlex.quote(text)}"
    return f"{key} = {text}"
