"""Checks the findings of rules of other packages, which may have any field wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar, cast, get_args

import numpy as np

from unisono.diagnose.finding import Finding, Severity
from unisono.diagnose.run_facts import RunFacts
from unisono.observe.events import is_count
from unisono.sanitize import printable

T = TypeVar("T")

_SETTING: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


def checked_finding(finding: Any, facts: RunFacts) -> Finding:
    """The same finding with plain Python values, where NumPy's stood. Raises TypeError and ValueError for a wrong field."""
    if not isinstance(finding, Finding):
        raise TypeError("it yields something else than unisono.diagnose.Finding")
    if finding.severity not in get_args(Severity):
        raise ValueError(f"severity is {finding.severity!r}, not one of {', '.join(get_args(Severity))}")
    return Finding(
        id=_text("id", finding.id),
        title=_text("title", finding.title),
        severity=finding.severity,
        cost_frac=_share("cost_frac", finding.cost_frac),
        confidence=_share("confidence", finding.confidence),
        ranks=_items("ranks", finding.ranks, _rank),
        evidence=_items("evidence", finding.evidence, lambda line: _text("evidence", line)),
        advice=_text("advice", finding.advice),
        patch=_patch(finding.patch, facts),
        expected_gain=_share("expected_gain", finding.expected_gain),
    )


def make_read_only(value: Any) -> None:
    """Make all arrays in facts of a run read-only: a rule that writes into one fails, and spoils no other rule's facts."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif is_dataclass(value):
        for each in fields(value):
            make_read_only(getattr(value, each.name))
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            make_read_only(item)
    elif isinstance(value, tuple | list):
        for item in cast("tuple[Any, ...]", value):
            make_read_only(item)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is {value!r}, no text")
    return printable(value)


def _share(field: str, value: Any) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field} is {value!r}, no number")
    if not 0 <= value <= 1:  # nor is NaN
        raise ValueError(f"{field} is {value}, not from 0 to 1")
    return float(value)


def _items(field: str, values: Any, item: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(values, tuple | list):  # a text would be a tuple of its letters
        raise TypeError(f"{field} is {values!r}, no tuple")
    return tuple(item(value) for value in cast("tuple[Any, ...]", values))


def _rank(value: Any) -> int:
    value = _plain(value)
    if not is_count(value):
        raise TypeError(f"a rank is {value!r}, no number of one")
    return value


def _patch(patch: Any, facts: RunFacts) -> dict[str, Any]:
    if not isinstance(patch, Mapping):
        raise TypeError(f"patch is {patch!r}, no mapping")
    checked: dict[str, Any] = {}
    for name, value in cast("Mapping[Any, Any]", patch).items():
        if not isinstance(name, str) or not _SETTING.fullmatch(name):
            raise ValueError(f"patch has {name!r}, no dotted name of a setting")
        # the file of a script has not all options, and a trace has none
        if facts.settings and not facts.is_script and name not in facts.settings:
            raise ValueError(f"patch has {name}, which is no setting of this run")
        checked[name] = _setting(name, value)
    return checked


def _setting(name: str, value: Any) -> Any:
    """The value as an option takes it: a list of plain values or one of them."""
    if isinstance(value, tuple | list):
        return [_setting(name, item) for item in cast("tuple[Any, ...]", value)]
    value = _plain(value)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not (value is None or is_number or (isinstance(value, str) and printable(value) == value)):
        raise TypeError(f"patch gives {name} {value!r}, no plain value")
    return value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
