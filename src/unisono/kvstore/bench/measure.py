"""Times rounds of push and pull, and checks the results.

Worker r pushes integers, so every sum is exact in float32: lossless kinds must give exactly that, lossy ones the same
bits on all workers. A round lasts from a barrier until the last value has arrived; each round counts the slowest
worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from unisono.dist import JobSpec, World, join_world
from unisono.errors import CommError
from unisono.kvstore.backends.local_sgd import LocalSGDConfig
from unisono.kvstore.backends.server_client import ServerClient, ServerConfig
from unisono.kvstore.bench.settings import CODED_KINDS, BenchSettings, nbytes_of, shapes_of
from unisono.kvstore.compression import Codec, PowerSGD, auto_codec, compressed_sum, find_codec
from unisono.kvstore.compression.auto import measure_codec
from unisono.kvstore.server.child_servers import child_servers
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.chunk_payload import raw_bytes
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.store import KVStore, create_kvstore
from unisono.kvstore.wire.tls import load_tls
from unisono.optim import OptimOptions
from unisono.optim.groups import Role

_TIMEOUT_S = 600.0
_CPU = torch.device("cpu")
_PERIOD = 251  # values repeat: no sum of a measurement comes near 2^24


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """One kind at one size on this worker. ``expected``: the values after that many rounds, None where they are not
    exact."""

    go: Callable[[], object]
    out: Mapping[str, Tensor]
    expected: Callable[[int], Mapping[str, Tensor]] | None
    theory_bytes: float  # that a worker sends in a round
    sent: Callable[[], int] | None = None  # by this worker so far; None: the host's interfaces tell
    ready: Callable[[], object] = lambda: None  # before each round, not timed
    settle: Callable[[], object] = lambda: (
        None
    )  # after the last round: apply all pushes and pull the result into ``out``


def join_and_measure(job: JobSpec, settings: BenchSettings) -> dict[str, Any] | None:
    """Join the job and measure; the result on rank 0, None on others."""
    world = join_world(job, device_type="cpu", timeout_s=_TIMEOUT_S)
    try:
        results = measure(world, settings)
        world.barrier()
    finally:
        world.close()
    return results if world.rank == 0 else None


def measure(world: World, settings: BenchSettings) -> dict[str, Any]:
    """Rows of every kind, codec and size, the codecs' speeds, and the choice of ``auto``. A collective.

    A row's ``link_bytes_per_s`` is ``theory_bytes`` over the median time. ``sent_bytes``, per round and worker, is
    counted by the connections of ``dist_async`` and by the host's interfaces for other kinds (null without interfaces
    to read), with headers, barriers, and all other traffic of the host. Raises CommError for a wrong sum.
    """
    rows: list[dict[str, Any]] = []
    coded = {codec: None if codec == "none" else find_codec(codec) for codec in settings.codecs}
    for kind in dict.fromkeys(("all_reduce", *settings.kinds)):
        for name, codec in coded.items() if kind in CODED_KINDS else (("none", None),):
            rows += _rows(kind, name, codec, world, settings)
    codecs = {
        name: {
            "ratio": speed.ratio,
            "encode_bytes_per_s": 1 / speed.encode_s_per_byte,
            "decode_bytes_per_s": 1 / speed.decode_s_per_byte,
        }
        for name, codec in coded.items()
        if codec is not None and not isinstance(codec, PowerSGD)
        for speed in [measure_codec(codec, _CPU)]
    }
    return {
        "workers": world.world_size,
        "servers": settings.servers,
        "rows": rows,
        "codecs": codecs,
        "auto": auto_codec(world, _CPU).reason,
    }


def _rows(
    kind: str, name: str, codec: Codec | PowerSGD | None, world: World, settings: BenchSettings
) -> Iterator[dict[str, Any]]:
    if kind in ("dist_sync_shm", "all_reduce") and world.world_size == 1:
        return
    with ExitStack() as stack:
        if kind in ("dist_async", "dist_async_shm"):
            sides = stack.enter_context(_served(name, codec, world, settings, shared_memory=kind == "dist_async_shm"))
        else:
            sides = {size: lambda size=size: _MAKERS[kind](size, codec, world) for size in settings.sizes}
        for size, make in sides.items():
            with make() as side:
                row = _timed(side, world, settings.rounds, f"{kind}, {name}, {size}")
            shapes = shapes_of(size)
            facts = {"kind": kind, "codec": name, "size": size, "keys": len(shapes), "bytes": nbytes_of(shapes)}
            yield facts | row


def _timed(side: _Side, world: World, rounds: int, what: str) -> dict[str, Any]:
    seconds: list[float] = []
    before = 0
    for number in range(rounds + 1):
        side.ready()
        world.barrier()
        if number == 1:
            before = _sent(side, world)
        started = time.monotonic()
        side.go()
        seconds.append(time.monotonic() - started)
    world.barrier()
    sent = _sent(side, world) - before
    side.settle()
    _check(side, world, rounds + 1, what)
    slowest = [max(times) for times in zip(*world.all_gather_json(seconds[1:]), strict=True)]
    sent_by_worker = world.all_gather_json(sent if side.sent is not None else sent / world.job.local_world)
    median_s = statistics.median(slowest)
    return {
        "median_s": median_s,
        "seconds": slowest,
        "theory_bytes": side.theory_bytes,
        "sent_bytes": statistics.mean(sent_by_worker) / rounds if before >= 0 else None,
        "link_bytes_per_s": side.theory_bytes / median_s,
        "checked": "alike" if side.expected is None else "exact",
    }


def _sent(side: _Side, world: World) -> int:
    """Bytes sent so far; -1 where they are not counted."""
    if side.sent is not None:
        return side.sent()
    counters = [
        int(path.read_text())
        for path in Path("/sys/class/net").glob("*/statistics/tx_bytes")
        if (path.parts[-3] == "lo") == world.job.is_local
    ]
    return sum(counters) if counters else -1


def _check(side: _Side, world: World, rounds: int, what: str) -> None:
    wrong: list[str] = []
    if side.expected is not None:
        expected = side.expected(rounds)
        wrong = [key for key, value in side.out.items() if not torch.equal(value, expected[key])]
    digests = world.all_gather_json(
        {key: xxhash.xxh3_64_hexdigest(raw_bytes(value)) for key, value in side.out.items()}
    )
    unlike = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if wrong or unlike:
        raise CommError(
            given=f"{what}: " + (f"wrong values of {wrong[0]!r}" if wrong else f"rank {unlike[0]} has other bits"),
            rule="lossless sums are exact, and all workers end with the same values",
            consequence="its times mean nothing, and there is no result",
            nearest="report this, with the processor and the versions of unisono and torch",
        )


# --- the sides -----------------------------------------------------------------------------------------------------


def _pushed(size: str, rank: int) -> dict[str, Tensor]:
    """A worker's values: per element a small integer, plus the rank."""
    return {
        key: (torch.arange(torch.Size(shape).numel()) % _PERIOD + rank).to(torch.float32).view(shape)
        for key, shape in shapes_of(size).items()
    }


def _sums(size: str, workers: int) -> dict[str, Tensor]:
    alone = _pushed(size, 0)
    return {key: value * workers + workers * (workers - 1) // 2 for key, value in alone.items()}


def _ring(world: World, nbytes: float) -> float:
    """Bytes that each worker sends in a ring all-reduce (Patarasuk & Yuan 2009)."""
    return 2 * (world.world_size - 1) / world.world_size * nbytes


@contextmanager
def _all_reduce(size: str, codec: object, world: World) -> Generator[_Side]:
    source = torch.cat([value.view(-1) for value in _pushed(size, world.rank).values()])
    total = torch.cat([value.view(-1) for value in _sums(size, world.world_size).values()])
    flat = torch.empty_like(source)
    yield _Side(
        go=lambda: dist.all_reduce(flat, group=world.group),
        ready=lambda: flat.copy_(source),
        out={"value": flat},
        expected=lambda rounds: {"value": total},
        theory_bytes=_ring(world, flat.nbytes),
    )


@contextmanager
def _stored(size: str, world: World, store: KVStore, theory_bytes: float, *, exact: bool = True) -> Generator[_Side]:
    values = _pushed(size, world.rank)
    out = {key: torch.zeros_like(value) for key, value in values.items()}
    store.init({key: torch.zeros_like(value) for key, value in values.items()})
    if store.kind == "dist_local":
        store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    names, given, targets = list(values), list(values.values()), list(out.values())
    sums = _sums(size, world.world_size)
    try:
        yield _Side(
            go=lambda: store.pushpull(names, given, targets).wait(),
            out=out,
            expected=(lambda rounds: sums) if exact else None,
            theory_bytes=theory_bytes,
        )
    finally:
        store.close()


@contextmanager
def _local(size: str, codec: object, world: World) -> Generator[_Side]:
    """A store of one process on every worker."""
    alone = World(JobSpec(), timeout_s=_TIMEOUT_S)
    with _stored(size, alone, create_kvstore("local", alone), 0.0) as side:
        yield side


@contextmanager
def _dist_sync(size: str, codec: Codec | PowerSGD | None, world: World) -> Generator[_Side]:
    if codec is None or world.group is None:
        store = create_kvstore("dist_sync", world, shared_memory=False)
        with _stored(size, world, store, _ring(world, nbytes_of(shapes_of(size)))) as side:
            yield side
        return
    values = _pushed(size, world.rank)
    out = {key: value.clone() for key, value in values.items()}
    sums = compressed_sum(codec, out, world.group)

    def go() -> None:
        sums.launch(out).wait()
        sums.commit(True)

    def ready() -> None:
        for key, value in values.items():
            out[key].copy_(value)

    ready()
    go()
    code = sum(stats["bytes_out"] for stats in sums.stats().values())
    uncoded_bytes = sum(value.nbytes for key, value in values.items() if key not in sums.stats())
    summable = isinstance(codec, PowerSGD) or codec.summable is not None
    theory_bytes = _ring(world, code + uncoded_bytes) if summable else (world.world_size - 1) * code
    yield _Side(go=go, ready=ready, out=out, expected=None, theory_bytes=theory_bytes)


@contextmanager
def _dist_sync_shm(size: str, codec: object, world: World) -> Generator[_Side]:
    with _stored(size, world, create_kvstore("dist_sync", world, shared_memory=True), 0.0) as side:
        yield side


@contextmanager
def _dist_local(size: str, codec: object, world: World) -> Generator[_Side]:
    """The round in which copies are averaged; other rounds send nothing."""
    store = create_kvstore(
        "dist_local", world, local_sgd=LocalSGDConfig(local_steps=1, outer_lr=1.0, outer_momentum=0.0)
    )
    with _stored(size, world, store, _ring(world, nbytes_of(shapes_of(size))), exact=False) as side:
        yield side


_MAKERS: Mapping[str, Any] = {
    "all_reduce": _all_reduce,
    "local": _local,
    "dist_sync": _dist_sync,
    "dist_sync_shm": _dist_sync_shm,
    "dist_local": _dist_local,
}


@contextmanager
def _served(
    name: str, codec: Codec | PowerSGD | None, world: World, settings: BenchSettings, *, shared_memory: bool
) -> Generator[dict[str, Callable[[], Any]]]:
    """All sizes are keys of one run, on servers with this codec. Plain SGD with a rate of 1."""
    assert not isinstance(codec, PowerSGD)  # BenchSettings refuses it for dist_async
    plain: Codec | None = codec
    tables = {size: {f"{size}/{key}": shape for key, shape in shapes_of(size).items()} for size in settings.sizes}
    table = {key: (shape, torch.float32) for shapes in tables.values() for key, shape in shapes.items()}
    run_spec = RunSpec(table=table, num_servers=settings.servers, codec=name, labels={"run": "bench"})
    options = OptimOptions(kind="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    tls = load_tls(Path(settings.tls)) if settings.tls else None
    with child_servers(world, settings.servers, tls=settings.tls) as (addresses, secret):
        config = ServerConfig(addresses=addresses, secret=secret, tls=tls)
        mine = ServerClient(config, run_spec, worker=world.rank, codec=codec, shared_memory=shared_memory)
        try:
            mine.init({key: torch.zeros(shape) for key, (shape, _) in table.items()})
            mine.set_optimizer(ServerOptimizerSpec(options=options, roles=dict.fromkeys(table, Role.NO_DECAY)))
            yield {size: lambda size=size: _dist_async(size, mine, plain, world, shared_memory) for size in tables}
            world.barrier()
        finally:
            mine.close()


@contextmanager
def _dist_async(
    size: str, mine: ServerClient, codec: Codec | None, world: World, shared_memory: bool
) -> Generator[_Side]:
    values = {f"{size}/{key}": value for key, value in _pushed(size, world.rank).items()}
    out = {key: torch.zeros_like(value) for key, value in values.items()}
    sums = {f"{size}/{key}": value for key, value in _sums(size, world.world_size).items()}
    numels = [chunk.num_elements for key in values for chunk in mine.placement.chunks_of(key)]

    def expected(rounds: int) -> Mapping[str, Tensor]:
        return {key: value * -rounds for key, value in sums.items()}

    def go() -> None:
        mine.push(values, out).wait()
        mine.commit()

    def settle() -> None:
        world.barrier()
        mine.pull(out, exact=True).wait()

    yield _Side(
        go=go,
        out=out,
        settle=settle,
        expected=expected if codec is None else None,
        theory_bytes=0.0 if shared_memory else sum(4 * n if codec is None else codec.encoded_bytes(n) for n in numels),
        sent=lambda: sum(link.sent_bytes for link in mine.traffic()),
    )
