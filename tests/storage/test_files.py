"""New files under hostile names: links that are planted, also while a file is written."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from intruder import as_another_user
from modes import modes, public_folder, umask, writable_by_others

from unisono.storage.files import create_file, file_lock, new_file, open_inside, open_new, opener, write_atomically

CONTENT = b"ours" * 1000


def with_opener(path: Path) -> None:
    with open(path, "xb", opener=opener) as file:
        file.write(CONTENT)


def locked(path: Path) -> None:
    with file_lock(path):
        pass


def opened(path: Path) -> None:
    with open_new(path) as file:
        file.write(CONTENT)


WRITERS: list[Callable[[Path], object]] = [
    lambda path: write_atomically(path, CONTENT),
    lambda path: create_file(path, CONTENT),
    opened,
    with_opener,
    locked,
]


@pytest.mark.parametrize("number", range(len(WRITERS)))
@pytest.mark.parametrize("there", [True, False])
def test_a_planted_link_is_not_followed(tmp_path: Path, number: int, there: bool) -> None:
    victim = tmp_path / "victim"
    if there:
        victim.write_text("mine")
    (tmp_path / "new").symlink_to(victim)
    with suppress(OSError):
        WRITERS[number](tmp_path / "new")
    assert victim.exists() == there
    assert not there or victim.read_text() == "mine"


@pytest.mark.parametrize("number", range(len(WRITERS)))
def test_under_no_umask_others_write_to_nothing(tmp_path: Path, number: int) -> None:
    (tmp_path / "folder").mkdir(mode=0o755)
    with umask(0):
        WRITERS[number](tmp_path / "folder/new")
    assert modes(tmp_path / "folder")["new"] == (0o600 if WRITERS[number] is locked else 0o644)
    assert writable_by_others(tmp_path / "folder") == {}


def test_a_file_that_does_not_fit_the_disk_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(OSError, match="No space left"):
        create_file(tmp_path / "new", CONTENT)
    (tmp_path / "there").write_bytes(CONTENT)
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "there", b"other")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"there": CONTENT}


def plants(folder: str, victim: str, seconds: float) -> int:
    """Puts links to ``victim`` in the place of every file of a folder that anybody can write to, as fast as it can."""
    until, planted = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for name in {*os.listdir(folder), "new", "new.tmp"}:
            with suppress(OSError):
                os.symlink(victim, f"{folder}/link")
                os.rename(f"{folder}/link", f"{folder}/{name}")
                planted += 1
    return planted


def test_links_that_another_user_plants_while_a_file_is_written_lead_nowhere() -> None:
    with public_folder() as folder:
        under_attack(folder / "victim", folder / "open")


def under_attack(victim: Path, shared: Path) -> None:
    victim.write_text("mine")
    shared.mkdir()
    shared.chmod(0o777)  # without the sticky bit: the kernel protects nothing here
    written, planted = 0, []
    attack = threading.Thread(target=lambda: planted.append(as_another_user(plants, str(shared), str(victim), 1.5)))
    attack.start()
    while attack.is_alive():
        with suppress(OSError):
            with new_file(shared / "new") as file:
                for _ in range(4):
                    file.write(CONTENT)
                    file.flush()
                    time.sleep(0.0005)
            written += 1
        for write in WRITERS:
            with suppress(OSError):
                write(shared / "new")
    attack.join()
    assert victim.read_text() == "mine"
    assert written > 5
    assert planted[0] > 50


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_file_outside_of_a_folder_is_not_opened(
    has_proc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a/file").write_text("ours")
    (tmp_path / "root-2").mkdir()
    (tmp_path / "root-2/file").write_text("secret")
    (root / "inside").symlink_to("a")
    (root / "outside").symlink_to("../root-2")
    readlink = os.readlink

    def absent(path: str, **options: int) -> str:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError
        return readlink(path, **options)

    if not has_proc:
        monkeypatch.setattr(os, "readlink", absent)
    for name in ("a/file", "inside/file", "../root-2/../root/a/file"):
        with open_inside(str(root), root / name) as file:
            assert file.read() == b"ours"
    for name in ("outside/file", "../root-2/file", "a/../outside/file"):
        with pytest.raises(PermissionError, match="it leads out of"):
            open_inside(str(root), root / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes devices")
def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    try:
        os.mknod(device := tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container may make no devices")
    (link := tmp_path / "link").symlink_to("device")
    for path in (device, link):
        with pytest.raises(FileExistsError, match="a device, which no file replaces"):
            write_atomically(path, CONTENT)
    assert device.is_char_device()
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device", "link"]
