"""Decides which steps of a run are profiled, and gives the profile the sizes of the run's tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unisono.dist import World
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.parallel.memory_ledger import MemoryLedger
from unisono.plan.plan import Plan
from unisono.profile.rank_profile import profile_folder
from unisono.profile.recorder import Recording
from unisono.profile.window import ProfileRequest, ProfileWindow, take_request, write_answer
from unisono.train.state import TrainState

NEVER: Final = 1 << 62


@dataclass(kw_only=True, slots=True)
class ProfileScheduler:
    """Records windows of steps: the one of ``observe.profile_steps``, and those that a file in the run's folder requests.

    Attributes:
        due: Number of finished steps at which ``at_boundary`` has to be called; ``NEVER`` without a window.
        run_dir: Folder of the run.
        world: Ranks that step together.
        events: This rank's event log.
        timers: Timers of the training thread.
        plan: The plan of these ranks.
        ledger: What the plan predicts of this rank's memory.
        state: The state of the run.
        device: The device of this rank.
        limit_bytes: The memory there is.
    """

    run_dir: Path
    world: World
    events: EventLog
    timers: StepTimers
    plan: Plan
    ledger: MemoryLedger
    state: TrainState
    device: torch.device
    limit_bytes: int
    due: int = NEVER
    _window: ProfileWindow | None = None
    _recording: Recording | None = None
    _num_started: int = 0  # steps that are recorded, or have been
    _polled_s: float = 0.0
    _pending: ProfileRequest | None = None  # a request that rank 0 has read, and not yet announced to the others
    _later: list[ProfileWindow] = field(
        default_factory=list[ProfileWindow]
    )  # windows that wait for the end of another one
    _made_at_s: float = field(default_factory=time.time)  # profiles that are older are of earlier attempts

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded, or the profiler is warmed up: such steps take longer than others."""
        return self._recording is not None

    def plan_window(self, window: ProfileWindow | None) -> None:
        """Record the window of the configuration, if there is one; a notice where the run is past it and has no profile of it."""
        if window is None:
            return
        if window.first - 2 < self.state.step:
            step = self.state.step
            if not (profile_folder(self.run_dir, window.first) / f"rank-{self.world.job.rank}.json").is_file():
                self._tell_lost(
                    window,
                    f"the run goes on after step {step}",
                    "the step before a window warms the profiler up, and steps that are made are not made again",
                    f"observe.profile_steps={step + 10}:{step + 13}, or +10:13, which counts from where the run goes on",
                )
            return
        self._plan(window)

    def _plan(self, window: ProfileWindow) -> None:
        self._window, self.due = window, window.first - 2
        if window.request and self.world.job.rank == 0:
            with suppress(OSError):  # who asked for it waits until the time-out
                write_answer(self.run_dir, window)

    def _add_requested(self, requested: ProfileWindow) -> None:
        """Record the steps that were requested: before the window of the configuration if they end in time, else after it."""
        planned = self._window
        if planned is None:
            self._plan(requested)
        elif (
            self._recording is None
            and not planned.request
            and requested.first + requested.num_steps + 2 <= planned.first
        ):
            self._later.insert(0, planned)
            self._plan(requested)
        else:
            self._later.append(requested)

    def _plan_next(self, step: int) -> None:
        """After a window that ended with ``step``: the next one that waits. A requested one begins as soon as it can."""
        if self._later:
            window = self._later.pop(0)
            self._plan(replace(window, first=step + 3) if window.request else window)

    def at_boundary(self, step: int, finish_save: Callable[[], None]) -> None:
        """Called between steps, ``step`` of them being finished, where ``step >= due``; ``finish_save`` finishes a save that is
        under way. A collective."""
        window = self._window
        if window is None:
            self.due = NEVER
            return
        if self._recording is None:
            self._recording = self._new_recording(window)
            self._recording.prepare()
            # what a run that is killed in the window, or judged during it, tells of its slow steps
            self.events.emit(
                "profile_begin", step=step, first_step=window.first, last_step=window.first + window.num_steps - 1
            )
        elif not self._num_started:
            self._recording.begin()
            self._num_started = 1
            self._recording.start_step(step + 1)
        elif self._num_started < window.num_steps:  # under dist_async the steps of a worker are not one after the other
            self._num_started += 1
            self._recording.start_step(step + 1)
        else:
            recording = self._recording
            self._clear()
            recording.finish(finish_save)
            self._plan_next(step)
            return
        self.due = step + 1

    def _clear(self) -> None:
        self._window = self._recording = None
        self._num_started, self.due = 0, NEVER

    def close(self) -> None:
        """Give up a window that has not ended. Not a collective."""
        if self._recording is not None:
            self._recording.abandon()
        lost = [*([] if self._window is None else [self._window]), *self._later]
        self._clear()
        self._later.clear()
        for window in lost:
            self._tell_lost(
                window,
                f"the run ended after step {self.state.step}",
                "a profile is written when its last step is made",
                f"observe.profile_steps before step {self.state.step}",
            )

    def _tell_lost(self, window: ProfileWindow, how: str, why: str, fix: str) -> None:
        steps = f"steps {window.first} to {window.first + window.num_steps - 1}"
        self.events.emit(
            "notice",
            step=self.state.step,
            code="no_profile",
            what=f"{'requested steps' if window.request else steps} were not profiled: {how}",
            why=why,
            cost="there is none",
            fix=fix,
        )

    # --- requests --------------------------------------------------------------------------------------------------

    def is_requested(self, now_s: float) -> bool:
        """Whether a file in the run's folder requests a profile; only rank 0 looks for it, once a second."""
        if self.world.job.rank != 0 or now_s - self._polled_s < 1.0:
            return self._pending is not None
        self._polled_s = now_s
        if self._pending is None and self._recording is None:
            self._pending = take_request(self.run_dir)
        return self._pending is not None

    def start_requested(self) -> None:
        """Plan the window that the request names, now or after another one. A collective, entered after the same step."""
        step = self.state.step
        requested = self._pending if self.world.rank == 0 else None
        announced: dict[str, Any] | None = self.world.broadcast_json(None if requested is None else asdict(requested))
        self._pending = None
        if announced is not None:
            asked = ProfileRequest(**announced)
            self._add_requested(
                ProfileWindow(first=step + 2, num_steps=asked.num_steps, stacks=asked.stacks, request=asked.number)
            )

    # --- memory ----------------------------------------------------------------------------------------------------

    def _new_recording(self, window: ProfileWindow) -> Recording:
        mesh = self.plan.mesh
        return Recording(
            window,
            run_dir=self.run_dir,
            world=self.world,
            events=self.events,
            timers=self.timers,
            device=self.device.type,
            mesh={"dp": mesh.dp_replicate * mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep, "pp": mesh.pp},
            held=self._held,
            planned={
                "parameters": self.ledger.parameter_bytes,
                "gradients": self.ledger.gradient_bytes,
                "optimizer": 0 if self.plan.sync.kind == "dist_async" else self.ledger.state_bytes,
            },
            limit_bytes=self.limit_bytes,
            lines=self.plan.backend.compile == "off",
            made_at_s=self._made_at_s,
        )

    def _held(self) -> Mapping[str, int]:
        """Bytes of the storages of this rank's tensors by category, each storage once."""
        parameters = self.state.sharded.parameters
        seen: set[int] = set()
        gradients = (p.grad for p in parameters.values())
        return {
            "parameters": _storage_bytes(parameters.values(), seen),
            "gradients": _storage_bytes((grad for grad in gradients if grad is not None), seen),
            "optimizer": _storage_bytes(self.state.optimizer.state_tensors(parameters).values(), seen),
            "other": _storage_bytes([*self.state.model.parameters(), *self.state.model.buffers()], seen),
        }


def _storage_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of storages that are not ``seen``; of a distributed tensor, of this rank's part."""
    total = 0
    for tensor in tensors:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not isinstance(local, Tensor) or local.is_meta:  # pyright: ignore[reportUnnecessaryIsInstance]
            continue
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
