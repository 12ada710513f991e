"""The recipe that data were cleaned by: where it is recorded, and how it goes with data that are made of them.

A data job writes ``report.json`` into its folder. Commands that write single files record the reports of their inputs in
``TARGET.cleaning.json``, the facts of ``cleaning_facts`` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from typing import Any, Final, cast

from unisono.data.convert.file_kind import beside_target
from unisono.data.kept_rows import KEPT_FOLDER
from unisono.data.per_file_arrays import FILES_JSON
from unisono.data.recordio.remote_file import is_url
from unisono.data.result_files import DATA_FOLDER, REPORT_FILE, require_whole_results
from unisono.storage.files import look_up, write_atomically
from unisono.storage.limits import LimitError, read_json

CLEANING_SUFFIX: Final = ".cleaning.json"
_FACTS: Final = ("recipe_hash", "documents", "kept", "dropped", "num_dropped", "masked", "inputs")
_NAMED: Final = ("recipe_hash", "inputs")  # what a report has, if its data or what they were made of was cleaned


def cleaning_facts(addresses: Iterable[str | Path]) -> dict[str, Any]:
    """The recipe's hash and the counts of data sets that were cleaned, by address.

    Of data that were made of cleaned ones, by a split, new labels, packing or conversion, the same of these is under ``inputs``.
    Of a part of a split, ``part`` is its name and ``documents`` the number of its own.

    Args:
        addresses: Files, globs, folders, and folders of kept rows. One whose data were not cleaned is left out.
    """
    return {str(address): facts for address in addresses if (facts := _facts_at(address))}


def cleaning_file(sources: Iterable[str | Path]) -> dict[str, str]:
    """The content of ``TARGET.cleaning.json`` for data that are made of ``sources``, by its suffix; empty if none was cleaned.

    Raises:
        DataError: Sources are results of which files were lost or cut, so the counts are not theirs.
    """
    sources = list(sources)
    require_whole_results(sources)
    return _content(sources)


def _content(sources: Iterable[str | Path]) -> dict[str, str]:
    facts = cleaning_facts(dict.fromkeys(map(str, sources)))
    return {CLEANING_SUFFIX: json.dumps({"inputs": facts}, indent=1, ensure_ascii=False) + "\n"} if facts else {}


def write_cleaning_file(target: Path, sources: Iterable[str | Path]) -> None:
    """Write ``TARGET.cleaning.json`` for a file that was made of ``sources``, or remove that of a file it took the place of."""
    path = Path(f"{target}{CLEANING_SUFFIX}")
    content = _content(sources)
    if content:
        write_atomically(path, content[CLEANING_SUFFIX].encode())
    else:
        path.unlink(missing_ok=True)


def _facts_at(address: str | Path) -> dict[str, Any]:
    if is_url(address):
        return {}
    path, fault = look_up(address)
    if fault:
        return {}
    paths = [path] if path.exists() else sorted(map(Path, glob(str(path)))) or [path]
    return _merged({str(each): facts for each in paths if (facts := _facts(each.absolute()))})


def _facts(path: Path) -> dict[str, Any]:
    if (path / KEPT_FOLDER / FILES_JSON).exists():
        facts = _of_job(path)
        return {name: value for name, value in facts.items() if name != "masked"}  # these rows are as they were
    beside = beside_target(path, CLEANING_SUFFIX)
    inside = sorted(path.glob(f"*{CLEANING_SUFFIX}")) if path.is_dir() else []
    files = [*([beside] if beside is not None else []), *inside]
    if recorded := _merged({str(file): facts for file in files if (facts := _named(_read(file)))}):
        return recorded
    for folder in (path, *path.parents):
        if folder.name == DATA_FOLDER and (facts := _of_job(folder.parent)):
            return facts
    return {}


def _of_job(folder: Path) -> dict[str, Any]:
    """The facts of a job in whose folder, or in that of a part of a split, data or kept rows are."""
    if facts := _named(_read(folder / REPORT_FILE)):
        return facts
    report = _read(folder.parent / REPORT_FILE)
    facts = _named(report)
    return {**facts, **_of_part(report, folder.name)} if facts else {}


def _of_part(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the report of a split says of one of its parts alone."""
    parts = report.get("parts")
    for part in cast("list[Any]", parts) if isinstance(parts, list) else ():
        if isinstance(part, dict) and cast("dict[str, Any]", part).get("name") == name and "documents" in part:
            return {"part": name, "documents": part["documents"]}
    return {}


def _merged(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The facts of several files: once if they are the same, else by file."""
    facts = list(found.values())
    return (facts[0] if facts else {}) if all(each == facts[0] for each in facts) else {"inputs": dict(found)}


def _named(report: Mapping[str, Any]) -> dict[str, Any]:
    if not any(report.get(name) for name in _NAMED):
        return {}
    return {name: report[name] for name in _FACTS if name in report}


def _read(path: Path) -> dict[str, Any]:
    try:
        report = read_json(path)
    except (OSError, ValueError, LimitError):
        return {}
    return cast("dict[str, Any]", report) if isinstance(report, dict) else {}
