"""``unisono plan``: shows, checks and compares plans stored as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.cli.common import every_verb, print_result
from unisono.train.options import PLAN_FILE

if TYPE_CHECKING:
    from unisono.plan.plan import Plan


@click.group("plan")
def command() -> None:
    """Show, check, compare strategy files. FILE may be the folder of a run."""


@command.command("show")
@click.argument("file", type=click.Path())
@every_verb
def show(file: str, as_json: bool) -> None:
    """Print the plan in FILE."""
    plan = _load(file)
    values = plan.decisions() | {"pins": list(plan.pins), "provenance": plan.provenance}
    width = max(map(len, values)) + 1
    lines = [f"{name:<{width}}{value}" for name, value in values.items()]
    print_result(as_json, {"hash": plan.hash, "plan": plan.to_json()}, [f"{plan.describe()}\n", *lines])


@command.command("check")
@click.argument("file", type=click.Path())
@click.option("--processes", type=click.IntRange(min=1), help="Number of ranks; default: what the plan is for.")
@every_verb
def check_file(file: str, processes: int | None, as_json: bool) -> None:
    """Say whether the plan in FILE can be carried out; exit 2 with all that is wrong if not."""
    from unisono.plan.validate import validate_plan

    plan = _load(file)
    world = processes or plan.mesh.world_size
    validate_plan(plan, world)
    text = f"a legal plan for {world} {'process' if world == 1 else 'processes'}: {plan.describe()}"
    print_result(as_json, {"hash": plan.hash, "processes": world}, text)


@command.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@every_verb
def compare(a: str, b: str, as_json: bool) -> None:
    """Print what differs between two plans; exit 1 if anything does."""
    differences = _load(a).diff(_load(b))
    rows = [{"field": name, "a": mine, "b": theirs} for name, (mine, theirs) in differences.items()]
    lines = [f"{name}: {mine} -> {theirs}" for name, (mine, theirs) in differences.items()]
    print_result(as_json, {"differences": rows}, lines)
    raise SystemExit(1 if differences else 0)


def _load(file: str) -> Plan:
    from unisono.plan.plan import Plan

    path = Path(file)
    return Plan.load(path / PLAN_FILE if path.is_dir() else path)
