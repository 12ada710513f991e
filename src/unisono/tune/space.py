"""The settings that a search varies: ranges and lists of values, from the command line or a TOML file.

    optim.lr=log:1e-4..1e-2      a number, log-uniform
    model.num_layers=2..8/2      2, 4, 6 or 8
    optim.kind=adamw,lamb        one of these values

A TOML file has the same texts, or lists of values, in its table ``[space]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

from unisono.config.toml_file import read_toml
from unisono.config.values import encode, literal, toml_value
from unisono.errors import ConfigError

_LOG: Final = "log:"
_RANGE: Final = ".."
MAX_VALUES: Final = 1_000_000  # of a grid
_EXAMPLES: Final = "optim.lr=log:1e-4..1e-2, model.num_layers=2..8/2, optim.kind=adamw,lamb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of several values.

    Attributes:
        values: Texts as ``--set`` takes them, all different.
    """

    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The same as a specification."""
        return ",".join(self.values)

    def checked_values(self) -> tuple[str, ...]:
        """Values with which a configuration is checked before the search."""
        return self.values

    def num_values(self) -> int:
        """Number of values of ``grid``."""
        return len(self.values)

    def grid(self) -> tuple[str, ...]:
        """All values."""
        return self.values

    def text_of(self, value: Any) -> str | None:
        """The text that stands for a value of a configuration, as TOML has it; None where it is none of these."""
        return next((text for text in self.values if literal(text) == value), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A number between two others, both included.

    Attributes:
        low: The smallest value.
        high: The largest one.
        step: Distance of the values from each other; None for any number between.
        is_log: Whether values are log-uniform.
        is_integer: Whether they are whole numbers.
    """

    low: float
    high: float
    step: float | None = None
    is_log: bool = False
    is_integer: bool = False

    @property
    def text(self) -> str:
        """The same as a specification."""
        step = "" if self.step is None else f"/{self.value_text(self.step)}"
        return f"{_LOG if self.is_log else ''}{self.value_text(self.low)}{_RANGE}{self.value_text(self.high)}{step}"

    def value_text(self, value: float) -> str:
        """A value as ``--set`` takes it, without loss."""
        return str(int(value)) if self.is_integer else repr(float(value))

    def checked_values(self) -> tuple[str, ...]:
        """Values with which a configuration is checked before the search."""
        return self.value_text(self.low), self.value_text(self.high)

    def num_values(self) -> int | None:
        """Number of values of ``grid``; None without a step. That of an integer range is 1, unless it is logarithmic."""
        step = self.step if self.step is not None else 1.0 if self.is_integer and not self.is_log else None
        return None if step is None else _num_steps(self.low, self.high, step) + 1

    def grid(self) -> tuple[str, ...] | None:
        """All values, each a step above the last; None where there is no step."""
        count = self.num_values()
        step = 1.0 if self.step is None else self.step
        return None if count is None else tuple(self.value_text(self.low + index * step) for index in range(count))

    def text_of(self, value: Any) -> str | None:
        """A value of a configuration as ``--set`` takes it; None where it is not in the range, or between two steps."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        is_between = abs(steps - round(steps)) > 1e-9 or (self.is_integer and value != round(value))
        return None if is_between else self.value_text(value)


Space = Mapping[str, Choice | Range]


def read_space(given: Iterable[str]) -> Space:
    """The settings that ``given`` names: ``NAME=SPECIFICATION``, or a TOML file with a table ``[space]``.

    Raises:
        ConfigError: A specification cannot be read, or a setting is given twice, or there is none.
    """
    space: dict[str, Choice | Range] = {}
    for text in given:
        name, equals, specification = text.partition("=")
        entries = [(name.strip(), specification.strip())] if equals else _entries(Path(text))
        for name, specification in entries:
            if name in space:
                raise _wrong(f"{name} twice", "a setting is searched in one range")
            space[name] = _parameter(name, specification)
    if not space:
        raise _wrong("no setting", "a search varies one setting or more")
    return space


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        table: Any = read_toml(path).values.get("space")
    except OSError as error:
        raise ConfigError(
            given=f"{path}: {error.strerror or error}",
            rule="--space is NAME=SPECIFICATION, or a TOML file with a table [space]",
            consequence="nothing was searched",
            nearest=f"such as {_EXAMPLES}",
        ) from None
    if not isinstance(table, dict):
        raise _wrong(f"{path} without a table [space]", "a file of a search has the settings there")
    yield from _leaves(cast("dict[str, Any]", table), "")


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """``optim.lr = …`` in the table, with quotes around the name or without."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parameter(name: str, given: Any) -> Choice | Range:
    if isinstance(given, list):
        return _choice(name, [_text(value) for value in cast("list[Any]", given)])
    text = _text(given)
    is_log, body = text.startswith(_LOG), text.removeprefix(_LOG)
    low, dots, rest = body.partition(_RANGE)
    if not dots:
        if is_log:
            raise _wrong(f"{name}={text}", "log: is for a range of numbers")
        return _choice(name, _split(text))
    high, slash, step = rest.partition("/")
    return _range(name, text, (low, high, step if slash else None), is_log=is_log)


def _range(name: str, text: str, parts: tuple[str, str, str | None], *, is_log: bool) -> Range:
    try:
        low, high, step = (None if part is None else float(part) for part in parts)
        is_integer = all(part is None or part.strip().lstrip("+-").isdecimal() for part in parts)
    except ValueError:
        raise _wrong(f"{name}={text}", "the ends of a range, and its step, are numbers") from None
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise _wrong(f"{name}={text}", "a range goes from a number up to a larger one")
    if is_log and (low <= 0 or step is not None):
        raise _wrong(f"{name}={text}", "a logarithmic range has no step, and begins above 0")
    if step is not None and not (math.isfinite(step) and step > 0 and _num_steps(low, high, step) > 0):
        raise _wrong(f"{name}={text}", "the step is above 0, and at most the length of the range")
    if step is not None:
        high = low + step * _num_steps(low, high, step)
    return Range(low=low, high=high, step=step, is_log=is_log, is_integer=is_integer)


def _num_steps(low: float, high: float, step: float) -> int:
    """Number of whole steps from ``low`` to ``high``; 0.1 is not exact, and 0..1/0.1 has eleven values."""
    rounding = 4 * math.ulp(max(abs(low), abs(high)))
    return math.floor((high - low + rounding) / step + 1e-9)


def _choice(name: str, values: Sequence[str]) -> Choice:
    if "" in values or len(set(values)) != len(values) or not values:
        raise _wrong(f"{name}={','.join(values)}", "the values of a list are not empty, and different from each other")
    return Choice(values=tuple(values))


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else toml_value(encode(value))


def _split(text: str) -> list[str]:
    """Parts between the commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def settings_within(space: Space, values: Mapping[str, Any]) -> dict[str, str] | None:
    """The settings of ``space`` with the values of a configuration; None where one of them is not in its range.

    Args:
        space: The settings that are searched.
        values: All settings of the configuration, by dotted name, as TOML has them.
    """
    texts = {name: parameter.text_of(values.get(name)) for name, parameter in space.items()}
    found = {name: text for name, text in texts.items() if text is not None}
    return found if len(found) == len(space) else None


def num_combinations(space: Space) -> int | None:
    """Number of combinations of all values; None where a range has no step."""
    counts = [parameter.num_values() for parameter in space.values()]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def grid_size(space: Space) -> int:
    """Number of combinations of all values. Raises ConfigError for a range without a step, and for too many combinations."""
    size = 1
    for name, parameter in space.items():
        count = parameter.num_values()
        if count is None:
            raise _wrong(
                f"{name}={parameter.text} with a grid",
                "a grid needs a list, an integer range or a range with a step; a logarithmic range has no step",
            )
        size *= count
        if size > MAX_VALUES:
            raise _wrong(f"a grid of {size} combinations or more", f"a grid has at most {MAX_VALUES}")
    return size


def grid(space: Space) -> Iterator[dict[str, str]]:
    """Every combination of values, the last setting varying fastest."""
    grid_size(space)
    for values in product(*(parameter.grid() or () for parameter in space.values())):
        yield dict(zip(space, values, strict=True))


def _wrong(given: str, rule: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was searched", nearest=f"such as {_EXAMPLES}")
