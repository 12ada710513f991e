"""A committed directory: what exists after each point of a commit, and which names count."""

from __future__ import annotations

import os

import pytest
from modes import FILE, left, mode_of

from unisono.storage.directory import (
    commit_directory,
    has_marker,
    number_of,
    numbered_directories,
    numbered_name,
    quarantine_directory,
    remove_directory,
)

POINTS = ["before_manifest", "before_rename", "before_commit", "after_commit"]


class Killed(BaseException):
    pass


def kill_at(point):
    def fault(at):
        if at == point:
            raise Killed

    return fault


def begin(folder):
    temporary = folder / "step-00000007.tmp-1"
    temporary.mkdir(parents=True)
    (temporary / "data").write_bytes(b"bytes")
    return temporary, folder / "step-00000007"


@pytest.mark.parametrize("point", POINTS)
def test_a_directory_with_a_marker_counts_once_the_marker_is_there(tmp_path, point):
    temporary, final = begin(tmp_path)
    with pytest.raises(Killed):
        commit_directory(temporary, final, manifest=("manifest", b"m"), marker=("COMMIT", b"c"), fault=kill_at(point))
    assert has_marker(final, "COMMIT") == (point == "after_commit")
    assert temporary.exists() == (point in POINTS[:2])
    assert (temporary / "manifest").exists() == (point == "before_rename")


def test_without_a_marker_the_rename_decides(tmp_path):
    temporary, final = begin(tmp_path)
    seen = []
    commit_directory(temporary, final, manifest=("manifest", b"m"), fault=seen.append)
    assert seen == ["before_manifest", "before_rename", "after_commit"]
    assert {path.name: path.read_bytes() for path in final.iterdir()} == {"data": b"bytes", "manifest": b"m"}
    assert mode_of(final / "manifest") == left(FILE)


def test_a_name_is_a_number_only_as_it_is_written():
    for number in (0, 7, 10**8, 10**12):
        assert number_of("snapshot", numbered_name("snapshot", number)) == number
    for name in ("snapshot-7", "snapshot-000000007", "step-00000007", "snapshot-00000007.tmp", "snapshot-0000000x"):
        assert number_of("snapshot", name) is None, name


def test_only_real_directories_are_listed_by_number(tmp_path):
    for number in (30, 4, 100_000_000):
        (tmp_path / numbered_name("snapshot", number)).mkdir()
    (tmp_path / "snapshot-00000005").symlink_to(tmp_path / "snapshot-00000004", target_is_directory=True)
    (tmp_path / "snapshot-00000006").write_text("a file")
    assert list(numbered_directories(tmp_path, "snapshot")) == [4, 30, 100_000_000]
    assert numbered_directories(tmp_path / "missing", "snapshot") == {}


def test_a_marker_is_a_regular_file(tmp_path):
    (tmp_path / "target").write_text("x")
    (tmp_path / "COMMIT").symlink_to(tmp_path / "target")
    assert not has_marker(tmp_path, "COMMIT")
    assert has_marker(tmp_path, "target")


def test_removal_and_quarantine_leave_no_name_behind(tmp_path):
    for reason in ("first", "second"):
        (tmp_path / "snapshot-00000001").mkdir()
        quarantine_directory(tmp_path / "snapshot-00000001", reason)
    (tmp_path / "snapshot-00000001").mkdir()
    (tmp_path / "snapshot-00000001.trash").mkdir()
    remove_directory(tmp_path / "snapshot-00000001")
    assert sorted(os.listdir(tmp_path)) == ["quarantine", "snapshot-00000001.trash"]
    assert {path.name: (path / "reason.txt").read_text() for path in (tmp_path / "quarantine").iterdir()} == {
        "snapshot-00000001": "first\n",
        "snapshot-00000001.1": "second\n",
    }
