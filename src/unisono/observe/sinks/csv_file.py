"""The tracker ``csv``: one table of all numbers of a run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.errors import ConfigError
from unisono.observe.events import Event, RewindFilter, number
from unisono.observe.tracked import TRACKED, event_metrics
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file


class CsvSink:
    """Writes ``metrics.csv``: one row per event of a kind in ``TRACKED``, and a column for each metric from its first value on.

    Each row is one append. A new column, or a step back after a crash, rewrites the file and replaces it atomically. A row
    truncated by a kill is dropped when the file is opened. An evaluation of the state that a run resumed from is left out where
    the table has that step's already.

    Raises:
        ConfigError: The file exists and does not start with the columns step, kind, attempt, t.
    """

    name = "csv"
    _FIXED = ("step", "kind", "attempt", "t")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rewind = RewindFilter()
        self._columns: list[str] = list(self._FIXED)
        self._seen: set[str] = set()  # field names seen before: the common row needs no search for new columns
        self._last_step = -1
        self._resumed_step = -1  # an earlier attempt may have made this step's rows
        self._resumed_names: set[str] | None = None  # what they have
        make_folder(path.parent)
        if path.is_symlink():
            raise ConfigError(
                given=f"{path}, which is a link",
                rule="the csv tracker writes a file of the run's own folder",
                consequence="nothing was started, and what it leads to is as it was",
                nearest="remove the link, or leave 'csv' out of observe.trackers",
            )
        if path.exists() and path.stat().st_size > 0:
            self._drop_torn_row()
            self._read_existing()
        else:
            self._replace(iter(()))
        self._fd = self._open()

    def write(self, event: Event) -> None:
        back_to = self._rewind.see(event)
        if back_to is not None and back_to <= self._last_step:
            self._rewrite(lambda row: int(row["step"]) < back_to)
            self._last_step = back_to - 1
        if event["kind"] == "resumed":
            self._resumed_step, self._resumed_names = event["step"], None
        if event["kind"] not in TRACKED:
            return
        if event["step"] <= self._resumed_step:
            event = self._without_known(event)
            if not event_metrics(event):
                return
        if not self._seen.issuperset(event):
            self._seen.update(name for name, value in event.items() if value is not None)
            new = [name for name in event_metrics(event) if name not in self._columns]
            if new:
                self._columns += new
                self._rewrite(lambda _: True)
        data = (",".join([_cell(event.get(name)) for name in self._columns]) + "\n").encode()
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes of a row could be written to {self._path}")
        self._last_step = max(self._last_step, int(event["step"]))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _without_known(self, event: Event) -> Event:
        """``event``, of the step that the run resumed from, without the metrics that the table has at this step."""
        if self._resumed_names is None:
            with open(self._path, encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if row["step"] == str(event["step"])]
            self._resumed_names = {name for row in rows for name in self._columns if row.get(name)} - {*self._FIXED}
        known = self._resumed_names.intersection(event)
        self._resumed_names |= event_metrics(event).keys()
        return {name: value for name, value in event.items() if name not in known}

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _rewrite(self, keep: Callable[[Mapping[str, str]], bool]) -> None:
        with open(self._path, encoding="utf-8", newline="") as old:
            self._replace(row for row in csv.DictReader(old) if keep(row))
        self.close()
        self._fd = self._open()

    def _replace(self, rows: Iterable[Mapping[str, str]]) -> None:
        with new_file(self._path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            text.detach()  # flushes, and leaves the file open

    def _drop_torn_row(self) -> None:
        with open(os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 4096)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                end = start
            file.truncate(0)

    def _read_existing(self) -> None:
        with open(self._path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or self._FIXED)
            if tuple(columns[: len(self._FIXED)]) != self._FIXED:
                raise ConfigError(
                    given=f"{self._path} exists and starts with the columns {', '.join(columns[:4])}",
                    rule=f"the csv tracker continues a file that starts with {', '.join(self._FIXED)}",
                    consequence="nothing was started, the file is as it was",
                    nearest="move that file away, or leave 'csv' out of observe.trackers",
                )
            self._columns = columns
            self._last_step = max((int(row["step"]) for row in reader), default=-1)
        if self._path.stat().st_size == 0:  # the file only had a truncated header
            self._replace(iter(()))


def _cell(value: Any) -> str:
    """Format a cell: ``nan`` and ``inf`` as numpy, pandas and spreadsheets read them; other text is left empty."""
    if value is None:
        return ""
    if type(value) in (float, int):
        return repr(value)
    if value in TRACKED:
        return value
    encoded = number(value)
    return "" if encoded is None else repr(encoded)
