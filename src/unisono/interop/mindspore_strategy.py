"""Files of parallel strategies that MindSpore saves: JSON, and the protocol buffer of ``.ckpt``. Imports no torch.

``set_auto_parallel_context(strategy_ckpt_config={"save_file": …})`` and ``AutoParallel.save_param_strategy_file`` write the
strategies of one pipeline stage; ``merge_pipeline_strategys`` puts several into one file, with the stage before the name of
each parameter. Source: MindSpore 2.10, ``strategy_checkpoint_info.cc`` for the JSON form, and ``node_strategy.proto`` as the
package has it.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from unisono.data.text_encoding import conversion_command, encoding_of
from unisono.errors import PlanError
from unisono.plan.options import MOST_RANKS
from unisono.sanitize import quoted
from unisono.storage.limits import (
    MAX_STRATEGY_BYTES,
    MAX_STRATEGY_DIMS,
    MAX_STRATEGY_ENTRIES,
    decode_json,
    read_limited,
)
from unisono.storage.protobuf import BYTES, VARINT, fields, varint

_STAGE: Final = re.compile(r"(\d{1,6})-(.+)", flags=re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorStrategy:
    """How an operator is cut: for each input the number of parts of each dim. ``name`` is ``MatMul_`` and a parameter's."""

    name: str
    stage: int
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterLayout:
    """How a parameter is cut.

    Attributes:
        name: Its name, without a stage.
        stage: The stage that the name in the file begins with; None for a file of one stage.
        num_devices: Devices of a stage.
        cuts: Number of parts of each dim.
        shard_size: Devices that share its copies for the optimizer (``opt_weight_shard_size``); 0: none, -1: all that have one.
    """

    name: str
    stage: int | None
    num_devices: int
    cuts: tuple[int, ...]
    shard_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFile:
    """The content of a file; ``stage`` is that of the process that wrote it."""

    stage: int
    operators: tuple[OperatorStrategy, ...]
    layouts: tuple[ParameterLayout, ...]


def read_strategies(path: Path) -> StrategyFile:
    """Read a file of either form. Raises PlanError."""
    data = b""
    try:
        data = read_limited(path, MAX_STRATEGY_BYTES)
        if data.lstrip()[:1] == b"{":
            return _of_json(decode_json(data, msgspec.json.decode, max_bytes=MAX_STRATEGY_BYTES))
        return _of_protobuf(memoryview(data))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        nearest = "the file that strategy_ckpt_config={'save_file': …} or save_param_strategy_file names there"
        if data.startswith(codecs.BOM_UTF8):
            reason = "it begins with a byte order mark, which JSON in UTF-8 has not"
        elif encoding := encoding_of(data):
            reason, nearest = f"it is {encoding}, not UTF-8", f"the file in UTF-8: {conversion_command(path, data)}"
        raise PlanError(
            given=f"strategy file of MindSpore {path}: {reason}",
            rule=f"it has current_stage, parallel_strategy_item and parallel_layout_item, as JSON or as a protocol buffer, in at "
            f"most {MAX_STRATEGY_BYTES >> 20} MiB",
            consequence="no plan was made of it",
            nearest=nearest,
        ) from error


def _file(stage: int, operators: Iterable[OperatorStrategy], layouts: Iterable[ParameterLayout]) -> StrategyFile:
    found = StrategyFile(stage=_bounded(stage, 0, "current_stage"), operators=tuple(operators), layouts=tuple(layouts))
    if not found.operators and not found.layouts:
        raise ValueError("it holds no strategies")
    return found


def _layout(name: str, dev_matrix: list[int], tensor_map: list[Any], shard_size: int) -> ParameterLayout:
    """Check a layout. ``tensor_map`` counts the axes of ``dev_matrix`` from the right, for each dim; -1: the dim is whole."""
    if len(dev_matrix) > MAX_STRATEGY_DIMS or len(tensor_map) > MAX_STRATEGY_DIMS:
        raise ValueError(f"{quoted(name)} has more than {MAX_STRATEGY_DIMS} dims")
    num_devices = 1
    for axis in dev_matrix:
        num_devices *= _bounded(axis, 1, f"dev_matrix of {quoted(name)}")
        _bounded(num_devices, 1, f"dev_matrix of {quoted(name)}")
    cuts: list[int] = []
    for dim in tensor_map:
        axes: list[int] = dim if isinstance(dim, list) else [dim]
        if len(axes) > MAX_STRATEGY_DIMS or any(not -1 <= axis < len(dev_matrix) for axis in axes):
            raise ValueError(f"tensor_map of {quoted(name)} names an axis that dev_matrix has not")
        cuts.append(math.prod(1 if axis < 0 else dev_matrix[-1 - axis] for axis in axes))
    merged = _STAGE.fullmatch(name)
    return ParameterLayout(
        name=merged[2] if merged else name,
        stage=int(merged[1]) if merged else None,
        num_devices=num_devices,
        cuts=tuple(cuts),
        shard_size=_bounded(shard_size, -1, f"opt_weight_shard_size of {quoted(name)}"),
    )


def _operator(name: str, stage: int, inputs: list[list[int]]) -> OperatorStrategy:
    if len(inputs) > MAX_STRATEGY_DIMS or any(len(each) > MAX_STRATEGY_DIMS for each in inputs):
        raise ValueError(f"{quoted(name)} has more than {MAX_STRATEGY_DIMS} inputs or dims")
    for each in inputs:
        product = 1
        for cut in each:
            product *= _bounded(cut, 1, f"strategy of {quoted(name)}")
            _bounded(product, 1, f"strategy of {quoted(name)}")
    return OperatorStrategy(
        name=name, stage=_bounded(stage, 0, f"stage of {quoted(name)}"), inputs=tuple(tuple(each) for each in inputs)
    )


def _bounded(value: int, least: int, what: str) -> int:
    if not least <= value <= MOST_RANKS:
        raise ValueError(f"{what} is {quoted(str(value)[:40])}, where {least} to {MOST_RANKS:,} are possible")
    return value


# --- JSON --------------------------------------------------------------------------------------------------------------


def _of_json(data: Any) -> StrategyFile:
    if not isinstance(data, dict):
        raise ValueError("it holds no object")
    content = cast("dict[str, Any]", data)
    operators: list[OperatorStrategy] = []
    for name, item in _entries(content, "parallel_strategy_item"):
        inputs = _list(item, "parallel_strategy", name)
        cuts = [_numbers(each, f"parallel_strategy of {quoted(name)}") for each in inputs]
        operators.append(_operator(name, _number(item, "stage", name), cuts))
    layouts: list[ParameterLayout] = []
    for name, item in _entries(content, "parallel_layout_item"):
        tensor_map = [
            _numbers(each, f"tensor_map of {quoted(name)}")
            if isinstance(each, list)
            else _whole(each, f"tensor_map of {quoted(name)}")
            for each in _list(item, "tensor_map", name)
        ]
        dev_matrix = _numbers(_list(item, "dev_matrix", name), f"dev_matrix of {quoted(name)}")
        shard_size = _number(item, "opt_weight_shard_size", name) if "opt_weight_shard_size" in item else 0
        layouts.append(_layout(name, dev_matrix, tensor_map, shard_size))
    return _file(_whole(content.get("current_stage"), "current_stage"), operators, layouts)


def _entries(content: dict[str, Any], key: str) -> Iterable[tuple[str, dict[str, Any]]]:
    items = content.get(key, {})
    if items is None:  # of a file without operators
        return []
    if not isinstance(items, dict) or len(cast("dict[str, Any]", items)) > MAX_STRATEGY_ENTRIES:
        raise ValueError(f"{key} is no object of at most {MAX_STRATEGY_ENTRIES:,} entries")
    found = cast("dict[str, Any]", items)
    if wrong := next((name for name, item in found.items() if not isinstance(item, dict)), None):
        raise ValueError(f"{quoted(wrong)} in {key} is no object")
    return found.items()


def _list(item: dict[str, Any], key: str, name: str) -> list[Any]:
    value = item.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} of {quoted(name)} is no list")
    return cast("list[Any]", value)


def _number(item: dict[str, Any], key: str, name: str) -> int:
    return _whole(item.get(key), f"{key} of {quoted(name)}")


def _numbers(value: Any, what: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list of numbers")
    return [_whole(each, what) for each in cast("list[Any]", value)]


def _whole(value: Any, what: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{what} is no whole number")
    return value


# --- protocol buffer ---------------------------------------------------------------------------------------------------


def _of_protobuf(data: memoryview) -> StrategyFile:
    stage = 0
    operators: list[OperatorStrategy] = []
    layouts: list[ParameterLayout] = []
    for number, kind, content in fields(data):
        if (number, kind) == (1, VARINT):
            stage = varint(content, 0)[0]
        elif (number, kind) == (2, BYTES):
            operators.append(_operator_of(content))
        elif (number, kind) == (3, BYTES):
            layouts.append(_layout_of(content))
        else:
            raise ValueError(f"field {number} of wire type {kind}, which no strategy file has")
        if len(operators) + len(layouts) > MAX_STRATEGY_ENTRIES:
            raise ValueError(f"more than {MAX_STRATEGY_ENTRIES:,} entries")
    return _file(stage, operators, layouts)


def _named(data: memoryview, read: Callable[[int, int, memoryview], None]) -> str:
    """The name in field 1 of an entry; ``read`` gets the fields of the message in field 2."""
    name = ""
    for number, kind, content in fields(data):
        if (number, kind) == (1, BYTES):
            name = bytes(content).decode()
        elif (number, kind) == (2, BYTES):
            for inner in fields(content):
                read(*inner)
        else:
            raise ValueError(f"an entry with field {number} of wire type {kind}")
    if not name:
        raise ValueError("an entry without a name")
    return name


def _operator_of(data: memoryview) -> OperatorStrategy:
    stage = 0
    inputs: list[list[int]] = []

    def read(number: int, kind: int, content: memoryview) -> None:
        nonlocal stage
        if (number, kind) == (1, VARINT):
            stage = varint(content, 0)[0]
        elif (number, kind) == (2, BYTES):
            inputs.append(_dims(content))
            if len(inputs) > MAX_STRATEGY_DIMS:
                raise ValueError(f"an operator of more than {MAX_STRATEGY_DIMS} inputs")
        else:
            raise ValueError(f"an operator with field {number} of wire type {kind}")

    name = _named(data, read)
    return _operator(name, stage, inputs)


def _layout_of(data: memoryview) -> ParameterLayout:
    dev_matrix: list[int] = []
    # one message with a number for each dim, or one message for each dim that several axes may cut
    maps: list[list[int]] = []
    shard_size = 0

    def read(number: int, kind: int, content: memoryview) -> None:
        nonlocal shard_size
        if (number, kind) == (1, BYTES):
            dev_matrix.extend(_dims(content))
        elif (number, kind) == (2, BYTES):
            maps.append(_dims(content))
        elif (number, kind) == (7, VARINT):
            shard_size = _signed(varint(content, 0)[0])
        elif not ((number in (3, 4) and kind == BYTES) or (number in (5, 6) and kind == VARINT)):
            raise ValueError(f"a layout with field {number} of wire type {kind}")
        if len(maps) > MAX_STRATEGY_DIMS or len(dev_matrix) > MAX_STRATEGY_DIMS:
            raise ValueError(f"a layout of more than {MAX_STRATEGY_DIMS} dims")

    name = _named(data, read)
    tensor_map: list[Any] = [dim for dim in maps if dim] if len(maps) > 1 else list(maps[0]) if maps else []
    return _layout(name, dev_matrix, tensor_map, shard_size)


def _dims(data: memoryview) -> list[int]:
    """Field 1 of a message, one number a field or all in one."""
    found: list[int] = []
    for number, kind, content in fields(data):
        if number != 1 or kind not in (VARINT, BYTES):
            raise ValueError(f"dims with field {number} of wire type {kind}")
        at = 0
        while at < len(content):
            value, at = varint(content, at)
            found.append(_signed(value))
            if len(found) > MAX_STRATEGY_DIMS:
                raise ValueError(f"more than {MAX_STRATEGY_DIMS} dims")
    return found


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
