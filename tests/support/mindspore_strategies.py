"""Strategy files of MindSpore for a Transformer of two layers, in the form that its C++ code writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.storage.protobuf import encode_varint


def strategy(
    *, dp: int = 2, tp: int = 2, stage: int = 0, shard: int = 0, layers: range = range(2), sequence: bool = False
) -> dict[str, Any]:
    """The content of the file of one stage: columns of the first weight of a layer are cut, rows of the second.

    Args:
        dp: Devices that compute different samples.
        tp: Devices that share a weight.
        stage: Pipeline stage.
        shard: ``opt_weight_shard_size`` of weights.
        layers: Numbers of the layers of this stage.
        sequence: Whether norms are cut over all devices.
    """
    operators: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    rest = {"param_split_shape": [], "indices_offset": [], "field": 0}
    for layer in layers:
        up, down, norm = (f"layers.{layer}.{part}" for part in ("up.weight", "down.weight", "norm.gamma"))
        operators[f"MatMul_{up}"] = {"stage": stage, "parallel_strategy": [[dp, 1], [tp, 1]]}
        operators[f"MatMul_{down}"] = {"stage": stage, "parallel_strategy": [[dp, tp], [1, tp]]}
        rows = dp * tp if sequence else dp
        operators[f"LayerNorm_{norm}"] = {"stage": stage, "parallel_strategy": [[rows, 1], [1], [1]]}
        sharded = {"opt_weight_shard_step": tp if shard else 0, "opt_weight_shard_size": shard}
        layouts[up] = {"dev_matrix": [dp, tp], "tensor_map": [0, -1], **rest, **sharded}
        layouts[down] = {"dev_matrix": [dp, tp], "tensor_map": [-1, 0], **rest, **sharded}
        layouts[norm] = {
            "dev_matrix": [dp, tp],
            "tensor_map": [-1],
            **rest,
            "opt_weight_shard_step": 0,
            "opt_weight_shard_size": 0,
        }
    return {"current_stage": stage, "parallel_strategy_item": operators, "parallel_layout_item": layouts}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def merged(*contents: dict[str, Any]) -> dict[str, Any]:
    """As ``merge_pipeline_strategys`` does."""
    whole: dict[str, Any] = {"current_stage": 1, "parallel_strategy_item": {}, "parallel_layout_item": {}}
    for content in contents:
        whole["parallel_strategy_item"] |= content["parallel_strategy_item"]
        stage = content["current_stage"]
        whole["parallel_layout_item"] |= {
            f"{stage}-{name}": item for name, item in content["parallel_layout_item"].items()
        }
    return whole


def protobuf(content: dict[str, Any]) -> bytes:
    """The same as a ``ParallelStrategyMap``."""
    encoded = _number(1, content["current_stage"])
    for name, item in content["parallel_strategy_item"].items():
        inputs = b"".join(_bytes(2, _dims(each)) for each in item["parallel_strategy"])
        encoded += _bytes(2, _bytes(1, name.encode()) + _bytes(2, _number(1, item["stage"]) + inputs))
    for name, item in content["parallel_layout_item"].items():
        layout = b"".join(_bytes(number, _dims(item[key])) for number, key in ((1, "dev_matrix"), (2, "tensor_map")))
        layout += (
            _number(5, item["field"])
            + _number(6, item["opt_weight_shard_step"])
            + _number(7, item["opt_weight_shard_size"])
        )
        encoded += _bytes(3, _bytes(1, name.encode()) + _bytes(2, layout))
    return encoded


def _bytes(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encode_varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3]) + encode_varint(value % (1 << 64))


def _dims(values: list[int]) -> bytes:
    return _bytes(1, b"".join(encode_varint(value % (1 << 64)) for value in values))
