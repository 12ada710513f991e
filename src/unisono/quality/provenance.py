"""The recipe of data that a run reads, from the report that lies beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from unisono.quality.job_folder import REPORT_FILE
from unisono.quality.kept_rows import DATA_FOLDER
from unisono.storage.limits import LimitError, read_json

_FACTS: Final = ("recipe_hash", "documents", "kept", "dropped", "masked", "inputs")
_NAMED: Final = ("recipe_hash", "inputs")  # what a report has, if its data or what they were made of was cleaned


def cleaning_facts(addresses: Iterable[str]) -> dict[str, Any]:
    """The recipe's hash and the counts of data sets that were cleaned, by address.

    Of data that were made of cleaned ones, by a split or new labels, the same of these is under ``inputs``.

    Args:
        addresses: Files and folders. One that does not lie in the ``data/`` of such a data set is left out.
    """
    return {address: facts for address in addresses if (facts := _facts(Path(address)))}


def _facts(path: Path) -> dict[str, Any]:
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.name == DATA_FOLDER:
            for of_job in (folder.parent, folder.parent.parent):  # the second of a part of a split
                report = _report(of_job / REPORT_FILE)
                if any(report.get(name) for name in _NAMED):
                    return {name: report[name] for name in _FACTS if name in report}
    return {}


def _report(path: Path) -> dict[str, Any]:
    try:
        report = read_json(path)
    except (OSError, ValueError, LimitError):
        return {}
    return report if isinstance(report, dict) else {}
