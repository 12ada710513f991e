"""``unisono predict``: what a trained model says of new data."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from unisono.cli.common import (
    ExpandedPath,
    FiniteRange,
    check_output,
    chosen_checkpoint,
    common_options,
    load_run,
    print_result,
    require_run,
    takes_checkpoint,
    trusts_python,
)
from unisono.cli.own_code import read_code, takes_model
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.data.tokens.tokenizer import Tokenizer
    from unisono.tasks.new_samples import NewSample
    from unisono.train.config import RunConfig
    from unisono.train.predict import NewInputs, Prediction

_STANDARD_INPUT: Final = "-"


@click.command("predict")
@click.argument("run_dir")
@click.argument("given", metavar="INPUT", type=ExpandedPath())
@takes_checkpoint
@takes_model
@click.option(
    "--collate-fn",
    metavar="FILE.py:NAME",
    help="Likewise: the collate_fn that Trainer got. A DataLoader as INPUT has its own.",
)
@click.option(
    "--objective",
    metavar="NAME",
    help="Likewise: FILE.py:NAME of the loss that Trainer got, or a built-in one by name: it says what outputs mean.",
)
@click.option(
    "--out",
    type=ExpandedPath(dir_okay=False, path_type=Path),
    help="New file for the predictions: .jsonl, .parquet or .rec. Default: JSON lines on standard output.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Samples at once (default: plan.micro_batch of the run)."
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    help="Likeliest classes, or fillings of a mask, of each sample.",
)
@click.option(
    "--threshold",
    type=FiniteRange(min=0, max=1),
    help="Least probability of a label, where a sample may have several (default 0.5).",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "mark"]),
    default="fail",
    show_default=True,
    help="On a sample that cannot be read: end, or go on and write why in its place.",
)
@trusts_python
@common_options
def command(
    run_dir: str,
    given: str,
    checkpoint: str | None,
    best: bool,
    model: str | None,
    collate_fn: str | None,
    objective: str | None,
    out: Path | None,
    batch_size: int | None,
    top_k: int | None,
    threshold: float | None,
    on_error: str,
    as_json: bool,
) -> None:
    """Predict with RUN_DIR's newest checkpoint for each sample of INPUT: a file, a folder, a glob or an address.

    With - for INPUT, each line of standard input is answered by a line: a text, the path of an image, or a JSON object
    of a table's columns. A run with data of its own takes FILE.py:NAME of a data set as INPUT.
    """
    require_run(run_dir)
    is_code = ".py:" in given
    if collate_fn is not None and not is_code:
        raise _inert(f"--collate-fn {collate_fn} with INPUT {given}", "it makes batches of a data set FILE.py:NAME")
    if as_json and out is None:
        raise _inert("--json without --out", "predict already prints JSON lines; --json needs --out", "--out FILE")
    if out is not None:
        check_output("--out", out, consequence="nothing was predicted")
    code = read_code(model=model, data=given if is_code else None, collate_fn=collate_fn, objective=objective)
    own_data = code.pop("data", None)
    config = load_run(run_dir, **code).value
    checkpoint = chosen_checkpoint(run_dir, checkpoint, best=best)
    from unisono.dist import job_from_environ, join_world
    from unisono.train.build import find_tokenizer, has_own_data
    from unisono.train.load import load_model
    from unisono.train.predict import predict, without_errors
    from unisono.train.prediction_files import line_of, writer_of
    from unisono.train.predictions import output_kind
    from unisono.train.setup import resolve_whole_model
    from unisono.train.step import ForwardBackward, input_selector

    if has_own_data(config) != is_code:
        raise _other_input(given, is_code=is_code)
    if own_data is not None:
        config = replace(config, components=replace(config.components, data=own_data))
    job = job_from_environ(os.environ)
    if given == _STANDARD_INPUT and job.world_size > 1:
        raise _inert(
            f"standard input with {job.world_size} processes", "one process reads it", "a file, or one process"
        )
    write = None if out is None else writer_of(out)
    tokenizer = find_tokenizer(config)
    kind = output_kind(config, tokenizer, top_k=top_k, threshold=threshold)
    samples, inputs = _samples(config, tokenizer, given)
    device, plan = resolve_whole_model(config.plan, job)
    launch = config.launch
    world = join_world(job, device_type=device.type, timeout_s=launch.timeout_s, backend=launch.collective_backend)
    counts = Counter[str]()
    try:
        module, step = load_model(config, tokenizer, world, checkpoint)
        forward_backward = ForwardBackward(
            model=module.to(device), inputs=input_selector(module), plan=plan, world=world
        )
        size = batch_size or (1 if given == _STANDARD_INPUT else plan.batch.micro_batch)
        found = predict(forward_backward, samples, inputs, kind, batch_size=size, device=device)
        found = _counted(found if on_error == "mark" else without_errors(found), counts)
        with sigterm_interrupts():
            if world.rank > 0:
                for _ in found:
                    pass
            elif write is not None and out is not None:
                write(out, found, kind)
            else:
                for prediction in found:
                    click.echo(line_of(prediction, kind))
    finally:
        world.close()
    if job.rank > 0 or out is None:
        return
    result = {
        "run_dir": run_dir,
        "step": step,
        "samples": counts["samples"],
        "errors": counts["errors"],
        "out": str(out),
    }
    bad = f", of which {counts['errors']} could not be read" if counts["errors"] else ""
    print_result(as_json, result, f"step {step}, {counts['samples']} samples{bad}: {out}")


def _samples(config: RunConfig, tokenizer: Tokenizer | None, given: str) -> tuple[Iterator[NewSample], NewInputs]:
    """The samples of INPUT, and how they become batches."""
    from unisono.data.dataset import collated
    from unisono.tasks.new_samples import line_samples, new_samples
    from unisono.train.build import build_data, has_own_data
    from unisono.train.predict import own_inputs, own_samples, task_inputs

    if has_own_data(config):
        sources = build_data(config, held_out_only=True)
        data = sources.held_out if sources.collate_fn is None else collated(sources.held_out, sources.collate_fn)
        return own_samples(data, given), own_inputs(data)
    inputs = task_inputs(config, tokenizer)
    if given == _STANDARD_INPUT:
        lines: Iterator[bytes] = iter(sys.stdin.buffer.readline, b"")
        return line_samples(lines, given, config.task), inputs
    return new_samples(given, config.task, config.data, tokenizer), inputs


def _counted(predictions: Iterable[Prediction], counts: Counter[str]) -> Iterator[Prediction]:
    """The predictions, which ``counts`` counts."""
    for prediction in predictions:
        counts["samples"] += 1
        counts["errors"] += prediction.problem is not None
        yield prediction


def _inert(given: str, rule: str, nearest: str = "leave it out") -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was predicted", nearest=nearest)


def _other_input(given: str, *, is_code: bool) -> ConfigError:
    if is_code:
        return _inert(
            f"INPUT {given} for a run whose data are those of its task",
            "new data of such a run are files of the kinds that it learned from",
            "a file or a folder",
        )
    return _inert(
        f"INPUT {given} for a run with data of its own",
        "only its code knows how a file becomes samples",
        "FILE.py:NAME of a data set, or of a function that returns one",
    )
