"""Validates one value of one option: type, choices, range. Each error names an accepted value.

Conversion is msgspec's and strict: a whole number is accepted as a number, no string becomes a number. No value names
code: a ``python:`` label stands only for the callable that the base Python file gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import date, time
from difflib import get_close_matches
from typing import Any, cast

from unisono.config.fields import Leaf, OptionTree, Spec, join, limit_words, option_tree, type_words
from unisono.config.toml_file import KeyPath, config_problem
from unisono.config.values import CALLABLE, NONE, assignment, encode, env_name, is_code, literal, shown, toml_key
from unisono.errors import ConfigError, Problem, nearest_name


def checked_value(leaf: Leaf, raw: Any, origin: str, beneath: Any) -> Any:
    """The typed value of ``leaf``; ``beneath`` is the value of lower layers. Raises ConfigError if it is not legal."""
    if leaf.spec.python_only and is_code(raw):
        return raw
    if leaf.optional and (raw is None or raw == NONE):
        return None
    if leaf.spec.python_only and isinstance(raw, str) and raw.startswith(CALLABLE):
        if is_code(beneath) and encode(beneath) == raw:
            return beneath
        raise _refused(leaf, raw, origin, *_label_breach(leaf, beneath))
    value, fault = _convert(raw, leaf.type)
    breach = (_type_rule(leaf, fault), _type_hint(leaf, raw, origin)) if fault else _breach(leaf, value, origin)
    if breach:
        raise _refused(leaf, raw, origin, *breach)
    return value


def check_options(*options: Any) -> None:
    """Check options objects that Python code built, as those of a file are. Raises ConfigError with all problems."""
    problems: list[Problem] = []
    for instance in filter(None, options):
        layout, origin = option_tree(type(instance)), type(instance).__name__
        legal = True
        for name, leaf in layout.leaves.items():
            value = getattr(instance, name)
            try:
                checked_value(leaf, value, origin, value)
            except ConfigError as error:
                problems += error.problems
                legal = False
        if legal and hasattr(instance, "problems"):  # rules that tie fields together expect legal ones
            problems += [problem for _, problem in instance.problems()]
    if problems:
        raise ConfigError(*problems)


def nearest_keys(layout: OptionTree, key: str, spell: Callable[[str], str] = str) -> str:
    """Suggestions for an unknown key: a close name in its section, then the same name in other sections."""
    everything = [other for other in (*layout.sections, *layout.leaves) if other]
    section, _, name = key.rpartition(".")
    same = [other for other in everything if other.rpartition(".")[2] == name]
    while section not in layout.sections:
        section, _, name = section.rpartition(".")
    close = [join(section, member) for member in get_close_matches(name, layout.members(section), n=1, cutoff=0.61)]
    if candidates := list(dict.fromkeys([*close, *same])):
        return "did you mean " + " or ".join(map(spell, candidates[:3])) + "?"
    return "one of: " + ", ".join(spell(join(section, member)) for member in layout.members(section))


def unknown_key(layout: OptionTree, path: KeyPath, raw: Any, origin: str) -> ConfigError:
    """The error of an undeclared name in a section that exists."""
    place = f"in section [{'.'.join(path[:-1])}]" if path[1:] else "at the top level"
    key = ".".join(map(toml_key, path))
    given = f"unknown section {key}" if isinstance(raw, dict) else f"unknown key {key} = {shown(raw)}"
    nearest = nearest_keys(layout, ".".join(path), env_name if origin.startswith("env ") else str)
    return _error(f"{origin}: {given}", f"only what is declared can be set {place}", nearest)


def not_a_section(layout: OptionTree, key: str, raw: Any, origin: str) -> ConfigError:
    """The error of a scalar or an array given for a section."""
    member = join(key, layout.members(key)[0])
    example = assignment(origin, member, layout.leaves[member].default) if member in layout.leaves else f"[{member}]"
    return _error(f"{origin}: {key} = {shown(raw)}", f"{key} is a section with keys of its own", example)


def one_value(layout: OptionTree, key: str, below: str, origin: str) -> ConfigError:
    """The error of a key below an option."""
    leaf = layout.leaves[key]
    rule = f"{key} is one option and takes {type_words(leaf)}"
    return _error(f"{origin}: unknown key {below}", rule, assignment(origin, key, leaf.default))


def _error(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(config_problem(given, rule, nearest))


def _refused(leaf: Leaf, raw: Any, origin: str, rule: str, nearest: str) -> ConfigError:
    return _error(f"{origin}: {leaf.key} = {shown(raw)}", rule, nearest)


# ---------------------------------------------------------------------------------------------- type


def _convert(raw: Any, to: Any) -> tuple[Any, str]:
    """The value and an empty fault, or msgspec's complaint."""
    import msgspec

    if isinstance(raw, set | frozenset):  # msgspec would take one for an array, in no order
        return None, "a set has no order"
    try:
        return msgspec.convert(raw, to), ""
    except msgspec.ValidationError as error:
        return None, str(error)


def _type_rule(leaf: Leaf, fault: str) -> str:
    code = ", or code of a Python file" if leaf.spec.python_only else ""
    rule = f"{leaf.key} takes {type_words(leaf)}{code}"
    place = fault.partition(" - at `$[")[2].rstrip("`]")
    return f"{rule}; see element {place}" if place.isdigit() else rule


def _type_hint(leaf: Leaf, raw: Any, origin: str) -> str:
    """The same value written in the right type, where there is one, else a choice close to it, else the default."""
    candidates: list[Any] = []
    if isinstance(raw, str):
        candidates += [[part.strip() for part in raw.split(",")], literal(raw)]
    else:
        candidates.append([raw])
    if isinstance(raw, bool | int | float | date | time):
        candidates.append(shown(raw))
    if isinstance(raw, float):
        candidates.append(int(raw) if raw.is_integer() else float(raw))
    for candidate in candidates:
        value, fault = _convert(candidate, leaf.type)
        if not fault and _breach(leaf, value, origin) is None:
            return assignment(origin, leaf.key, value)
    if leaf.choices is not None and isinstance(raw, str):
        return nearest_name(raw, map(str, leaf.choices))
    return _default_hint(leaf, origin)


def _default_hint(leaf: Leaf, origin: str) -> str:
    return f"{assignment(origin, leaf.key, leaf.default)} (the default)"


def _label_breach(leaf: Leaf, beneath: Any) -> tuple[str, str]:
    rule = f"a {CALLABLE} label stands for the callable that the Python file beneath gives {leaf.key}"
    if is_code(beneath):
        return rule, f"that file gives {encode(beneath)}"
    return rule, f'base = "config.py", whose config() gives {leaf.key}'


# ---------------------------------------------------------------------------------------------- content


def _breach(leaf: Leaf, value: Any, origin: str) -> tuple[str, str] | None:
    """(rule, nearest legal value) that a value of the right type breaks; None for a legal value."""
    many = isinstance(value, list | tuple | dict)
    subject = f"each element of {leaf.key}" if many else leaf.key
    for atom in _atoms(value):
        number = isinstance(atom, int | float) and not isinstance(atom, bool)
        if number and not _inside(atom, leaf.spec):
            bound = None if many else _crossed(atom, leaf.spec)
            nearest = _default_hint(leaf, origin) if bound is None else assignment(origin, leaf.key, bound)
            return f"{subject} must be {limit_words(leaf.spec)}", nearest
        if isinstance(atom, float) and not math.isfinite(atom):
            return f"{subject} must be a finite number", _default_hint(leaf, origin)
        if isinstance(atom, int) and not -(2**63) <= atom < 2**64:
            return f"{subject} fits in 64 bits", _default_hint(leaf, origin)
        if leaf.choices is not None and atom not in leaf.choices:
            listed = ", ".join(shown(choice) for choice in leaf.choices)
            return f"{subject} is one of {listed}", nearest_name(str(atom), map(str, leaf.choices))
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # arguments and variables in another encoding
        return f"{subject} is Unicode text", _default_hint(leaf, origin)
    return None


def _inside(number: float, spec: Spec) -> bool:
    """Written so that nan, which compares false with everything, is inside no range."""
    return (
        (spec.ge is None or number >= spec.ge)
        and (spec.gt is None or number > spec.gt)
        and (spec.le is None or number <= spec.le)
        and (spec.lt is None or number < spec.lt)
    )


def _crossed(number: float, spec: Spec) -> float | None:
    """The bound on the side where the number lies, if the bound itself is legal."""
    if spec.ge is not None and number < spec.ge:
        return spec.ge
    return spec.le if spec.le is not None and number > spec.le else None


def _atoms(value: Any) -> Iterator[Any]:
    """The scalars of a value: elements of arrays, values of tables, at any depth."""
    if isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _atoms(item)
    elif isinstance(value, dict):
        for item in cast("dict[str, Any]", value).values():
            yield from _atoms(item)
    else:
        yield value
