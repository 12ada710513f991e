"""One rank of ``unisono train``, from the configuration to the export. Imports torch."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from unisono.cli.common import LOG
from unisono.config import Resolved
from unisono.data.cleaning_record import cleaning_facts
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.recordio.remote_file import is_url
from unisono.data.result_files import data_of_results, require_whole_results
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.dist import JobSpec, join_world
from unisono.errors import UnisonoError
from unisono.measure.ceiling import device_name
from unisono.models.gpt import GPT
from unisono.observe.events import Event
from unisono.observe.formatting import RunEndFacts
from unisono.observe.history import RankHistory
from unisono.plan.plan import Plan
from unisono.planner.plan_record import (
    PLAN_RECORD_FILE,
    SteadySteps,
    add_to_plan_record,
    machine_of,
    measured_layout,
    measured_run,
    plan_digest,
    read_plan_record,
    work_digest,
)
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import PLAN_FILE, RUN_FILE
from unisono.train.build import (
    RunData,
    build_data,
    build_trainer,
    check_quantize,
    data_notices,
    resolve_run,
    resolve_steps,
    vocab_size,
)
from unisono.train.config import RunConfig
from unisono.train.distilled_features import without_projections
from unisono.train.load import empty_model, open_run_checkpoint, read_model
from unisono.train.outputs import RunOutputs
from unisono.train.parameter_servers import start_servers
from unisono.train.run_checkpoints import best_before
from unisono.train.run_export import export_run
from unisono.train.settings import STRETCHED_SCHEDULES, function_name
from unisono.train.setup import init_distributed, open_events, resolve_plan
from unisono.train.trainer import Trainer
from unisono.train.whole_model import tensor_reader

# the text that a language model writes at the end of a run, and by default in ``unisono generate``
SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200
# a sharded model is assembled for its text sample up to this size
SAMPLE_BYTES = 1 << 30


def run_rank(resolved: Resolved[RunConfig], job: JobSpec, *, quiet: bool) -> dict[str, Any]:
    """Train until the end, a stop or an error; rank 0 also writes console (unless ``quiet``), sample, export and report.

    Returns:
        The outcome for ``--json``: run folder, step, reason of the end, evaluation and paths.
    """
    config = resolved.value
    run_dir = Path(config.run.dir)
    device, plan = resolve_plan(config.plan, job)
    check_quantize(config, plan)  # before the folder of a quantized model is touched
    with ExitStack() as stack:
        job = stack.enter_context(start_servers(plan, job, config.launch, run_dir))
        world = init_distributed(plan, job, device.type, config.launch.timeout_s, config.launch.collective_backend)
        stack.callback(world.close)
        task = config.task
        require_whole_results(_data_addresses(config.data))
        resolved = resolve_run(resolved, world)
        data = build_data(resolved.value)
        resolved = resolve_steps(resolved, data, plan)
        config = resolved.value
        events = stack.enter_context(open_events(run_dir, world))
        outputs = None
        if job.rank == 0:
            observe = replace(config.observe, console="off") if quiet else config.observe
            outputs = stack.enter_context(RunOutputs(events, observe, run_dir))
        if LOG.isEnabledFor(logging.DEBUG):
            events.subscribe(_log_event, "log")
        provenance = {
            "config_hash": resolved.hash,
            "config": resolved.encoded,
            "origins": resolved.origins,
            "launch": launch_facts(),
            "data": data.facts,
            **({"cleaning": cleaning} if (cleaning := cleaning_facts(_addresses(config))) else {}),
        }
        trainer = build_trainer(config, data, plan, world=world, events=events, provenance=provenance)
        with trainer as run:
            if job.rank == 0:
                # from here on the folder is a run, and starting it again continues the run
                write_atomically(run_dir / RUN_FILE, resolved.to_toml().encode())
                run.plan.save(run_dir / PLAN_FILE)
                if run.state.step == 0:
                    for notice in data_notices(config, data, found=config.task != task):
                        run.events.emit("notice", step=0, **notice)
            result = run.fit()
            outcome: dict[str, Any] = {
                "run_dir": str(run_dir),
                "step": result.step,
                "steps_total": config.train.steps,
                "reason": result.reason,
                "evaluation": dict(result.evaluation),
            }
            unfinished: UnisonoError | None = None
            if job.rank == 0 and result.reason != "preempted":
                unfinished = finish(run, config, data, outcome)
        if outputs is not None:
            if result.reason != "preempted" and (report := outputs.write_report()) is not None:
                outcome["report"] = str(report)
            facts = RunEndFacts(
                sample_text=outcome.get("sample", ""),
                report_path=Path(outcome["report"]) if "report" in outcome else None,
                export_path=Path(outcome["export"]) if "export" in outcome else None,
                best=best_before(run_dir, result.step),
                next_commands=next_commands(config, result.reason, writes=outcome.get("sample") is not None),
            )
            record_step_time(config, plan, device, job, data.tokenizer, outputs.summary(facts), events.attempt)
    if unfinished is not None:
        raise unfinished
    return outcome


def record_step_time(
    config: RunConfig,
    plan: Plan,
    device: torch.device,
    job: JobSpec,
    tokenizer: Tokenizer | None,
    history: RankHistory,
    attempt: int,
) -> None:
    """Add what this attempt took to the record from which predictions of plans are corrected; a failure is a line in the log.

    Args:
        config: Configuration of the run.
        plan: Its plan.
        device: The device of rank 0.
        job: The job.
        tokenizer: Tokenizer of its texts; None of other data.
        history: Events of rank 0.
        attempt: The attempt, from 1.
    """
    from unisono.planner.measured_cluster import device_here
    from unisono.planner.run_layout import layout_of_run

    path = default_cache_dir(os.environ) / PLAN_RECORD_FILE
    try:
        steady = SteadySteps.of(history, attempt)
        if steady is None or config.observe.verify_every_steps:  # steps that are computed twice
            return
        predicted = None
        if job.local_world == job.world_size:  # predictions of plans are of one host
            work = work_digest(config, function_name)
            predicted = read_plan_record(path).predicted(machine_of(device), plan_digest(plan), work)
        vocab = config.model.vocab_size or (0 if tokenizer is None else vocab_size(config, tokenizer))
        kind = device_here(device_name(device)) if vocab else None
        layout = None if kind is None else layout_of_run(config, plan, kind, vocab)
        now_s = time.time()
        runs = [] if predicted is None else [measured_run(predicted, steady, at_s=now_s)]
        layouts = [] if layout is None else [measured_layout(layout, steady, at_s=now_s)]
        if runs or layouts:
            add_to_plan_record(path, runs=runs, layouts=layouts)
    except Exception as error:  # the run is finished: its record is no part of it
        LOG.warning("the step time was not recorded in %s: %s: %s", path, type(error).__name__, error)


def _addresses(config: RunConfig) -> list[str]:
    """The files and folders that the run reads, and folders of the rows that it reads of them."""
    rows = config.data.kept_rows
    data = [each if is_url(each) else str(data_of_results(Path(each))) for each in _data_addresses(config.data)]
    return [*data, *((rows,) if isinstance(rows, str) and rows else filter(None, rows))]


def _data_addresses(data: DataOptions) -> list[str]:
    given = [data.train, data.eval, "" if data.train else data.corpus]
    addresses = [(each,) if isinstance(each, str) else each for each in given]
    return [address for several in addresses for address in several if address]


def _log_event(event: Event) -> None:
    LOG.debug("%s", json.dumps(event, default=str))


def next_commands(config: RunConfig, reason: str, *, writes: bool) -> list[str]:
    """Commands to suggest after a run; ``writes`` tells whether the model can generate text."""
    run_dir = shlex.quote(config.run.dir)
    setting = shlex.quote(f"run.dir={config.run.dir}")
    if reason == "preempted":
        return [f"unisono train --set {setting}"]
    return [
        *([f"unisono generate {run_dir}"] if writes else []),
        f"unisono eval {run_dir}",
        f"unisono train --set {setting} --set train.steps={2 * config.train.steps}" + _stretched(config),
    ]


def _stretched(config: RunConfig) -> str:
    """A shell comment if a longer run has another learning rate from here on."""
    if config.components.schedule or config.schedule.kind not in STRETCHED_SCHEDULES:
        return ""
    return f"  # stretches the {config.schedule.kind} schedule to the new length"


def finish(run: Trainer, config: RunConfig, data: RunData, outcome: dict[str, Any]) -> UnisonoError | None:
    """Write the export and a text sample, and add them to ``outcome``.

    Returns:
        The error of an export that could not be written, to be raised after the rest of the run's end.
    """
    tokenizer = data.tokenizer
    refused: UnisonoError | None = None
    spread = run.plan.is_model_sharded
    with run.averaged_weights(), nullcontext() if spread else without_projections(run.model):
        model, snapshot = run.model, None
        if spread:
            # this rank has a part of the model; export the checkpoint just committed, one tensor at a time
            alone = join_world(JobSpec(), device_type="cpu", timeout_s=config.launch.timeout_s)
            snapshot, model = open_run_checkpoint(config, alone, None), empty_model(config, tokenizer)
        try:
            read = tensor_reader(model, snapshot) if snapshot is not None else None
            outcome["export"] = str(export_run(model, config, tokenizer, read=read))
        except UnisonoError as error:
            refused = error
        if tokenizer is None or not isinstance(model, GPT):
            return refused
        if snapshot is not None:
            size = sum(parameter.nbytes for parameter in model.parameters())
            if size > SAMPLE_BYTES:
                run.events.emit("notice", step=run.state.step, **_no_sample(size, config.run.dir))
                return refused
            model = cast(GPT, read_model(config, tokenizer, snapshot))
        context, seed = config.data.seq_len, config.run.seed
        outcome["sample"] = write_sample(model, tokenizer, context=context, seed=seed)
        run.events.emit("sample", step=run.state.step, prompt=SAMPLE_PROMPT, text=outcome["sample"])
    return refused


def _no_sample(size: int, run_dir: str) -> dict[str, str]:
    return {
        "code": "no_sample",
        "what": f"no sample was written by a model of {size / 2**30:.1f} GiB",
        "why": f"rank 0 would hold all of a model that the plan spreads; up to {SAMPLE_BYTES / 2**30:g} GiB it does",
        "cost": "nothing else is missing",
        "fix": f"unisono generate {shlex.quote(run_dir)}, on a machine with enough memory",
    }


def write_sample(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    prompt: str = SAMPLE_PROMPT,
    num_tokens: int = SAMPLE_TOKENS,
    context: int,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """Generate text that continues the prompt.

    Args:
        num_tokens: Number of tokens after the prompt.
        context: Number of last tokens that the model sees.
        seed: Seed of the sampling.
        temperature: 0 takes the most likely token.
    """
    device = model.embedding.weight.device
    start: list[int] = tokenizer.encode([prompt])[0].ids.tolist() or [tokenizer.end_of_document]
    training = model.training
    model.eval()
    tokens = model.generate(
        torch.tensor([start], device=device), num_tokens, temperature=temperature, context=context, seed=seed
    )
    model.train(training)
    written: list[int] = cast(Any, tokens[0]).tolist()
    return tokenizer.decode(written)


def launch_facts() -> dict[str, Any]:
    """Settings of the launcher for this process, its threads and CPU affinity, and the versions of Python and torch."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        **json.loads(os.environ.get("UNISONO_LAUNCH", "{}")),
        "threads": torch.get_num_threads(),
        "affinity": affinity,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
