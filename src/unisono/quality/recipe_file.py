"""A recipe from files and single settings, in which paths of a file are relative to that file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from unisono.config import load_config
from unisono.config.values import SET
from unisono.errors import ConfigError
from unisono.quality.options import CleanRecipe

_AGAINST: Final = "decontaminate.against"
_LINE: Final = re.compile(r":[0-9]+\Z")  # of a value in a TOML file, behind its path


def load_recipe(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> CleanRecipe:
    """The recipe of TOML files and of ``KEY=VALUE`` texts, which win.

    Paths of benchmarks are relative to the file that names them, as ``base`` is, and in ``overrides`` to the current folder.

    Raises:
        ConfigError: A file or a setting is wrong; it holds all problems at once.
    """
    try:
        resolved = load_config(CleanRecipe, files, overrides=overrides)
    except ConfigError as error:
        more = "; unisono data recipe prints all settings"
        raise ConfigError(*(replace(problem, nearest=problem.nearest + more) for problem in error.problems)) from error
    recipe, origin = resolved.value, resolved.origins[_AGAINST]
    if origin in ("default", SET):
        return recipe
    folder = Path(_LINE.sub("", origin)).parent
    against = tuple(str(folder / os.path.expanduser(path)) for path in recipe.decontaminate.against)
    return replace(recipe, decontaminate=replace(recipe.decontaminate, against=against))
