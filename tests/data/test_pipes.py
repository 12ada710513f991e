"""A pipe in place of a file is refused at once: opening one would wait for whoever writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz import FORMATS, copy, make
from untrusted import Confined

from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.pack.record_schema import RecordSchema
from unisono.data.recordio.maintenance import repair, verify
from unisono.data.text.augment import load_synonyms
from unisono.errors import ConfigError, DataError
from unisono.observe.events import next_attempt, read_events
from unisono.storage import limits

# given to its reader as bytes: no image is opened by its path but by `data pack` (test_images.py has its pipe)
AS_BYTES = "image"
# repair saves the records without a sidecar that cannot be used, as it does beside a damaged one, and does not open the text
# index where the sidecar has the keys; a job goes on without a journal of its own, and writes the shard again
READ_WITHOUT = {("recordio_repaired", "a.uidx"), ("recordio_repaired", "a.idx")}
READ_WITHOUT |= {("packing_journal", "a.rec.part/all-00000.json"), ("packing_journal", "a.rec.part/all-00000/part.rec")}
READ_WITHOUT |= {("packing_ending", "a.rec.part/ending.json")}
# what is said of a run without its profile, stacks and record of the launcher, and without measurements
READ_WITHOUT |= {("run_folder", file) for file in FORMATS["run_folder"].mutated if "/events/" not in file}


@pytest.fixture(scope="module")
def child() -> Iterator[Confined]:
    with Confined(time_s=10) as confined:
        yield confined


@pytest.mark.parametrize("name", [name for name, case in FORMATS.items() if case.reader != AS_BYTES])
def test_a_pipe_in_place_of_a_file(name: str, tmp_path: Path, child: Confined) -> None:
    case = FORMATS[name]
    make(name, tmp_path / "whole")
    for mutated in case.mutated:
        copy(tmp_path / "whole", tmp_path / "read")
        (tmp_path / "read" / mutated).unlink()
        os.mkfifo(tmp_path / "read" / mutated)
        outcome = child.read(case.reader, tmp_path / "read" / case.file)
        assert not outcome.bad, f"{mutated}: {outcome.bad}"
        assert bool(outcome.problems) is ((name, mutated) not in READ_WITHOUT), mutated


TEXTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a.schema": (RecordSchema.load, "MAX_TEXT_BYTES"),
    "a.lst": (list_images, "MAX_LIST_BYTES"),
    "a.csv": (list_images, "MAX_LIST_BYTES"),
    "a.tsv": (load_synonyms, "MAX_JSON_BYTES"),
    "a.json": (load_synonyms, "MAX_JSON_BYTES"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("target", ["a pipe", "/dev/zero"])
def test_a_text_without_end(name: str, target: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name) if target == "a pipe" else (tmp_path / name).symlink_to(target)
    with pytest.raises(DataError, match="not a regular file") as caught:
        TEXTS[name][0](tmp_path / name)
    ((given, *parts),) = [(p.given, p.rule, p.consequence, p.nearest) for p in caught.value.problems]
    assert str(tmp_path / name) in given
    assert all(parts)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_beyond_its_limit(name: str, tmp_path: Path) -> None:
    limit = getattr(limits, TEXTS[name][1])
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, limit + (1 << 40))  # without taking space
    with pytest.raises(DataError, match=f"more than {limit:,} bytes"):
        TEXTS[name][0](tmp_path / name)


def test_a_file_as_large_as_its_limit_and_one_byte_more(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    assert limits.read_limited(tmp_path / "a", 8) == b"12345678"
    with pytest.raises(limits.LimitError, match="more than 7 bytes"):
        limits.read_limited(tmp_path / "a", 7)
    assert limits.read_limited(Path("/proc/self/stat"), 1 << 16)  # of no known size


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["a pipe", "/dev/zero"])
def test_events_without_end(target: str, tmp_path: Path) -> None:
    path = tmp_path / "rank00000.jsonl"
    os.mkfifo(path) if target == "a pipe" else path.symlink_to(target)
    for read in (read_events, next_attempt):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(path)


@pytest.mark.timeout(20)
def test_a_text_index_of_records_that_is_a_pipe(tmp_path: Path) -> None:
    make("recordio_alone", tmp_path / "whole")
    path = tmp_path / "whole" / "a.rec"
    path.with_suffix(".idx").unlink()
    os.mkfifo(path.with_suffix(".idx"))
    assert [finding.what for finding in verify(path).findings] == ["it cannot be read: not a regular file"]
    with pytest.raises(DataError, match="not a regular file"):
        repair(path, tmp_path / "new.rec")
    assert not (tmp_path / "new.rec").exists()
