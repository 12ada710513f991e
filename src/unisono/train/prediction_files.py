"""Files of predictions, a row for each sample in order: JSON lines, Parquet, or RecordIO.

    .jsonl, .parquet  ``file`` and ``row`` of the sample, and the values of the task; ``error`` of a sample that could not be read
    .rec              image records: the header has the class number, or the numbers, as its label, and the number of the sample
                      as its id; behind it is the image, or for other samples the row as JSON. The label of a sample that could
                      not be read is NaN. Names of classes are in ``NAME.rec.classes.txt``.

A file is written completely or not at all, in memory for some thousand rows.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.data.convert.formats.parquet import write_batches
from unisono.data.convert.formats.table import encode_png
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.errors import ConfigError, missing_extra
from unisono.storage.files import new_file, write_atomically
from unisono.train.predict import Prediction
from unisono.train.predictions import OutputKind, ValueType

_GROUP_ROWS: Final = 1024
_CLASSES: Final = ".classes.txt"
_CONTROLS: Final = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}  # JSON itself escapes those below


def writer_of(path: Path) -> Callable[[Path, Iterable[Prediction], OutputKind], None]:
    """What writes predictions to a file of this name.

    Raises:
        ConfigError: No format has its suffix.
        ExtraError: The package of the format is not installed.
    """
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        raise ConfigError(
            given=f"--out {path}",
            rule=f"the ending of the file is its format: {', '.join(_WRITERS)}",
            consequence="nothing was predicted",
            nearest=f"--out {path.with_suffix('.jsonl')}",
        )
    if write is _write_parquet:
        _pyarrow()
    return write


def line_of(prediction: Prediction, kind: OutputKind) -> str:
    """The line of JSON of a prediction, without its end; one that failed has an ``error`` in place of the values."""
    line = json.dumps(_row_of(prediction, kind), ensure_ascii=False, allow_nan=False).translate(_CONTROLS)
    return line.encode("utf-8", "backslashreplace").decode()  # a lone surrogate of a path becomes JSON's escape


def _row_of(prediction: Prediction, kind: OutputKind) -> dict[str, Any]:
    row: dict[str, Any] = {"file": prediction.sample.file, "row": prediction.sample.row}
    if prediction.values is not None:
        row |= {name: prediction.values[name] for name in kind.fields}
    if prediction.problem is not None:
        row["error"] = prediction.problem.given
    return row


def _write_lines(path: Path, predictions: Iterable[Prediction], kind: OutputKind) -> None:
    with new_file(path) as file:
        for prediction in predictions:
            file.write(f"{line_of(prediction, kind)}\n".encode())


def _write_parquet(path: Path, predictions: Iterable[Prediction], kind: OutputKind) -> None:
    pa = _pyarrow()
    text, integer, real = pa.string(), pa.int64(), pa.float64()
    types: dict[ValueType, Any] = {"text": text, "int": integer, "float": real}
    types |= {"texts": pa.list_(text), "ints": pa.list_(integer), "floats": pa.list_(real)}
    types |= {"texts of each": pa.list_(pa.list_(text)), "floats of each": pa.list_(pa.list_(real))}
    fields = {"file": text, "row": integer, **{name: types[of] for name, of in kind.fields.items()}, "error": text}
    schema = pa.schema(list(fields.items()))

    def batches() -> Iterator[Any]:
        waiting = iter(predictions)
        while group := list(islice(waiting, _GROUP_ROWS)):
            rows = [_row_of(prediction, kind) for prediction in group]
            columns = [pa.array([row.get(name) for row in rows], of) for name, of in fields.items()]
            yield pa.record_batch(columns, schema=schema)

    write_batches(path, schema, batches())


def _write_records(path: Path, predictions: Iterable[Prediction], kind: OutputKind) -> None:
    with RecordWriter(path) as writer:
        for number, prediction in enumerate(predictions):
            header = ImageHeader(label=_label(prediction, kind), id=number)
            writer.write(pack_header(header, _payload(prediction, kind)))
        if kind.classes:
            names = "".join(f"{name}\n" for name in kind.classes)
            write_atomically(path.with_name(path.name + _CLASSES), names.encode())


def _label(prediction: Prediction, kind: OutputKind) -> Any:
    if prediction.values is None:
        return math.nan
    label = prediction.values[kind.label]
    if isinstance(label, list):
        return np.array([math.nan if number is None else number for number in label], np.float32)
    return math.nan if label is None else float(label)


def _payload(prediction: Prediction, kind: OutputKind) -> bytes:
    if prediction.values is None:
        return line_of(prediction, kind).encode()
    image = prediction.sample.read().get("image")
    if image is None:
        return line_of(prediction, kind).encode()
    pixels = np.asarray(image)
    return pixels.tobytes() if pixels.ndim == 1 else encode_png(pixels)


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise missing_extra("parquet", "pyarrow", "a .parquet file") from error


_WRITERS: Final[dict[str, Callable[[Path, Iterable[Prediction], OutputKind], None]]] = {
    ".jsonl": _write_lines,
    ".parquet": _write_parquet,
    ".rec": _write_records,
}
