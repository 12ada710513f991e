"""A configuration file with some settings over another file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.fields import BASE
from unisono.config.values import encode, toml_value


def overlay_text(base: str, settings: Mapping[str, Any]) -> str:
    """The TOML text of a file with ``settings``, by dotted name, over the file ``base``, relative to it or absolute; without a
    name, over the defaults."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, option = name.rpartition(".")
        sections.setdefault(section, {})[option] = value
    lines = [f"{BASE} = {toml_value(base)}"] if base else []
    for section, options in sections.items():
        lines += ["", f"[{section}]", *(f"{option} = {toml_value(encode(value))}" for option, value in options.items())]
    return "\n".join(lines or ["# all defaults"]) + "\n"
