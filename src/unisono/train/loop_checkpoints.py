"""Checkpoints of a loop of your own: of anything with ``state_dict`` and ``load_state_dict``, and of the random generators.

Tensors go into the files of a checkpoint by path, ``part/key/key``; all else is JSON in its manifest. Nothing is pickled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from unisono.checkpoint import Checkpointer, CheckpointOptions, CheckpointReader, find_latest, open_checkpoint
from unisono.dist import World
from unisono.errors import CheckpointError, Problem
from unisono.sanitize import printable, redact_text
from unisono.train.options import folder_problem, is_due
from unisono.train.state import generator_states, restore_generators


class Stateful(Protocol):
    """A module, an optimizer, a scheduler of torch, a ``GuardedOptimizer``, a ``Loader``, or anything of your own."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class LoopCheckpoints:
    """Saves ``parts`` while the loop goes on, and continues from the newest good checkpoint. A collective throughout.

    A checkpoint commits as a whole or not at all, is verified before it is loaded, and also has each rank's generators of torch,
    Python and numpy. So a loop that was killed makes the same steps again, on as many ranks bit for bit.

    Example::

        with LoopCheckpoints("runs/gan", {"update": update, "scheduler": scheduler}, world) as checkpoints:
            for step in range(checkpoints.resume(), 1000):
                ...
                checkpoints.after_step(step + 1)

    Leaving it waits for the save that was begun.

    Args:
        folder: Folder of the checkpoints, on a file system that all ranks share.
        parts: What has state that is equal on all ranks, by name. States are dicts, lists, tensors, numbers, strings and None.
        world: The ranks.
        options: When checkpoints are written and how many are kept. Default: ``CheckpointOptions()``.
        seed: Seeds the random generators of ranks that have none in the checkpoint. Any integer.
        emit: Called as ``emit(kind, **fields)`` for each event: checkpoint_saved, checkpoint_failed, checkpoint_quarantined,
            and with ``upload_to`` checkpoint_uploaded, checkpoint_upload_failed, checkpoint_downloaded.
            Default: rank 0 prints failed saves, failed uploads and quarantined checkpoints.

    Raises:
        CheckpointError: The folder or a part cannot be used; later, a state cannot be saved or does not fit, or
            ``options.max_failures`` saves in a row have failed.
    """

    def __init__(
        self,
        folder: str | Path,
        parts: Mapping[str, Stateful],
        world: World,
        *,
        options: CheckpointOptions | None = None,
        seed: int = 0,
        emit: Callable[..., None] | None = None,
    ) -> None:
        if problem := folder_problem(folder, "folder"):
            raise CheckpointError(problem)
        _require_states(parts)
        # absolute: the loop may change the current folder
        self._given, self._root = str(folder), Path(folder).absolute()
        self._parts, self._world, self._seed = dict(parts), world, seed
        self._options = options or CheckpointOptions()
        self._emit = emit or (_print_failures if world.rank == 0 else _print_nothing)
        self._saved_step = self._resumed_step = -1
        self._checkpointer = Checkpointer(
            self._root, world=world, options=self._options, attempt=world.job.restart_count + 1, emit=self._emit
        )

    def __repr__(self) -> str:
        last = "none saved" if self._saved_step < 0 else f"last of step {self._saved_step}"
        return f"LoopCheckpoints({self._given!r}, parts {', '.join(self._parts)}, {last})"

    def resume(self) -> int:
        """Load the newest good checkpoint into the parts; returns the number of steps made, 0 if there is none."""
        self._checkpointer.fetch_newest()
        path = find_latest(self._root, self._world, emit=self._emit)
        if path is None:
            return 0
        reader = open_checkpoint(path)
        saved: dict[str, Any] = reader.meta["parts"]
        if saved.keys() != self._parts.keys():
            raise CheckpointError(
                given=f"a checkpoint of {', '.join(sorted(saved))} for {', '.join(sorted(self._parts))} ({path})",
                rule="a loop continues with the parts that it saved",
                consequence="nothing was loaded and nothing was changed",
                nearest="the same parts under the same names, or another folder",
            )
        states = {name: _decoded(state, reader) for name, state in saved.items()}
        for name, part in self._parts.items():
            try:
                part.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise CheckpointError(
                    given=f"the state of {name!r} in {path} does not fit {type(part).__name__}: {error}",
                    rule="a loop continues with parts like those that it saved: the same model, the same optimizer",
                    consequence="the loop did not begin; parts before this one have their saved state",
                    nearest="the parts as they were, or another folder for a new loop",
                ) from error
        restore_generators(reader, rank=self._world.rank, seed=self._seed, step=reader.step)
        self._saved_step = self._resumed_step = reader.step
        return reader.step

    def after_step(self, step: int) -> None:
        """Report a save that has ended, and begin one if ``options.every_steps`` has it; ``step`` is the number of steps made."""
        self._checkpointer.poll()
        if is_due(self._options.every_steps, step):
            self.save(step)

    def save(self, step: int) -> None:
        """Begin to save the parts as they are, once per step. They may change after the return."""
        if step == self._saved_step:
            return
        tensors: dict[str, Tensor] = {}
        meta = {name: _encoded(part.state_dict(), name, tensors) for name, part in self._parts.items()}
        self._saved_step = step
        self._checkpointer.save(step, tensors, generator_states(self._world.rank), {"parts": meta})

    def wait(self) -> None:
        """Return when the save that was begun is committed. Raises CheckpointError if it could not be written."""
        self._checkpointer.wait_committed(self._saved_step, resumed_step=self._resumed_step)

    def close(self) -> None:
        """Finish a save that is under way."""
        self._checkpointer.close()

    def __enter__(self) -> LoopCheckpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()


def _require_states(parts: Mapping[str, Any]) -> None:
    """Raises CheckpointError for parts that cannot be saved and loaded."""
    problems: list[Problem] = []
    for name, part in parts.items():
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(part, method, None))]
        if missing or isinstance(part, type):
            problems.append(
                Problem(
                    given=f"part {name!r} is {'the class ' + part.__name__ if isinstance(part, type) else type(part).__name__}"
                    + (f", which has no {' and no '.join(missing)}" if missing else ", not an object of it"),
                    rule="a part has state_dict() and load_state_dict(state)",
                    consequence="it could not be saved, so nothing was started",
                    nearest="a module, an optimizer, a scheduler, or an object of yours with these two methods",
                )
            )
    if problems:
        raise CheckpointError(*problems)


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, with the tensors in it moved to ``tensors`` under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        if all(isinstance(key, str | int) and not isinstance(key, bool) for key, _ in entries):
            return {"dict": [[key, _encoded(entry, f"{path}/{key}", tensors)] for key, entry in entries]}
    elif isinstance(value, list | tuple):
        entries = enumerate(cast("list[Any]", value))
        return {"list": [_encoded(entry, f"{path}/{number}", tensors) for number, entry in entries]}
    elif isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        given=f"the state {path} is of type {type(value).__name__}",
        rule="a state is made of dicts with strings or ints as keys, lists, tensors, numbers, strings and None",
        consequence="nothing was saved",
        nearest="leave it out of state_dict, or turn it into one of these",
    )


def _decoded(value: Any, reader: CheckpointReader) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = cast("dict[str, Any]", value).items()
    match kind:
        case "tensor":
            return reader.tensor(content)
        case "dict":
            return {key: _decoded(entry, reader) for key, entry in content}
        case "list":
            return [_decoded(entry, reader) for entry in content]
        case _:
            return float(content)


def _print_failures(kind: str, **fields: Any) -> None:
    if kind in ("checkpoint_failed", "checkpoint_quarantined", "checkpoint_upload_failed"):
        text = " ".join([kind, *(f"{name}={value}" for name, value in fields.items())])
        print(printable(redact_text(text)), file=sys.stderr, flush=True)


def _print_nothing(kind: str, **fields: Any) -> None: ...
