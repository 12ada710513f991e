"""Folders that ``Dataset.save_to_disk`` of Hugging Face's datasets wrote: Arrow streams and two JSON files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from unisono.data.convert.formats.table import Row
from unisono.errors import DataError, missing_extra
from unisono.storage.limits import read_json

STATE: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"
_LISTS: Final = ("List", "LargeList", "Sequence")  # Sequence before datasets 4


def is_arrow_folder(folder: Path) -> bool:
    """Whether the folder has a data set of Hugging Face, or several splits."""
    return (folder / STATE).is_file() or (folder / _SPLITS).is_file()


def arrow_files(folder: Path) -> list[Path]:
    """The Arrow files of the folder in order. Raises DataError for a folder of splits, of chosen rows, or without its files."""
    if not (folder / STATE).is_file():
        splits: list[str] = _json(folder / _SPLITS).get("splits", [])
        raise _unreadable(f"{folder}, which has the splits {', '.join(splits)}", f"{folder / (splits or ['train'])[0]}")
    state = _json(folder / STATE)
    if state.get("_indices_files"):
        raise _unreadable(
            f"{folder}, whose rows are chosen by indices", "dataset.flatten_indices() before save_to_disk"
        )
    files = [folder / Path(str(entry["filename"])).name for entry in state.get("_data_files", [])]
    absent = [file for file in files if not file.is_file()]
    if absent or not files:
        raise _unreadable(f"{folder} without {absent[0].name if absent else 'data files'}", "the whole folder")
    return files


def arrow_classes(folder: Path) -> dict[str, tuple[str, ...]]:
    """Names of the classes of each column that is a ``ClassLabel`` or a list of them."""
    path = folder / "dataset_info.json"
    features: dict[str, Any] = _json(path).get("features") or {} if path.is_file() else {}
    classes = {str(name): _class_names(feature) for name, feature in features.items()}
    return {name: names for name, names in classes.items() if names}


def _class_names(feature: Any) -> tuple[str, ...]:
    while isinstance(feature, list) and feature:  # before datasets 4 also written for a list
        feature = cast("list[Any]", feature)[0]
    if not isinstance(feature, dict):
        return ()
    fields = cast("dict[str, Any]", feature)
    if fields.get("_type") == "ClassLabel":
        return tuple(map(str, fields.get("names") or ()))
    return _class_names(fields.get("feature")) if fields.get("_type") in _LISTS else ()


def arrow_rows(files: list[Path]) -> Iterator[Row]:
    """The rows of the files; an image or sound is its encoded bytes. Raises DataError for a damaged file."""
    try:
        pa: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise missing_extra("parquet", "pyarrow", f"the Arrow file {files[0]}") from error
    for file in files:
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    for row in batch.to_pylist():
                        yield {name: _encoded(value, file) for name, value in row.items()}
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(f"{file}: {error}", "a whole file, as save_to_disk wrote it") from error


def _encoded(value: Any, file: Path) -> Any:
    if isinstance(value, dict) and cast("dict[str, Any]", value).keys() == {"bytes", "path"}:
        content: bytes | None = cast("dict[str, Any]", value)["bytes"]
        if content is None:
            raise _unreadable(f"{file}, whose images are in other files", "embed them: dataset.map(…) and save_to_disk")
        return content
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise _unreadable(
            f"{path}: {type(error).__name__}: {error}", "a whole file, as save_to_disk wrote it"
        ) from error


def _unreadable(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="a data set of Hugging Face on disk is the folder of one split, with its Arrow files",
        consequence="nothing was opened",
        nearest=nearest,
    )
