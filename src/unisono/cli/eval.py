"""``unisono eval``: evaluates a checkpoint of a run on its held-out data."""

from __future__ import annotations

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
    from unisono.train.sample_losses import losses_of_samples
    from unisono.train.trained import trained_run

    with trained_run(config, checkpoint) as run:
        values = run.evaluate(run.model, samples)
        if sample_losses is not None:
            passes = run.forward_backward(run.model)
            losses = losses_of_samples(config, run.sources, run.held_out, passes, run.objective, run.device)
            if run.world.rank == 0:
                losses.write(sample_losses)
    if run.world.rank > 0:
        return
    total = len(run.held_out)
    used = min(samples, total) or total
    result: dict[str, Any] = {
        "run_dir": run_dir,
        "step": run.step,
        "samples": used,
        "samples_total": total,
        "evaluation": values,
    }
    rows = [f"  {name:<16} {value:.4f}" for name, value in values.items()]
    if sample_losses is not None:
        result["sample_losses"] = str(sample_losses)
        rows.append(f"losses of samples: {sample_losses}")
    print_result(
        as_json, result, [f"step {run.step}, {used}{f' of {total}' if used < total else ''} held-out samples", *rows]
    )
