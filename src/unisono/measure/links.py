"""Times of messages between the ranks of a job: sums of all of them, each pair, and how far their clocks are apart.

All functions are collectives: every rank calls them in the same order with the same arguments. A round begins when all ranks have
come, and counts the slowest one. A budget of time limits rounds and sizes, so that a slow link does not take minutes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from unisono.device.torch_adapters import adapter_of
from unisono.dist import World
from unisono.measure.calibration import LinkRate, Operation

SIZES: Final = (4, 64 << 10, 8 << 20, 64 << 20)  # of a sum, in bytes; the first shows the latency
PAIR_SIZES: Final = (64 << 10, 512 << 10, 4 << 20)  # of a message between two ranks, in bytes
_ROUNDS: Final = (5, 30)
_PAIR_ROUNDS: Final = 5
_CLOCK_ROUNDS: Final = 8
STEP_SIZES: Final = (4, 64 << 10, 1 << 20, 8 << 20)  # of a sum between computations, in bytes
_ROUNDS_IN_STEP: Final = (3, 15)  # blocks of sums
_BLOCK: Final = 10
_WORK_S: Final = 0.002  # between two sums
_LEAST_S: Final = 1e-6  # of a sum that adds nothing that could be told from scatter


def probe_all_reduce(
    world: World,
    reduce: Callable[[torch.Tensor], object],
    *,
    transport: str,
    hosts: Sequence[str],
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    budget_s: float = 1.0,
) -> list[LinkRate]:
    """Time sums over all ranks.

    Args:
        world: The ranks.
        reduce: Sums a flat fp32 tensor over the ranks, in place, and returns once that is done or launched.
        transport: What ``reduce`` sends over, for the result.
        hosts: Names of the hosts of the job.
        device: Where the tensors are.
        sizes: Bytes of the tensors, ascending.
        budget_s: Time for the rounds of one size; at least five are made. A size above 1 MiB of which one round would take more
            than twice as long is left out, with those after it.
    """
    rates: list[LinkRate] = []
    for nbytes in sizes:
        if rates and rates[-1].seconds * nbytes / rates[-1].nbytes > 2 * budget_s and nbytes > 1 << 20:
            break
        tensor = torch.zeros(nbytes // 4, device=device)

        def go(tensor: torch.Tensor = tensor) -> None:
            reduce(tensor)
            _wait(device)

        go()  # connections are made, buffers allocated
        first_s = _rounds(world, go, 1)[0]
        count = max(_ROUNDS[0], min(_ROUNDS[1], int(budget_s / max(first_s, 1e-9))))
        median_s, spread_frac = _middle(_rounds(world, go, count))
        measured: dict[str, Any] = {"nbytes": nbytes, "seconds": median_s, "spread_frac": spread_frac}
        rates.append(_rate(world, "all_reduce", transport, hosts, **measured))
    return rates


def probe_in_step(
    world: World,
    exchange: Callable[[torch.Tensor], object],
    *,
    operation: Operation,
    transport: str,
    hosts: Sequence[str],
    device: torch.device,
    sizes: Sequence[int] = STEP_SIZES,
    budget_s: float = 1.0,
) -> list[LinkRate]:
    """Time what ``exchange``, of all ranks, adds to ranks that compute between exchanges, as those of a step do.

    It is more than between idle ranks: the ranks come at different times, a thread that waits has to be woken, and the tensors
    are in no cache.

    Args:
        world: The job.
        exchange: A sum over all ranks, or messages to the next rank (``ring_exchange``).
        operation: What rates are named.
        transport: Its name.
        hosts: Names of all ranks' hosts.
        device: Where the tensors are.
        sizes: Bytes of a message.
        budget_s: Seconds for each size; at least three blocks of ten exchanges are made.
    """
    rates: list[LinkRate] = []
    work = _work(device)
    for nbytes in sizes:
        tensor = torch.zeros(max(1, nbytes // 4), device=device)

        def block(exchanges: bool, tensor: torch.Tensor = tensor) -> float:
            world.barrier()
            begin = time.perf_counter()
            for _ in range(_BLOCK):
                work()
                if exchanges:
                    exchange(tensor)
            _wait(device)
            return _slowest(world, [time.perf_counter() - begin])[0] / _BLOCK

        first_s = block(exchanges=True)
        if rates and first_s * _BLOCK > 2 * budget_s and nbytes > 1 << 20:
            break
        count = max(_ROUNDS_IN_STEP[0], min(_ROUNDS_IN_STEP[1], int(budget_s / (2 * _BLOCK * first_s))))
        added = [block(exchanges=True) - block(exchanges=False) for _ in range(count)]
        median_s = max(statistics.median(added), _LEAST_S)
        lower_s, _, upper_s = statistics.quantiles(added, n=4)
        spread_frac = max(0.0, upper_s - lower_s) / median_s
        measured: dict[str, Any] = {"nbytes": nbytes, "seconds": median_s, "spread_frac": spread_frac}
        rates.append(_rate(world, operation, transport, hosts, **measured))
    return rates


def _rate(world: World, operation: Operation, transport: str, hosts: Sequence[str], **measured: Any) -> LinkRate:
    return LinkRate(
        operation=operation,
        transport=transport,
        ranks=world.world_size,
        hosts=tuple(sorted(set(hosts))),
        at_s=time.time(),
        torch=torch.__version__,
        **measured,
    )


def ring_exchange(world: World, tensor: torch.Tensor) -> None:
    """Send ``tensor`` to the next rank, and receive one like it from the rank before: on two ranks, as pipeline stages do."""
    received = torch.empty_like(tensor)
    following, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    operations = [
        dist.P2POp(dist.isend, tensor, following, world.group),
        dist.P2POp(dist.irecv, received, before, world.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _work(device: torch.device) -> Callable[[], None]:
    """Matrix products that take about two milliseconds."""
    matrix = torch.ones(256, 256, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    products(3)
    _wait(device)
    begin = time.perf_counter()
    products(10)
    _wait(device)
    each_s = max((time.perf_counter() - begin) / 10, 1e-6)
    count = min(200, math.ceil(_WORK_S / each_s))
    return lambda: products(count)


def probe_pairs(
    world: World,
    *,
    transport: str,
    hosts: Sequence[str],
    device: torch.device,
    sizes: Sequence[int] = PAIR_SIZES,
    budget_s: float = 10.0,
) -> list[LinkRate]:
    """Time messages between every two ranks, there and back; ordered by size, of each size the slowest pair first.

    Pairs without a common rank exchange at the same time, as in a tournament: n ranks need n - 1 rounds. With more than 64 ranks
    only the pairs of the first 63 rounds are measured.

    Args:
        world: The ranks.
        transport: What messages are sent over, for the result.
        hosts: Names of the hosts of the job.
        device: Where the tensors are.
        sizes: Bytes of the messages, ascending.
        budget_s: Time for all exchanges. A round of the first size does not begin after it, so that some pairs are left out. A
            larger size that would not fit in, to judge by the one before, is left out, with those after it.
    """
    rates: list[LinkRate] = []
    spent_s = size_s = 0.0  # so far; with the last size, without what connections took
    world.barrier()
    for nbytes in sizes:
        if rates and spent_s + size_s * nbytes / rates[-1].nbytes > budget_s:
            break
        tensor = torch.zeros(nbytes // 4, device=device)
        mine: list[tuple[int, int, float, float]] = []
        size_s = 0.0
        for pairs in tournament(world.world_size):
            if spent_s > budget_s and not rates:
                break
            pair = next((pair for pair in pairs if world.rank in pair), None)
            times: list[float] = []
            if pair is not None:
                times = [_there_and_back(world, tensor, pair, device) for _ in range(_PAIR_ROUNDS + 1)]
                if world.rank == pair[0]:
                    mine.append((*pair, *_middle(times[1:])))  # the first one connects
            all_s, steady_s = _slowest(world, [2 * sum(times), 2 * sum(times[1:])])
            spent_s += all_s
            size_s += steady_s
        rates += _pair_rates(world, mine, nbytes, transport=transport, hosts=hosts)
    return rates


def _slowest(world: World, seconds: Sequence[float]) -> list[float]:
    """Of each of these times the longest of any rank, on which all agree."""
    return world.all_reduce(torch.tensor(seconds, dtype=torch.float64, device="cpu"), "max").tolist()


def _pair_rates(
    world: World, mine: Sequence[tuple[int, int, float, float]], nbytes: int, *, transport: str, hosts: Sequence[str]
) -> list[LinkRate]:
    """Rates of the pairs of all ranks, the slowest first; ``mine`` has pair, median seconds and spread of those of this rank."""
    found = [row for rows in world.all_gather_json(mine) for row in rows]
    rates = [
        _rate(
            world, "send", transport, hosts,
            nbytes=nbytes, seconds=seconds, spread_frac=spread_frac, pair=(first, second),
        )
        for first, second, seconds, spread_frac in found
    ]  # fmt: skip
    return sorted(rates, key=lambda rate: -rate.seconds)


def tournament(ranks: int, *, most_rounds: int = 63) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs without a common rank, in which every two ranks meet once (the circle method)."""
    places = [*range(ranks), *([] if ranks % 2 == 0 else [-1])]
    for _ in range(min(most_rounds, len(places) - 1)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def clock_offsets(world: World) -> list[float]:
    """Seconds by which the clock of each rank is ahead of that of rank 0, by ping-pong [ranks].

    Of several exchanges the shortest counts: half of its time is the error at most.
    """
    offsets = [0.0] * world.world_size
    for rank in range(1, world.world_size if world.group is not None else 1):
        best_s = float("inf")
        for _ in range(_CLOCK_ROUNDS):
            if world.rank == 0:
                sent_s = time.time()
                theirs_s = _ping(world, rank, 0.0)
                back_s = time.time()
                if back_s - sent_s < best_s:
                    best_s, offsets[rank] = back_s - sent_s, theirs_s - (sent_s + back_s) / 2
            elif world.rank == rank:
                _pong(world)
    return world.broadcast_json(offsets)


def _ping(world: World, rank: int, value: float) -> float:
    answer = torch.zeros(1, dtype=torch.float64, device="cpu")
    with world.explain_errors(f"clock of rank {rank}"):
        dist.send(torch.tensor([value], dtype=torch.float64, device="cpu"), rank, group=world.group)
        dist.recv(answer, rank, group=world.group)
    return float(answer.item())


def _pong(world: World) -> None:
    question = torch.zeros(1, dtype=torch.float64, device="cpu")
    with world.explain_errors("clock of rank 0"):
        dist.recv(question, 0, group=world.group)
        dist.send(torch.tensor([time.time()], dtype=torch.float64, device="cpu"), 0, group=world.group)


def _there_and_back(world: World, tensor: torch.Tensor, pair: tuple[int, int], device: torch.device) -> float:
    """Half the time of a message to the other rank and back."""
    _wait(device)
    begin = time.perf_counter()
    with world.explain_errors(f"messages between ranks {pair[0]} and {pair[1]}", tensor.nbytes):
        if world.rank == pair[0]:
            dist.send(tensor, pair[1], group=world.group)
            dist.recv(tensor, pair[1], group=world.group)
        else:
            dist.recv(tensor, pair[0], group=world.group)
            dist.send(tensor, pair[0], group=world.group)
        _wait(device)
    return (time.perf_counter() - begin) / 2


def _rounds(world: World, go: Callable[[], None], count: int) -> list[float]:
    """Seconds of each round, of the slowest rank."""
    seconds: list[float] = []
    for _ in range(count):
        world.barrier()
        begin = time.perf_counter()
        with world.explain_errors("a measured sum"):
            go()
        seconds.append(time.perf_counter() - begin)
    return [max(times) for times in zip(*world.all_gather_json(seconds), strict=True)]


def _middle(seconds: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance of the quartiles over it."""
    lower_s, median_s, upper_s = statistics.quantiles(seconds, n=4)
    median_s = max(median_s, 1e-9)
    return median_s, (upper_s - lower_s) / median_s


def _wait(device: torch.device) -> None:
    adapter, index = adapter_of(device)
    adapter.synchronize(index)
