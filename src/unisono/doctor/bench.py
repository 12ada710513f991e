"""Speeds of links, storage and devices, compared with what was measured here before and among the ranks. A collective.

A figure below 80 % of the stored one is a warning, below 50 % a failure; where the measurements vary by more than a quarter, it
is at most a warning. A figure below 80 % is not stored, so that what was measured once stays the measure; all others take the
place of earlier ones.
"""

from __future__ import annotations

import itertools
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from unisono.device.torch_adapters import adapter_of, present_adapter
from unisono.dist import JobSpec, World
from unisono.doctor.check import Check, judged
from unisono.doctor.storage import nearest_folder
from unisono.errors import ConfigError
from unisono.kvstore.allreduce.buckets import transport_name
from unisono.kvstore.allreduce.shared_memory import SharedMemoryAllReduce
from unisono.measure.calibration import (
    SHARED_MEMORY,
    Calibration,
    DeviceRate,
    LinkRate,
    MatmulRate,
    StorageRate,
    add_to_calibration,
    read_calibration,
)
from unisono.measure.ceiling import QUIET_SPREAD_FRAC, baseline_dtype, device_name, matmul_key, time_matmul
from unisono.measure.links import SIZES, probe_all_reduce, probe_in_step, probe_pairs, ring_exchange
from unisono.measure.memory import time_copy
from unisono.measure.storage import probe_storage
from unisono.observe.host_memory import host_memory_limit_bytes
from unisono.storage.files import os_reason

_WARNING, _FAILURE = 0.8, 0.5
_BIG_BYTES: Final = 1 << 20  # of such sums the rate is shown, of smaller ones the time
_SLOWER: Final = (
    "what takes the machine or its network now (unisono doctor --nodes, top); delete {cache} if the hardware changed"
)


def find_device(job: JobSpec) -> torch.device:
    """The accelerator of a rank, or the CPU where there is not one for each rank of the host."""
    adapter = present_adapter()
    if adapter.name == "cpu" or adapter.count() < job.local_world:
        return torch.device("cpu")
    adapter.set_current(job.local_rank)
    return torch.device(adapter.name, job.local_rank)


def bench(
    world: World,
    folder: Path,
    cache: Path,
    *,
    device: torch.device,
    sizes: Sequence[int] = (),
    file_bytes: int = 0,
    budget_s: float = 1.0,
) -> tuple[list[Check], dict[str, Any]]:
    """Measure, compare with ``cache`` and add to it; the checks and the figures, on every rank.

    Args:
        folder: Folder of runs, whose storage is measured.
        sizes: Bytes of the sums, ascending; empty for the usual ones.
        file_bytes: Size of the file that is written; 0 for the usual one.
        budget_s: Seconds for each figure; ten times as long for all pairs together.
    """
    hosts: list[str] = world.all_gather_json(socket.gethostname())
    known = read_calibration(cache)
    links, checks = _links(world, hosts, device, sizes or SIZES, budget_s, known)
    storage, troubles = _storage(world, folder, file_bytes, budget_s)
    peers, own = _matmul(world, device, budget_s)
    one = _device(world, hosts, device, peers, budget_s)
    cure = _SLOWER.format(cache=cache)
    checks = [*_sum_checks(links, known, cure), *checks]
    checks += [*troubles, *([_storage_check(storage, known, cure)] if storage else [])]
    checks += [_peer_check(peers, hosts)] if len(peers) > 1 else []
    name, key = matmul_key(device, baseline_dtype(device))
    before = known.matmul.get(key)
    ratio = own.tflops / before.tflops if before is not None else None
    evidence = f"{own.tflops:.3g} TFLOP/s ({name}){_scatter(own.spread_frac)}{_than_before(ratio)}"
    checks.append(_compared("BENCH06", "matrix products of one rank", evidence, ratio, own.spread_frac, cure))
    answer = world.broadcast_json(
        [asdict(check) for check in checks]
    )  # rank 0 has the file that they are compared with
    _store(world, cache, known, links, storage, {key: own} if own.spread_frac <= QUIET_SPREAD_FRAC else {}, [one])
    figures = {
        "links": [asdict(rate) for rate in links],
        "storage": [asdict(rate) for rate in storage],
        "matmul": {key: asdict(own)},
        "device": asdict(one),
        "stored_in": str(cache),
    }
    return [Check(**check) for check in answer], figures


# --- measuring -------------------------------------------------------------------------------------------------------


def _links(
    world: World,
    hosts: Sequence[str],
    device: torch.device,
    sizes: Sequence[int],
    budget_s: float,
    known: Calibration,
) -> tuple[list[LinkRate], list[Check]]:
    """The rates of sums and of the slowest pair by size, and the check that compares the pairs."""
    if world.group is None:
        return [], []
    backend, group = transport_name(world.group), world.group

    def by_torch(tensor: torch.Tensor, group: dist.ProcessGroup = group) -> object:
        return dist.all_reduce(tensor, group=group)

    given: dict[str, Any] = {"hosts": hosts, "device": device, "budget_s": budget_s}

    def probe(reduce: Callable[[torch.Tensor], object], transport: str) -> list[LinkRate]:
        idle = probe_all_reduce(world, reduce, transport=transport, sizes=sizes, **given)
        return [*idle, *probe_in_step(world, reduce, operation="all_reduce_in_step", transport=transport, **given)]

    rates = probe(by_torch, backend)
    if len(set(hosts)) == 1:  # an axis of a plan joins some of the ranks
        parts = {f"parts of {size}": _parts(world.world_size, size) for size in _part_sizes(world.world_size)}
        for part in world.groups(parts).values():
            sums = probe(partial(by_torch, group=part), backend)
            rates += [replace(rate, ranks=part.size()) for rate in sums]
    rates += probe_in_step(world, partial(ring_exchange, world), operation="send_in_step", transport=backend, **given)
    if device.type == "cpu":
        with suppress(ConfigError):  # several hosts, or another system: gradients go over the backend
            memory = SharedMemoryAllReduce(world)
            try:
                rates += probe(memory.all_reduce, SHARED_MEMORY)
            finally:
                memory.close()
    measured = probe_pairs(world, transport=backend, hosts=hosts, device=device, budget_s=10 * budget_s)
    by_size = [list(pairs) for _, pairs in itertools.groupby(measured, key=lambda rate: rate.nbytes)]
    check = _pairs_check(by_size[-1], hosts, known)
    # of each size, so that a link that has become too slow for the largest one is compared too
    return [*rates, *(pairs[0] for pairs in by_size)], [check]


def _part_sizes(num_ranks: int) -> list[int]:
    """Numbers of ranks, of 2 and more, by which ``num_ranks`` can be divided into equal parts."""
    return [size for size in range(2, num_ranks) if num_ranks % size == 0]


def _parts(num_ranks: int, size: int) -> list[range]:
    """Neighbouring ranks, ``size`` at a time."""
    return [range(first, first + size) for first in range(0, num_ranks, size)]


def _storage(world: World, folder: Path, file_bytes: int, budget_s: float) -> tuple[list[StorageRate], list[Check]]:
    """The folder's speed on each host, measured by its first rank."""
    mine: Any = None
    if world.job.local_rank == 0:
        try:
            size = {"file_bytes": file_bytes} if file_bytes else {}
            mine = asdict(probe_storage(nearest_folder(folder), budget_s=3 * budget_s, **size))
        except OSError as error:
            mine = f"{socket.gethostname()}: {folder}: {os_reason(error)}"
    answers = world.all_gather_json(mine)
    troubles = [answer for answer in answers if isinstance(answer, str)]
    cure = "a folder that this user may write to, with --run-dir"
    return [StorageRate(**answer) for answer in answers if isinstance(answer, dict)], [
        judged("BENCH04", "storage of runs", "; ".join(troubles), failure=cure)
    ] if troubles else []


def _matmul(world: World, device: torch.device, budget_s: float) -> tuple[list[MatmulRate], MatmulRate]:
    """The rate of each rank while all of them compute, and that of rank 0 alone."""
    world.barrier()
    together = time_matmul(device, baseline_dtype(device), budget_s=budget_s / 2)
    peers = [MatmulRate(**answer) for answer in world.all_gather_json(asdict(together))]
    alone = asdict(time_matmul(device, baseline_dtype(device), budget_s=budget_s)) if world.rank == 0 else None
    return peers, MatmulRate(**world.broadcast_json(alone))


def _device(
    world: World, hosts: Sequence[str], device: torch.device, peers: Sequence[MatmulRate], budget_s: float
) -> DeviceRate:
    """What the slowest rank does in bf16 and with its memory while all do the same; ``peers`` are rates of ``baseline_dtype``."""
    half = torch.bfloat16
    if baseline_dtype(device) != half:
        world.barrier()
        mine = time_matmul(device, half, budget_s=budget_s / 2)
        peers = [MatmulRate(**answer) for answer in world.all_gather_json(asdict(mine))]
    world.barrier()
    copied = time_copy(device, budget_s=budget_s / 2)
    adapter, index = adapter_of(device)
    memory = adapter.memory(index)
    has = host_memory_limit_bytes() / world.job.local_world if memory is None else memory.limit_bytes
    told: list[tuple[float, float, float]] = world.all_gather_json([*copied, has])
    return DeviceRate(
        hosts=tuple(sorted(set(hosts))),
        name=world.broadcast_json(device_name(device)),
        ranks=world.world_size,
        tflops=min(rate.tflops for rate in peers),
        memory_bytes=min(each[2] for each in told),
        memory_bytes_per_s=min(each[0] for each in told),
        spread_frac=max(*(rate.spread_frac for rate in peers), *(each[1] for each in told)),
        at_s=world.broadcast_json(time.time()),
    )


# --- judging ---------------------------------------------------------------------------------------------------------


def _sum_checks(links: Sequence[LinkRate], known: Calibration, cure: str) -> list[Check]:
    """A check for each transport of sums."""
    checks: list[Check] = []
    ranks = max((rate.ranks for rate in links), default=0)
    sums = [rate for rate in links if rate.operation == "all_reduce" and rate.ranks == ranks]
    for transport in dict.fromkeys(rate.transport for rate in sums):
        rates = [rate for rate in sums if rate.transport == transport]
        # of the smallest sizes a scheduler's time slice is as long as the message
        ratios = [before.seconds / rate.seconds for rate in rates if (before := known.link(rate)) is not None]
        ratio = statistics.median(ratios) if ratios else None
        spread_frac = statistics.median(rate.spread_frac for rate in rates)
        shown = ", ".join(_sum_text(rate) for rate in rates)
        num_hosts = len(rates[0].hosts)
        where = "this host" if num_hosts == 1 else f"{num_hosts} hosts"
        evidence = f"{ranks} ranks on {where}: {shown}{_scatter(spread_frac)}{_than_before(ratio)}"
        code = "BENCH02" if transport == SHARED_MEMORY else "BENCH01"
        checks.append(_compared(code, f"sums over {transport}", evidence, ratio, spread_frac, cure))
    return checks


def _sum_text(rate: LinkRate) -> str:
    size = f"{rate.nbytes} B" if rate.nbytes < 1024 else _size(rate.nbytes)
    return f"{size} {_rate(rate.bytes_per_s)}" if rate.nbytes >= _BIG_BYTES else f"{size} {1e3 * rate.seconds:.3g} ms"


def _pairs_check(pairs: Sequence[LinkRate], hosts: Sequence[str], known: Calibration) -> Check:
    """The slowest of the pairs, which comes first, against what it was before and against the middle one."""
    slowest, middle_s = pairs[0], statistics.median(rate.seconds for rate in pairs)
    first, second = slowest.pair
    before = known.link(slowest)
    to_before = None if before is None else before.seconds / slowest.seconds
    to_others = middle_s / slowest.seconds if len(pairs) > 1 else None
    others = f", the middle one {_rate(slowest.nbytes / middle_s)}" if len(pairs) > 1 else ""
    all_pairs = math.comb(slowest.ranks, 2)
    count = f"{len(pairs)}" if len(pairs) == all_pairs else f"{len(pairs)} that were measured, of {all_pairs}"
    evidence = (
        f"{_size(slowest.nbytes)}, slowest of {count}: ranks {first} ({hosts[first]}) and {second} ({hosts[second]}) with "
        f"{_rate(slowest.bytes_per_s)}{_scatter(slowest.spread_frac)}{others}{_than_before(to_before)}"
    )
    cure = f"look at the network between {hosts[first]} and {hosts[second]}: cables, switch, rate of the interfaces (ethtool)"
    ratio = min((ratio for ratio in (to_before, to_others) if ratio is not None), default=None)
    return _compared("BENCH03", "pairs of ranks", evidence, ratio, slowest.spread_frac, cure)


def _storage_check(storage: Sequence[StorageRate], known: Calibration, cure: str) -> Check:
    """The host whose folder is slowest, or has become slower most."""

    def ratio_of(rate: StorageRate) -> float | None:
        before = known.folder(rate)
        return None if before is None else rate.write_bytes_per_s / before.write_bytes_per_s

    worst = min(storage, key=lambda rate: (ratio_of(rate) or 1.0, rate.write_bytes_per_s))
    ratio = ratio_of(worst)
    evidence = (
        f"{worst.folder} of {worst.host}: writes {_rate(worst.write_bytes_per_s)}, reads {_rate(worst.read_bytes_per_s)}, opens "
        f"{worst.opens_per_s:,.0f} small files/s{_scatter(worst.spread_frac)}{_than_before(ratio)}"
    )
    return _compared("BENCH04", "storage of runs", evidence, ratio, worst.spread_frac, cure)


def _peer_check(peers: Sequence[MatmulRate], hosts: Sequence[str]) -> Check:
    tflops = [rate.tflops for rate in peers]
    slowest, middle = tflops.index(min(tflops)), statistics.median(tflops)
    evidence = (
        f"{len(peers)} ranks at the same time: {middle:.3g} TFLOP/s, the slowest, rank {slowest} ({hosts[slowest]}), "
        f"{min(tflops):.3g}"
    )
    cure = f"look at {hosts[slowest]}: other processes, clocks and throttling, cores of the rank"
    spread_frac = max(rate.spread_frac for rate in peers)
    return _compared("BENCH05", "matrix products of all ranks", evidence, min(tflops) / middle, spread_frac, cure)


def _compared(code: str, title: str, evidence: str, ratio: float | None, spread_frac: float, cure: str) -> Check:
    is_quiet = spread_frac <= QUIET_SPREAD_FRAC
    is_failure = ratio is not None and ratio < _FAILURE and is_quiet
    is_warning = ratio is not None and ratio < _WARNING
    return judged(code, title, evidence, failure=cure if is_failure else "", warning=cure if is_warning else "")


def _than_before(ratio: float | None) -> str:
    return "" if ratio is None else f"; {ratio:.0%} of what was measured before"


def _scatter(spread_frac: float) -> str:
    return f" (±{spread_frac / 2:.0%})"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


# --- storing ---------------------------------------------------------------------------------------------------------


def _store(
    world: World,
    cache: Path,
    known: Calibration,
    links: Sequence[LinkRate],
    storage: Sequence[StorageRate],
    matmul: dict[str, MatmulRate],
    devices: Sequence[DeviceRate],
) -> None:
    """Add the figures to the file of each host that are not much worse than those in it."""
    if world.job.local_rank != 0:
        return
    good_links = [
        rate for rate in links if (before := known.link(rate)) is None or before.seconds / rate.seconds >= _WARNING
    ]
    good_storage = [
        rate
        for rate in storage
        if (before := known.folder(rate)) is None or rate.write_bytes_per_s / before.write_bytes_per_s >= _WARNING
    ]
    good_matmul = {
        key: rate
        for key, rate in matmul.items()
        if (before := known.matmul.get(key)) is None or rate.tflops / before.tflops >= _WARNING
    }
    earlier = {rate.key: rate for rate in known.devices}
    good_devices = [
        rate
        for rate in devices
        if (one := earlier.get(rate.key)) is None
        or min(rate.tflops / one.tflops, rate.memory_bytes_per_s / one.memory_bytes_per_s) >= _WARNING
    ]
    with suppress(OSError):  # nothing to compare with next time
        add_to_calibration(cache, matmul=good_matmul, links=good_links, storage=good_storage, devices=good_devices)
