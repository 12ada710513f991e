"""The recipe of data that a run reads, from the report that lies beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from unisono.quality.job_folder import REPORT_FILE
from unisono.quality.kept_rows import DATA_FOLDER
from unisono.storage.limits import LimitError, read_json

_FACTS: Final = ("recipe_hash", "documents", "kept", "dropped", "masked")


def cleaning_facts(addresses: Iterable[str]) -> dict[str, Any]:
    """The recipe's hash and the counts of data sets that were cleaned, by address.

    Args:
        addresses: Files and folders. One that does not lie in the ``data/`` of a cleaned data set is left out.
    """
    return {address: facts for address in addresses if (facts := _facts(Path(address)))}


def _facts(path: Path) -> dict[str, Any]:
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.name == DATA_FOLDER:
            try:
                report = read_json(folder.parent / REPORT_FILE)
            except (OSError, ValueError, LimitError):
                return {}
            known = isinstance(report, dict) and isinstance(report.get("recipe_hash"), str)
            return {name: report[name] for name in _FACTS if name in report} if known else {}
    return {}
