"""Plans with single fields changed, by name: ``changed(plan, tp=2)`` or, where names could be mistaken, dotted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from unisono.plan.plan import Plan

# options whose plan field has another name
_OPTIONS = {"recompute": "recompute.mode", "precision": "precision.compute", "sync": "sync.kind"}
GROUPS = {name: kind for name, kind in get_type_hints(Plan).items() if is_dataclass(kind)}
DOTTED = {f"{group}.{each.name}" for group, kind in GROUPS.items() for each in fields(kind)}


def dotted(name: str) -> str:
    """``tp`` → ``mesh.tp``."""
    (full,) = {_OPTIONS.get(name, name)} & DOTTED or {each for each in DOTTED if each.endswith(f".{name}")}
    return full


def changed(plan: Plan, **changes: Any) -> Plan:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        group, _, short = dotted(name).partition(".")
        groups.setdefault(group, {})[short] = value
    return plan.updated(**groups)


def is_plan_field(name: str) -> bool:
    """Whether it names a field: dotted, or short where no other options class has such a field."""
    short = {each.partition(".")[2] for each in DOTTED} - {"kind", "mode", "modules"}
    return name in DOTTED or name in _OPTIONS or name in short
