"""``unisono kvstore``: measure the key-value store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click

from unisono.cli.common import common_options, print_result


@click.group("kvstore")
def command() -> None:
    """Measure the stores that keep workers in step."""


@command.command("bench")
@click.option("--kind", "kinds", multiple=True, help="A store's kind, dist_sync_shm, dist_async_shm or all_reduce.")
@click.option("--size", "sizes", multiple=True, help="Such as 100MB, or the keys of resnet50 or bert-base.")
@click.option("--codec", "codecs", multiple=True, help="Such as int8; none is no compression.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes on this host (default 2); a job brings its own.")
@click.option("--servers", default=1, show_default=True, type=click.IntRange(min=1), help="For dist_async.")
@click.option("--tls", default="", metavar="FOLDER", help="Certificates, for dist_async.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Timed, of each row.")
@common_options
def bench(
    kinds: tuple[str, ...],
    sizes: tuple[str, ...],
    codecs: tuple[str, ...],
    workers: int | None,
    servers: int,
    tls: str,
    rounds: int,
    as_json: bool,
) -> int:
    """Time push and pull of each kind of store, size and codec, and check every sum.

    Options may be repeated, or name several with commas. By itself it starts workers and servers on this host; inside a job
    (unisono launch, torchrun, srun) it measures between the job's own processes, and rank 0 prints.
    """
    from unisono.dist import job_from_environ
    from unisono.errors import ConfigError
    from unisono.kvstore.bench.processes import measure_on_this_host
    from unisono.kvstore.bench.settings import BenchSettings, split_repeated

    named = {"kinds": split_repeated(kinds), "sizes": split_repeated(sizes), "codecs": split_repeated(codecs)}
    settings = BenchSettings(
        servers=servers, rounds=rounds, tls=tls, **{name: given for name, given in named.items() if given}
    )
    job = job_from_environ(os.environ)
    if job.world_size > 1:
        if workers not in (None, job.world_size):
            raise ConfigError(
                given=f"--workers {workers} in a job of {job.world_size} processes",
                rule="inside a job its processes are the workers",
                consequence="nothing was measured",
                nearest="leave --workers out",
            )
        from unisono.kvstore.bench.measure import join_and_measure

        result = join_and_measure(job, settings)
    else:
        result = measure_on_this_host(settings, workers or 2)
    if result is None:
        return 0
    print_result(as_json, result, _lines(result))
    return 0


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['workers']} workers, {result['servers']} servers; median of rounds of push and pull, the slowest worker's"
    head = ("kind", "codec", "size", "keys", "median", "per link", "sent", "in theory", "of all_reduce", "sums")
    plain = {row["size"]: row["median_s"] for row in result["rows"] if row["kind"] == "all_reduce"}
    rows = [head, *(_cells(row, plain.get(row["size"])) for row in result["rows"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            cell.rjust(width) if place > 2 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
    for name, speed in result["codecs"].items():
        rates = (
            f"encodes {_mb(speed['encode_bytes_per_s'])}/s, decodes {_mb(speed['decode_bytes_per_s'])}/s of gradients"
        )
        yield f"{name}: {speed['ratio']:.3g} times smaller, {rates}"
    yield f"auto: {result['auto']}"


def _cells(row: dict[str, Any], plain_s: float | None) -> tuple[str, ...]:
    sent = "unknown" if row["sent_bytes"] is None else _mb(row["sent_bytes"])
    return (
        row["kind"],
        row["codec"],
        row["size"],
        f"{row['keys']:,}",
        f"{1e3 * row['median_s']:,.3f} ms",
        f"{_mb(row['link_bytes_per_s'])}/s" if row["theory_bytes"] else "no link",
        sent,
        _mb(row["theory_bytes"]),
        f"{row['median_s'] / plain_s:.2f}" if plain_s else "",
        row["checked"],
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3g} MB" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f} MB"
