"""Ranks that are really started, small measurements, and the comparison with what was measured before."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pool import Pool

from unisono.doctor import bench, child, rank_devices, ranks
from unisono.doctor.bench import bench as measure
from unisono.doctor.ranks import RankExamination, examine_ranks
from unisono.measure import (
    Calibration,
    DeviceRate,
    LinkRate,
    MatmulRate,
    StorageRate,
    add_to_calibration,
    read_calibration,
)
from unisono.measure.ceiling import cpu_name
from unisono.measure.links import PAIR_SIZES, STEP_SIZES

SMALL = {"sizes": (4, 65536, 1 << 20), "file_bytes": 1 << 20, "budget_s": 0.05}
CODES = ["BENCH01", "BENCH02", "BENCH03", "BENCH04", "BENCH05", "BENCH06"]


def link(**changes: Any) -> LinkRate:
    fields: dict[str, Any] = {
        "operation": "all_reduce",
        "transport": "gloo",
        "ranks": 2,
        "hosts": ("a",),
        "nbytes": 8 << 20,
        "seconds": 0.01,
        "spread_frac": 0.1,
    }
    return LinkRate(**fields | changes)


def disk(rate: float, host: str = "a") -> StorageRate:
    return StorageRate(
        host=host, folder="/runs", write_bytes_per_s=rate, read_bytes_per_s=1e9, opens_per_s=1e3, spread_frac=0.0
    )


@pytest.mark.parametrize(
    ("seconds", "spread_frac", "status", "text"),
    [
        (0.01, 0.1, "ok", "8 MiB 839 MB/s (±5%); 100% of what was measured before"),
        (0.005, 0.1, "ok", "200% of what"),
        (0.0124, 0.1, "ok", "81% of what"),
        (0.0126, 0.1, "warning", "79% of what"),
        (0.021, 0.1, "failure", "48% of what"),
        (0.021, 0.9, "warning", "(±45%); 48% of what"),
    ],
)
def test_sums_are_compared_with_those_before(seconds: float, spread_frac: float, status: str, text: str) -> None:
    known = Calibration(links=[link()])
    (check,) = bench._sum_checks([link(seconds=seconds, spread_frac=spread_frac)], known, "cure")
    assert (check.code, check.status) == ("BENCH01", status)
    assert text in check.evidence
    assert bool(check.cure) == (status != "ok")
    (check,) = bench._sum_checks([link(seconds=seconds, transport="shared memory")], known, "cure")
    assert (check.code, check.status, "before" in check.evidence) == ("BENCH02", "ok", False)


def test_the_storage_that_became_slowest_is_shown() -> None:
    known = Calibration(storage=[disk(1e9, "a"), disk(1e8, "b")])
    check = bench._storage_check([disk(4e8, "a"), disk(1e8, "b")], known, "cure")
    assert (check.status, check.evidence.startswith("/runs of a: writes 400 MB/s")) == ("failure", True)
    assert "40% of what was measured before" in check.evidence


def test_the_slowest_of_all_ranks_is_named() -> None:
    rates = [MatmulRate(tflops=tflops, size=1, repeats=5, spread_frac=0.1) for tflops in (1.0, 1.0, 0.4)]
    check = bench._peer_check(rates, ["a", "a", "b"])
    assert (check.status, "rank 2 (b), 0.4" in check.evidence, "look at b" in check.cure) == ("failure", True, True)
    assert bench._peer_check(rates[:2], ["a", "a"]).status == "ok"


IN_STEP = (("all_reduce_in_step", "gloo"), ("all_reduce_in_step", "shared memory"), ("send_in_step", "gloo"))


def sizes_in_steps(known: Calibration, operation: str, transport: str) -> tuple[int, ...]:
    """Sizes of exchanges between computations: on a busy machine those above 1 MiB can be left out."""
    rates = [rate for rate in known.links if (rate.operation, rate.transport) == (operation, transport)]
    sizes = tuple(sorted(rate.nbytes for rate in rates))
    assert len(sizes) >= 3
    assert sizes == STEP_SIZES[: len(sizes)]
    assert all(rate.seconds >= 1e-6 for rate in rates)
    return sizes


def pair_sizes(known: Calibration) -> tuple[int, ...]:
    """Sizes of messages that were measured: on a busy machine not all of them fit into the time, but always the first."""
    sizes = tuple(sorted(rate.nbytes for rate in known.links if rate.operation == "send"))
    assert sizes
    assert sizes == PAIR_SIZES[: len(sizes)]
    return sizes


def sent(seconds: float, pair: tuple[int, int] = (0, 1), ranks: int = 4) -> LinkRate:
    return link(operation="send", nbytes=512 << 10, seconds=seconds, pair=pair, ranks=ranks)


def test_pairs_are_compared_with_each_other_and_with_those_before() -> None:
    pairs = [
        sent(0.004, (1, 3)),
        *(sent(0.003, (0, rank)) for rank in (1, 2, 3)),
        sent(0.003, (1, 2)),
        sent(0.002, (2, 3)),
    ]
    check = bench._pairs_check(pairs, ["a", "b", "c", "d"], Calibration())
    assert (check.code, check.status) == ("BENCH03", "warning")
    assert check.evidence == (
        "512 KiB, slowest of 6: ranks 1 (b) and 3 (d) with 131 MB/s (±5%), the middle one 175 MB/s"
    )
    check = bench._pairs_check(pairs[:1], ["a", "b", "c", "d"], Calibration(links=[sent(0.001)]))
    assert (check.status, "between b and d" in check.cure) == ("failure", True)
    assert check.evidence.startswith("512 KiB, slowest of 1 that were measured, of 6: ")
    assert check.evidence.endswith("; 25% of what was measured before")


def two_benches(world: Any, folder: str) -> list[dict[str, Any]]:
    cache = Path(folder) / "cache" / "calibration.json"
    told: list[dict[str, Any]] = []
    for _ in range(2):
        checks, figures = measure(world, Path(folder), cache, device=torch.device("cpu"), **SMALL)
        world.barrier()
        told.append({"checks": [check.to_json() for check in checks], "figures": figures})
    return told


def test_what_is_measured_is_stored_and_compared_next_time(tmp_path: Path, pool: Pool) -> None:
    first, other = pool.run(two_benches, str(tmp_path))
    assert first[0]["checks"] == other[0]["checks"]
    for told, is_compared in zip(first, (False, True), strict=True):
        by_code = {check["code"]: check["evidence"] for check in told["checks"]}
        assert list(by_code) == CODES
        for code in ("BENCH01", "BENCH02", "BENCH04"):
            assert ("of what was measured before" in by_code[code]) == is_compared
    known = read_calibration(tmp_path / "cache" / "calibration.json")
    assert {(rate.operation, rate.transport, rate.nbytes) for rate in known.links} == {
        *(("all_reduce", name, size) for name in ("gloo", "shared memory") for size in SMALL["sizes"]),
        *(
            (operation, transport, size)
            for operation, transport in IN_STEP
            for size in sizes_in_steps(known, operation, transport)
        ),
        *(("send", "gloo", size) for size in pair_sizes(known)),
    }
    (one,) = known.devices
    assert (one.ranks, one.name) == (2, cpu_name())
    assert 0 < one.memory_bytes <= psutil.virtual_memory().total / 2
    assert [rate.folder for rate in known.storage] == [str(tmp_path.resolve())]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def one_bench(world: Any, folder: str) -> list[dict[str, Any]]:
    measured: dict[str, Any] = {**SMALL, "sizes": (4, 65536), "budget_s": 0.01}
    checks, figures = measure(
        world, Path(folder), Path(folder) / "calibration.json", device=torch.device("cpu"), **measured
    )
    return [figures, {check.code: check.evidence for check in checks}]


def test_sums_of_parts_of_the_ranks_are_measured_too(tmp_path: Path, pool: Pool) -> None:
    """Four ranks can have axes of two: a plan with these must not need a job of two ranks."""
    (figures, evidence), *others = pool.run(one_bench, str(tmp_path), ranks=4)
    seconds_of = [[rate["seconds"] for rate in told["links"]] for told, _ in ((figures, evidence), *others)]
    assert seconds_of == [seconds_of[0]] * 4  # of the slowest rank, on all of them
    known = read_calibration(tmp_path / "calibration.json")
    (host,) = {name for rate in known.links for name in rate.hosts}
    for size in (2, 4):
        for in_step in (False, True):
            seconds = known.all_reduce_s(65536, transport="gloo", ranks=size, host=host, num_hosts=1, in_step=in_step)
            assert seconds
    assert {rate.ranks for rate in known.links if rate.transport == "shared memory"} == {4}
    assert evidence["BENCH01"].startswith("4 ranks on this host: ")


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, []), (2, []), (3, []), (4, [2]), (6, [2, 3]), (7, []), (8, [2, 4]), (12, [2, 3, 4, 6])]
)
def test_parts_are_equal(ranks: int, sizes: list[int]) -> None:
    assert bench._part_sizes(ranks) == sizes
    for size in sizes:
        parts = bench._parts(ranks, size)
        assert {len(part) for part in parts} == {size}
        assert [rank for part in parts for rank in part] == list(range(ranks))


def test_much_worse_figures_do_not_take_the_place_of_good_ones(tmp_path: Path, pool: Pool) -> None:
    (stored,) = pool.run(stores_worse, str(tmp_path), ranks=1)
    links = [LinkRate(**{**rate, "hosts": tuple(rate["hosts"]), "pair": ()}) for rate in stored["links"]]
    assert [rate.seconds for rate in links] == [0.01]
    assert [rate["write_bytes_per_s"] for rate in stored["storage"]] == [9e7]
    assert [(rate["ranks"], rate["memory_bytes_per_s"]) for rate in stored["devices"]] == [(2, 9), (4, 9)]


def stores_worse(world: Any, folder: str) -> dict[str, Any]:
    cache = Path(folder) / "calibration.json"
    add_to_calibration(cache, links=[link()], storage=[disk(1e8)])
    device = DeviceRate(hosts=("a",), name="d", ranks=2, tflops=1, memory_bytes=1, memory_bytes_per_s=9, spread_frac=0)
    add_to_calibration(cache, devices=[device])
    worse = [replace(device, memory_bytes_per_s=7.0), replace(device, ranks=4)]
    bench._store(world, cache, read_calibration(cache), [link(seconds=0.02)], [disk(9e7)], {}, worse)
    known = read_calibration(cache)
    kinds = {"links": known.links, "storage": known.storage, "devices": known.devices}
    return {name: [asdict(rate) for rate in rates] for name, rates in kinds.items()}


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, and a folder of temporary files that has to be empty at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return temporary


def test_ranks_are_started_and_report(tmp_path: Path, own_places: Path) -> None:
    report = examine_ranks(RankExamination(kind="bench", run_dir=str(tmp_path / "runs"), **SMALL), processes=2)
    assert report is not None
    assert [check.code for check in report.checks] == CODES
    assert "2 ranks on this host: 4 B " in report.checks[0].evidence
    path = tmp_path / "cache" / "unisono" / "calibration.json"
    assert report.figures["stored_in"] == str(path)
    known = read_calibration(path)
    in_steps = [size for measured in IN_STEP for size in sizes_in_steps(known, *measured)]
    assert len(known.links) == 6 + len(in_steps) + len(pair_sizes(known))
    assert list(own_places.iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_the_one_rank_of_a_host_with_one_device_has_no_peers(
    tmp_path: Path, own_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_devices, "count_accelerators", lambda: 1)
    report = examine_ranks(RankExamination(kind="bench", run_dir=str(tmp_path / "runs"), **SMALL))
    assert report is not None
    assert [check.code for check in report.checks] == ["BENCH04", "BENCH06"]


def test_ranks_that_fail_are_a_check_with_their_words(
    tmp_path: Path, own_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_MODULE", "absent_module")
    report = examine_ranks(RankExamination(kind="nodes", run_dir=str(tmp_path)), processes=2)
    assert report is not None
    assert [(check.code, check.status) for check in report.checks] == [("JOB01", "failure")]
    assert "rank" in report.checks[0].evidence
    assert list(own_places.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "is_whole"),
    [
        ('[rank 0 n1] {mark} 0/2 {{"checks":[],\n[rank 0 n1] hello\n[rank 0 n1] {mark} 1/2 "figures":{{}}}}\n', True),
        ('{mark} 0/1 {{"checks":[],"figures":{{}}}}\n', True),
        ('{mark} 0/2 {{"checks":[],\n', False),
        ("{mark} 0/1 [1]\n", False),
        ("{mark} 0/1 \n", False),
        ("{mark} 7/0 x\n", False),
        ("nothing", False),
    ],
)
def test_a_report_comes_through_a_launcher_that_marks_lines(output: str, is_whole: bool) -> None:
    report = ranks._reported(output.format(mark=ranks._MARK))
    assert (report == ranks.RankReport(checks=(), figures={})) == is_whole


@pytest.mark.parametrize(
    ("said", "paragraph"),
    [
        ("", ""),
        ("a\nb\n", "a\nb"),
        ("x\nlaunch: one\nlaunch: two\ny\n", "one\ntwo"),
        (
            "unisono: lost\n  try:  t\nlaunch: attempt 0: rank 1 was killed\nlaunch: no restart left\n",
            "attempt 0: rank 1 was killed\nlost\n  try:  t",
        ),
        ("unisono: first\n  rule: r\nunisono: second\n  rule: q\n  try:  t\nafter\n", "second\n  rule: q\n  try:  t"),
    ],
)
def test_the_words_of_a_failure(said: str, paragraph: str) -> None:
    assert child.error_paragraph(said) == paragraph


def test_numbers_of_an_examination_go_through_json() -> None:
    examination = RankExamination(kind="bench", run_dir="/runs", **SMALL)
    text = json.dumps(asdict(examination))
    assert ranks.msgspec.json.decode(text, type=RankExamination) == replace(examination)
