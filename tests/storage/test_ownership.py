"""Files and folders that other users of the host can have written."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.data.loading.worker_tuning import WorkerSetting, _remember
from unisono.errors import DataError
from unisono.measure.calibration import add_to_calibration
from unisono.storage import ownership
from unisono.storage.files import open_new
from unisono.storage.ownership import make_own_folder, open_own, read_own_json, untrusted_reason

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755])
def test_own_files(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    assert untrusted_reason(tmp_path / "file") == ""
    assert untrusted_reason(tmp_path / "absent") == ""
    assert untrusted_reason(Path("/tmp")) == ""


def test_files_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    (tmp_path / "link").symlink_to("file")
    assert untrusted_reason(tmp_path / "file") == f"{tmp_path}/file can be written by others (mode 666)"
    assert untrusted_reason(tmp_path / "link") == f"{tmp_path}/link can be written by others (mode 666)"
    (tmp_path / "file").chmod(0o600)
    assert untrusted_reason(tmp_path / "link") == ""


@ROOT
def test_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    assert untrusted_reason(tmp_path / "link") == f"{tmp_path}/link belongs to the user nobody"
    os.chown(tmp_path / "file", 54321, 54321)
    assert untrusted_reason(tmp_path / "file") == f"{tmp_path}/file belongs to the user 54321"


def test_a_made_folder_is_ones_own_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    make_own_folder(tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_in_which_others_can_make_files_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(DataError) as caught:
        make_own_folder(tmp_path / "cache", option="cache_dir")
    assert str(caught.value) == (
        f"a folder of prepared data that is not this user's alone: {tmp_path}/cache can be written by others (mode {mode:o})\n"
        "  rule: prepared data and copies are read only from a folder that this user or root alone can have written\n"
        "  so:   nothing was read from it or written to it\n"
        "  try:  chmod go-w on the folder that has this mode, if it is yours; or cache_dir=FOLDER of your own"
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
    monkeypatch.setattr(pwd, "getpwuid", {user.pw_uid: user for user in users}.__getitem__)
    reasons = {
        1000: "",
        0: "",
        77: "the group ada2",
        50: "the group staff",
        100: "the group users",
        5000: "the group 5000",
    }
    reasons |= {70: "the group domain"}  # of a directory, which lists neither its members nor its users
    for gid, reason in reasons.items():
        os.chown(path, 1000, gid)
        assert untrusted_reason(path) == (f"{path} can be written by {reason} (mode 775)" if reason else "")
    if kind == "folder":  # others cannot replace what they do not own, but make files
        path.chmod(0o1775)
        assert untrusted_reason(path) == ""
        with pytest.raises(DataError, match="can be written by the group domain"):
            make_own_folder(path)
    ownership._others_in_group.cache_clear()  # pyright: ignore[reportPrivateUsage]


_USERS = (("ada", 1000, 1000), ("bob", 1001, 1001), ("eve", 1002, 100), ("root", 0, 0))


class _Groups(dict[int, grp.struct_group]):
    def __missing__(self, gid: int) -> grp.struct_group:
        raise KeyError(gid)


_LISTED = {
    **{"ada": (1000, []), "ada2": (77, ["ada"]), "staff": (50, ["ada", "bob"]), "users": (100, [])},
    **{"domain": (70, []), "root": (0, [])},
}
_GROUPS = _Groups({gid: grp.struct_group((name, "", gid, members)) for name, (gid, members) in _LISTED.items()})


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


@pytest.fixture
def shared_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host where everybody is of one group and the umask lets it write."""
    monkeypatch.setattr(ownership, "_others_in_group", lambda *_: "the group users")
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("shared_group")
@pytest.mark.parametrize("made_by", ["make_own_folder", "calibration", "tuning"])
def test_folders_of_caches_are_ones_own_in_a_group_too(tmp_path: Path, made_by: str) -> None:
    tmp_path.chmod(0o755)
    cache = tmp_path / "home" / ".cache" / "unisono"
    if made_by == "make_own_folder":
        make_own_folder(cache / "remote-1" / "train" / "cats")
    elif made_by == "calibration":
        add_to_calibration(cache / "calibration.json")
    else:
        _remember(cache / "loader" / "1.json", WorkerSetting(kind="thread", workers=1))
    make_own_folder(cache)
    make_own_folder(cache / "remote-1" / "train")


@ROOT
def test_what_the_file_system_gives_to_another_user_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives the files of root to nobody."""
    os.chown(tmp_path, 65534, 65534)
    assert untrusted_reason(tmp_path) == f"{tmp_path} belongs to the user nobody"
    monkeypatch.setattr(ownership, "open_new", squashed)
    assert untrusted_reason(tmp_path) == ""
    tmp_path.chmod(0o777)
    assert untrusted_reason(tmp_path) == f"{tmp_path} belongs to the user nobody"
    os.chown(tmp_path, 1234, 1234)
    assert untrusted_reason(tmp_path) == f"{tmp_path} belongs to the user 1234"
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT, or a folder of Windows: all is everybody's."""
    tmp_path.chmod(0o777)
    assert untrusted_reason(tmp_path)
    monkeypatch.setattr(ownership, "open_new", everybodys)
    assert untrusted_reason(tmp_path) == ""
    tmp_path.chmod(0o755)


def squashed(path: Path, **options: Any) -> Any:
    file = open_new(path, **options)
    os.fchown(file.fileno(), 65534, 65534)
    return file


def everybodys(path: Path, **options: Any) -> Any:
    file = open_new(path, **options)
    os.fchmod(file.fileno(), 0o777)
    return file
