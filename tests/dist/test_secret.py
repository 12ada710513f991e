"""Where the secret may come from, and from where it is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from procs import command_lines

from unisono.dist.secret import read_or_create_secret
from unisono.errors import LaunchError

SECRET = bytes(range(100, 132))


def _file(path: Path, content: bytes = SECRET, mode: int = 0o600) -> dict[str, str]:
    path.write_bytes(content)
    path.chmod(mode)
    return {"UNISONO_SECRET_FILE": str(path)}


def _said(environ: dict[str, str]) -> str:
    with pytest.raises(LaunchError) as caught:
        read_or_create_secret(environ)
    assert SECRET.hex() not in str(caught.value)
    return caught.value.problems[0].given


@pytest.mark.parametrize("kind", ["pipe", "memfd"])
def test_a_descriptor_is_read_as_often_as_this_process_wants_and_by_no_child(kind: str) -> None:
    if kind == "pipe":
        reading, writing = os.pipe()
        os.write(writing, SECRET)
        os.close(writing)
    else:
        reading = os.memfd_create("secret", 0)
        os.write(reading, SECRET)
    os.set_inheritable(reading, True)
    for _ in range(3):
        assert read_or_create_secret({"UNISONO_SECRET_FD": str(reading)}) == SECRET
    assert not os.get_inheritable(reading)
    os.close(reading)
    assert _said({"UNISONO_SECRET_FD": str(reading)}).startswith(
        f"UNISONO_SECRET_FD={reading} is not an open descriptor"
    )
    assert _said({"UNISONO_SECRET_FD": "9" * 30}).startswith(f"UNISONO_SECRET_FD={'9' * 30} is not an open descriptor")


@pytest.mark.full
def test_a_child_reads_it_and_no_other_process_can_see_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, SECRET)
    os.close(writing)
    code = (
        "import os, sys\n"
        "from unisono.dist.secret import read_or_create_secret\n"
        "print(sum(read_or_create_secret(os.environ)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environ = os.environ | {"UNISONO_SECRET_FD": str(reading), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, pass_fds=[reading], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.close(reading)
    assert child.stdout is not None
    assert int(child.stdout.readline()) == sum(SECRET)
    variables = Path(f"/proc/{child.pid}/environ").read_bytes()
    open_files = [os.readlink(fd) for fd in Path(f"/proc/{child.pid}/fd").iterdir() if int(fd.name) > 2]
    child.communicate()
    for form in (SECRET, SECRET.hex().encode()):
        assert form not in variables
        assert form not in command_lines().encode()
    assert len([name for name in open_files if name.startswith("pipe:")]) <= 1


def test_a_file_of_ours_is_read(tmp_path: Path) -> None:
    assert read_or_create_secret(_file(tmp_path / "secret")) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    environ = _file(tmp_path / "secret", mode=mode)
    assert _said(environ) == f"{tmp_path}/secret has mode {mode:04o}"


@pytest.mark.parametrize(("size", "said"), [(0, "0"), (31, "31"), (33, "more than 32")])
def test_another_length_is_refused(tmp_path: Path, size: int, said: str) -> None:
    assert _said(_file(tmp_path / "secret", b"s" * size)) == f"{tmp_path}/secret holds {said} bytes"


def test_links_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    _file(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "cannot be opened" in _said({"UNISONO_SECRET_FILE": str(tmp_path / "link")})
    assert _said({"UNISONO_SECRET_FILE": str(tmp_path / "fifo")}) == f"{tmp_path}/fifo is not a plain file"
    assert _said({"UNISONO_SECRET_FILE": str(tmp_path)}) == f"{tmp_path} is not a plain file"
    assert "cannot be opened" in _said({"UNISONO_SECRET_FILE": str(tmp_path / "none")})


def test_two_sources_are_one_too_many(tmp_path: Path) -> None:
    assert _said(_file(tmp_path / "secret") | {"UNISONO_SECRET_FD": "5"}).startswith("both UNISONO_SECRET_FD and")


def test_the_users_own_is_made_once_and_private(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(read_or_create_secret({"HOME": str(tmp_path)}))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    folder = tmp_path / ".config/unisono"
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_planted_in_its_place_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / ".config/unisono"
    folder.mkdir(parents=True, mode=0o700)
    target = tmp_path / "target"
    (folder / "secret").symlink_to(target)
    assert "cannot be opened" in _said({"HOME": str(tmp_path)})
    assert not target.exists()


def test_a_folder_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".config/unisono"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert _said({"HOME": str(tmp_path)}) == f"{folder} can be written by others (mode 777)"
    folder.chmod(0o1777)  # the sticky bit lets others make the file first
    assert _said({"HOME": str(tmp_path)}) == f"{folder} can be written by others (mode 1777)"


def test_a_folder_of_a_group_that_is_the_users_alone_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / ".config/unisono"
    folder.mkdir(parents=True)
    folder.chmod(0o775)  # as under umask 002, with which Linux gives every user a group of its own
    os.chown(folder, -1, os.getuid())
    assert len(read_or_create_secret({"HOME": str(tmp_path)})) == 32


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    environ = _file(tmp_path / "secret")
    os.chown(tmp_path / "secret", 54321, 54321)
    assert _said(environ) == f"{tmp_path}/secret belongs to the user 54321"
