"""``unisono eval``: evaluates a checkpoint of a run on its held-out data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from unisono.cli.common import (
    ExpandedPath,
    chosen_checkpoint,
    common_options,
    load_run,
    print_result,
    require_run,
    takes_checkpoint,
    trusts_python,
)
from unisono.cli.own_code import read_code, takes_evaluation, takes_model
from unisono.errors import ConfigError


@click.command("eval")
@click.argument("run_dir", default="runs/first")
@takes_checkpoint
@takes_model
@takes_evaluation
@click.option("--samples", type=click.IntRange(min=0), default=0, show_default=True, help="Samples to use; 0 = all.")
@click.option(
    "--sample-losses",
    metavar="FILE",
    type=ExpandedPath(dir_okay=False, path_type=Path),
    help="Write the loss of each held-out sample there, and of each class its probability: a safetensors file.",
)
@trusts_python
@common_options
def command(
    run_dir: str,
    checkpoint: str | None,
    best: bool,
    model: str | None,
    data: str | None,
    collate_fn: str | None,
    objective: str | None,
    metrics: tuple[str, ...],
    samples: int,
    sample_losses: Path | None,
    as_json: bool,
) -> None:
    """Print loss and metrics of RUN_DIR's newest checkpoint on the data held out from training.

    The folder of a Python script's run holds no code: --model, --data and, unless it is built in, --objective name it.
    """
    require_run(run_dir)
    code = read_code(model=model, data=data, collate_fn=collate_fn, objective=objective, metrics=metrics)
    config = load_run(run_dir, **code).value
    checkpoint = chosen_checkpoint(run_dir, checkpoint, best=best)
    if sample_losses is not None and samples:
        raise ConfigError(
            given=f"--samples {samples} with --sample-losses",
            rule="the file has the loss of each held-out sample",
            consequence="nothing was evaluated",
            nearest="one of them",
        )
    from unisono.data.dataset import collated
    from unisono.dist import job_from_environ, join_world
    from unisono.train.build import build_data, build_metrics, find_objective
    from unisono.train.evaluate import evaluate
    from unisono.train.load import load_model
    from unisono.train.objectives import as_objective
    from unisono.train.sample_losses import losses_of_samples
    from unisono.train.setup import resolve_whole_model
    from unisono.train.step import ForwardBackward, input_selector

    job = job_from_environ(os.environ)
    device, plan = resolve_whole_model(config.plan, job)
    world = join_world(job, device_type=device.type, timeout_s=config.launch.timeout_s)
    try:
        sources = build_data(config, held_out_only=True)
        module, step = load_model(config, sources.tokenizer, world, checkpoint)
        held_out = sources.held_out
        if sources.collate_fn is not None:
            held_out = collated(held_out, sources.collate_fn)
        forward_backward = ForwardBackward(
            model=module.to(device), inputs=input_selector(module), plan=plan, world=world
        )
        loss = as_objective(find_objective(config))
        values = evaluate(
            forward_backward,
            held_out,
            objective=loss,
            metrics=build_metrics(config, sources),
            device=device,
            data_rank=world.rank,
            limit=samples,
        )
        if sample_losses is not None:
            losses = losses_of_samples(config, sources, held_out, forward_backward, loss, device)
            if world.rank == 0:
                losses.write(sample_losses)
    finally:
        world.close()
    if job.rank > 0:
        return
    total = len(held_out)
    used = min(samples, total) or total
    result: dict[str, Any] = {
        "run_dir": run_dir,
        "step": step,
        "samples": used,
        "samples_total": total,
        "evaluation": values,
    }
    rows = [f"  {name:<16} {value:.4f}" for name, value in values.items()]
    if sample_losses is not None:
        result["sample_losses"] = str(sample_losses)
        rows.append(f"losses of samples: {sample_losses}")
    print_result(
        as_json, result, [f"step {step}, {used}{f' of {total}' if used < total else ''} held-out samples", *rows]
    )
