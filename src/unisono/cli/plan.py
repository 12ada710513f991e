"""``unisono plan``: shows, checks, compares and writes plans stored as JSON files."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import ExpandedPath, common_options, load_run_config, print_result, takes_config
from unisono.cli.plan_accuracy import accuracy
from unisono.cli.plan_auto import auto
from unisono.cli.plan_calibrate import calibrate
from unisono.cli.plan_fit import fit
from unisono.cli.plan_search import find_plan, search_options
from unisono.cli.plan_simulate import simulate
from unisono.errors import ConfigError
from unisono.plan.options import PlanOptions
from unisono.storage.run_folder import PLAN_FILE

if TYPE_CHECKING:
    from unisono.plan.plan import Plan


_PROCESSES = click.option(
    "--processes", type=click.IntRange(min=1), help="Number of ranks; default: what the plan is for."
)


@click.group("plan", invoke_without_command=True)
@search_options
@common_options
@click.pass_context
def command(context: click.Context, as_json: bool, **options: Any) -> None:
    """With --model and --global-batch: find the fastest layout that fits --cluster, or this machine. Nothing is run.

    With a command: show, check, compare, write strategy files; find a plan that fits, or the fastest one; simulate jobs. FILE may
    be the folder of a run.
    """
    given = [name for name, value in options.items() if value]
    if context.invoked_subcommand is None and not given:
        raise click.UsageError(
            "no command, and no --cluster, --model and --global-batch to search a plan for; without --cluster it is one for this "
            "machine"
        )
    if context.invoked_subcommand is None:
        find_plan(as_json=as_json, **options)
    elif given or as_json:
        raise click.UsageError(
            f"options of a search before the command {context.invoked_subcommand!r}, which does not read them"
        )


@command.command("show")
@click.argument("file", type=ExpandedPath())
@_PROCESSES
@common_options
def show(file: str, processes: int | None, as_json: bool) -> None:
    """Print the plan in FILE, and for each field who chose it: strategy file, setting, default or planner."""
    from unisono.plan.plan import field_origins

    plan = _load(file, processes)
    origins = field_origins(plan)
    values = plan.decisions() | {"pins": list(plan.pins), "provenance": plan.provenance}
    texts = {name: str(value) for name, value in values.items()}
    width, column = max(map(len, texts)) + 1, min(40, max(len(texts[name]) for name in origins) + 1)
    lines = [
        f"{name:<{width}}{text:<{column}}{origins[name]}" if name in origins else f"{name:<{width}}{text}"
        for name, text in texts.items()
    ]
    result = {"hash": plan.hash, "plan": plan.to_json(), "origins": origins}
    print_result(as_json, result, [f"{plan.describe()}\n", *lines])


@command.command("export")
@takes_config
@click.option(
    "--output", default=PLAN_FILE, show_default=True, type=ExpandedPath(dir_okay=False), help="File to write."
)
@click.option("--processes", type=click.IntRange(min=1), help="Number of ranks; default: launch.num_processes.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@common_options
def export_file(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    output: str,
    processes: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the whole plan that CONFIG and this machine's device give as a strategy file.

    What depends on the model (inferred rules, layers per stage) is left to the run.
    """
    resolved = load_run_config(config, overrides).value
    path = Path(output)
    _require_new("export", path, [Path(file) for file in config], force=force)
    plan = _derive(resolved.plan, processes or max(1, resolved.launch.num_processes))
    try:
        plan.save(path)
    except OSError as error:
        raise _unwritable("export", path, error) from None
    text = f"wrote {path}: {plan.describe()}; try: unisono train --plan {shlex.quote(output)}"
    print_result(as_json, {"path": output, "hash": plan.hash, "plan": plan.to_json()}, text)


@command.command("import")
@click.argument("files", nargs=-1, metavar="STRATEGY...", type=ExpandedPath(path_type=Path))
@click.option(
    "--context",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of MindSpore's set_auto_parallel_context or AutoParallel; may be repeated.",
)
@click.option(
    "--output", default=PLAN_FILE, show_default=True, type=ExpandedPath(dir_okay=False), help="File to write."
)
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@common_options
def import_file(files: tuple[Path, ...], settings: tuple[str, ...], output: str, force: bool, as_json: bool) -> None:
    """Write what strategy files and settings of MindSpore come to as a partial plan, and list what it leaves out.

    STRATEGY is a file of one pipeline stage, or one that was merged: several are those of the stages of one job.
    """
    from unisono.interop.mindspore_plan import imported_plan, parse_settings
    from unisono.interop.mindspore_strategy import read_strategies
    from unisono.plan.plan import strategy_text
    from unisono.storage.files import write_atomically

    path = Path(output)
    _require_new("import", path, files, force=force)
    if not files and not settings:
        raise click.UsageError("neither a strategy file nor a setting (--context) of MindSpore")
    imported = imported_plan([read_strategies(file) for file in files], parse_settings(settings))
    text = strategy_text(imported.fields)
    with tempfile.TemporaryDirectory() as folder:  # only a plan that can be carried out is written
        write_atomically(Path(folder) / PLAN_FILE, text.encode())
        plan = _load(folder, imported.num_ranks)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise _unwritable("import", path, error) from None
    notes = [{"subject": subject, "reason": reason} for subject, reason in imported.notes]
    ranks = f"{imported.num_ranks} {'process' if imported.num_ranks == 1 else 'processes'}"
    lines = [f"wrote {path}, for {ranks}: {plan.describe()}", *(f"- {what}: {why}" for what, why in imported.notes)]
    result = {"path": output, "processes": imported.num_ranks, "fields": imported.fields, "notes": notes}
    print_result(as_json, result, lines)


def _require_new(verb: str, path: Path, sources: Sequence[Path], *, force: bool) -> None:
    """Raise ConfigError where ``path`` is there and not to be overwritten, or is one of the files that the plan is made of."""
    if not path.exists():
        return
    if source := next((source for source in sources if source.exists() and path.samefile(source)), None):
        raise ConfigError(
            given=f"plan {verb} {source} --output {path}, which is that file",
            rule="a plan does not replace a file that it is made of, nor with --force",
            consequence="nothing was written",
            nearest="another name (--output)",
        )
    if not force:
        raise ConfigError(
            given=f"plan {verb} --output {path}",
            rule="a file that exists is not overwritten",
            consequence="nothing was written",
            nearest="another name, or --force",
        )


def _unwritable(verb: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        given=f"plan {verb} --output {path}: {error.strerror}",
        rule="the file can be created",
        consequence="nothing was written",
        nearest="a path in a folder that exists and that you may write to",
    )


@command.command("check")
@click.argument("file", type=ExpandedPath())
@_PROCESSES
@common_options
def check_file(file: str, processes: int | None, as_json: bool) -> None:
    """Say whether the plan in FILE can be carried out; exit 2 with all that is wrong if not."""
    from unisono.plan.validate import validate_plan

    plan = _load(file, processes)
    world = processes or plan.mesh.world_size
    validate_plan(plan, world)
    text = f"a legal plan for {world} {'process' if world == 1 else 'processes'}: {plan.describe()}"
    print_result(as_json, {"hash": plan.hash, "processes": world}, text)


@command.command("diff")
@click.argument("a", type=ExpandedPath())
@click.argument("b", type=ExpandedPath())
@common_options
def compare(a: str, b: str, as_json: bool) -> None:
    """Print what differs between two plans; exit 1 if anything does."""
    differences = _load(a).diff(_load(b))
    rows = [{"field": name, "a": mine, "b": theirs} for name, (mine, theirs) in differences.items()]
    lines = [f"{name}: {mine} -> {theirs}" for name, (mine, theirs) in differences.items()]
    print_result(as_json, {"differences": rows}, lines)
    raise SystemExit(1 if differences else 0)


command.add_command(accuracy)
command.add_command(auto)
command.add_command(calibrate)
command.add_command(fit)
command.add_command(simulate)


def _load(file: str, processes: int | None = None) -> Plan:
    """The plan in ``file``; the planner fills in what a partial one leaves out, for ``processes`` ranks or the fewest it fits."""
    from unisono.plan.plan import Plan, is_whole, load_fields, read_strategy_file

    path = Path(file) / PLAN_FILE if os.path.isdir(file) else Path(file)
    if is_whole(read_strategy_file(path)):
        return Plan.load(path)
    mesh = {name: value for name, value in load_fields(path).items() if name.startswith("mesh.")}
    fewest = math.prod(max(1, mesh.get(f"mesh.{axis}", 1)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    return _derive(PlanOptions(file=str(path)), processes or fewest)


def _derive(options: PlanOptions, processes: int) -> Plan:
    from unisono.dist import JobSpec
    from unisono.parallel.device import find_device
    from unisono.plan.resolve import derive_plan, with_strategy_file
    from unisono.planner.layout_strategy import ACCELERATOR
    from unisono.train.setup import resolve_plan

    given = with_strategy_file(options)[0]
    if given.offload and given.device == "auto" and find_device("auto", 0).type == "cpu":
        # it is of accelerators, as no run moves activations from the CPU
        return derive_plan(options, world_size=processes, device=ACCELERATOR, native_bf16=True)
    return resolve_plan(options, JobSpec(world_size=processes))[1]
