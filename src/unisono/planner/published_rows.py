"""Rows of published training runs, read as layouts. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from unisono.planner.devices import Arithmetic, Device, find_device
from unisono.planner.layout import Layout, Recompute
from unisono.planner.model_presets import find_preset
from unisono.planner.model_shape import ModelShape

COLUMNS: Final = (
    *("model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu_type", "gpus"),
    *("tp", "pp", "cp", "ep", "fsdp", "micro_batch", "global_batch", "precision", "recompute", "notes"),
)
# first match wins
_ARITHMETIC: Final[tuple[tuple[str, Arithmetic], ...]] = (
    ("fp4", "fp4"),
    ("fp8", "fp8"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
)
_RECOMPUTE: Final[Mapping[str, Recompute]] = {"full": "full", "remat:full": "full", "yes": "full"}


class RowError(ValueError):
    """A row lacks something that a prediction needs; the message says what."""


def read_layout(row: Mapping[str, str]) -> Layout:
    """The layout of ``row``, whose columns are those of ``published_runs.csv``.

    A shape that is not in the row is that of the model's preset. Axes that are empty are 1. Without ``micro_batch`` it has some
    8192 tokens; without ``global_batch`` each replica has 8 micro-batches for each pipeline stage. Virtual stages are
    read from ``VP=`` in the notes.

    Raises:
        RowError: Model, device, number of devices or sequence length are not known; or only adapters are trained.
    """
    model = _model(row)
    device = find_device(row.get("gpu_type", ""))
    if device is None:
        raise RowError(f"device {row.get('gpu_type', '')!r} has no preset")
    num_devices = _integer(row, "gpus")
    if not num_devices:
        raise RowError("column gpus is empty")
    seq_len = _integer(row, "seq_len") or model.max_seq_len
    if not seq_len:
        raise RowError("column seq_len is empty, and the model has no preset that says it")
    arithmetic = _arithmetic(row.get("precision", ""), device)
    tp, pp, cp, ep = (max(1, _integer(row, axis)) for axis in ("tp", "pp", "cp", "ep"))
    if num_devices % (tp * pp * cp):
        raise RowError(f"tp {tp}, pp {pp}, cp {cp} do not divide {num_devices} devices")
    replicas = num_devices / (tp * pp * cp)
    global_batch = _number(row, "global_batch")
    # some 8192 tokens, or the whole batch of a replica if it is less
    micro_batch = _number(row, "micro_batch") or max(1.0, min(8192 // seq_len, global_batch // replicas or 8192))
    stages = re.search(r"\b(?:VPP?|virtual stages)\W{0,3}(\d+)", row.get("notes", ""), re.IGNORECASE)
    return Layout(
        model=model,
        device=device,
        arithmetic=arithmetic,
        num_devices=num_devices,
        tp=tp,
        pp=pp,
        virtual_stages=int(stages[1]) if stages and pp > 1 else 0,
        cp=cp,
        ep=ep if model.experts else 1,
        dp_shard=max(1, _integer(row, "fsdp")),
        micro_batch=micro_batch,
        global_batch=global_batch or replicas * micro_batch * (8 * pp if pp > 1 else 1),
        seq_len=seq_len,
        recompute=_RECOMPUTE.get(row.get("recompute", ""), "none"),
    )


def _model(row: Mapping[str, str]) -> ModelShape:
    name = row.get("model", "")
    if "lora" in name.lower() or "nf4" in row.get("precision", ""):
        raise RowError("only adapters are trained")
    preset = find_preset(name)
    layers, hidden, heads = (_integer(row, column) for column in ("layers", "hidden", "heads"))
    if preset is not None and (preset.experts or not (layers and hidden and heads)):
        return preset
    if not (layers and hidden and heads):
        raise RowError(f"model {name!r} has no preset, and the row lacks layers, hidden or heads")
    if _integer(row, "ep") > 1 or "moe" in name.lower():
        raise RowError(f"model {name!r} has experts and no preset")
    if hidden % heads:
        raise RowError(f"heads {heads} do not divide hidden {hidden}")
    ffn = _integer(row, "ffn") or 4 * hidden
    given = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_integer(row, "kv_heads") or heads,
        head_dim=hidden // heads,
        ffn=ffn,
        gated=ffn != 4 * hidden,
        vocab=_integer(row, "vocab") or (preset.vocab if preset else 51200),
        tied=ffn == 4 * hidden,
        max_seq_len=2048,
    )
    if preset is None:
        return given
    return replace(preset, layers=layers, hidden=hidden, heads=heads, vocab=given.vocab)


def _arithmetic(precision: str, device: Device) -> Arithmetic:
    for text, arithmetic in _ARITHMETIC:
        if text in precision:
            if device.peak_flops(arithmetic) is None:
                raise RowError(f"{device.name} has no {arithmetic}")
            return arithmetic
    if precision:
        raise RowError(f"precision {precision!r} is not known")
    return "bf16"


def _number(row: Mapping[str, str], column: str) -> float:
    text = row.get(column) or ""
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RowError(f"column {column} is no number: {text!r}")
    if value < 0:
        raise RowError(f"column {column} is negative: {text!r}")
    return value


def _integer(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)
    if not (value.is_integer() and value < 2**53):
        raise RowError(f"column {column} is no count: {row[column]!r}")
    return int(value)
