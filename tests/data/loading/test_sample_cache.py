"""The cache: same samples, read once per host, bounded, gone with its users."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.combined import mapped
from unisono.data.loading import sample_cache
from unisono.data.loading.loader import Loader
from unisono.data.loading.sample_cache import cached
from unisono.errors import DataError


class Ragged:
    """Sample i: i + 1 bytes and a label; counts what is read."""

    def __init__(self, size: int, name: str = "ragged") -> None:
        self.fingerprint = f"{name}:{size}"
        self.size = size
        self.read_ids: list[int] = []

    def __len__(self) -> int:
        return self.size

    def samples(self, indices: np.ndarray) -> list[dict[str, Any]]:
        self.read_ids += indices.tolist()
        return [
            {"bytes": np.full(i + 1, i % 256, np.uint8), "label": np.array(i, np.float64)} for i in indices.tolist()
        ]

    def read(self, indices: np.ndarray) -> dict[str, Any]:
        raise AssertionError("samples of several lengths")


def check(samples: list[dict[str, Any]], ids: list[int]) -> None:
    for sample, number in zip(samples, ids, strict=True):
        assert sample["bytes"].tolist() == [number % 256] * (number + 1)
        assert sample["label"].item() == number
        assert sample["label"].dtype == np.float64


def files(folder: Path | None = None) -> set[str]:
    return {path.name for path in (folder or sample_cache._MEMORY).glob("unisono-cache-*")}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of its own for each test, as tests that run at the same time share one /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        monkeypatch.setattr(sample_cache, "_MEMORY", Path(memory))
        yield
        gc.collect()
        assert files() == set()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_each_sample_is_read_once(where: str, tmp_path: Path) -> None:
    data = Ragged(200)
    one = cached(data, budget_bytes=1 << 20, folder=tmp_path if where == "folder" else None)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.permutation(200)[:16]
        check(one.samples(ids), ids.tolist())
    assert len(set(data.read_ids)) == len(data.read_ids) == one.num_cached
    once = data.read_ids

    other = Ragged(200)
    again = cached(other, budget_bytes=1 << 20, folder=tmp_path if where == "folder" else None)
    check(again.samples(np.arange(200)), list(range(200)))
    assert sorted(other.read_ids) == sorted(set(range(200)) - set(once)), "what another user has read is there"
    assert one.fingerprint == data.fingerprint
    assert len(one) == 200


def test_a_cache_on_disk_is_there_for_the_next_run(tmp_path: Path) -> None:
    cached(Ragged(50), budget_bytes=1 << 20, folder=tmp_path).samples(np.arange(50))
    gc.collect()
    data = Ragged(50)
    check(cached(data, budget_bytes=1 << 20, folder=tmp_path).samples(np.arange(50)), list(range(50)))
    assert data.read_ids == []
    cached(Ragged(50, name="other"), budget_bytes=1 << 20, folder=tmp_path)
    assert len(files(tmp_path)) == 2, "another data set has another file"


def test_the_budget_is_kept_and_nothing_is_given_up() -> None:
    data = Ragged(300)
    one = cached(data, budget_bytes=8192)
    check(one.samples(np.arange(300)), list(range(300)))
    kept = one.num_cached
    assert 8 < kept < 60
    for _ in range(3):
        data.read_ids.clear()
        check(one.samples(np.arange(300)), list(range(300)))
        assert len(data.read_ids) == 300 - kept


def test_a_damaged_entry_is_read_again(tmp_path: Path) -> None:
    cached(Ragged(20), budget_bytes=1 << 20, folder=tmp_path).samples(np.arange(20))
    gc.collect()
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    table = 64 + 20 * 24
    place = raw.index(bytes([13] * 14), table)
    raw[place] ^= 1
    path.write_bytes(raw)
    data = Ragged(20)
    check(cached(data, budget_bytes=1 << 20, folder=tmp_path).samples(np.arange(20)), list(range(20)))
    assert data.read_ids == [13]


def test_threads_share_it() -> None:
    data = Ragged(500)
    one = cached(data, budget_bytes=1 << 20)
    wrong: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(100):
                ids = rng.integers(0, 500, 8)
                check(one.samples(ids), ids.tolist())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import numpy as np
from unisono.data.loading import sample_cache
from unisono.data.loading.sample_cache import cached
sample_cache._MEMORY = Path({memory!r})
class Data:
    fingerprint = "shared"
    def __len__(self): return 400
    def read(self, ids): raise AssertionError
    def samples(self, ids):
        global read
        read += len(ids)
        return [{{"x": np.full(100, i)}} for i in ids.tolist()]
read = 0
one = cached(Data(), budget_bytes=1 << 20)
rng = np.random.default_rng(int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for ids in rng.permutation(400).reshape(-1, 4):
    for sample, i in zip(one.samples(ids), ids.tolist()):
        assert sample["x"].tolist() == [i] * 100
print(one.num_cached, read, flush=True)
sys.stdin.readline()
"""


def start(number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(path=sys.path, memory=str(sample_cache._MEMORY)), str(number)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_processes_share_one_copy_and_the_last_removes_it() -> None:
    children = [start(number) for number in range(3)]
    assert len(files()) == 1
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [tuple(map(int, child.stdout.readline().split())) for child in children if child.stdout is not None]
    assert max(kept for kept, _ in told) == 400
    assert sum(read for _, read in told) < 1200, "one reads what another has not read yet"
    for left, child in enumerate(reversed(children)):
        assert len(files()) == 1, f"{left} gone"
        assert child.communicate("end\n")[0] == ""
        assert child.returncode == 0
    assert files() == set()


def test_what_a_killed_process_leaves_is_removed_by_the_next() -> None:
    child = start(0)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(files()) == 1
    one = cached(Ragged(5), budget_bytes=1 << 12)
    assert len(files()) == 1
    del one
    gc.collect()
    assert files() == set()


def test_a_full_file_system_ends_the_growth_and_nothing_else(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", small], check=False).returncode
    ):
        pytest.skip("cannot mount a small tmpfs here")
    try:
        data = Ragged(1000)
        one = cached(data, budget_bytes=1 << 20, folder=small)
        for _ in range(2):
            check(one.samples(np.arange(1000)), list(range(1000)))
        assert 0 < one.num_cached < 500
        with pytest.raises(DataError, match=r"a cache has room for its table, .* bytes for 1,000,000 samples"):
            cached(Ragged(10**6), budget_bytes=1 << 20, folder=small)
        del one
        gc.collect()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_in_a_loader_with_worker_processes_and_decoding_kept() -> None:
    calls: list[int] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(int(sample["label"]))
        return {"size": np.array(len(sample["bytes"])), "label": sample["label"]}

    one = cached(mapped(Ragged(30), decode), budget_bytes=1 << 20)
    loader = Loader(one, seed=0, global_batch=10)
    epochs = [sorted(x for batch in loader for x in batch["size"].tolist()) for _ in range(4)]
    assert epochs == [list(range(1, 31))] * 4
    assert sorted(calls) == list(range(30)), "each was decoded once"
    loader.close()


def test_a_cache_follows_no_link_and_takes_no_file_of_another_user(tmp_path: Path) -> None:
    cached(Ragged(10), folder=tmp_path, budget_bytes=1 << 20)
    (name,) = files(tmp_path)  # which anybody can compute
    path = tmp_path / name
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path.unlink()
    path.symlink_to(precious)
    with pytest.raises(DataError, match="Too many levels of symbolic links"):
        cached(Ragged(10), folder=tmp_path, budget_bytes=1 << 20)
    assert precious.read_bytes() == b"mine"
    path.unlink()
    if os.geteuid() == 0:
        path.touch()
        os.chown(path, 65534, 65534)
        with pytest.raises(DataError, match="it belongs to another user"):
            cached(Ragged(10), folder=tmp_path, budget_bytes=1 << 20)


def test_others_read_neither_the_samples_nor_the_folder_of_those_in_memory() -> None:
    sample_cache._MEMORY.rmdir()
    before = os.umask(0)
    try:
        data = cached(Ragged(10), budget_bytes=1 << 20)
    finally:
        os.umask(before)
    folder = sample_cache._MEMORY
    (name,) = files()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    check(data.samples(np.arange(10)), list(range(10)))


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_in_memory_that_others_can_write_is_refused(mode: int) -> None:
    sample_cache._MEMORY.chmod(mode)
    with pytest.raises(DataError, match="can be written by others"):
        cached(Ragged(10), budget_bytes=1 << 20)
    sample_cache._MEMORY.chmod(0o700)
