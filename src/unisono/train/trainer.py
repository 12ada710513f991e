"""The trainer: an iterator of optimizer steps that resumes, accumulates, synchronises, guards and saves by itself.

Entering it joins the ranks and settles the plan. ``assembly`` makes the parts of the run, ``loop_assembly`` its loop. ``step``
makes one step, ``loop`` and ``async_loop`` make them all, ``run_checkpoints`` resumes and saves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from unisono.checkpoint import CheckpointOptions, scored_checkpoints
from unisono.checkpoint.folder import step_name
from unisono.config import check_options
from unisono.config.python_file import refuse_in_file
from unisono.data.dataset import CollateFn, Dataset, MapStyle
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.options import LoaderOptions
from unisono.dist import StopNotice, World
from unisono.dist.progress import at_work
from unisono.dist.watchdog import Watchdog
from unisono.errors import ConfigError
from unisono.observe.events import EventLog
from unisono.observe.formatting import RunEndFacts
from unisono.observe.host_memory import ProcessMemory
from unisono.observe.options import HISTOGRAM_SINKS, ObserveOptions
from unisono.observe.own_values import log_image, log_text, log_value
from unisono.observe.system_monitor import SystemMonitor, device_readers
from unisono.optim import OptimOptions, ScheduleOptions
from unisono.optim.learning_rate import SchedulerFactory
from unisono.optim.run_optimizer import GivenOptimizer
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.sanitize import redact
from unisono.storage.run_folder import CHECKPOINTS_FOLDER
from unisono.train.argument_checks import check_arguments, check_without_eval_data, inert_metrics_notice
from unisono.train.assembly import RunInputs, agree_on_run, assemble
from unisono.train.async_loop import AsyncLoop
from unisono.train.callbacks import Every
from unisono.train.distillation import Distillation
from unisono.train.distilled_features import without_projections
from unisono.train.failure_memory import beside_tensors, memory_of_failure
from unisono.train.input_pipeline import InputPipeline, read_eval_source, read_source
from unisono.train.loop import Result, SyncLoop
from unisono.train.loop_assembly import build_loop
from unisono.train.metrics import Metric, as_metrics, check_metric_kinds
from unisono.train.objectives import MEAN_LOSS_NOTICE, Batch, Objective, as_objective, find_objective
from unisono.train.optimizers import OptimizerSetup
from unisono.train.options import TrainOptions, folder_problem
from unisono.train.outputs import RunOutputs
from unisono.train.replay import inputs_of_replay
from unisono.train.run_checkpoints import best_before
from unisono.train.run_record import sequence_length, write_run_record
from unisono.train.setup import (
    again,
    default_run_dir,
    init_distributed,
    launched_job,
    open_events,
    report_failure,
    resolve_plan,
    watch_steps,
)
from unisono.train.step import Step
from unisono.train.whole_model import export_model

if TYPE_CHECKING:
    from unisono.train.dry_run import RankMemory
    from unisono.train.rank_timing import RankTiming

COLLECTIVE_TIMEOUT_S = 300.0
_LOG: Final = logging.getLogger("unisono.train")


class Trainer:
    """Trains ``model`` on ``data`` as ``plan`` says. A context manager and an iterator; ``fit()`` is the whole run.

    Entering it joins the other ranks, resolves the plan, shards the model and resumes from a checkpoint. Iterating it trains:
    each item is a finished step. Leaving it saves the last step and closes everything that it opened. After entering,
    ``self.model`` is this rank's (part of the) model. ``fit()`` of a trainer that is not entered enters and leaves it.

    Example::

        def objective(outputs, batch):
            losses = torch.nn.functional.cross_entropy(outputs, batch["targets"], reduction="none")  # [B]
            return losses.sum(), torch.tensor(float(len(losses)))

        data = from_map_style([(torch.randn(2), 0), (torch.randn(2), 1)])  # (inputs, target) pairs
        options = TrainOptions(steps=200)
        with Trainer(Net(), data, PlanOptions(global_batch=2), objective=objective, options=options) as run:
            for step in run:
                if step.index % 50 == 0:
                    print(step.index, run.evaluate(data)["loss"])

    Args:
        model: A module, whose values on rank 0 are broadcast, or a callable that builds one, the same on all ranks. Where the
            plan shards the model, the module that a callable builds is never whole on any rank (``parallel.deferred_init``).
            Batch entries whose names are parameters of ``model.forward`` are passed to it.
        data: A ``Dataset``, anything indexable with a length, an iterable (a stream), or torch's ``DataLoader`` (it is replaced).
        plan: The layout of model and batch on the ranks. ``PlanOptions`` (default: all defaults) are resolved into a plan for
            this job; a ``Plan`` is only validated.
        objective: ``(outputs, batch) -> (loss_sum, weight)``, two 0-dim tensors. The loss of a step is the sum of ``loss_sum``
            divided by the sum of ``weight``, both over all micro-batches and ranks. Or a loss of ``torch.nn``, or a function that
            returns the mean of a micro-batch (``train.objectives.as_objective``); or the name of a built-in objective. Several
            losses by name, ``{name: tensor}``, take the place of the one: their sum is trained, and ``Step.losses`` and the
            events have each.
        distill: A trained module that the model also learns from, its teacher (``train.distillation``). Default: none.
        optimizer: ``OptimOptions`` (default: ``OptimOptions()``, AdamW); a ``torch.optim`` optimizer of the model's parameters; a
            class or function of a list of parameters that builds one; or several by pattern of parameter names, of which the
            first match wins: ``{"*.bias": partial(SGD, lr=0.1), "*": AdamW}``.
        schedule: ``ScheduleOptions``; a function of the step, from 0, that returns the learning rate itself; or a
            ``torch.optim.lr_scheduler`` class, a partial of one, or ``lambda optimizer: …`` that builds one. Default:
            ``ScheduleOptions()``, cosine, with ``OptimOptions``, and a constant rate with another optimizer.
        clip_norm: Largest global gradient norm with an optimizer that is no ``OptimOptions``. Default: no clipping.
        options: Length of the run in steps or epochs, cadence of evaluations, early stopping, EMA and the guard against bad
            steps. Default: ``TrainOptions()``.
        checkpoint: When checkpoints are written and how many are kept. Default: ``CheckpointOptions()``.
        run_dir: Folder of this run: checkpoints, events and logs. It is created if it is missing. Default:
            ``runs/<name of the script or notebook>``; ``runs/notebook`` where a notebook's name is not known.
        seed: Seed of data order, augmentation and dropout. It does not initialise a module that is passed or built.
        resume: ``auto`` resumes from the newest good checkpoint in ``run_dir`` or starts a new run; ``strict`` also refuses
            any difference that bit-exactness depends on; ``never`` refuses a folder with checkpoints; a path names a checkpoint.
        eval_data: Held-out samples with a length, for ``fit`` and ``evaluate``. Default: none, and ``fit`` does not evaluate.
        metrics: Metrics of an evaluation by name, or names of built-in ones, in addition to ``loss``. Default: none.
        callbacks: Observers of the run, such as ``Every(steps=100, call=function)``. Default: none.
        transform: ``(sample, rng) -> sample``, applied to each training sample; see ``Loader``.
        pair_transform: ``(a, b, rng) -> (a, b)`` on two neighbours of the global batch, such as mixup; see ``Loader``.
        batch_transform: ``(batch) -> batch`` on all rows of a micro-batch; see ``Loader``.
        collate_fn: ``(list of samples) -> batch``, for ``data`` and ``eval_data``; see ``Loader``. Default: samples are stacked.
        loader: Workers, prefetching and the treatment of bad samples and last batches. Default: ``LoaderOptions()``.
        shuffle_block: Number of neighbouring samples that stay together when samples are shuffled, for storage that is slow at
            random access. 0 shuffles single samples.
        flops_per_token: FLOPs of forward and backward per unit of weight (per token in text), or a function of the unsharded
            model, which may be on the meta device. The default 0 reports no TFLOP/s and no utilization.
        world: The ranks to train on; the caller closes it. By default the environment of the process tells which rank this is,
            and entering joins the others.
        observe: Console, trackers and report, which rank 0 makes of the events. Default: ``ObserveOptions()``.
        events: Event log to write to; the caller closes it, and makes what is to be seen of it. Default: a log under ``run_dir``.
        provenance: Facts, as JSON types by name, that are recorded in the ``run_start`` event and in every checkpoint. Its
            ``config_hash`` must be equal on all ranks; its ``settings`` are compared on resume. Default: none.

    Raises:
        ConfigError: Options are not legal, at construction; or the optimizer or schedule cannot be used.
        PlanError: The plan does not fit the ranks, the model or a batch. Before the first step.
        DataError: The data or its loader settings cannot be used. Before the first step.
        CheckpointError: The checkpoint cannot be resumed from, or the last step cannot be saved.
        NumericsError: ``options.max_skips`` steps in a row were skipped.
        CommError: Ranks disagree, or one of them does not answer.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Dataset | MapStyle | Iterable[Any],
        plan: Plan | PlanOptions | None = None,
        *,
        objective: Objective | Callable[[Any, Batch], Tensor | Mapping[str, Tensor]] | str,
        distill: Distillation | None = None,
        optimizer: OptimOptions | GivenOptimizer | None = None,
        schedule: ScheduleOptions | Callable[[int], float] | SchedulerFactory | None = None,
        clip_norm: float | None = None,
        options: TrainOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        run_dir: str | Path | None = None,
        seed: int = 0,
        resume: str | Path = "auto",
        eval_data: Dataset | MapStyle | None = None,
        metrics: Mapping[str, Metric | str] | Sequence[str] | None = None,
        callbacks: Sequence[Every] = (),
        transform: Transform | None = None,
        pair_transform: PairTransform | None = None,
        batch_transform: BatchTransform | None = None,
        collate_fn: CollateFn | None = None,
        loader: LoaderOptions | None = None,
        shuffle_block: int = 0,
        flops_per_token: float | Callable[[nn.Module], float] = 0.0,
        world: World | None = None,
        observe: ObserveOptions | None = None,
        events: EventLog | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(locals())
        taught = None if distill is None else distill.options
        check_options(options, checkpoint, loader, observe, plan if isinstance(plan, PlanOptions) else None, taught)
        if eval_data is None:
            check_without_eval_data(options or TrainOptions(), checkpoint or CheckpointOptions())
        if isinstance(model, nn.Module):
            self.model = model
        source = read_source(data, plan=plan, loader=loader, collate_fn=collate_fn)
        self._data_kind = type(data).__qualname__
        self._given_plan = source.plan
        given_objective = find_objective(objective)
        self._given_dir = default_run_dir() if run_dir is None else Path(run_dir)
        if problem := folder_problem(self._given_dir if run_dir is None else run_dir, "run_dir"):
            raise ConfigError(problem)
        check_metric_kinds(metrics or {}, given_objective)
        self._inputs = RunInputs(
            model=model,
            eval_data=read_eval_source(eval_data, source.collate_fn),
            options=options or TrainOptions(),
            run_dir=self._given_dir.absolute(),  # the caller's loop may change the current folder
            given_objective=given_objective,
            objective=as_objective(
                given_objective, lambda: self.events.emit("notice", step=self.state.step, **MEAN_LOSS_NOTICE)
            ),
            optim=OptimizerSetup(
                given=OptimOptions() if optimizer is None else optimizer, schedule=schedule, clip_norm=clip_norm
            ),
            checkpoint=checkpoint or CheckpointOptions(),
            seed=seed,
            resume=str(resume),
            metrics=as_metrics(metrics or {}),
            input=InputPipeline(
                data=source.data,
                options=source.loader,
                transform=transform,
                pair_transform=pair_transform,
                batch_transform=batch_transform,
                shuffle_block=shuffle_block,
                shuffle=source.shuffle,
                collate_fn=source.collate_fn,
            ),
            flops_per_token=flops_per_token,
            callbacks=tuple(callbacks),
            observe=observe or ObserveOptions(),
            provenance=redact(provenance or {}),
            distill=distill,
            shows_histograms=observe is not None and not HISTOGRAM_SINKS.isdisjoint(observe.trackers),
        )
        self._inputs = inputs_of_replay(self._inputs)
        self.data, self.eval_data = source.data, self._inputs.eval_data
        self.options, self.run_dir = self._inputs.options, self._inputs.run_dir
        self._given_world, self._given_events = world, events
        self._outputs: RunOutputs | None = None
        self._is_open = self._ended = False
        self._resources: list[Any] = []  # to be closed in this order
        self._watchdog: Watchdog | None = None
        self._beside_tensors: ProcessMemory | None = None

    def __repr__(self) -> str:
        model, steps = self._inputs.model, self.options.steps
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__qualname__", "a function")
        if hasattr(self, "state"):
            at = f"{'open' if self._is_open else 'closed'} at step {self.state.step} of {steps}"
        else:
            at = f"not entered, {steps} steps"
        return f"Trainer({name}, {at}, run_dir={str(self._given_dir)!r})"

    # --- assembling a run ------------------------------------------------------------------------------------------

    def __enter__(self) -> Trainer:
        refuse_in_file("enters a Trainer")
        if hasattr(self, "state") and isinstance(self._inputs.model, nn.Module) and self.plan.is_model_sharded:
            raise ConfigError(
                given="a Trainer, entered again, with a plan that shards the module it was given",
                rule="the parameters of that module are replaced by the shards of this rank",
                consequence="there is no whole model to begin with; nothing was started",
                nearest="Trainer(build, …) with a function that builds the model, or a new Trainer of a new module",
            )
        self._ended, self._resources = False, []  # it may have been entered before
        self._open_world()
        try:
            self._assemble()
            if self._given_events is None and self.world.job.rank == 0:
                self._write_record()
        except BaseException as error:
            self._close(error)
            raise
        self._is_open = True
        return self

    def _write_record(self) -> None:
        inputs = self._inputs
        write_run_record(
            self.run_dir,
            given_dir=self._given_dir,
            seed=inputs.seed,
            model=inputs.model,
            objective=inputs.given_objective,
            data=self.data,
            data_kind=self._data_kind,
            metrics=inputs.metrics,
            given_plan=self._given_plan,
            plan=self.plan,
            optimizer=inputs.optim.given,
            schedule=inputs.optim.used_schedule,
            optimization=inputs.optim.in_words(self.state.optimizer, self.options.steps),
            options=self.options,
            checkpoint=inputs.checkpoint,
            loader=inputs.input.options,
            observe=self._inputs.observe,
        )

    def _open_world(self) -> None:
        """Set world, plan and device, open the event log, and listen for stop signals."""
        job = self._given_world.job if self._given_world else launched_job()
        self.device, self.plan = resolve_plan(self._given_plan, job)  # a Plan is only validated
        self.world = self._given_world or init_distributed(self.plan, job, self.device.type, COLLECTIVE_TIMEOUT_S)
        self.events = self._given_events or open_events(self.run_dir, self.world)
        if self._given_events is None and self.world.job.rank == 0:
            self._outputs = RunOutputs(self.events, self._inputs.observe, self.run_dir)
        # the local launcher tells of a Ctrl-C for all its ranks
        notice = StopNotice.shared(announce=self.world.rank == 0 and self.world.job.source != "unisono")
        self._stop_notice = notice if threading.current_thread() is threading.main_thread() else None
        if self._stop_notice is not None:
            self._stop_notice.__enter__()

    @at_work("the set-up", silent=True)
    def _assemble(self) -> None:
        """Make the parts of the run and its loop; a failure closes those made so far."""
        inputs = self._inputs = self._inputs.with_steps(self.plan)
        self.options = inputs.options
        self.store = agree_on_run(inputs, self.plan, self.world)
        parts = assemble(
            inputs,
            self.plan,
            world=self.world,
            store=self.store,
            device=self.device,
            events=self.events,
            stop_notice=self._stop_notice,
            resources=self._resources,
        )
        self.model, self.plan, self.state, self._unsharded = parts.built.model, parts.plan, parts.state, parts.unsharded
        self._loop = build_loop(parts, self._resources)
        self._resources.insert(0, self._loop.runner.profiler)
        if self._inputs.observe.monitor_every_s:
            monitor = SystemMonitor(
                self.events,
                every_s=self._inputs.observe.monitor_every_s,
                step=lambda: self.state.step,
                with_host=self.world.job.local_rank == 0,
                readers=device_readers(self.device),
            )
            self._resources.append(monitor)
        self._watchdog = watch_steps(self.world, self.run_dir, lambda: self.state.step)
        self._beside_tensors = beside_tensors(parts.ledger, self.state)

    # --- closing ---------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._loop.runner.metrics_reader.read()
                if self._loop.owns_final_state:
                    self.save(wait=True)
                self._end(left=self.state.step < self.options.steps)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self._is_open = False
        self._end_watch(failed=error is not None)
        if error is not None:
            step = self.state.step if hasattr(self, "state") else None
            memory = memory_of_failure(error, self.device, self._beside_tensors)
            report_failure(self.events, self.run_dir, self.world.job, error, step, memory)
        stores = [self.store] if hasattr(self, "store") else []  # last: what sums gradients may use it
        for resource in [*self._resources, *stores]:
            try:
                resource.close()
            except Exception as closing:
                if error is None:
                    raise
                _LOG.warning("%s could not be closed: %s", type(resource).__name__, closing)
        if self._stop_notice is not None:
            self._stop_notice.__exit__(None, None, None)
        if self._outputs is not None:
            if error is not None:
                self._outputs.write_report()
            else:
                preempted, best = self._loop.preempted, best_before(self.run_dir, self.state.step)
                report = None if preempted else self._outputs.write_report()
                shown = None if report is None else self._as_given(report)
                shown_best = None if best is None else (*best[:2], self._as_given(best[2]))
                commands = again() if preempted else ()
                self._outputs.summary(RunEndFacts(report_path=shown, best=shown_best, next_commands=commands))
            self._outputs.close()
        if self._given_events is None:
            self.events.close()
        if self._given_world is None:
            self.world.close()

    def _end_watch(self, *, failed: bool) -> None:
        """Watch no longer; after a failure its record is the last word. The world's own goes on without our steps."""
        if self._watchdog is not None:
            self._watchdog.close(failed=failed)
            self._watchdog = None
        elif self.world.watchdog is not None and failed:
            self.world.watchdog.close(failed=True)
        elif self.world.watchdog is not None:
            self.world.watchdog.follow(None)

    def _as_given(self, path: Path) -> Path:
        """A path in the run's folder as it follows from the folder that was given, for texts."""
        return self._given_dir / path.relative_to(self.run_dir)

    # --- training --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Steps from where the run stands to its end, to an early stop, or to the step all ranks agreed to stop at.

        A step's checkpoint is written after the loop's body has seen it, so that an evaluation of that step counts.
        """
        return iter(self._open_loop("a loop over", "for step in run: …"))

    @property
    def preempted(self) -> bool:
        """Whether a signal to any rank ended the loop; after ``with`` the state is committed, exit with 75."""
        return hasattr(self, "_loop") and self._loop.preempted

    def fit(self) -> Result:
        """Train to the end, evaluating every ``eval_every_steps`` steps and at the end.

        A trainer that is not entered is entered for this call, and left after it. Another call resumes the run.
        """
        if self._is_open:
            return self._fit()
        with self:
            return self._fit()

    def dry_run(self, num_ranks: int, ranks: Sequence[int] = ()) -> list[RankMemory]:
        """Trace steps of ``ranks`` of a job of ``num_ranks`` in this process, without values: what each would hold in memory.

        By default of one rank of each place in the pipeline. See ``train.dry_run``, also for what is raised.
        """
        from unisono.train.dry_run import trace_ranks

        return trace_ranks(self._inputs, self._given_plan, num_ranks, ranks)

    def time_ranks(self, num_ranks: int, ranks: Sequence[int] = ()) -> list[RankTiming]:
        """Time steps of ``ranks`` of a job of ``num_ranks`` in this process, as if the other ranks answered at once.

        By default of one rank of each place in the pipeline. See ``train.rank_timing``, also for what is raised.
        """
        from unisono.train.rank_timing import time_ranks

        return time_ranks(self._inputs, self._given_plan, num_ranks, ranks)

    def _fit(self) -> Result:
        loop, metrics = self._loop, self._inputs.metrics
        evaluator = loop.runner.evaluator
        if metrics and self.eval_data is None:
            self.events.emit("notice", step=self.state.step, **inert_metrics_notice(list(metrics)))
        if self.state.step < self.options.steps:
            evaluator.try_metrics()
        for step in loop:
            if self.eval_data is not None and loop.evaluates_after(step.index):
                self.evaluate()
        if loop.owns_final_state:
            finished = not (loop.preempted or loop.stopped_early)
            if self.eval_data is not None and finished and evaluator.evaluated_step != self.state.step:
                self.evaluate()
            self.save(wait=True)
        return Result(step=self.state.step, reason=self._end(), evaluation=evaluator.values)

    def _end(self, *, left: bool = False) -> str:
        """Emit how the run ended, once; returns the reason. ``left`` is a loop that the caller ended before its last step."""
        loop, values = self._loop, self._loop.runner.evaluator.values
        reason = (
            "preempted" if loop.preempted else "early_stop" if loop.stopped_early else "left" if left else "finished"
        )
        if not self._ended:
            numbers = {f"eval/{name}": value for name, value in values.items()}
            self.events.emit("run_end", step=self.state.step, reason=reason, **numbers)
            self._ended = True
        return reason

    def evaluate(self, data: Dataset | MapStyle | None = None) -> dict[str, float]:
        """Loss and metrics on ``data`` (default: the held-out set), with the averaged weights where ``ema_decay`` is set.

        On the held-out set it also decides about early stopping. All ranks must call it.
        """
        return self._open_loop("evaluate() of", "run.evaluate(data)").runner.evaluator.run(
            read_eval_source(data, self._inputs.input.collate_fn)
        )

    @property
    def best(self) -> Path | None:
        """The committed checkpoint with the lowest held-out loss, among those of steps that were evaluated; None without one.

        ``Trainer(…, resume=run.best)`` continues from it; the command line's ``--best`` evaluates and exports it.
        """
        return next((path for _, _, path in scored_checkpoints(self.run_dir / CHECKPOINTS_FOLDER)), None)

    def averaged_weights(self) -> AbstractContextManager[Any]:
        """A context in which the model has the weights that evaluation and export use."""
        if not hasattr(self, "_loop"):
            self._open_loop("averaged_weights() of", "with run.averaged_weights(): …")
        return self.state.averaged_weights()

    def save(self, *, wait: bool = False) -> None:
        """Save the state of the last finished step, in the background unless ``wait``; a step is saved once."""
        self._open_loop("save() of", "run.fit(); run.save()").save(wait=wait)

    def tap(self, *patterns: str, every: int = 100) -> None:
        """Each ``every`` steps, write a ``tap`` event of the modules that match ``patterns``, such as ``blocks.*``, and of their
        parameters (``train.taps``). All ranks call it, before or between steps. Raises ConfigError for a pattern without a match.
        """
        loop = self._open_loop("tap() of", "run.tap('blocks.*', every=100)")
        loop.runner.train_step.taps.add(patterns, every)

    def _open_loop(self, call: str, example: str) -> SyncLoop | AsyncLoop:
        """The loop of an entered trainer. Raises ConfigError before it is entered and after it is left."""
        if not self._is_open:
            raise ConfigError(
                given=f"{call} a Trainer that {'was left' if hasattr(self, '_loop') else 'was not entered'}",
                rule="it works inside of a with statement, which opens and closes its files, workers and connections",
                consequence="nothing was done",
                nearest=f"with trainer as run: {example}",
            )
        return self._loop

    def export(
        self, folder: str | Path, *, checkpoint: str | Path | None = None, tokenizer: str | Path | None = None
    ) -> Path:
        """Write the whole model as safetensors in the Hugging Face layout (``unisono.interop.export``); returns the folder.

        Values are those that evaluation uses. All ranks call it, rank 0 writes. A model of transformers is written with its own
        configuration; ``tokenizer`` is its folder, or a tokenizer.json. A model that the plan shards is saved first, and read
        from that checkpoint a tensor at a time. After the trainer was left, the other ranks do not wait for rank 0.

        Args:
            folder: A new folder, or that of an earlier export.
            checkpoint: Folder of a checkpoint of this run, such as ``run.best``. Default: the model as it is.

        Raises:
            CheckpointError: The folder or the checkpoint cannot be used.
        """
        if not hasattr(self, "_loop"):
            self._open_loop("export() of", "run.fit(); run.export(folder)")
        path = None if checkpoint is None else Path(checkpoint)
        if path is None and self.plan.is_model_sharded:
            if self._is_open:  # leaving it saved the last step
                self.save(wait=True)
            path = self.run_dir / CHECKPOINTS_FOLDER / step_name(self.state.step)
        if self.world.job.rank == 0:
            with self.averaged_weights() if path is None else nullcontext(), without_projections(self._unsharded):
                export_model(
                    self._unsharded,
                    Path(folder),
                    checkpoint=path,
                    max_length=sequence_length(self.data),
                    tokenizer=None if tokenizer is None else Path(tokenizer),
                )
        self.world.barrier()
        return Path(folder)

    def log(self, name: str, value: Any) -> None:
        """Record a number of your own at the last finished step: event log, trackers and report show it under ``name``.

        Each rank has a log; trackers and report show rank 0's, so reduce a value over ranks before. Reading a tensor waits
        for the device. Raises ConfigError for a name of the run's own numbers (``train/…``, ``eval/…``, ``step``), or no number.
        """
        self._open_loop("log() of", "run.log('own/value', 1.0)")
        log_value(self.events, self.state.step, name, value)

    def log_text(self, name: str, text: str) -> None:
        """Record a text of your own, such as a generated sample, at the last finished step, as a file in ``run_dir/media``.

        Trackers show rank 0's, all but ``csv``. Raises ConfigError for a name that ``log`` refuses, or above 1 MiB.
        """
        self._open_loop("log_text() of", "run.log_text('own/sample', text)")
        log_text(self.events, self.run_dir, self.state.step, name, text)

    def log_image(self, name: str, image: Any) -> None:
        """Record a picture of your own at the last finished step, as a PNG file in ``run_dir/media``.

        Trackers show rank 0's, all but ``csv``. ``image`` is a uint8 array or tensor [H, W, 3], or [H, W] for gray. Raises
        ConfigError for another one, or a name that ``log`` refuses.
        """
        self._open_loop("log_image() of", "run.log_image('own/picture', pixels)")
        log_image(self.events, self.run_dir, self.state.step, name, image)
