"""Sources of values: TOML files and their base files, a Python file, the environment, ``--set``.

Each source becomes a list of entries in order of precedence; only the layering key ``base`` is interpreted here.
A TOML file is data: no value of it is imported, called or constructed. Only ``base`` may name a Python file,
and that file then runs; one that is named by a run's folder, if ``config.trust`` allows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unisono.config.fields import BASE, OptionTree
from unisono.config.python_file import PythonFile, run_python
from unisono.config.toml_file import KeyPath, config_problem, read_toml
from unisono.config.trust import python_problem
from unisono.config.values import ENV, SET, literal, shown
from unisono.errors import ConfigError, Problem
from unisono.sanitize import shorten
from unisono.storage.files import MAX_SHOWN_PATH, look_up
from unisono.storage.limits import MAX_CONFIG_FILES
from unisono.storage.run_folder import RUN_FILE

SUFFIXES = (".toml", ".py")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """A raw value for a key path (a leaf, or a section as a dict), and the origin of every path at or below it.

    ``renamed`` is (earlier key, current key) if the source gives the option or its section by a name of an earlier version.
    """

    path: KeyPath
    raw: Any
    origin: Callable[[KeyPath], str]
    renamed: tuple[str, str] | None = None

    def nested(self) -> Any:
        """The value as seen from the first name of the path: ``a.b.c = 1`` is ``{b: {c: 1}}`` for ``a``."""
        raw = self.raw
        for name in reversed(self.path[1:]):
            raw = {name: raw}
        return raw


@dataclass(kw_only=True, slots=True)
class Reading:
    """The entries of each file, lowest layer first, and the problems of the files."""

    layout: OptionTree
    layers: list[list[SourceEntry]] = field(default_factory=list[list[SourceEntry]])
    python: PythonFile | None = None
    files: list[Path] = field(default_factory=list[Path])
    problems: list[Problem] = field(default_factory=list[Problem])
    renamed: list[str] = field(default_factory=list[str])  # "old → new" of each key or value of an earlier version
    cause: BaseException | None = None  # exception of a Python file, for its traceback
    trust_python: bool = False  # run the Python file of a run's folder, whoever wrote it
    refused: Problem | None = None  # the Python file of a run's folder, which did not run

    def layer(self, path: Path, *, named: str = "", above: tuple[Path, ...] = (), of_run: bool = False) -> None:
        """Read one file after the layers beneath it.

        ``named`` is the line that names it, ``above`` the files above it, and ``of_run`` tells whether one of them is a run's.
        """
        try:
            _, fault = look_up(path)
            if fault:
                raise ConfigError(_unreadable(path, named, fault))
            self._check(path, named, above)
            if path.suffix == ".py":
                self._python(path, named, of_run=of_run)
            else:
                self._toml(path, above, of_run=of_run or path.name == RUN_FILE)
            self.files.append(path)
        except ConfigError as error:
            self.problems.extend(error.problems)
            self.cause = self.cause or error.__cause__
        except FileNotFoundError:
            self.problems.append(_missing(path, named))
        except OSError as error:
            self.problems.append(_unreadable(path, named, error.strerror))

    def _check(self, path: Path, named: str, above: tuple[Path, ...]) -> None:
        if path.suffix not in SUFFIXES:
            rule = "a configuration is a .toml file or a .py file with def config()"
            raise ConfigError(config_problem(f"{named}{path} is neither TOML nor Python", rule, f"{path.stem}.toml"))
        if path.resolve() in above:
            way = [*above[above.index(path.resolve()) :], path.resolve()]
            nearest = "drop one base of " + " -> ".join(step.name for step in way)
            raise ConfigError(
                config_problem(f"{named}comes back to {path}", "the layers beneath a file end somewhere", nearest)
            )
        if len(above) >= MAX_CONFIG_FILES:
            given = (
                f"{named}{path} would be file {len(above) + 1} of this configuration, each the {BASE} of the one before"
            )
            rule = f"a configuration has {MAX_CONFIG_FILES} files at most"
            nearest = f"put the settings of several of these files into one; or drop the {BASE} of {above[-1]}"
            raise ConfigError(config_problem(given, rule, nearest))

    def _toml(self, path: Path, above: tuple[Path, ...], *, of_run: bool) -> None:
        read = read_toml(path)
        base = read.values.pop(BASE, None)
        if isinstance(base, str):
            named = f"{read.where((BASE,))}: {BASE} = {shown(base)}: "
            self.layer(path.parent / base, named=named, above=(*above, path.resolve()), of_run=of_run)
        elif base is not None:
            given = f"{read.where((BASE,))}: {BASE} = {shown(base)}"
            rule = f"{BASE} names one file, as a string, relative to this one"
            self.problems.append(config_problem(given, rule, f'{BASE} = "other.toml"'))
        self.layers.append([SourceEntry(path=(key,), raw=raw, origin=read.where) for key, raw in read.values.items()])

    def _python(self, path: Path, named: str, *, of_run: bool) -> None:
        if self.files:
            rule = "a Python file gives every value, so it can only be the lowest layer"
            given = f"{named}{path} comes after {self.files[-1]}"
            raise ConfigError(config_problem(given, rule, f"name {path.name} first"))

        def check(digest: str) -> None:
            if of_run and not self.trust_python:
                self.refused = python_problem(path, digest, named, os.environ)
            if self.refused is not None:
                raise ConfigError(self.refused)

        with self.layout.renames.keywords(self.layout.sections, self.renamed):
            value, self.python = run_python(path, self.layout.cls, check)
        objects: dict[str, object] = {}
        entries: list[SourceEntry] = []
        for section, expected in self.layout.sections.items():  # parents come before what they hold
            parent, _, name = section.rpartition(".")
            if section and parent not in objects:
                continue
            options = getattr(objects[parent], name) if section else value
            if not isinstance(options, expected):
                given, rule = (
                    f"{path}: {section} = {shown(options)}",
                    f"{section} is an instance of {expected.__name__}",
                )
                self.problems.append(config_problem(given, rule, f"{name}={expected.__name__}(...)"))
                continue
            objects[section] = options
            for leaf in self.layout.leaves_of(section):
                raw: object = getattr(options, leaf.name)
                # a dataclass cannot tell a default from the same value given: only another value counts as set
                if type(raw) is not type(leaf.default) or raw != leaf.default:
                    entries.append(fixed(leaf.key, raw, str(path)))
        self.layers.append(entries)


def fixed(key: str, raw: Any, origin: str) -> SourceEntry:
    """An entry whose origin is the same everywhere."""
    return SourceEntry(path=tuple(key.split(".")), raw=raw, origin=lambda _: origin)


def read_files(paths: Sequence[str | Path], layout: OptionTree, *, trust_python: bool) -> Reading:
    """Entries of all files; every file is read even where another one is at fault."""
    reading = Reading(layout=layout, trust_python=trust_python)
    for path in paths:
        reading.layer(Path(path))
    return reading


def environment_entries(environ: Mapping[str, str]) -> list[SourceEntry]:
    """``UNISONO__OPTIM__LR=0.1`` sets ``optim.lr``; names without the double underscore are not ours."""
    ours = {name: name.removeprefix(ENV).lower().replace("__", ".") for name in sorted(environ) if name.startswith(ENV)}
    return [fixed(key, literal(environ[name]), f"env {name}") for name, key in ours.items()]


def override_entries(overrides: Sequence[str], problems: list[Problem]) -> list[SourceEntry]:
    """``optim.lr=0.1`` as ``--set`` takes it."""
    entries: list[SourceEntry] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if equals and key.strip():
            entries.append(fixed(key.strip(), literal(value.strip()), SET))
        else:
            nearest = f"{SET} {key.strip() or 'section.name'}=VALUE"
            problems.append(config_problem(f"{SET} {shown(text)}", f"{SET} takes KEY=VALUE with a dotted key", nearest))
    return entries


def _unreadable(path: Path, named: str, reason: str | None) -> Problem:
    shown_path = shorten(str(path), MAX_SHOWN_PATH)
    rule = "a configuration is a regular file, which this process may read"
    return config_problem(f"{named}{shown_path}: {reason}", rule, f"ls -ld {shown_path}")


def _missing(path: Path, named: str) -> Problem:
    folder = path.parent
    present = sorted(item.name for item in folder.iterdir() if item.suffix in SUFFIXES) if folder.is_dir() else []
    stems = {Path(name).stem: name for name in present}  # the suffix alone would make any two names alike
    if close := get_close_matches(path.stem, stems, n=1):
        nearest = f"did you mean {folder / stems[close[0]]}?"
    elif present:
        nearest = f"{folder} holds " + ", ".join(present[:8])
    else:
        nearest = f"{folder} holds no .toml or .py file" if folder.is_dir() else f"there is no folder {folder}"
    return config_problem(f"{named}no file {path}", "every configuration that is named exists", nearest)
