"""``unisono plan --cluster … --model …``: the fastest layout of a model on a cluster, and why not others."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unisono.cli.common import (
    LOG,
    ExpandedPath,
    FiniteRange,
    check_output,
    is_python_trusted,
    print_result,
    trusts_python,
)
from unisono.errors import ConfigError, nearest_name
from unisono.storage.write_errors import explained_write_errors
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.planner.finalists import Finalists
    from unisono.planner.layout_space import Job
    from unisono.planner.search import LayoutTable

F = TypeVar("F", bound=Callable[..., object])
_MOST_COUNT = 1 << 53
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def search_options(function: F) -> F:
    """Decorator that adds the options of a search."""
    function = trusts_python(function)
    for option in (
        click.option(
            "--memory-gib",
            type=FiniteRange(min=0, max=1e6, min_open=True),
            help="Memory of a device (default: that of its data sheet).",
        ),
        click.option(
            "--apply",
            type=ExpandedPath(dir_okay=False, path_type=Path),
            help="Also write the best layout as a strategy file (JSON) of unisono train.",
        ),
        click.option("--report", type=ExpandedPath(dir_okay=False, path_type=Path), help="Also write a page (HTML) here."),
        click.option("--pin", "pins", multiple=True, metavar="AXIS=VALUE", help="A value that is given; may be repeated."),
        click.option(
            "--trace",
            "is_traced",
            is_flag=True,
            help="Trace the fastest layouts as unisono runs them (up to 8), and choose by the exact memory.",
        ),
        click.option("--compile", "is_compiled", is_flag=True, help="The model is compiled, which needs less memory."),
        click.option("--precision", default="", help="bf16 (default), fp16, fp8 or fp4."),
        click.option("--seq-len", type=click.IntRange(min=1), help="Tokens of a sequence (default: the model's)."),
        click.option("--global-batch", metavar="COUNT", help="Of a step: sequences (512) or tokens (4Mtok)."),
        click.option(
            "--model",
            metavar="NAME|FILE|FOLDER",
            help="A preset (llama-3-70b), a folder of Hugging Face or its config.json, a run's configuration, or FILE.py:NAME.",
        ),
        click.option(
            "--cluster",
            metavar="DEVICExCOUNT|FILE.toml",
            help="Devices: of a preset (h100x64), or as a TOML file describes them (default: those of this machine).",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def find_plan(*, as_json: bool, report: Path | None, apply: Path | None, is_traced: bool, **options: Any) -> None:
    """Search, write the page and the strategy file, and print the result.

    Args:
        as_json: Print one JSON object.
        report: The file of the page.
        apply: The strategy file.
        is_traced: Whether the finalists are traced.
        options: The others of ``search_options``.
    """
    from unisono.cli.search_text import search_json, search_lines
    from unisono.planner.answer import Answer
    from unisono.planner.decision_flips import sensitivity
    from unisono.planner.layout import LayoutError
    from unisono.planner.layout_strategy import write_strategy
    from unisono.planner.plan_page import write_plan_page
    from unisono.planner.search import choose, compare

    if apply is not None:
        check_output("--apply", apply, consequence="nothing was searched")
    if report is not None:
        check_output("--report", report, consequence="nothing was searched")
    try:
        job = _job(**options)
        compared, finalists = compare(job), None
        if is_traced:
            job, compared, finalists = _traced(job, compared)
    except LayoutError as error:
        raise _refused(error.given, error.rule, error.nearest) from error
    answer = Answer.of(job, choose(job, compared), sensitivity(job, compared), finalists)
    if answer.best is not None and report is not None:
        with explained_write_errors(
            report.parent, consequence="no page was written", other_name="another file (--report)"
        ):
            write_plan_page(report, job, answer)
    if answer.best is not None and apply is not None:
        with explained_write_errors(
            apply.parent, consequence="no strategy file was written", other_name="another file (--apply)"
        ):
            write_strategy(apply, answer.best.layout)
    result = {"model": options["model"], **search_json(answer)}
    print_result(as_json, result, search_lines(answer, apply))
    if answer.best is None:
        if unwritten := [name for name, file in (("--report", report), ("--apply", apply)) if file is not None]:
            LOG.warning("no layout fits, so nothing was written for %s", " and ".join(unwritten))
        raise SystemExit(1)


def _traced(job: Job, compared: LayoutTable) -> tuple[Job, LayoutTable, Finalists]:
    """The job as traces correct it, its layouts, and those that were traced."""
    from unisono.planner.finalists import Finalists, trace_finalists, untraceable
    from unisono.planner.layout_space import OFFLOAD

    for is_given, given, rule in (
        (job.compiled, "--trace --compile", "blocks are traced as they are, not compiled"),
        (job.pins.get(OFFLOAD), "--trace --pin offload=true", "what waits in the memory of the host is not traced"),
    ):
        if is_given:
            raise _refused(given, rule, "one of the two alone")
    if reason := untraceable(job.model):
        return job, compared, Finalists(refused=reason)
    from unisono.planner.traced_layout import LayoutTracer  # imports torch

    return trace_finalists(job, LayoutTracer().memory)


def _job(
    *,
    cluster: str | None,
    model: str | None,
    global_batch: str | None,
    seq_len: int | None,
    precision: str,
    is_compiled: bool,
    pins: Sequence[str],
    memory_gib: float | None,
) -> Job:
    """The job of some options, read as the columns of ``plan simulate`` are."""
    from unisono.data.options import default_cache_dir
    from unisono.planner.cluster_file import find_cluster
    from unisono.planner.layout_columns import read_layout
    from unisono.planner.layout_record import learned_factors
    from unisono.planner.measured_cluster import this_machine
    from unisono.planner.plan_record import PLAN_RECORD_FILE, read_plan_record
    from unisono.planner.search import Job

    missing = [name for name, value in (("--model", model), ("--global-batch", global_batch)) if not value]
    if missing:
        raise _refused(
            f"no {', no '.join(missing)}",
            "a plan is searched for a model, a batch and a cluster; without --cluster, for this machine",
            "unisono plan --cluster h100x64 --model llama-3-70b --global-batch 512",
        )
    layout = read_layout(
        {"model": model or "", "seq_len": str(seq_len or ""), "precision": precision},
        this_machine() if cluster is None else find_cluster(cluster),
        trust_python=is_python_trusted(),
    )
    record = read_plan_record(default_cache_dir(os.environ) / PLAN_RECORD_FILE)
    cut, pins = _given_cut(pins)
    return Job(
        model=layout.model,
        device=layout.device,
        num_devices=layout.num_devices,
        precision=layout.precision,
        global_batch=_sequences(global_batch or "", layout.seq_len),
        seq_len=layout.seq_len,
        compiled=is_compiled,
        pins=_pins(pins),
        layers_per_stage=cut,
        memory_bytes=(memory_gib or 0) * GIB,
        learned=learned_factors(record.layouts, layout.model, layout.device),
    )


def _sequences(text: str, seq_len: int) -> int:
    """Sequences of a step. Tokens, in decimal units, become the nearest power of two of sequences."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)\s*(tok(?:ens)?)?", text, re.IGNORECASE)
    count = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if count >= _MOST_COUNT:
        raise _refused(f"--global-batch {text}", "it is less than 2^53, as numbers from there on are rounded", "4Mtok")
    if match and match[3]:
        return 1 << max(0, round(math.log2(count / seq_len))) if count else 0
    if count < 1 or not count.is_integer():
        raise _refused(
            f"--global-batch {text}", "it is a number of sequences, or of tokens with tok behind it", "512, or 4Mtok"
        )
    return int(count)


def _given_cut(texts: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """Blocks of each stage, if they are pinned, and the other pins."""
    from unisono.planner.layout_space import LAYERS_PER_STAGE

    cuts = [text for text in texts if text.partition("=")[0] == LAYERS_PER_STAGE]
    others = [text for text in texts if text not in cuts]
    if len(cuts) > 1:
        raise _refused(
            " ".join(f"--pin {cut}" for cut in cuts), "stages have one number of blocks", f"--pin {cuts[-1]}"
        )
    counts = cuts[0].partition("=")[2] if cuts else ""
    if cuts and not re.fullmatch(r"\d{1,9}(,\d{1,9})+", counts, re.ASCII):
        raise _refused(
            f"--pin {cuts[0]}", "it is the blocks of each stage of a pipeline, with commas", "layers_per_stage=6,8,8,8"
        )
    return tuple(map(int, counts.split(","))) if counts else (), others


def _pins(texts: Sequence[str]) -> dict[str, int | str]:
    from unisono.planner.layout_space import OFFLOAD, PARTIAL, RECOMPUTED_BLOCKS

    pins: dict[str, int | str] = {}
    for text in texts:
        name, value = _pin(text)
        if name in pins:
            raise _refused(f"--pin {name}={pins[name]} --pin {text}", "an axis has one value", f"--pin {text}")
        pins[name] = value
    if RECOMPUTED_BLOCKS in pins and pins.setdefault("recompute", PARTIAL) != PARTIAL:
        raise _refused(
            f"--pin {RECOMPUTED_BLOCKS}={pins[RECOMPUTED_BLOCKS]} with recompute={pins['recompute']}",
            "some blocks are recomputed in partial recompute alone",
            f"--pin {RECOMPUTED_BLOCKS}={pins[RECOMPUTED_BLOCKS]} alone",
        )
    if pins.get(OFFLOAD) and pins.get("recompute", "none") != "none":
        raise _refused(
            f"--pin offload=true with recompute={pins['recompute']}",
            "offload moves what blocks keep, and recomputed blocks keep next to nothing",
            "--pin offload=true alone",
        )
    return pins


def _pin(text: str) -> tuple[str, int | str]:
    from unisono.planner.layout import ZERO_STAGES
    from unisono.planner.layout_space import (
        AXES,
        LAYERS_PER_STAGE,
        OFFLOAD,
        PARTIAL,
        RECOMPUTE,
        RECOMPUTED_BLOCKS,
        SCHEDULES,
        nearest_value,
    )

    name, _, value = text.partition("=")
    name = {"fsdp": "dp_shard", "vp": "stages_per_rank"}.get(name, name)
    names = (*AXES, LAYERS_PER_STAGE, RECOMPUTED_BLOCKS)
    if name not in names:
        raise _refused(f"--pin {text}", f"an axis is one of {', '.join(names)}", nearest_name(name, names))
    if name == "recompute":
        if value not in (*RECOMPUTE, PARTIAL):
            raise _refused(
                f"--pin {text}",
                "recompute is none, selective, full or partial",
                nearest_name(value, (*RECOMPUTE, PARTIAL)),
            )
        return name, value
    if name == OFFLOAD:
        if value not in ("true", "false"):
            raise _refused(f"--pin {text}", "offload is true or false", "offload=true")
        return name, value == "true"
    if name == "schedule":
        if value not in SCHEDULES:
            raise _refused(f"--pin {text}", f"a schedule is {', '.join(SCHEDULES)}", nearest_name(value, SCHEDULES))
        return name, value
    if name == "zero":
        if value not in map(str, ZERO_STAGES):
            near = nearest_value(int(value), ZERO_STAGES) if re.fullmatch("[0-9]{1,9}", value) else 1
            raise _refused(f"--pin {text}", "the ZeRO stage is 0, 1, 2 or 3", f"zero={near}")
    elif not re.fullmatch("[1-9][0-9]{0,9}", value):
        raise _refused(f"--pin {text}", "the value of an axis is a whole number above 0", f"{name}=1")
    return name, int(value)


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was searched", nearest=nearest)
