"""The overlay of a diagnosis: a configuration file with the settings that its findings change, over those of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.config.overlay_text import overlay_text
from unisono.config.toml_file import read_toml
from unisono.config.values import encode
from unisono.diagnose.finding import Finding
from unisono.errors import ConfigError
from unisono.observe.events import as_mapping
from unisono.plan.plan import load_fields, option_of
from unisono.storage.files import create_file, look_up, os_reason
from unisono.storage.ownership import untrusted_reason
from unisono.storage.run_folder import RUN_FILE


def merged_patch(findings: Iterable[Finding]) -> dict[str, Any]:
    """The settings that findings change, by dotted name; of two values the one of the earlier, more costly finding."""
    patch: dict[str, Any] = {}
    for finding in findings:
        patch = {**finding.patch, **patch}
    return patch


_OPTIONS: Final = {
    **{"loader": "LoaderOptions", "plan": "PlanOptions", "train": "TrainOptions", "checkpoint": "CheckpointOptions"},
    **{"observe": "ObserveOptions", "optim": "OptimOptions", "schedule": "ScheduleOptions"},
}


def patch_text(patch: Mapping[str, Any], *, is_script: bool) -> str:
    """Settings as ``unisono train`` takes them, or as the options of a ``Trainer`` in a Python script."""
    if not is_script:
        return " ".join(f"--set {name}={encode(value)}" for name, value in patch.items())
    texts: list[str] = []
    for name, value in patch.items():
        section, _, option = name.partition(".")
        # the model and the launch are no options of a Trainer
        texts.append(f"{_OPTIONS[section]}({option}={value!r})" if section in _OPTIONS else f"{name}={value!r}")
    return ", ".join(texts)


def write_overlay(path: Path, run_dir: Path, patch: Mapping[str, Any]) -> Path:
    """Write ``patch`` as a new file over the configuration of the run in ``run_dir``; returns the folder of the run that
    ``unisono train path`` starts: ``run_dir`` with the next free number.

    Fields that the run's strategy file gives are changed in a copy of it, ``path`` with the ending ``.plan.json``.

    Raises:
        ConfigError: The file is no ``.toml``, exists or cannot be created, or the run has no configuration file of its own, or
            one that another user can have written.
        PlanError: The run's strategy file cannot be read.
    """
    if path.suffix != ".toml":
        raise ConfigError(
            given=f"{path}, for an overlay",
            rule="an overlay is a .toml file, which is how unisono train knows a configuration",
            consequence="nothing was written",
            nearest=str(path.parent / f"{path.stem or 'faster'}.toml"),
        )
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
    patch, plan = _in_strategy_file(patch, base)
    files: dict[Path, str] = {}
    if plan is not None:
        plan_path = path.with_suffix(".plan.json").resolve()
        files[plan_path] = json.dumps(plan, indent=1) + "\n"
        patch = {**patch, "plan.file": str(plan_path)}
    _create_all({path: overlay_text(str(base), {"run.dir": str(next_dir), **patch}), **files})
    return next_dir


def _in_strategy_file(patch: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The settings of ``patch`` that stay settings, and the strategy file of the run with the others; None where it has none of
    them."""
    file = as_mapping(read_toml(base).values.get("plan")).get("file")
    if not isinstance(file, str) or not file:
        return dict(patch), None
    fields = load_fields(look_up(file)[0])
    names = {f"plan.{option}": name for name in fields if (option := option_of(name))}
    changes = {names[setting]: value for setting, value in patch.items() if setting in names}
    if not changes:
        return dict(patch), None
    if "batch.micro_batch" in changes:
        fields.pop("batch.accumulation", None)  # it follows from the micro-batch
    plan: dict[str, Any] = {}
    for name, value in (fields | changes).items():
        group, _, field = name.partition(".")
        plan.setdefault(group, {})[field] = value
    return {setting: value for setting, value in patch.items() if setting not in names}, msgspec.to_builtins(plan)


def _create_all(files: Mapping[Path, str]) -> None:
    """Create all files, or none where one of them cannot be created."""
    created: list[Path] = []
    try:
        for path, text in files.items():
            _create(path, text)
            created.append(path)
    except BaseException:
        for path in created:
            path.unlink(missing_ok=True)
        raise


def _create(path: Path, text: str) -> None:
    try:
        create_file(path, text.encode())
    except (OSError, UnicodeEncodeError) as error:  # the latter of a folder whose name is no text
        reason = os_reason(error) if isinstance(error, OSError) else "the name of the run's folder is no UTF-8"
        raise ConfigError(
            given=f"{path}: {reason}",
            rule="an overlay is a new file; one that exists is not overwritten",
            consequence="nothing was written",
            nearest="another name, in a folder that you may write to",
        ) from None
