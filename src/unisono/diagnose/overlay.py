"""The overlay of a diagnosis: a configuration file with the settings that its findings change, over those of the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from unisono.config.fields import BASE
from unisono.config.values import toml_value
from unisono.diagnose.finding import Finding
from unisono.errors import ConfigError
from unisono.storage.files import create_file, os_reason
from unisono.storage.ownership import untrusted_reason
from unisono.storage.run_folder import RUN_FILE


def merged_patch(findings: Iterable[Finding]) -> dict[str, Any]:
    """The settings that findings change, by dotted name; of two values the one of the earlier, more costly finding."""
    patch: dict[str, Any] = {}
    for finding in findings:
        patch = {**finding.patch, **patch}
    return patch


def write_overlay(path: Path, run_dir: Path, patch: Mapping[str, Any]) -> Path:
    """Write ``patch`` as a new file over the configuration of the run in ``run_dir``; returns the folder of the run that
    ``unisono train path`` starts: ``run_dir`` with the next free number.

    Raises:
        ConfigError: The file exists or cannot be created, or the run has no configuration file of its own, or one that another
            user can have written.
    """
    base = run_dir.resolve() / RUN_FILE
    if not base.is_file():
        raise ConfigError(
            given=f"{base}, which is no file",
            rule="the overlay changes settings of the run's own configuration",
            consequence="nothing was written",
            nearest="the folder of a run of unisono train; or set the options in the script that made this run",
        )
    if reason := untrusted_reason(base):
        raise ConfigError(
            given=f"an overlay over the configuration of another user's run: {reason}",
            rule="a file of one's own does not take over where another user's run keeps data and checkpoints",
            consequence="nothing was written",
            nearest="copy the settings that you want into a file of your own, with --set for those of the findings",
        )
    named = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
    folders = (named.with_name(f"{named.name}-{number}") for number in count(2))
    next_dir = next(folder for folder in folders if not os.path.lexists(folder))
    sections: dict[str, dict[str, Any]] = {"run": {"dir": str(next_dir)}}
    for name, value in patch.items():
        section, _, option = name.rpartition(".")
        sections.setdefault(section, {})[option] = value
    lines = [f"{BASE} = {toml_value(str(base))}"]
    for section, options in sections.items():
        lines += ["", f"[{section}]", *(f"{option} = {toml_value(value)}" for option, value in options.items())]
    try:
        create_file(path, "\n".join([*lines, ""]).encode())
    except (OSError, UnicodeEncodeError) as error:  # the latter of a folder whose name is no text
        raise ConfigError(
            given=f"{path}: {os_reason(error) if isinstance(error, OSError) else f'the name of {base} is no UTF-8'}",
            rule="an overlay is a new file; one that exists is not overwritten",
            consequence="nothing was written",
            nearest="another name, in a folder that you may write to",
        ) from None
    return next_dir
