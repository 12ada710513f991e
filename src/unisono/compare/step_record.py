"""The record of a replayed step: a summary of every tensor that one rank has made in it, in order, and the values of many.

``step-N-rank-R.json`` has the entries, ``step-N-rank-R.bin`` the values. A run is asked for records by a file that the variable
``UNISONO_REPLAY`` names (``ReplayRequest``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.storage.files import open_regular, os_reason, write_atomically

REPLAY_VARIABLE: Final = "UNISONO_REPLAY"
# phases of a step, in order
DATA, START, RANDOM = "data", "weights at start", "random state"
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
SYNC, OPTIMIZER = "gradient synchronisation", "optimizer"
PHASES: Final = (DATA, START, RANDOM, FORWARD, LOSS, BACKWARD, SYNC, OPTIMIZER)


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a replay, which ``Trainer`` reads.

    Attributes:
        run_dir: Folder of the replay, in place of that of the run.
        resume: The checkpoint to start from; empty for step 0.
        record_dir: Where the records go.
        record_steps: Numbers of the steps to record, from 1.
        last_step: The step after which the process ends.
    """

    run_dir: str
    resume: str
    record_dir: str
    record_steps: tuple[int, ...]
    last_step: int


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a rank's part of a global tensor: of each its bounds in the part, and its offset in the global tensor."""

    global_shape: tuple[int, ...]
    blocks: tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a step.

    Attributes:
        kind: ``input``, ``state``, ``operator``, ``output`` (of a module), ``loss``, ``gradient`` or ``updated``.
        phase: One of ``PHASES``.
        micro_batch: Number of the micro-batch, from 0.
        layer: Name of the innermost module; empty outside of all modules.
        call: Number of earlier calls of the module with this micro-batch.
        operator: The operator that made it, such as ``aten.mm.default``; empty for other kinds.
        tensor: Name of the entry of the batch, of the parameter or state; empty for a result without a name.
        place: Number of earlier results of the same operator call.
        arguments: Arguments of the operator that are no tensors.
        shape: Its shape on this rank.
        dtype: Such as ``float32``.
        digest: ``tensor_digest`` of its bits.
        norm: Its Euclidean norm.
        max_abs: Largest magnitude of an element.
        begin: Where its values begin in the file of values; -1 where they are not there.
        stored: The numpy dtype of these values.
        shard: Its place in the global tensor; None where it is whole.
    """

    kind: str
    phase: str
    micro_batch: int
    layer: str
    call: int
    operator: str
    tensor: str
    place: int
    arguments: str
    shape: tuple[int, ...]
    dtype: str
    digest: int
    norm: float | None
    max_abs: float | None
    begin: int = -1
    stored: str = ""
    shard: Shard | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The key by which the entries of two records are aligned."""
        return (
            self.kind,
            self.phase,
            self.micro_batch,
            self.layer,
            self.call,
            self.operator,
            self.tensor,
            self.place,
        )

    @property
    def bits(self) -> tuple[Any, ...]:
        """Digest, shape and dtype: equal for tensors of the same bits."""
        return self.digest, self.shape, self.dtype


class StepRecord(msgspec.Struct, kw_only=True):
    """One step of one rank.

    Attributes:
        step: Number of the step, from 1.
        rank: The rank.
        loss: Loss of the step.
        grad_norm: Its gradient norm.
        sample_ids: Samples of this rank, in order.
        rows: Samples in each micro-batch.
        layout: Sizes of the mesh, batch and precision, and this rank's place.
        modules: Description of each module by its name.
        code: Texts of the run's code by setting (``train.code_record``).
        hyperparameters: Of the optimizer, and what else the update reads, by name.
        entries: The tensors, in order.
    """

    step: int
    rank: int
    loss: float | None = None
    grad_norm: float | None = None
    sample_ids: list[int] = []
    rows: list[int] = []
    layout: dict[str, int | str | bool] = {}
    modules: dict[str, str] = {}
    code: dict[str, dict[str, str]] = {}
    hyperparameters: dict[str, str] = {}
    entries: list[Entry] = []


class Replay(msgspec.Struct, kw_only=True):
    """The result of a replay on one rank: loss, gradient norm and digest of the state after each step, by step, from 1."""

    losses: dict[int, float | None] = {}
    grad_norms: dict[int, float | None] = {}
    states: dict[int, int] = {}


def write_record(folder: Path, record: StepRecord) -> None:
    """Write a record; its values are in the file already."""
    write_atomically(_path(folder, record.step, record.rank, "json"), msgspec.json.encode(record))


def values_path(folder: Path, step: int, rank: int) -> Path:
    """The file of values of a step of a rank."""
    return _path(folder, step, rank, "bin")


def read_records(folder: Path, step: int) -> list[StepRecord]:
    """The records of a step by rank. Raises DataError for one that is damaged."""
    paths = sorted(folder.glob(f"step-{step}-rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [_decode(path, StepRecord) for path in paths]


def write_replay(folder: Path, rank: int, replay: Replay) -> None:
    """Write the result of a replay on one rank."""
    write_atomically(folder / f"replay-rank-{rank}.json", msgspec.json.encode(replay))


def read_replays(folder: Path) -> list[Replay]:
    """The results of a replay by rank. Raises DataError for a file that is damaged."""
    paths = sorted(folder.glob("replay-rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [_decode(path, Replay) for path in paths]


def read_values(folder: Path, record: StepRecord, entry: Entry) -> NDArray[Any] | None:
    """The values of an entry; None where they were not kept."""
    if entry.begin < 0:
        return None
    dtype = np.dtype(entry.stored)
    count = int(np.prod(entry.shape, dtype=np.int64))
    with open_regular(values_path(folder, record.step, record.rank)) as file:
        file.seek(entry.begin)
        data = file.read(count * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(entry.shape) if len(data) == count * dtype.itemsize else None


def request_of(environ: Mapping[str, str]) -> ReplayRequest | None:
    """The replay that this process is started for; None for none. Raises DataError."""
    path = environ.get(REPLAY_VARIABLE)
    return _decode(Path(path), ReplayRequest) if path else None


def _path(folder: Path, step: int, rank: int, ending: str) -> Path:
    return folder / f"step-{step}-rank-{rank}.{ending}"


def _decode(path: Path, kind: Any) -> Any:
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            given=f"{path}: {os_reason(error) if isinstance(error, OSError) else error}",
            rule="a replay leaves records of its steps",
            consequence="nothing was compared",
            nearest="the same command again, and space on the disk of temporary files",
        ) from None
