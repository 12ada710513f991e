"""Loads a configuration: merges the layers, checks every value, and reports all problems at once.

Later layers win: defaults, ``planned``, files in the order given (each after its base), environment, ``--set``. Every
value is checked where it stands, also one that a later layer replaces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from unisono.config.fields import BASE, OptionTree, join, option_tree
from unisono.config.renames import given_twice
from unisono.config.resolved import Resolved, resolve
from unisono.config.sources import SourceEntry, environment_entries, fixed, override_entries, read_files
from unisono.config.toml_file import KeyPath, read_toml
from unisono.config.validate import checked_value, not_a_section, one_value, unknown_key
from unisono.config.values import CALLABLE, shown
from unisono.errors import ConfigError, Problem

T = TypeVar("T")

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@runtime_checkable
class Checked(Protocol):
    """An options class with rules across its fields: pairs of field name, relative to the section, and problem."""

    def problems(self) -> Iterable[tuple[str, Problem]]: ...


def load_config(
    cls: type[T],
    sources: Sequence[str | Path] = (),
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = _NOTHING,
    planned: Mapping[str, Any] = _NOTHING,
    trust_python: bool = False,
) -> Resolved[T]:
    """Build ``cls`` from ``.toml`` and ``.py`` files, ``UNISONO__SECTION__FIELD`` variables, ``key=value`` overrides.

    Later layers win: defaults, ``planned``, files, environment, overrides. A ``.toml`` file may name the layer beneath it
    with a top-level ``base``; a ``.py`` file gives every value and must be the lowest layer. Only a value that differs from
    the default counts as set by it. Naming a ``.py`` file, also through ``base``, runs it. The one that a run's folder names in
    its ``config.toml`` runs if this user has run it before (``config.trust``), or with ``trust_python``.

    Args:
        cls: Options class to build, such as ``RunConfig``.
        sources: Paths of files; a later file wins.
        overrides: ``section.field=value`` texts, as after ``--set``; values are TOML or plain strings.
        environ: Environment variables, such as ``os.environ``; other names are ignored. Default: none.
        planned: Values by dotted key that replace defaults.
        trust_python: Run the Python file that a run's folder names, whoever wrote it.

    Returns:
        The options object with the origin of each value.

    Raises:
        ConfigError: A file, key or value is wrong; it holds all problems at once.
    """
    layout = option_tree(cls)
    reading = read_files(sources, layout, trust_python=trust_python)
    if reading.refused is not None:  # other problems would be those of the missing code
        raise ConfigError(reading.refused)
    walk = _Walk(layout=layout, problems=reading.problems, renamed=reading.renamed, fields_alone=bool(reading.problems))
    walk.defaults()
    walk.take([fixed(key, raw, "planned") for key, raw in planned.items()])
    for layer in reading.layers:
        walk.take(layer)
    walk.take(environment_entries(environ))
    walk.take(override_entries(overrides, walk.problems))
    value = walk.build()
    if walk.problems:
        raise ConfigError(*walk.problems) from reading.cause
    renamed = tuple(dict.fromkeys(reading.renamed))
    return resolve(cast(T, value), walk.origins, layout, reading.python, renamed)


def check_file(cls: type, path: Path) -> None:
    """Check each key and value of a TOML file by itself: its ``base`` is not read, and code that it names is not needed.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; it holds all problems at once.
        OSError: The file cannot be read.
    """
    read = read_toml(path)
    values = {key: _without_code(raw) for key, raw in read.values.items() if key != BASE}
    walk = _Walk(layout=option_tree(cls), problems=[], renamed=[], fields_alone=True)
    walk.defaults()
    walk.take([SourceEntry(path=(key,), raw=raw, origin=read.where) for key, raw in values.items()])
    if walk.problems:
        raise ConfigError(*walk.problems)


def _without_code(raw: Any) -> Any:
    """A value of a TOML file without the labels that stand for code, in tables of it too."""
    if not isinstance(raw, dict):
        return raw
    items = cast("dict[str, Any]", raw).items()
    return {
        name: _without_code(item) for name, item in items if not (isinstance(item, str) and item.startswith(CALLABLE))
    }


@dataclass(kw_only=True, slots=True)
class _Walk:
    """The state of loading: the value of each leaf so far, and all problems so far."""

    layout: OptionTree
    problems: list[Problem]
    renamed: list[str]  # as ``Reading.renamed``
    fields_alone: bool  # values are missing, as of a source that could not be read: rules across fields are not checked
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    faulty: set[str] = field(default_factory=set[str])  # keys with a problem; the same holds for the sections around
    # leaves that the current source has given, with their first value
    given: dict[str, tuple[SourceEntry, Any]] = field(default_factory=dict[str, tuple[SourceEntry, Any]])

    def defaults(self) -> None:
        for key, leaf in self.layout.leaves.items():
            self.values[key], self.origins[key] = leaf.default, "default"
            with self._gather(key):
                self.values[key] = checked_value(leaf, leaf.default, "default", None)

    def take(self, entries: Sequence[SourceEntry]) -> None:
        """Set all values of one source."""
        self.given = {}
        for entry in entries:
            self.assign(entry, entry.path[:1], entry.nested())
        for key, leaf in self.layout.leaves.items():
            if leaf.spec.instead_of:
                self._unset_other(key, key.removesuffix(leaf.name) + leaf.spec.instead_of)

    def _unset_other(self, one: str, two: str) -> None:
        """Of two options that replace each other, unset the one of lower layers where the source sets the other alone."""
        for new, old in ((one, two), (two, one)):
            if new in self.given and old not in self.given and self.values[new] != self.layout.leaves[new].default:
                self.values[old], self.origins[old] = self.layout.leaves[old].default, "default"

    def assign(self, entry: SourceEntry, path: KeyPath, raw: Any) -> None:
        """Set the leaf at ``path``, or everything below it."""
        current_key = self.layout.renames.paths.get(path)
        if current_key is not None:
            self._assign_renamed(entry, path, raw, current_key)
            return
        key, origin = ".".join(path), entry.origin(path)
        with self._gather(key):
            # by name, not by key: the one quoted name "optim.lr" at the top level is not lr in [optim]
            if path[-1] not in self.layout.members(".".join(path[:-1])):
                raise unknown_key(self.layout, path, raw, origin)
            if key in self.layout.leaves:
                if len(path) < len(entry.path):
                    raise one_value(self.layout, key, ".".join(entry.path), origin)
                self._require_one_name(entry, path, raw)
                raw = self.layout.renames.current_value(key, raw, self.renamed)
                self.values[key] = checked_value(self.layout.leaves[key], raw, origin, self.values[key])
                self.origins[key] = origin
            elif not isinstance(raw, dict):
                raise not_a_section(self.layout, key, raw, origin)
            else:
                for name, item in cast("dict[str, Any]", raw).items():
                    self.assign(entry, (*path, name), item)

    def _assign_renamed(self, entry: SourceEntry, path: KeyPath, raw: Any, new: str) -> None:
        """Set the option or section ``new`` to the value that the source gives for its earlier name, at ``path``."""
        old, target = ".".join(path), tuple(new.split("."))
        self.renamed.append(f"{old} → {new or 'nothing (this option is gone)'}")
        if new:
            moved = replace(
                entry,
                path=(*target, *entry.path[len(path) :]),
                origin=lambda below: entry.origin((*path, *below[len(target) :])),
                renamed=(old, new),
            )
            self.assign(moved, target, raw)

    def _require_one_name(self, entry: SourceEntry, path: KeyPath, raw: Any) -> None:
        """Raise ConfigError if the source gives this option by its earlier name and by the current one."""
        key = ".".join(path)
        earlier = self.given.setdefault(key, (entry, raw))
        if earlier[0].renamed == entry.renamed:
            return
        (renamed, value), (current, _) = sorted((earlier, (entry, raw)), key=lambda item: item[0].renamed is None)
        assert renamed.renamed is not None
        old = key.replace(renamed.renamed[1], renamed.renamed[0], 1)
        given = f"{renamed.origin(path)}: {old} = {shown(value)} together with {key} ({current.origin(path)})"
        raise ConfigError(given_twice(given, old, key))

    def build(self, section: str = "") -> object:
        """Build the options object of a section, its own sections first, and collect the problems across its fields."""
        parts: dict[str, Any] = {}
        for name in self.layout.members(section):
            key = join(section, name)
            parts[name] = self.build(key) if key in self.layout.sections else self.values[key]
        options = self.layout.sections[section](**parts)
        around = f"{section}." if section else ""
        sound = not self.fields_alone and not any(f"{key}.".startswith(around) for key in self.faulty)
        if sound and isinstance(options, Checked):
            for name, problem in options.problems():
                key = join(section, name)
                place = f"{self.origins[key]}: {key}" if key in self.origins else key
                self.problems.append(replace(problem, given=f"{place}: {problem.given}"))
        return options

    @contextmanager
    def _gather(self, key: str) -> Generator[None]:
        try:
            yield
        except ConfigError as error:
            self.problems.extend(error.problems)
            self.faulty.add(key)
