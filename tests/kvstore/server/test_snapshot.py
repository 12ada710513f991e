"""A snapshot is whole or not there, and a damaged one is quarantined with its reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono.errors import CommError
from unisono.kvstore.server import snapshot


def take(folder: Path, value: int) -> int:
    tensors = {"0/value": torch.full((64,), float(value))}
    return snapshot.write_snapshot(folder, {"value": value}, tensors, after=snapshot.latest_snapshot_number(folder))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    assert snapshot.read_newest_snapshot(tmp_path / "none") is None
    for value in range(1, 5):
        assert take(tmp_path, value) == value
    assert names(tmp_path) == ["snapshot-00000003", "snapshot-00000004"]
    found = snapshot.read_newest_snapshot(tmp_path)
    assert (found.number, found.facts, found.set_aside) == (4, {"value": 4}, [])
    assert torch.equal(found.tensors["0/value"], torch.full((64,), 4.0))


@pytest.mark.parametrize("file", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_damaged_one_is_set_aside_and_the_one_before_taken(tmp_path: Path, file: str, damage: str) -> None:
    take(tmp_path, 1)
    take(tmp_path, 2)
    path = tmp_path / "snapshot-00000002" / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "remove":
        path.unlink()
    else:  # a file of another snapshot; the facts of one are whole in themselves, so swap the tensors under them
        path = path.with_name("state.safetensors")
        path.write_bytes((tmp_path / "snapshot-00000001" / "state.safetensors").read_bytes())
    found = snapshot.read_newest_snapshot(tmp_path)
    assert found.facts == {"value": 1}
    assert len(found.set_aside) == 1
    assert "snapshot-00000002" in found.set_aside[0]
    assert names(tmp_path) == ["quarantine", "snapshot-00000001"]
    assert (tmp_path / "quarantine/snapshot-00000002/reason.txt").read_text().strip() == found.set_aside[0]
    assert take(tmp_path, 3) == 2


def test_none_that_holds_is_an_error(tmp_path: Path) -> None:
    take(tmp_path, 1)
    (tmp_path / "snapshot-00000001/state.json").write_text("{}")
    with pytest.raises(CommError, match=r"none of the 1 snapshots in .* holds: snapshot-00000001"):
        snapshot.read_newest_snapshot(tmp_path)


def test_links_and_other_names_do_not_count(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    take(elsewhere, 9)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "snapshot-00000009").symlink_to(elsewhere / "snapshot-00000001")
    (folder / "snapshot-..%2f00000010").mkdir()
    assert snapshot.read_newest_snapshot(folder) is None


WRITER = """
import itertools, sys, torch
from pathlib import Path
from unisono.kvstore.server import snapshot
for value in itertools.count(1):
    tensors = {"0/value": torch.full((200_000,), float(value))}
    snapshot.write_snapshot(Path(sys.argv[1]), {"value": value}, tensors, after=value - 1)
    print(value, flush=True)
"""


@pytest.mark.full
def test_killed_at_any_moment_the_newest_holds(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    written = [int(line) for line in [*lines, *process.stdout.read().split()] if line.strip()]
    process.wait()
    process.stdout.close()
    found = snapshot.read_newest_snapshot(tmp_path)
    assert found.set_aside == []
    assert found.facts["value"] in (written[-1], written[-1] + 1)
    assert torch.equal(found.tensors["0/value"], torch.full((200_000,), float(found.facts["value"])))
    take(tmp_path, 0)
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_only_its_user_reads_it_and_a_replaced_server_writes_no_more(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        take(tmp_path / "server-0", 1)
    finally:
        os.umask(before)
    assert [
        path.stat().st_mode & 0o777 for path in (tmp_path / "server-0", tmp_path / "server-0/snapshot-00000001")
    ] == [
        0o700,
        0o700,
    ]
    with pytest.raises(CommError, match=r"snapshot 1 in .* \(its last one is 0\)\n.*another one has taken"):
        snapshot.write_snapshot(tmp_path / "server-0", {}, {}, after=0)
    assert snapshot.read_newest_snapshot(tmp_path / "server-0").facts == {"value": 1}


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(tmp_path: Path, mode: int) -> None:
    take(tmp_path / "mine", 1)
    (tmp_path / "mine").chmod(mode)
    for action in (lambda folder: take(folder, 2), snapshot.read_newest_snapshot):
        with pytest.raises(CommError, match=r"can be written by others .*\n.*\n.*no snapshot was read or written"):
            action(tmp_path / "mine")
    assert names(tmp_path / "mine") == ["snapshot-00000001"]
