"""Files and folders that other users of the host can have written."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from unisono.errors import DataError
from unisono.storage import ownership
from unisono.storage.ownership import foreign_reason, make_own_folder, open_own, read_own_json

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755])
def test_own_files(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    assert foreign_reason(tmp_path / "file") == ""
    assert foreign_reason(tmp_path / "absent") == ""
    assert foreign_reason(Path("/tmp")) == ""


def test_files_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    (tmp_path / "link").symlink_to("file")
    assert foreign_reason(tmp_path / "file") == f"{tmp_path}/file can be written by others (mode 666)"
    assert foreign_reason(tmp_path / "link") == f"{tmp_path}/link can be written by others (mode 666)"
    (tmp_path / "file").chmod(0o600)
    assert foreign_reason(tmp_path / "link") == ""


@ROOT
def test_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    assert foreign_reason(tmp_path / "link") == f"{tmp_path}/link belongs to the user nobody"
    os.chown(tmp_path / "file", 54321, 54321)
    assert foreign_reason(tmp_path / "file") == f"{tmp_path}/file belongs to the user 54321"


def test_a_made_folder_is_ones_own_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o755
    make_own_folder(tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_in_which_others_can_make_files_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(DataError) as caught:
        make_own_folder(tmp_path / "cache")
    assert str(caught.value) == (
        f"a folder of prepared data that is not this user's alone: {tmp_path}/cache can be written by others (mode {mode:o})\n"
        "  rule: prepared data and copies are read only from a folder that this user or root alone can have written\n"
        "  so:   nothing was read from it or written to it\n"
        "  try:  data.cache_dir=~/.cache/unisono, or chmod go-w on that folder if it is yours"
    )


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    if mode & 0o1000:  # others can make files there, but not replace those of other users
        return make_own_folder(tmp_path / "open" / "cache")
    with pytest.raises(DataError, match=r"others can replace it: .*/open has mode 777"):
        make_own_folder(tmp_path / "open" / "cache")
    return None


@ROOT
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_group_with_other_members_counts_and_a_private_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "path"
    path.touch() if kind == "file" else path.mkdir()
    path.chmod(0o775)
    users = [pwd.struct_passwd((name, "", uid, gid, "", "", "")) for name, uid, gid in _USERS]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", _GROUPS.__getitem__)
    ownership._others_in_group.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for gid, reason in (
        (1000, ""),
        (77, ""),
        (50, "the group staff"),
        (100, "the group users"),
        (1001, "the group 1001"),
    ):
        os.chown(path, 1000, gid)
        assert foreign_reason(path) == (f"{path} can be written by {reason} (mode 775)" if reason else "")
    if kind == "folder":  # others cannot replace what they do not own, but make files
        path.chmod(0o1775)
        assert foreign_reason(path) == ""
        with pytest.raises(DataError, match="can be written by the group 1001"):
            make_own_folder(path)
    ownership._others_in_group.cache_clear()  # pyright: ignore[reportPrivateUsage]


_USERS = (("ada", 1000, 1000), ("bob", 1001, 1001), ("eve", 1002, 100))


class _Groups(dict[int, grp.struct_group]):
    def __missing__(self, gid: int) -> grp.struct_group:
        raise KeyError(gid)


_GROUPS = _Groups(
    {
        gid: grp.struct_group((name, "", gid, members))
        for name, gid, members in (
            ("ada", 1000, []),
            ("ada2", 77, ["ada"]),
            ("staff", 50, ["ada", "bob"]),
            ("users", 100, []),
        )
    }
)


def test_own_files_are_opened_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("[1]")
    assert read_own_json(file) == [1]
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by others"):
        open_own(file)
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    for other, error in (("link", "symbolic links"), ("pipe", "not a regular file"), (".", "Is a directory")):
        with pytest.raises(OSError, match=error):
            open_own(tmp_path / other)
