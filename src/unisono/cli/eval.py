"""``unisono eval``: evaluates a checkpoint of a run on its held-out data."""

from __future__ import annotations

import os

import click

from unisono.cli.common import (
    chosen_checkpoint,
    every_verb,
    load_run,
    print_result,
    require_run,
    takes_checkpoint,
    trusts_python,
)
from unisono.cli.own_code import read_code, takes_evaluation, takes_model


@click.command("eval")
@click.argument("run_dir", default="runs/first")
@takes_checkpoint
@takes_model
@takes_evaluation
@click.option("--samples", type=click.IntRange(min=0), default=0, show_default=True, help="Samples to use; 0 = all.")
@trusts_python
@every_verb
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
    as_json: bool,
) -> None:
    """Print loss and metrics of RUN_DIR's newest checkpoint on the data held out from training.

    The folder of a Python script's run holds no code: --model, --data and, unless it is built in, --objective name it.
    """
    require_run(run_dir)
    code = read_code(model=model, data=data, collate_fn=collate_fn, objective=objective, metrics=metrics)
    config = load_run(run_dir, **code).value
    checkpoint = chosen_checkpoint(run_dir, checkpoint, best=best)
    from unisono.data.dataset import collated
    from unisono.dist import job_from_environ, join_world
    from unisono.plan.options import PlanOptions
    from unisono.plan.resolve import with_strategy_file
    from unisono.train.build import build_data, build_metrics, find_objective
    from unisono.train.evaluate import evaluate
    from unisono.train.load import load_model
    from unisono.train.objectives import as_objective
    from unisono.train.setup import resolve_plan
    from unisono.train.step import ForwardBackward, input_selector

    job = job_from_environ(os.environ)
    options, _ = with_strategy_file(config.plan)
    unsharded = PlanOptions(  # every process has the whole model, whatever the plan of the training
        device=options.device,
        precision=options.precision,
        global_batch=options.global_batch * job.world_size,
        micro_batch=options.micro_batch,
    )
    device, plan = resolve_plan(unsharded, job)
    world = join_world(job, device_type=device.type, timeout_s=config.launch.timeout_s)
    try:
        sources = build_data(config, held_out_only=True)
        module, step = load_model(config, sources.tokenizer, world, checkpoint)
        held_out = sources.held_out
        if sources.collate_fn is not None:
            held_out = collated(held_out, sources.collate_fn)
        values = evaluate(
            ForwardBackward(model=module.to(device), inputs=input_selector(module), plan=plan, world=world),
            held_out,
            objective=as_objective(find_objective(config)),
            metrics=build_metrics(config, sources),
            device=device,
            data_rank=world.rank,
            limit=samples,
        )
    finally:
        world.close()
    if job.rank > 0:
        return
    total = len(held_out)
    used = min(samples, total) or total
    result = {"run_dir": run_dir, "step": step, "samples": used, "samples_total": total, "evaluation": values}
    rows = [f"  {name:<16} {value:.4f}" for name, value in values.items()]
    print_result(
        as_json, result, [f"step {step}, {used}{f' of {total}' if used < total else ''} held-out samples", *rows]
    )
