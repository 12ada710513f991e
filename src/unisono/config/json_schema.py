"""JSON Schema (2020-12) of an options class, for editors that complete and check TOML files.

Types come from msgspec, leaf by leaf; help, defaults, choices and ranges are added here. The schema describes one file
of several, so nothing is required. It is a little wider than ``load``: JSON Schema takes 1.0 for an integer.
"""

from __future__ import annotations

from typing import Any, cast

from unisono.config.fields import BASE, Leaf, OptionTree, join, option_tree
from unisono.config.values import NONE, encode

_KEYWORDS = (("ge", "minimum"), ("gt", "exclusiveMinimum"), ("le", "maximum"), ("lt", "exclusiveMaximum"))


def schema(cls: type) -> dict[str, Any]:
    """The schema of TOML files for ``cls``."""
    root = _section_schema(option_tree(cls), "")
    base = {"type": "string", "description": "The TOML or Python file beneath this one, relative to it."}
    root["properties"] = {BASE: base, **root["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.__name__, **root}


def _section_schema(layout: OptionTree, section: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in layout.members(section):
        key = join(section, name)
        properties[name] = _leaf_schema(layout.leaves[key]) if key in layout.leaves else _section_schema(layout, key)
    described = {"description": words} if (words := section_help(layout.sections[section])) else {}
    return {"type": "object", **described, "properties": properties, "additionalProperties": False}


def _leaf_schema(leaf: Leaf) -> dict[str, Any]:
    import msgspec

    accepted = _limited(msgspec.json.schema(leaf.type), leaf)
    if leaf.optional:
        accepted = {"anyOf": [accepted, {"const": NONE}]}
    return {"description": leaf.spec.help, "default": encode(leaf.default), **accepted}


def _limited(part: dict[str, Any], leaf: Leaf) -> dict[str, Any]:
    """Put choices and range where the scalars are: at any depth of arrays, tables and unions."""
    inner = dict(part)
    for keyword in ("items", "additionalProperties"):
        if isinstance(inner.get(keyword), dict):
            inner[keyword] = _limited(inner[keyword], leaf)
    for keyword in ("anyOf", "prefixItems"):
        if keyword in inner:
            inner[keyword] = [_limited(item, leaf) for item in cast("list[dict[str, Any]]", inner[keyword])]
    if inner.get("type") in ("integer", "number"):
        bounds = ((keyword, getattr(leaf.spec, limit)) for limit, keyword in _KEYWORDS)
        inner |= {keyword: bound for keyword, bound in bounds if bound is not None}
    if leaf.choices is not None and inner.get("type") in ("integer", "number", "string", "boolean"):
        inner["enum"] = list(leaf.choices)
    return inner


def section_help(cls: type) -> str:
    """First line of a section's docstring; empty where the dataclass decorator wrote it."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text.strip().partition("\n")[0]
