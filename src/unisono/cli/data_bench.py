"""``unisono data bench``: what this machine's data path gives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from unisono.cli.common import every_verb, print_json


@click.command("bench")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--seconds", default=1.0, show_default=True, type=click.FloatRange(min=0.05), help="Of each of three repeats."
)
@click.option(
    "--size", default=224, show_default=True, type=click.IntRange(min=1), help="Side of the crops, in pixels."
)
@every_verb
def command(file: Path, seconds: float, size: int, as_json: bool) -> int:
    """Measure how fast records of FILE (.rec) are read here, and if they are images, decoded and loaded."""
    from unisono.data.loading.throughput import measure_throughput

    rates = measure_throughput(file, seconds=seconds, size=size)
    if as_json:
        print_json({"path": str(file), "rates": [asdict(rate) for rate in rates]})
        return 0
    for rate in rates:
        size_of = f", {rate.bytes_per_s / 1e6:,.0f} MB/s" if rate.bytes_per_s else ""
        click.echo(f"{rate.name}: {rate.per_s:,.0f} /s{size_of}")
    last = rates[-1]
    click.echo(
        f"A training loop on this machine that takes fewer than {last.per_s:,.0f} samples/s does not wait ({last.name})."
    )
    return 0
