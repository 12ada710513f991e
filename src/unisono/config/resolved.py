"""A configuration after all layers: the typed value, where each part came from, a hash, and TOML that loads again.

The hash is over the values alone, in a canonical form: order and layout of files, origins, and the path of a Python
file do not enter. Where a value is a callable, the content of the Python file that gave it enters in its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from unisono.config.fields import BASE, OptionTree
from unisono.config.python_file import PythonFile
from unisono.config.values import CALLABLE, encode, is_code, toml_value
from unisono.sanitize import without_credentials

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An option that two configurations hold differently.

    Attributes:
        key: Dotted key of the option.
        left: Value in the first configuration, as TOML.
        right: Value in the second configuration, as TOML.
        left_origin: Where the first value came from; see ``Resolved.origins``.
        right_origin: Where the second value came from.
    """

    key: str
    left: str
    right: str
    left_origin: str
    right_origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[T]):
    """A configuration after all layers; made by ``load_config``.

    Attributes:
        value: The options object.
        origins: For each dotted key ``default``, ``planned``, ``file:line``, the Python file, ``env NAME`` or ``--set``.
        hash: 32 hex digits over the values, and over the Python file if it gave callables.
        python: The file that callables come from; None if no value is a callable.
        executed: The Python file that was run, whatever it gave; None if there was none.
        layout: Declarations of the options class.
        renamed: Keys of earlier versions that were read, each with its current name.
        encoded: For each dotted key the value as TOML and JSON hold it.
    """

    value: T
    origins: dict[str, str]
    hash: str
    python: PythonFile | None
    executed: PythonFile | None
    layout: OptionTree = field(repr=False)
    renamed: tuple[str, ...] = field(default=(), repr=False)
    encoded: dict[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        given = sum(origin != "default" for origin in self.origins.values())
        return f"Resolved({self.value!r}, hash={self.hash!r}, {given} of {len(self.origins)} values given)"

    def to_toml(self) -> str:
        """A complete file: every option, and ``base`` where callables need their Python file. Same hash on reload.

        Credentials in addresses are left out; such a file tells only those who have them where the data is.
        """
        lines = [f"# resolved configuration {self.hash}"]
        if self.python:
            lines.append(f"{BASE} = {toml_value(str(self.python.path))}")
        for section in self.layout.sections:
            leaves = self.layout.leaves_of(section)
            lines += ["", f"[{section}]"] if section and leaves else []
            lines += [f"{leaf.name} = {without_credentials(toml_value(self.encoded[leaf.key]))}" for leaf in leaves]
        return "\n".join(lines) + "\n"

    def updated(self, value: T, keys: Iterable[str], origin: str) -> Resolved[T]:
        """The configuration with ``value`` as its options, of which those at the dotted ``keys`` are new, from ``origin``."""
        origins = self.origins | dict.fromkeys(keys, origin)
        return resolve(value, origins, self.layout, self.executed, self.renamed)

    def shown(self, key: str) -> str:
        """The value as TOML, without credentials in addresses; a callable with the digest of its file."""
        text = without_credentials(toml_value(self.encoded[key]))
        return f"{text} @{self.python.digest[:12]}" if self.python and self._is_callable(key) else text

    def _is_callable(self, key: str) -> bool:
        # a string that looks like a label cannot get here: ``validate`` takes it for the label it is
        encoded = self.encoded[key]
        python_only = self.layout.leaves[key].spec.python_only
        return python_only and isinstance(encoded, str) and encoded.startswith(CALLABLE)


def resolve(
    value: T,
    origins: dict[str, str],
    layout: OptionTree,
    python: PythonFile | None,
    renamed: tuple[str, ...],
) -> Resolved[T]:
    """Seal a configuration and the origins of its values."""
    values: dict[str, Any] = {key: reduce(getattr, key.split("."), value) for key in layout.leaves}
    encoded = {key: encode(item) for key, item in values.items()}
    needed = python if any(is_code(item) for item in values.values()) else None
    canonical = json.dumps([encoded, needed.digest if needed else None], sort_keys=True, separators=(",", ":"))
    digest = blake2b(canonical.encode(), digest_size=16).hexdigest()
    return Resolved(
        value=value,
        origins=origins,
        hash=digest,
        python=needed,
        executed=python,
        layout=layout,
        renamed=renamed,
        encoded=encoded,
    )


def diff(a: Resolved[T], b: Resolved[T]) -> list[Difference]:
    """The options in which ``a`` and ``b`` differ, in order of declaration; empty exactly when the hashes agree.

    Raises:
        TypeError: They are configurations of different classes.
    """
    if a.layout.cls is not b.layout.cls:
        raise TypeError(f"cannot compare {a.layout.cls.__name__} with {b.layout.cls.__name__}")
    return [
        Difference(
            key=key, left=a.shown(key), right=b.shown(key), left_origin=a.origins[key], right_origin=b.origins[key]
        )
        for key in a.layout.leaves
        if a.shown(key) != b.shown(key) or a.encoded[key] != b.encoded[key]
    ]


def render_origins(resolved: Resolved[T]) -> list[tuple[str, str, str]]:
    """``(key, value as TOML, origin)`` for every option of ``resolved``, in order of declaration."""
    return [(key, resolved.shown(key), resolved.origins[key]) for key in resolved.layout.leaves]
