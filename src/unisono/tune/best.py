"""The best trial of a search as a configuration file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from unisono.config.overlay_text import overlay_text
from unisono.config.values import literal
from unisono.errors import ConfigError
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import RUN_FILE
from unisono.tune.study import TrialRecord

BEST_FILE: Final = "best.toml"


def write_best(path: Path, best: TrialRecord, sizes: Mapping[str, int]) -> None:
    """Write a file with which ``unisono train`` trains as the trial did, in the folder ``best`` beside ``path``.

    It has the trial's own configuration beneath, so that it gives the same numbers, and the settings that were searched. If they
    were searched for a wider model, ``sizes`` are its settings (``WidthTransfer.full``), else empty.

    Raises:
        ConfigError: The trial's configuration is missing.
    """
    if not (best.run_dir / RUN_FILE).exists():
        raise ConfigError(
            given=f"{best.run_dir / RUN_FILE}, the configuration of the best trial, which is missing",
            rule=f"{path.name} takes from it all settings that were not searched",
            consequence=f"{path.name} was not written",
            nearest="a copy of the trial's folder; or another folder (--out), which begins a new search",
        )
    folder = path.absolute().parent
    base = os.path.relpath(best.run_dir / RUN_FILE, folder)
    settings = {name: literal(text) for name, text in best.settings.items()}
    write_atomically(path, overlay_text(base, {"run.dir": str(folder / "best"), **sizes, **settings}).encode())
