"""Temporary folders are removed at the end; those of killed processes by the next process of their user, and no others."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.dist.interpreter import module_path

USE = """
import sys
from unisono.storage.scratch import scratch_folder
with scratch_folder("unisono-test-") as folder:
    (folder / "file").write_text("content")
    print(folder, flush=True)
    sys.stdin.readline()
"""
PREFIX = f"unisono-test-{socket.gethostname()}-"


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


class User:
    """A process with a temporary folder, which it removes when it is told to end."""

    def __init__(self, temporary: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": module_path(), "TMPDIR": str(temporary)}
        command = [sys.executable, "-c", USE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip()).parent

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL

    def end(self) -> None:
        self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    user = User(temporary)
    assert user.folder.parent == temporary
    assert user.folder.name.startswith(PREFIX)
    assert user.folder.stat().st_mode & 0o777 == 0o700
    user.end()
    assert names(temporary) == set()


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not(temporary: Path) -> None:
    killed, alive = User(temporary), User(temporary)
    killed.kill()
    assert names(temporary) == {killed.folder.name, alive.folder.name}
    User(temporary).end()
    assert names(temporary) == {alive.folder.name}
    assert (alive.folder / "content" / "file").read_text() == "content"
    alive.end()
    assert names(temporary) == set()


def test_links_and_folders_of_others_stay(temporary: Path, tmp_path: Path) -> None:
    killed, kept = User(temporary), tmp_path / "kept"
    killed.kill()
    shutil.copytree(killed.folder, kept)
    (temporary / f"{PREFIX}link").symlink_to(kept)
    (temporary / f"{PREFIX}file").write_text("mine")
    (temporary / f"{PREFIX}empty").mkdir()  # without a lock, it may be in the making
    (temporary / f"{PREFIX}linked").mkdir()
    (temporary / f"{PREFIX}linked" / ".scratch.lock").symlink_to(kept / ".scratch.lock")
    (killed.folder / "inside").symlink_to(kept)
    User(temporary).end()
    assert names(temporary) == {f"{PREFIX}{name}" for name in ("link", "file", "empty", "linked")}
    assert names(kept) == {"content", ".scratch.lock"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_what_another_user_left_stays(temporary: Path) -> None:
    first, second = User(temporary), User(temporary)
    first.kill()
    second.kill()
    os.chown(first.folder, 12345, 12345)
    os.chown(second.folder / ".scratch.lock", 12345, 12345)
    User(temporary).end()
    assert names(temporary) == {first.folder.name, second.folder.name}
