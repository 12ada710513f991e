"""The settings and the environment in which runs differ, from what each wrote at its start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from unisono.config.toml_file import read_toml
from unisono.errors import ConfigError
from unisono.observe.events import Event
from unisono.sanitize import printable, redact
from unisono.storage.run_folder import RUN_FILE

_MAX_DEPTH: Final = 20
_MAX_TEXT: Final = 200  # characters of a value
# of every run its own: its folder, and what tells one start from another
_OWN: Final = frozenset({"run.dir", "launch.restarted", "launch.affinity", "environment.plan.version"})
# fields of run_start that say where a run was made
_PLACES: Final = ("environment", "launch", "data", "device", "launcher", "parameters", "parameters_trained")


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs: as text in each run, None where a run has none of that name."""

    key: str
    a: str | None
    b: str | None


def settings_of(start: Event, run_dir: Path) -> dict[str, str]:
    """The options of a run by dotted name, as text: of its start, or of its ``config.toml`` for the run of a script."""
    config: Any = start.get("config")
    if not isinstance(config, Mapping):
        config = {}
        with suppress(OSError, ConfigError):
            config = read_toml(run_dir / RUN_FILE).values
    return _texts(cast("Mapping[str, Any]", config))


def environment_of(start: Event) -> dict[str, str]:
    """Versions, hosts, devices, data and plan of a run by dotted name, as text."""
    return _texts({name: start[name] for name in _PLACES if name in start})


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """The names whose values differ, or that one mapping lacks, in order."""
    return [Difference(key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: text for key, text in _leaves(cast("Mapping[str, Any]", redact(dict(values))), "", 0) if key not in _OWN
    }


def _leaves(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = printable(f"{prefix}{name}")
        if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
            yield from _leaves(cast("Mapping[str, Any]", value), f"{key}.", depth + 1)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield key, printable(text)[:_MAX_TEXT]
