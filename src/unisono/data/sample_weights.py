"""Sampling weights of training data: from the sizes of classes, and stored in a folder of their own.

A folder of weights has ``weights/NAME.npy`` for each file of the data, float64 [rows], and ``weights/files.json``, as
``data.per_file_arrays`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.per_file_arrays import FILES_JSON, find_entry, read_array, write_array
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.directory import make_folder
from unisono.storage.files import look_up, write_atomically
from unisono.storage.limits import LimitError, read_json

WEIGHTS_FOLDER: Final = "weights"
_COMMAND: Final = "unisono data balance"


class WeightedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, or a folder that is read as one data set, whose rows have weights.

    Attributes:
        name: Its path relative to the folder that all files lie in.
        stamp: Changes when the file does; see ``file_stamp``.
    """

    name: str
    stamp: str


def inverse_frequency(counts: NDArray[np.int64], power: float = 1.0) -> NDArray[np.float64]:
    """``counts`` to the power of ``-power``, float64 [classes]: 1 gives all classes the same share, 0 leaves shares as they are.

    Args:
        counts: Rows of each class, above 0, int64 [classes].
        power: From 0.

    Source:
        Powers between: Mahajan et al. 2018 (square root); Conneau et al. 2020 (``1 - power`` is their alpha).
    """
    return counts.astype(np.float64) ** -power


def reads_per_epoch(
    counts: NDArray[np.int64], num_reads: int, *, power: float = 1.0, max_repeats: int = 0
) -> NDArray[np.float64]:
    """How often a row of each class is read in an epoch, on average, float64 [classes]; in proportion to ``inverse_frequency``.

    Classes whose rows would be read more often than ``max_repeats`` stay there, and the others share the rest.

    Args:
        counts: Rows of each class, above 0, int64 [classes].
        num_reads: Rows read in an epoch; with ``max_repeats`` at most ``max_repeats`` times the sum of ``counts``.
        power: See ``inverse_frequency``.
        max_repeats: 0 = no limit.
    """
    weights = inverse_frequency(counts, power)
    at_limit = np.zeros(len(counts), np.bool_)
    while not at_limit.all():
        rest = num_reads - max_repeats * int(counts[at_limit].sum())
        reads = weights * (rest / float((counts * weights)[~at_limit].sum()))
        above = ~at_limit & (reads > max_repeats)
        if not max_repeats or not above.any():
            return np.where(at_limit, max_repeats, reads)
        at_limit |= above
    return np.full(len(counts), float(max_repeats))


def write_sample_weights(folder: Path, files: Sequence[WeightedFile], weights: Iterable[NDArray[np.float64]]) -> None:
    """Write the weights of the rows of each file into ``folder``, below ``weights``."""
    for file, values in zip(files, weights, strict=True):
        place = folder / WEIGHTS_FOLDER / f"{file.name}.npy"
        make_folder(place.parent)
        write_array(place, values.astype(np.float64))
    write_atomically(folder / WEIGHTS_FOLDER / FILES_JSON, msgspec.json.encode(files))


def read_sample_weights(
    address: str, files: Sequence[Sequence[str | Path]], sizes: Sequence[int]
) -> list[NDArray[np.float64]]:
    """The weights of the samples of several data sets, float64 [samples] each.

    Args:
        address: A folder of weights, or an ``.npy`` file with those of all samples, one data set after the other.
        files: The files of each data set, in the order of their samples.
        sizes: Number of samples of each data set.

    Raises:
        DataError: There are no weights of a file, the file has changed since, their number is not that of the samples, a weight
            is negative or not finite, or all weights of a data set are 0.
    """
    path, fault = look_up(address)
    if fault or not path.exists():
        raise _refused(f"{quoted(address)}: {fault or 'it does not exist'}", f"a folder of {_COMMAND}, or an .npy file")
    if not path.is_dir():
        values = _read_array(path)
        _check_size(address, len(values), sum(sizes))
        by_set = list(np.split(values, np.cumsum(sizes)[:-1]))
    else:
        known, by_set = _read_files(path), []
        for of_set, size in zip(files, sizes, strict=True):
            places = [path / WEIGHTS_FOLDER / f"{_entry(path, known, file).name}.npy" for file in of_set]
            values = np.concatenate([_read_array(place) for place in places])
            _check_size(f"{address} for {listed(map(str, of_set))}", len(values), size)
            by_set.append(values)
    for of_set, values in zip(files, by_set, strict=True):
        if not values.any():
            raise _refused(f"{address} for {listed(map(str, of_set))}: all weights are 0", "some that are above 0")
    return by_set


def _entry(folder: Path, known: Mapping[str, WeightedFile], file: str | Path) -> WeightedFile:
    """What the folder has of a file: the entry with its name and stamp."""
    return find_entry(
        known,
        file,
        unknown=lambda: _refused(
            f"{file}, of which {folder} has no weights", f"{_COMMAND} with all files of data.train"
        ),
        changed=lambda: _refused(
            f"{file}, which has changed since {folder} was written", f"{_COMMAND} again, with another folder"
        ),
    )


def _read_files(folder: Path) -> dict[str, WeightedFile]:
    path = folder / WEIGHTS_FOLDER / FILES_JSON
    try:
        entries = read_json(path, msgspec.json.Decoder(list[WeightedFile]).decode)
    except (LimitError, ValueError, OSError) as error:
        raise _refused(
            f"{folder}, where weights/{FILES_JSON} cannot be read: {error}", f"a folder of {_COMMAND}"
        ) from error
    return {entry.name: entry for entry in entries}


def _read_array(path: Path) -> NDArray[np.float64]:
    try:
        values = read_array(path, "iuf").astype(np.float64)
    except (ValueError, OSError) as error:
        raise _refused(
            f"{path}: {error}", "an array of numbers, one for each sample, as numpy.save writes it"
        ) from error
    if not np.isfinite(values).all() or values.min(initial=0) < 0:
        raise _refused(
            f"{path} with weights from {values.min()} to {values.max()}", "weights from 0; 0 leaves a sample out"
        )
    return values


def _check_size(given: str, found: int, size: int) -> None:
    if found != size:
        raise _refused(f"{given}: {found:,} weights for {size:,} samples", f"{_COMMAND} with the files of data.train")


def _refused(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="data.sample_weights has a weight for each sample of data.train, finite and >= 0",
        consequence="it is not known how often a sample is read",
        nearest=nearest,
    )
