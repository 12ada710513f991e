"""The calibration file: figures come back as they were, and whatever else is in it costs only itself."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.measure import (
    Calibration,
    DeviceRate,
    LinkRate,
    MatmulRate,
    StorageRate,
    add_to_calibration,
    probe_storage,
    read_calibration,
)

LINK = LinkRate(
    operation="all_reduce", transport="gloo", ranks=2, hosts=("a",), nbytes=1000, seconds=0.5, spread_frac=0.1, at_s=5.0
)
DISK = StorageRate(
    host="a", folder="/runs", write_bytes_per_s=1e8, read_bytes_per_s=2e8, opens_per_s=900.0, spread_frac=0.2, at_s=6.0
)
DEVICE = DeviceRate(
    hosts=("a",), name="d", ranks=2, tflops=0.5, memory_bytes=1e10, memory_bytes_per_s=1e10, spread_frac=0.1, at_s=7.0
)
MATMUL = MatmulRate(tflops=0.5, size=512, repeats=9, spread_frac=0.0)


def test_figures_come_back_and_later_ones_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    assert read_calibration(path) == read_calibration(None) == Calibration()
    add_to_calibration(path, matmul={"m": MATMUL}, links=[LINK], storage=[DISK], devices=[DEVICE])
    assert read_calibration(path) == Calibration(
        matmul={"m": MATMUL}, links=(LINK,), storage=(DISK,), devices=(DEVICE,)
    )
    faster, other = replace(LINK, seconds=0.25, at_s=9.0), replace(LINK, transport="nccl", at_s=8.0)
    add_to_calibration(path, links=[faster, other])
    known = read_calibration(path)
    assert (known.links, known.storage) == ((other, faster), (DISK,))
    assert known.link(LINK) == faster
    assert known.folder(replace(DISK, write_bytes_per_s=1.0)) == DISK
    assert known.folder(replace(DISK, host="b")) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(10, 1.0), (100, 1.0), (150, 1.5), (200, 2.0), (700, 5.0), (1200, 8.0), (2400, 16.0)]
)
def test_the_time_of_a_size_that_was_not_measured(nbytes: int, seconds: float) -> None:
    measured = {100: 1.0, 200: 2.0, 1200: 8.0}
    links = [replace(LINK, nbytes=size, seconds=took_s, hosts=("a", "b")) for size, took_s in measured.items()]
    known = Calibration(links=[*links, LINK, replace(LINK, operation="send", hosts=("a", "b"), nbytes=1, seconds=99.0)])
    assert known.all_reduce_s(nbytes, transport="gloo", ranks=2, host="b", num_hosts=2) == pytest.approx(seconds)
    for like in ({"transport": "nccl"}, {"ranks": 4}, {"host": "c"}, {"num_hosts": 3}):
        asked: dict[str, Any] = {"transport": "gloo", "ranks": 2, "host": "b", "num_hosts": 2, **like}
        assert known.all_reduce_s(nbytes, **asked) is None


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (100, 1.0), (150, 1.0), (200, 1.0), (700, 4.5), (1200, 8.0)])
def test_a_small_message_that_was_disturbed(nbytes: int, seconds: float) -> None:
    measured = {100: 3.0, 200: 1.0, 1200: 8.0}
    known = Calibration(links=[replace(LINK, nbytes=size, seconds=took_s) for size, took_s in measured.items()])
    assert known.all_reduce_s(nbytes, transport="gloo", ranks=2, host="a", num_hosts=1) == pytest.approx(seconds)


@pytest.mark.parametrize(("nbytes", "seconds"), [(400, 2.0), (1, 0.25)])  # a message takes as long as a sum of nothing
def test_the_time_of_a_message(nbytes: int, seconds: float) -> None:
    pair = replace(LINK, operation="send", hosts=("a", "b"), nbytes=200, seconds=1.0)
    sums = [replace(LINK, hosts=("a", "b"), nbytes=size, seconds=size / 16) for size in (4, 1024)]
    more = replace(pair, ranks=8, seconds=9.0)
    shorter = replace(pair, nbytes=20, seconds=0.5, at_s=2.0)
    known = Calibration(links=[more, pair, shorter, *sums])
    assert known.send_s(nbytes, transport="gloo", host="b", num_hosts=2) == pytest.approx(seconds)
    for like in ({"transport": "nccl"}, {"host": "c"}, {"num_hosts": 3}):
        asked: dict[str, Any] = {"transport": "gloo", "host": "b", "num_hosts": 2, **like}
        assert known.send_s(nbytes, **asked) is None


def test_exchanges_in_a_step_take_at_least_as_long_as_between_idle_ranks() -> None:
    where: dict[str, Any] = {"transport": "gloo", "host": "a", "num_hosts": 1}
    idle = [replace(LINK, nbytes=size, seconds=took_s) for size, took_s in ((100, 1.0), (1000, 4.0))]
    added = [replace(each, operation="all_reduce_in_step", seconds=3.0) for each in idle]
    pair = replace(LINK, operation="send", nbytes=1000, seconds=2.0)
    known = Calibration(links=[*idle, *added, pair])
    assert known.all_reduce_s(100, ranks=2, in_step=True, **where) == 3.0
    assert known.all_reduce_s(1000, ranks=2, in_step=True, **where) == 4.0
    assert (
        known.send_s(1000, in_step=True, **where) == known.send_s(1000, **where) == 2.0
    )  # messages in steps were not measured
    messages = replace(pair, operation="send_in_step", seconds=5.0)
    known = Calibration(links=[*idle, pair, messages, replace(messages, ranks=4, seconds=9.0)])
    assert known.send_s(1000, in_step=True, **where) == 5.0
    assert known.send_s(1000, **where) == 2.0
    assert known.all_reduce_s(100, ranks=2, in_step=True, **where) is None


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "operation": "all_reduce",
        "transport": "gloo",
        "ranks": 2,
        "hosts": ["a"],
        "nbytes": 1000,
        "seconds": 0.5,
        "spread_frac": 0.1,
        "at_s": 5.0,
        "torch": "",
        "pair": [],
        **changes,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 3, "x", [], {}, {"transport": "gloo"}),
        *(entry(seconds=0), entry(seconds=-1), entry(seconds="0.5"), entry(seconds=None), entry(seconds=1e300)),
        *(
            entry(nbytes=0),
            entry(nbytes=2**80),
            entry(nbytes=10**400),
            entry(nbytes=True),
            entry(ranks=0),
            entry(ranks=1.5),
        ),
        *(entry(operation="steal"), entry(hosts="a"), entry(hosts=[1]), entry(pair={}), entry(spread_frac=-1)),
    ],
)
def test_a_wrong_entry_costs_only_itself(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "calibration.json"
    content = {
        "version": 2,
        "matmul": {"m": {"tflops": 0.5, "size": 512, "repeats": 9, "spread_frac": 0.0, "later": 1}, "n": wrong},
        "links": [wrong, entry()],
        "storage": [wrong],
    }
    path.write_text(json.dumps(content))
    known = read_calibration(path)
    assert (known.matmul, known.links, known.storage) == ({"m": MATMUL}, (LINK,), ())
    add_to_calibration(path, storage=[DISK])
    assert read_calibration(path).storage == (DISK,)
    assert wrong not in json.loads(path.read_text())["links"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "not json", "null", "[]", '"x"', "{", "NaN", "[" * 5000, '{"version": 3, "links": []}'),
        *('{"version": 2}', '{"version": 2, "links": {}, "matmul": [], "storage": 7}', '{"version": null}', "\0\1\2"),
    ],
)
def test_a_file_that_is_none_is_empty_and_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    assert read_calibration(path) == Calibration()
    add_to_calibration(path, links=[LINK])
    assert read_calibration(path).links == (LINK,)


def test_a_link_a_folder_and_a_file_that_others_can_write_are_not_read(tmp_path: Path) -> None:
    real = tmp_path / "calibration.json"
    add_to_calibration(real, links=[LINK])
    link = tmp_path / "link.json"
    link.symlink_to(real)
    assert read_calibration(link) == Calibration()
    assert read_calibration(tmp_path) == Calibration()
    os.chmod(real, 0o666)
    assert read_calibration(real) == Calibration()


def test_the_number_of_entries_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    links = [replace(LINK, nbytes=1 + number, at_s=float(number)) for number in range(600)]
    add_to_calibration(path, links=links)
    assert read_calibration(path).links == tuple(links[-256:])


def test_storage_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rate = probe_storage(tmp_path, file_bytes=1 << 20)
    assert rate.folder == str(tmp_path.resolve())
    assert min(rate.write_bytes_per_s, rate.read_bytes_per_s, rate.opens_per_s) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="absent"):
        probe_storage(tmp_path / "absent")
