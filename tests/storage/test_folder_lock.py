"""One process at a time works in a folder; the lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from procs import wait_until

from unisono.errors import ConfigError
from unisono.storage import folder_lock
from unisono.storage.folder_lock import FolderLock, is_abandoned

HOLD = """
import os, sys, time
sys.path[:] = {path!r}
from pathlib import Path
from unisono.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), work="is training", nearest="wait")
child = os.fork()
if child:
    print("held", child, flush=True)
time.sleep(60)
"""


def lock(path: Path) -> FolderLock:
    return FolderLock(path, work="is training", nearest="wait")


def heartbeats() -> set[threading.Thread]:
    """Threads that keep locks alive; another test of this process may have left some."""
    return {thread for thread in threading.enumerate() if thread.name == "unisono-folder-lock"}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        lock(path)
    return str(caught.value)


def is_free(path: Path) -> bool:
    try:
        lock(path).close()
    except ConfigError:
        return False
    return True


def test_a_full_disk_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"):
            lock(tmp_path / ".lock")
    assert is_free(tmp_path / ".lock")


def test_another_process_is_named_and_its_kill_frees_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(path=sys.path), str(path)], stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        assert holder.stdout is not None
        word, child_text = holder.stdout.readline().split()
        assert word == "held"
        child = int(child_text)
        said = refusal(path)
        assert re.fullmatch(
            rf"{tmp_path}, in which process {holder.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d, is training\n"
            "  rule: one process at a time works in a folder: two would mix their events, settings and checkpoints\n"
            "  so:   nothing was started\n"
            "  try:  wait",
            said,
        ), said
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        os.kill(child, 0)  # what it had forked lives on; it closes its copy of the lock as soon as it runs
        wait_until(lambda: is_free(path), "the lock is free")
    finally:
        holder.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_the_same_process(tmp_path: Path) -> None:
    held = lock(tmp_path / "run.lock")
    assert f"process {os.getpid()} on " in refusal(tmp_path / "run.lock")
    held.close()
    held.close()


def test_a_lock_whose_holder_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert not is_abandoned(path)
    held = lock(path)
    assert not is_abandoned(path)
    os.utime(path, (0, 0))  # no heartbeat for a minute
    assert is_abandoned(path)
    held.close()
    os.utime(path, (0, 0))
    assert not is_abandoned(path)
    path.unlink()
    path.symlink_to("elsewhere")
    assert not is_abandoned(path)


def test_a_record_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    held = lock(path)
    for text in ("", "[" * 3000, json.dumps({"pid": 1, "host": "\x1b[2J", "since": "now"}), json.dumps([1])):
        path.write_text(text)
        assert f"{tmp_path}, in which another process is training\n" in refusal(path)
    held.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.lock").symlink_to("mine")
    assert refusal(tmp_path / "run.lock").startswith(f"{tmp_path}/run.lock, which is a link\n")
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "run.lock").unlink()
    os.mkfifo(tmp_path / "run.lock")
    assert refusal(tmp_path / "run.lock").startswith(f"{tmp_path}/run.lock, which is no regular file\n")


def test_a_lock_that_counts_on_its_own_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS with local locks: another host holds its own, and shows that it lives by changing the file."""
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(folder_lock, "_WATCH_S", 1.0)
    monkeypatch.setattr(folder_lock, "_POLL_S", 0.01)
    path = tmp_path / "run.lock"
    others = heartbeats()
    with monkeypatch.context() as there:
        there.setattr(fcntl, "flock", lambda *_: None)
        there.setattr(socket, "gethostname", lambda: "there")
        held = lock(path)
        assert heartbeats() - others
    with monkeypatch.context() as here:
        here.setattr(fcntl, "flock", lambda *_: None)
        assert f"process {os.getpid()} on there, since " in refusal(path)
        held._stop.set()  # killed
        wait_until(lambda: not heartbeats() - others, "no heartbeat")
        lock(path).close()


def test_two_that_begin_at_the_same_moment_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On hosts whose locks count for themselves alone."""
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_S", 0.05)
    path = tmp_path / "run.lock"
    held = lock(path)
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
    wait_until(lambda: "process 1 on" in caplog.text, "it is said")
    assert f"{tmp_path}: process 1 on" in caplog.text
    assert "works here too: end one of the two" in caplog.text
    held.close()


def test_a_lock_without_a_heartbeat_starts_no_thread(tmp_path: Path) -> None:
    others = heartbeats()
    held = FolderLock(tmp_path / "launch.lock", work="runs a job", nearest="wait", heartbeat=False)
    assert not heartbeats() - others
    held.close()


def test_without_locks_of_the_file_system_a_heartbeat_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_S", 0.05)
    path = tmp_path / "run.lock"
    held = lock(path)
    os.utime(path, (1, 1))
    until = time.monotonic() + 20
    while path.stat().st_mtime < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "is training" in refusal(path)
    held.close()
    lock(path).close()
    killed = lock(path)
    killed._stop.set()  # no heartbeat any more, and no close
    os.utime(path, (1, 1))
    lock(path).close()
