"""The tracker ``csv``: one table of all numbers of a run."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from unisono.errors import ConfigError
from unisono.observe.events import Event, RewindFilter, number
from unisono.observe.tracked import TRACKED, event_metrics
from unisono.storage.directory import make_folder
from unisono.storage.files import FILE_MODE, new_file, open_regular, os_reason

_LOG: Final = logging.getLogger("unisono.observe")
_MAX_HEADER_BYTES: Final = 1 << 20


class CsvSink:
    """Writes ``metrics.csv``: one row per event of a kind in ``TRACKED``, and a column for each metric from its first value on.

    Each row is one append. A new column, or a step back after a crash, rewrites the file and replaces it atomically. A row
    truncated by a kill is dropped when the file is opened, and lines that are no rows are moved to ``metrics.csv.damaged``. An
    evaluation of the state that a run resumed from is left out where the table has that step's already.

    Raises:
        ConfigError: The file exists and does not start with the columns step, kind, attempt, t; then it is not touched. Or it
            has lines that are no rows, which cannot be moved.
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
        if path.exists() and not path.is_file():
            raise ConfigError(
                given=f"{path}, which is no regular file",
                rule="the csv tracker writes a file of the run's own folder",
                consequence="nothing was started, and it is as it was",
                nearest="move it away, or leave 'csv' out of observe.trackers",
            )
        if path.exists() and path.stat().st_size > 0:
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

    def _read_existing(self) -> None:
        """Take over the columns and the last step of the file, and repair what an earlier attempt left. Raises ConfigError."""
        damaged: list[int] = []  # numbers of the lines that are no rows
        with open_regular(self._path, flags=os.O_NOFOLLOW) as file:
            header = file.readline(_MAX_HEADER_BYTES)
            self._read_header(header)
            end = len(header) if header.endswith(b"\n") else 0
            for count, line in enumerate(file, start=2):
                if not line.endswith(b"\n") and line.partition(b",")[0].isdigit():
                    break  # a row, truncated by a kill
                end += len(line)
                step = self._step_of(line)
                if step is None:
                    damaged.append(count)
                else:
                    self._last_step = max(self._last_step, step)
        if damaged:
            self._move_damaged(damaged, end)
        elif end == 0:  # the file only had a truncated header
            self._replace(iter(()))
        else:
            self._truncate(end)

    def _read_header(self, header: bytes) -> None:
        text = header.decode("utf-8", "backslashreplace")
        try:
            columns = next(csv.reader([text]), [])
        except csv.Error:
            columns = [text]
        start = ",".join(self._FIXED).encode()
        if header.endswith(b"\n"):
            is_ours = tuple(columns[: len(self._FIXED)]) == self._FIXED and text.encode() == header
        else:
            is_torn = header.startswith(start + b",") or start.startswith(header)
            is_ours = is_torn and len(header) < _MAX_HEADER_BYTES
        if not is_ours:
            raise ConfigError(
                given=f"{self._path} exists and starts with the columns {', '.join(columns[:4])[:200]}",
                rule=f"the csv tracker continues a file that starts with {', '.join(self._FIXED)}",
                consequence="nothing was started, the file is as it was",
                nearest="move that file away, or leave 'csv' out of observe.trackers",
            )
        if header.endswith(b"\n"):
            self._columns = columns

    def _step_of(self, line: bytes) -> int | None:
        """The step of a row, -1 of an empty line; None for a line that is no row of this table."""
        try:
            cells = next(csv.reader([line.decode()], strict=True), [])
            if not cells:
                return -1
            return int(cells[0]) if len(cells) == len(self._columns) and b"\0" not in line else None
        except (ValueError, csv.Error):
            return None

    def _move_damaged(self, numbers: Collection[int], end: int) -> None:
        """Move the lines of these numbers to the end of another file, and drop what comes after ``end`` bytes."""
        beside = self._path.with_name(f"{self._path.name}.damaged")
        what = f"{self._path} has lines that are no rows of the table: {len(numbers)}, first line {min(numbers)}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with (
                open_regular(self._path, flags=os.O_NOFOLLOW) as old,
                open(os.open(beside, flags, FILE_MODE), "ab") as aside,
                new_file(self._path) as new,
            ):
                _divide(old, frozenset(numbers), end, aside, new)
        except OSError as error:
            raise ConfigError(
                given=f"{what}; and {beside.name} cannot be written: {os_reason(error)}",
                rule="the csv tracker moves such lines to that file before it goes on",
                consequence="nothing was started, the table is as it was",
                nearest=f"make room for {beside}, or remove the lines",
            ) from error
        _LOG.warning("%s; moved to %s", what, beside.name)

    def _truncate(self, end: int) -> None:
        fd = self._open()
        try:
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
        finally:
            os.close(fd)


def _divide(old: IO[Any], numbers: Collection[int], end: int, aside: IO[Any], new: IO[Any]) -> None:
    """Copy a file line by line.

    Args:
        old: What is read, from its beginning.
        numbers: Numbers, from 1, of the lines that go to ``aside``.
        end: Bytes of ``old`` that are read.
        aside: Takes those lines, and is synced.
        new: Takes the other lines.
    """
    for count, line in enumerate(old, start=1):
        if end <= 0:
            break
        end -= len(line)
        if count in numbers:
            aside.write(line if line.endswith(b"\n") else line + b"\n")
        else:
            new.write(line)
    aside.flush()
    os.fsync(aside.fileno())


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
