"""Folders that ``Dataset.save_to_disk`` of Hugging Face's datasets wrote: Arrow streams and two JSON files."""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from unisono.data.convert.formats.table import Row
from unisono.errors import DataError, missing_extra
from unisono.sanitize import listed, shorten
from unisono.storage.files import is_inside, require_regular
from unisono.storage.limits import MAX_VALUES_PER_BYTE, SMALL_FILE_ROWS, LimitError, check_count, read_json

STATE: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"
_INFO: Final = "dataset_info.json"
_SLICE_VALUES: Final = 1 << 20
_SLICE_BYTES: Final = 16 << 20
_LISTS: Final = ("List", "LargeList", "Sequence")  # Sequence before datasets 4


class _Splits(msgspec.Struct):
    splits: list[str] = []


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files", default_factory=list[_DataFile])
    indices: list[Any] | None = msgspec.field(name="_indices_files", default=None)


class _Info(msgspec.Struct):
    features: dict[str, Any] | None = None


_Content = TypeVar("_Content", _Splits, _State, _Info)


def is_arrow_folder(folder: Path) -> bool:
    """Whether the folder has a data set of Hugging Face, or several splits."""
    return os.path.isfile(folder / STATE) or os.path.isfile(folder / _SPLITS)


def arrow_files(folder: Path) -> list[Path]:
    """The Arrow files of the folder in order.

    Raises DataError for a folder of splits, of chosen rows, without its files, or with a link that leads out of it.
    """
    if not (folder / STATE).exists():
        splits = _read(folder, _SPLITS, _Splits).splits
        raise _unreadable(
            f"{folder}, which has the splits {listed(splits)}", f"{folder / shorten((splits or ['train'])[0])}"
        )
    state = _read(folder, STATE, _State)
    if state.indices:
        raise _unreadable(
            f"{folder}, whose rows are chosen by indices", "dataset.flatten_indices() before save_to_disk"
        )
    files = [folder / Path(entry.filename).name for entry in state.files]
    try:
        absent = [file for file in files if not file.is_file()]
    except (OSError, ValueError) as error:  # no name that a file can have
        raise _unreadable(
            f"{folder}, whose {STATE} names files that cannot be: {error}"[:500], "the whole folder"
        ) from error
    if absent or not files:
        raise _unreadable(f"{folder} without {shorten(absent[0].name) if absent else 'data files'}", "the whole folder")
    for file in files:
        _require_inside(folder, file)
    return files


def arrow_classes(folder: Path) -> dict[str, tuple[str, ...]]:
    """Names of the classes of each column that is a ``ClassLabel`` or a list of them."""
    features = _read(folder, _INFO, _Info).features or {} if (folder / _INFO).exists() else {}
    classes = {str(name): _class_names(feature) for name, feature in features.items()}
    return {name: names for name, names in classes.items() if names}


def _class_names(feature: Any) -> tuple[str, ...]:
    while isinstance(feature, list) and feature:  # before datasets 4 also written for a list
        feature = cast("list[Any]", feature)[0]
    if not isinstance(feature, dict):
        return ()
    fields = cast("dict[str, Any]", feature)
    if fields.get("_type") == "ClassLabel":
        names = fields.get("names")
        return tuple(map(str, cast("list[Any]", names))) if isinstance(names, list) else ()
    return _class_names(fields.get("feature")) if fields.get("_type") in _LISTS else ()


def arrow_rows(files: list[Path]) -> Iterator[Row]:
    """The rows of the files; an image or sound is its encoded bytes.

    Raises DataError for a damaged file, and for what ``save_to_disk`` does not write: compressed data, and types of which a few
    bytes are many values.
    """
    try:
        pa: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise missing_extra("parquet", "pyarrow", f"the Arrow file {files[0]}") from error
    for file in files:
        try:
            require_regular(file)
            with pa.memory_map(str(file)) as source:
                for batch in _batches(pa, source):
                    for row in _rows(pa, batch):
                        yield {name: _encoded(value, file) for name, value in row.items()}
        except (pa.ArrowException, OSError, ValueError, OverflowError, struct.error) as error:
            raise _unreadable(f"{file}: {error}", "a whole file, as save_to_disk wrote it") from error


def _batches(pa: Any, source: Any) -> Iterator[Any]:
    """The record batches of a stream (Arrow's IPC format), valid in every byte. Raises ValueError for what is refused."""
    messages = pa.ipc.MessageReader.open_stream(source)
    schema = pa.ipc.read_schema(_message(messages, "schema"))
    check_count(len(schema))
    if len(set(schema.names)) != len(schema):
        raise ValueError("two columns have one name")
    for field in schema:
        _check_type(pa, field.type)
    while (message := _message(messages, "record batch")) is not None:
        if _is_compressed(memoryview(message.metadata)):
            raise ValueError("its data are compressed")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        most = SMALL_FILE_ROWS + MAX_VALUES_PER_BYTE * message.body.size
        if sum(_num_values(pa, column) for column in batch.columns) > most or batch.num_rows > most:
            raise LimitError(f"more than {most:,} values in {message.body.size:,} bytes")
        yield batch


def _message(messages: Any, kind: str) -> Any:
    """The next message, None at the end. Raises ValueError for one of another kind, which pyarrow would read as this one."""
    try:
        message = messages.read_next_message()
    except StopIteration:
        if kind == "schema":
            raise ValueError("it has no schema") from None
        return None
    if message.type != kind:
        raise ValueError(f"a message of type {message.type} in place of a {kind}")
    return message


def _check_type(pa: Any, kind: Any) -> None:
    """Raise ValueError for a type whose values share bytes, so that few of them can be without end."""
    tests = ("dictionary", "run_end_encoded", "union", "list_view", "large_list_view", "string_view", "binary_view")
    if any(getattr(pa.types, f"is_{test}")(kind) for test in tests):
        raise ValueError(f"a column of type {kind}")
    if isinstance(kind, pa.BaseExtensionType):
        _check_type(pa, kind.storage_type)
    for child in range(kind.num_fields):
        _check_type(pa, kind.field(child).type)


def _num_values(pa: Any, array: Any) -> int:
    """Values of an array and of those inside it."""
    if isinstance(array, pa.ExtensionArray):
        return _num_values(pa, array.storage)
    if isinstance(array, pa.StructArray):
        return len(array) + sum(_num_values(pa, array.field(child)) for child in range(array.type.num_fields))
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):  # a map is a list too
        return len(array) + _num_values(pa, array.values)
    return len(array)


def _rows(pa: Any, batch: Any) -> Iterator[Row]:
    """The rows of a batch, converted a few at a time."""
    values = sum(_num_values(pa, column) for column in batch.columns)
    share = max(values / _SLICE_VALUES, batch.nbytes / _SLICE_BYTES, 1)
    step = max(1, int(batch.num_rows / share))
    for begin in range(0, batch.num_rows, step):
        yield from batch.slice(begin, step).to_pylist()


def _is_compressed(message: memoryview) -> bool:
    """Whether a record batch's metadata (flatbuffers, checked by pyarrow) has ``RecordBatch.compression`` (its field 3)."""
    root = struct.unpack_from("<I", message)[0]
    header = _field(message, root, 2)
    return header != 0 and _field(message, header + struct.unpack_from("<I", message, header)[0], 3) != 0


def _field(buffer: memoryview, table: int, number: int) -> int:
    """The place of a field of a flatbuffers table; 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, vtable)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + at)[0] if at + 2 <= size else 0
    return table + offset if offset else 0


def _encoded(value: Any, file: Path) -> Any:
    if isinstance(value, dict) and cast("dict[str, Any]", value).keys() == {"bytes", "path"}:
        content: bytes | None = cast("dict[str, Any]", value)["bytes"]
        if content is None:
            raise _unreadable(f"{file}, whose images are in other files", "embed them: dataset.map(…) and save_to_disk")
        return content
    return value


def _require_inside(folder: Path, file: Path) -> None:
    if not is_inside(folder, file):
        raise DataError(
            given=f"{file}, a link to {os.path.realpath(file)}",
            rule=f"the files of a data set lie in its folder, {folder}, links followed",
            consequence="nothing was opened",
            nearest="a copy with the files in place of the links ('cp -rL FOLDER COPY'), or remove the link",
        )


def _read(folder: Path, name: str, kind: type[_Content]) -> _Content:
    path = folder / name
    _require_inside(folder, path)
    try:
        return read_json(path, msgspec.json.Decoder(kind).decode)
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
