"""The same GPT at another width: heads of the same width, and heads and feed-forward layer in proportion to ``model.dim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.errors import ConfigError

WIDTH_SETTINGS = ("model.dim", "model.num_heads", "model.num_kv_heads", "model.ffn_dim")


def settings_of_width(settings: Mapping[str, Any], width: int, option: str = "") -> dict[str, int]:
    """``WIDTH_SETTINGS`` of the model of ``settings`` at another ``model.dim``.

    Args:
        settings: Values of a configuration by dotted name.
        width: The other ``model.dim``.
        option: The option of the command line that gives it, for an error.

    Raises:
        ConfigError: There is no such model of this width.
    """
    dim, kv_heads, ffn_dim = (int(settings[name]) for name in ("model.dim", "model.num_kv_heads", "model.ffn_dim"))
    unit = dim // kv_heads
    if width * kv_heads % dim or width * ffn_dim % dim:
        nearest = max(1, round(width / unit)) * unit
        raise ConfigError(
            given=f"width {width} of a model of dim {dim}, num_kv_heads {kv_heads} and ffn_dim {ffn_dim}",
            rule="heads have one width, and heads and feed-forward layer are in proportion to dim",
            consequence="there is no such model, and nothing was started",
            nearest=f"a multiple of {unit}, such as {f'{option} {nearest}'.strip()}"
            + (", and ffn_dim=0" if ffn_dim else ""),
        )
    return {name: int(settings[name]) * width // dim for name in WIDTH_SETTINGS}


def default_widths(settings: Mapping[str, Any]) -> list[int]:
    """The width with one key/value head, and 2, 4 and 8 times it."""
    unit = int(settings["model.dim"]) // int(settings["model.num_kv_heads"])
    return [unit << doubling for doubling in range(4)]
