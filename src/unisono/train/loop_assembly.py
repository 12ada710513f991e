"""The loop of a run, from the parts of ``assembly``: the checkpoint to resume from, the step, and what reports and checks it."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from unisono.data.loading.loader import Loader, StepBatch, to_device
from unisono.device.torch_adapters import adapter_for, adapter_of
from unisono.errors import ConfigError
from unisono.kvstore import GradientSync
from unisono.measure.flops import CONVENTION
from unisono.observe.events import EVENT_SCHEMA
from unisono.observe.host_memory import host_memory_limit_bytes
from unisono.observe.meters import GarbageTimer, RateMeter
from unisono.observe.options import parse_tap
from unisono.optim import ScheduleOptions
from unisono.plan.plan import precision_reason
from unisono.profile.window import window_of
from unisono.storage.run_folder import CHECKPOINTS_FOLDER
from unisono.train.assembly import RunParts
from unisono.train.async_loop import AsyncLoop
from unisono.train.async_worker import open_async_worker, require_random_access
from unisono.train.code_record import RunCode
from unisono.train.comm_stats import ReportsTraffic
from unisono.train.evaluate import Evaluator
from unisono.train.gradient_sync import build_comm_stats
from unisono.train.loop import StepRunner, SyncLoop
from unisono.train.metrics_reader import GradientStats, MetricsReader
from unisono.train.named_losses import NamedLosses
from unisono.train.nonfinite_search import NonfiniteSearch
from unisono.train.options import is_due
from unisono.train.profiling import ProfileScheduler
from unisono.train.replay import build_recorder
from unisono.train.run_checkpoints import RunCheckpoints, run_environment
from unisono.train.settings import run_settings
from unisono.train.setup import baseline_of, count_tokens, find_peak, throughput_unit
from unisono.train.state_digests import StateDigests
from unisono.train.step import ForwardBackward, TrainStep
from unisono.train.taps import Taps, TapTarget
from unisono.train.verify import StepVerifier

# steps between two readings of loss, norm and flags; on the CPU there is nothing to wait for
ACCELERATOR_READ_STEPS = 10


def build_loop(parts: RunParts, resources: list[Any]) -> SyncLoop | AsyncLoop:
    """Load the checkpoint to resume from, if there is one, and choose the loop. What it opens is added to ``resources``."""
    given = parts.inputs
    facts = {
        "environment": run_environment(parts.world, parts.plan),
        "order": given.input.order(given.seed, parts.plan),
    }
    checkpoints = _open_checkpoints(parts, facts)
    resources.append(checkpoints)
    _emit_start(parts, facts)
    if parts.plan.sync.kind != "dist_async":
        checkpoints.restore()
        return SyncLoop(runner=_build_runner(parts, checkpoints, parts.sync), loader=parts.loader)
    loader = require_random_access(parts.loader)
    optim = given.optim.options
    assert optim is not None  # OptimizerSetup.check
    worker = open_async_worker(
        parts.plan,
        parts.world.job,
        parts.state,
        optimizer=optim,
        roles=given.optim.roles,
        steps=given.options.steps,
        save_every=math.gcd(given.checkpoint.every_steps, given.options.eval_every_steps),
        configuration=str(given.provenance.get("config_hash")),
        events=parts.events,
        timers=parts.timers,
    )
    resources.append(worker)
    worker.start(checkpoints.restore)
    return AsyncLoop(runner=_build_runner(parts, checkpoints, worker), loader=loader, worker=worker)


def _open_checkpoints(parts: RunParts, facts: Mapping[str, Any]) -> RunCheckpoints:
    given, optim, record = parts.inputs, parts.inputs.optim, parts.built.record
    schedule = optim.used_schedule
    functions = {"objective": given.given_objective, **given.input.functions}
    settings = run_settings(
        optimizer=optim.describe(parts.state.optimizer),
        schedule=schedule,
        options=given.options,
        functions=functions,
        model=parts.built.modules,
        data=given.input.data_without_fingerprint,
        config=given.provenance.get("settings", {}),
        loader=given.input.options,
        teacher=None if parts.distilled is None else parts.distilled.settings,
    )
    return RunCheckpoints(
        given.run_dir / CHECKPOINTS_FOLDER,
        parts.state,
        parts.built.dims,
        options=given.checkpoint,
        resume=given.resume,
        meta={**facts, "settings": settings, "provenance": given.provenance},
        code=RunCode(
            functions if isinstance(schedule, ScheduleOptions) else {**functions, "schedule": schedule}, record
        ),
        seed=given.seed,
        events=parts.events,
        worker=parts.world.job.rank if parts.plan.sync.kind == "dist_async" else None,
    )


def _emit_start(parts: RunParts, facts: Mapping[str, Any]) -> None:
    """Emit ``run_start`` with the plan; ``facts`` are the environment and the order of samples."""
    given, plan, ledger = parts.inputs, parts.plan, parts.ledger
    parts.events.emit(
        "run_start",
        schema=EVENT_SCHEMA,
        plan=plan.to_json(),
        plan_text=plan.describe(),
        optimization=given.optim.in_words(parts.state.optimizer, given.options.steps),
        flops_convention=CONVENTION,
        precision_why=precision_reason(plan),
        device=str(parts.device),
        host=socket.gethostname(),
        parameters=parts.sharded.sharded.num_parameters,
        parameters_trained=parts.built.num_trained,
        held_bytes={
            "parameters": ledger.parameter_bytes,
            "gradients": ledger.gradient_bytes,
            # under dist_async the servers have it
            "optimizer": 0 if plan.sync.kind == "dist_async" else ledger.state_bytes,
        },
        **({"baseline_flops_per_s": baseline} if (baseline := baseline_of(parts.device)) else {}),
        steps_total=given.options.steps,
        **({"steps_per_epoch": loader.schedule.steps_per_epoch} if isinstance(loader := parts.loader, Loader) else {}),
        epoch=parts.world.job.restart_count,
        launcher=parts.world.job.source,
        **facts,
        **given.provenance,
    )


def _build_runner(parts: RunParts, checkpoints: RunCheckpoints, traffic: GradientSync | ReportsTraffic) -> StepRunner:
    """One step of this run and everything that reports it; ``traffic`` counts what is sent for it."""
    given, state, options = parts.inputs, parts.state, parts.inputs.options
    train_step = build_train_step(parts)
    train_step.profiler.plan_window(window_of(parts.profile_steps, state.step))
    rates = RateMeter(steps_total=options.steps, devices=parts.world.world_size)
    return StepRunner(
        train_step=train_step,
        metrics_reader=_build_metrics_reader(parts, rates, traffic, _build_search(parts, train_step)),
        profiler=train_step.profiler,
        rates=rates,
        timers=parts.timers,
        events=parts.events,
        checkpoints=checkpoints,
        evaluator=Evaluator(
            forward_backward=train_step.forward_backward,
            objective=given.objective,
            metrics=given.metrics,
            held_out=given.eval_data,
            options=options,
            state=state,
            device=parts.device,
            data_rank=parts.built.dims.data_rank,
            rates=rates,
            timers=parts.timers,
            events=parts.events,
        ),
        state=state,
        options=options,
        device=parts.device,
        stop_notice=parts.stop_notice,
        verifier=_build_verifier(parts, train_step, checkpoints, rates),
        callbacks=given.callbacks,
        recorder=build_recorder(parts),
    )


def build_train_step(parts: RunParts) -> TrainStep:
    """What makes one step of this run."""
    given, built, state = parts.inputs, parts.built, parts.state
    options, parallel, pipeline = given.options, parts.sharded.parallel, parts.sharded.pipeline
    plan = built.dims.plan  # dist_async: the plan of one worker; else parts.plan
    # only rank 0 has trackers, and its script may have given them on rank 0 alone
    with_histograms = (
        bool(options.gradient_stats_every_steps) and parts.world.all_gather_json(given.shows_histograms)[0]
    )
    adapter, index = adapter_of(parts.device)
    memory = adapter.memory(index)
    ranks_diverge = state.sync_state is not None and state.sync_state.params_diverge
    stage_groups = pipeline.shared_parameter_groups if pipeline is not None else ()
    return TrainStep(
        forward_backward=ForwardBackward(
            model=built.model,
            inputs=built.inputs,
            plan=plan,
            world=parts.world,
            context=parallel.context,
            pipeline=pipeline,
            before_loss=None if parts.distilled is None else parts.distilled.observe,
        ),
        objective=parts.distilled or given.objective,
        named_losses=NamedLosses(parts.world, sums_ranks=not ranks_diverge),
        clip_norm=given.optim.norm_limit,
        plan=plan,
        state=state,
        sync=parts.sync,
        partial_grad_groups=[*parallel.table.partial_grad_groups, *stage_groups],
        timers=parts.timers,
        stop_notice=parts.stop_notice,
        profiler=ProfileScheduler(
            run_dir=given.run_dir,
            world=parts.world,
            events=parts.events,
            timers=parts.timers,
            plan=plan,
            ledger=parts.ledger,
            state=state,
            device=parts.device,
            limit_bytes=host_memory_limit_bytes() if memory is None else memory.limit_bytes,
        ),
        observe_gradients=GradientStats(
            parts.sharded.sharded,
            parts.events,
            options.gradient_stats_every_steps,
            with_histograms=with_histograms,
        ),
        taps=_build_taps(parts, ranks_diverge=ranks_diverge),
        count_units=count_tokens(given.objective),
    )


def _build_taps(parts: RunParts, *, ranks_diverge: bool) -> Taps:
    observe, built = parts.inputs.observe, parts.built
    target = TapTarget(
        model=built.model,
        paths=built.paths,
        sharded=parts.sharded.sharded,
        dims=built.dims,
        stages=parts.sharded.parallel.stages,
        ranks_diverge=ranks_diverge,
        updates_here=parts.plan.sync.kind != "dist_async",
    )
    taps = Taps(target, parts.events)
    for tap in observe.taps:
        pattern, every_steps = parse_tap(tap)
        taps.add((pattern,), every_steps)
    return taps


def _build_search(parts: RunParts, train_step: TrainStep) -> NonfiniteSearch | None:
    """The search for the origin of a skipped step; None where it is off, or ranks skip steps each on its own."""
    if not parts.inputs.observe.replay_nonfinite or parts.plan.sync.kind in ("dist_async", "dist_local"):
        return None
    loader = parts.loader

    def load(step: int) -> StepBatch:
        with closing(loader.iterate(step, step + 1)) as steps:
            batch = next(steps)
        return replace(batch, micro_batches=[to_device(part, parts.device) for part in batch.micro_batches])

    return NonfiniteSearch(
        train_step=train_step,
        load=load if isinstance(loader, Loader) else None,  # a stream would have to be read from its start
        events=parts.events,
        device=parts.device,
    )


def _build_verifier(
    parts: RunParts, train_step: TrainStep, checkpoints: RunCheckpoints, rates: RateMeter
) -> StepVerifier | None:
    """The verification of steps; None where it is off. Raises ConfigError where a step cannot be computed again."""
    every, last = parts.inputs.observe.verify_every_steps, parts.inputs.options.steps
    if not every:
        return None
    if parts.state.sync_state is not None or parts.plan.sync.kind == "dist_async":
        kind, codec = parts.plan.sync.kind, parts.plan.sync.compression
        raise ConfigError(
            given=f"observe.verify_every_steps {every} with plan.sync {kind!r} and compression {codec!r}",
            rule="a step is computed again from a copy of its state, all of which is on this rank and equal on its replicas",
            consequence="servers, averages or residuals of a codec would take the step twice; nothing was started",
            nearest="observe.verify_every_steps=0, or plan.sync=dist_sync without compression",
        )
    world = train_step.forward_backward.world
    return StepVerifier(
        train_step=train_step,
        digests=StateDigests(parts.state, world, parts.device),
        is_due=lambda step: is_due(every, step) or checkpoints.is_due(step) or step == last,
        rates=rates,
        events=parts.events,
        device=parts.device,
        stage=parts.built.dims.rank_along("pp"),
    )


def _build_metrics_reader(
    parts: RunParts, rates: RateMeter, traffic: GradientSync | ReportsTraffic, nonfinite_search: NonfiniteSearch | None
) -> MetricsReader:
    given, loader, flops_per_token = parts.inputs, parts.loader, parts.built.flops_per_token
    return MetricsReader(
        events=parts.events,
        timers=parts.timers,
        garbage_timer=GarbageTimer(),
        rates=rates,
        every=1 if adapter_for(parts.device.type).streams is None else ACCELERATOR_READ_STEPS,
        steps_total=given.options.steps,
        epochs_total=loader.schedule.epoch(given.options.steps - 1) + 1 if isinstance(loader, Loader) else None,
        max_skips=given.options.max_skips,
        device=parts.device,
        memory_limit_bytes=host_memory_limit_bytes(),
        flops_per_token=flops_per_token,
        comm_stats=build_comm_stats(parts.events, traffic, parts.built.dims),
        peak=find_peak(parts.device, parts.plan, parts.world) if flops_per_token else None,
        # of a run that begins both are 0, also where its step is traced without values
        weight_total=float(parts.state.weight_total) if parts.state.step else 0.0,
        skipped_total=int(parts.state.guard.skipped) if parts.state.step else 0,
        nonfinite_search=nonfinite_search,
        compiling=parts.plan.backend.compile != "off",
        **throughput_unit(given.objective, given.input.data, parts.built.dims.plan, flops_per_token),
    )
