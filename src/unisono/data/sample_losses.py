"""Losses of single samples in a file, from models that did not train on them.

The tensors of the file, in the safetensors format; samples are numbered in the order of the data set's files and rows, from 0,
those of a folder of images in the order of the folders and names of these:

    sample         int64   [samples]           their numbers, ascending
    loss           float64 [samples]           mean loss of the sample; NaN of one in which nothing counts
    fold           int64   [samples]           the fold that it is in
    target         int64   [samples]           number of the class that it has; -1 of a task without classes
    probabilities  float32 [samples, classes]  what the model gives each class; no columns of a task without classes

All of a data set are in memory while a file is written: 4 bytes for each sample and class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from unisono.data.convert.pack.image_listing import list_images
from unisono.data.sources.arrow_folder import is_arrow_folder
from unisono.errors import DataError
from unisono.storage.files import write_atomically

VERSION: Final = 1
LOSSES_FILE: Final = "losses.safetensors"  # in a folder of unisono tune folds
_ABOUT: Final = "unisono_losses"
_KINDS: Final = {"sample": "i", "loss": "f", "fold": "i", "target": "i", "probabilities": "f"}


class SampleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of samples, or a folder of images, as it was when they were evaluated.

    Attributes:
        path: Absolute.
        size: In bytes; of a folder that of its images.
        mtime_ns: Time of its last change; of a folder that of the image that was changed last.
        listing: Of a folder of images a hash of their names, sizes and times of change, in the order of the samples; else empty.
    """

    path: str
    size: int
    mtime_ns: int
    listing: str = ""


class LossesOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The samples that losses are of.

    Attributes:
        version: Of the format.
        num_samples: Number of samples in all files.
        target: Column of the labels; empty if the task has none.
        classes: Names of the classes in the order of their numbers; empty if the task has none.
        files: In the order in which samples are numbered.
    """

    version: int
    num_samples: int
    target: str
    classes: list[str]
    files: list[SampleFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLosses:
    """Losses of samples; the arrays are those of the module's description.

    Attributes:
        about: The samples that they are of.
        sample: Their numbers.
        loss: Their losses.
        fold: Their folds.
        target: Their classes.
        probabilities: Of each class.
    """

    about: LossesOf
    sample: NDArray[np.int64]
    loss: NDArray[np.float64]
    fold: NDArray[np.int64]
    target: NDArray[np.int64]
    probabilities: NDArray[np.float32]

    def write(self, path: Path) -> None:
        """Write them to ``path``, atomically."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _KINDS}
        write_atomically(path, save(arrays, {_ABOUT: msgspec.json.encode(self.about).decode()}))


def describe_files(paths: Sequence[str | Path]) -> list[SampleFile]:
    """Files, and folders of images, as they are now.

    Raises:
        DataError: A folder has no images.
        OSError: A file is not there.
    """
    found: list[SampleFile] = []
    for path in (Path(os.path.abspath(path)) for path in paths):
        if path.is_dir() and not is_arrow_folder(path):
            found.append(_describe_folder(path, images_in(path)))
        else:
            status = path.stat()
            found.append(SampleFile(path=str(path), size=status.st_size, mtime_ns=status.st_mtime_ns))
    return found


def images_in(folder: Path) -> list[SampleFile]:
    """The images of a folder in the order in which a run numbers its samples.

    Raises:
        DataError: It has no images.
    """
    listing = list_images(folder)
    return [
        SampleFile(path=str(listing.root / image.name), size=image.stamp[0], mtime_ns=image.stamp[1])
        for image in listing.samples
    ]


def files_with_samples(about: LossesOf) -> list[SampleFile]:
    """The files in the order of their samples; of a folder of images each of these.

    Raises:
        DataError: A folder of images is not there, or has changed.
    """
    files: list[SampleFile] = []
    for file in about.files:
        if not file.listing:
            files.append(file)
            continue
        images = images_in(Path(file.path)) if os.path.isdir(file.path) else []
        if _describe_folder(Path(file.path), images) != file:
            raise DataError(
                given=f"losses of the images in {file.path}, which have changed since, or are not there",
                rule="losses belong to the files that they are of, as these were",
                consequence="nothing was written",
                nearest="the files as they were; or the cross-validation again: unisono tune folds CONFIG --sample-losses",
            )
        files += images
    return files


def _describe_folder(folder: Path, images: Sequence[SampleFile]) -> SampleFile:
    listing = xxhash.xxh3_128()
    for image in images:
        listing.update(f"{image.path.removeprefix(str(folder))}\0{image.size} {image.mtime_ns}\n".encode())
    return SampleFile(
        path=str(folder),
        size=sum(image.size for image in images),
        mtime_ns=max((image.mtime_ns for image in images), default=0),
        listing=listing.hexdigest(),
    )


def read_losses(path: Path) -> SampleLosses:
    """Read a file of losses.

    Raises:
        DataError: It is not there, is damaged, or is of another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = msgspec.json.decode((file.metadata() or {}).get(_ABOUT, ""), type=LossesOf)
            arrays: dict[str, Any] = {name: file.get_tensor(name) for name in _KINDS}
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise _refused(f"{path}: {error}") from error
    sample, samples = arrays["sample"], arrays["sample"].shape
    fits = (
        all(arrays[name].dtype.kind == kind for name, kind in _KINDS.items())
        and len(samples) == 1
        and all(arrays[name].shape == samples for name in ("loss", "fold", "target"))
        and arrays["probabilities"].shape == (*samples, len(about.classes))
    )
    if not fits or about.version != VERSION:
        raise _refused(f"{path}, of version {about.version}, whose arrays are {_shapes(arrays)}")
    if (sample[1:] <= sample[:-1]).any() or (samples[0] and not 0 <= sample[0] <= sample[-1] < about.num_samples):
        raise _refused(f"{path}, whose samples are not in order, or are not among {about.num_samples}")
    if about.classes and not ((arrays["target"] >= 0) & (arrays["target"] < len(about.classes))).all():
        raise _refused(f"{path}, with targets that are none of its {len(about.classes)} classes")
    return SampleLosses(about=about, **arrays)


def merge_losses(folds: Sequence[SampleLosses]) -> SampleLosses:
    """The losses of the folds of one data set together.

    Raises:
        DataError: They are of different data or classes, or have a sample in common.
    """
    first, *others = folds
    if any(fold.about != first.about for fold in others):
        raise DataError(
            given="losses of folds whose files or classes differ",
            rule="the folds of a cross-validation are of one data set",
            consequence="they were not put together",
            nearest="the cross-validation again in a new folder, while the data stay as they are",
        )
    arrays = {name: np.concatenate([getattr(fold, name) for fold in folds]) for name in _KINDS}
    order = np.argsort(arrays["sample"], kind="stable")
    arrays = {name: array[order] for name, array in arrays.items()}
    twice = np.flatnonzero(arrays["sample"][1:] == arrays["sample"][:-1])
    if len(twice):
        raise DataError(
            given=f"losses of sample {int(arrays['sample'][twice[0]])} in two folds",
            rule="each sample is held out once",
            consequence="they were not put together",
            nearest="the cross-validation again in a new folder",
        )
    return SampleLosses(about=first.about, **arrays)


def _shapes(arrays: dict[str, Any]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items())


def _refused(given: str) -> DataError:
    return DataError(
        given=given,
        rule="losses of samples are in a file that unisono eval or unisono tune folds wrote with --sample-losses",
        consequence="no losses were read",
        nearest="unisono tune folds CONFIG --sample-losses --out FOLDER",
    )
