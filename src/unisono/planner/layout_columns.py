"""Jobs written as columns of text, such as the rows of published runs, read as layouts. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from unisono.errors import nearest_name
from unisono.plan.options import Schedule
from unisono.plan.plan import STAGES_PER_RANK
from unisono.planner.cluster_file import Cluster, is_cluster_file, named_device, read_cluster
from unisono.planner.devices import Device, Precision
from unisono.planner.layout import KEPT, ZERO_STAGES, AttentionKernel, Cut, Kept, Layout, LayoutError, Loss, Recompute
from unisono.planner.model_files import is_model_file, read_model
from unisono.planner.model_presets import PRESETS, find_preset
from unisono.planner.model_shape import ModelShape
from unisono.planner.stage_blocks import blocks_per_rank, recomputed_per_rank

_SHAPE: Final = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
COLUMNS: Final = (
    *("model", "gpu_type", "gpus", *_SHAPE, "tied", "seq_len"),
    *("tp", "pp", "cp", "ep", "fsdp", "zero", "micro_batch", "global_batch", "precision", "recompute"),
    *("recomputed_blocks", "offload", "cut", "layers_per_stage", "schedule", "keeps", "notes"),
)
DEFAULT_TOKENS: Final = 8192  # of a micro-batch
DEFAULT_SEQ_LEN: Final = 2048
_PRECISIONS: Final[tuple[Precision, ...]] = ("fp4", "fp8", "fp16", "bf16")  # the first that is in the text
_CUTS: Final[tuple[Cut, ...]] = ("equal", "balanced")
_FULL: Final = ("full", "remat:full", "yes")
_SELECTIVE: Final = re.compile(r"selective.*|remat:.*")
_NONE: Final = ("none", "")


def read_layout(row: Mapping[str, str], cluster: Cluster | None = None, *, trust_python: bool = False) -> Layout:
    """The layout of a job, by the columns of ``COLUMNS``; other columns are not read.

    ``cluster`` takes the place of ``gpu_type`` and ``gpus``. ``gpu_type`` may be a TOML file, whose devices are all used unless
    ``gpus`` says how many.

    ``model`` is a preset, or a file or folder of ``read_model``. Columns of the shape take the place of the preset's. Axes that
    are empty are 1. Without ``micro_batch`` it has some 8,192 tokens; without ``global_batch`` each replica has one micro-batch,
    in a pipeline 8 for each stage. Without ``zero``, ``fsdp`` x ``cp`` ranks share all states (ZeRO 3), and without ``fsdp`` all
    data ranks share those of the optimizer (ZeRO 1). Stages per rank are read from ``VP=`` in the notes, and whether the model is
    compiled or eager, the loss fused or in place, and attention FlashAttention-1, FlashAttention-2 or one with stored scores; a
    ``schedule`` has its usual number of stages. ``keeps`` are some of ``KEPT``, with commas. A precision such as ``bf16-true``
    has all states in 16 bits. With ``recompute=partial``, ``recomputed_blocks`` are the blocks of each stage that are recomputed
    in full, such as ``8,6,4,4``; a single number is that of every stage. ``layers_per_stage`` are the blocks of each stage of a
    cut that is given.

    Raises:
        LayoutError: Something needed is missing or not known, or no run could have this layout.
        ConfigError: A file of a cluster or of a model is wrong.
    """
    model = _model(row, trust_python=trust_python)
    cluster = cluster or _cluster(row)
    device, num_devices = cluster.device, cluster.num_devices
    seq_len = _count(row, "seq_len") or model.max_seq_len or DEFAULT_SEQ_LEN
    tp, pp, cp, ep, fsdp = (_count(row, axis) or 1 for axis in ("tp", "pp", "cp", "ep", "fsdp"))
    is_fsdp = bool(row.get("fsdp")) and fsdp * cp > 1  # ranks of a sequence share states too
    replicas = max(1, num_devices // (tp * pp * cp))
    global_batch = _number(row, "global_batch")
    micro_batch = _number(row, "micro_batch") or _default_micro_batch(seq_len, global_batch / replicas)
    virtual = re.search(r"\b(?:VPP?|virtual stages)\W{0,3}(\d+)", row.get("notes", ""), re.IGNORECASE)
    schedule = _schedule(row.get("schedule", ""))
    stages_per_rank = STAGES_PER_RANK[schedule] if schedule else 0
    if virtual and pp > 1:
        stages_per_rank = int(virtual[1])
    layers_per_stage = _numbers(row, "layers_per_stage", "it is the blocks of each stage in order")
    layout = Layout(
        model=model,
        device=device,
        precision=_precision(row.get("precision", ""), device),
        num_devices=num_devices,
        tp=tp,
        pp=pp,
        stages_per_rank=stages_per_rank,
        schedule=schedule,
        cut=_cut(row.get("cut", ""), layers_per_stage),
        layers_per_stage=layers_per_stage,
        cp=cp,
        ep=ep,
        zero=_zero(row.get("zero", ""), 3 if is_fsdp else 1),
        dp_shard=fsdp if is_fsdp else 0,
        micro_batch=micro_batch,
        global_batch=global_batch or replicas * micro_batch * (8 * pp if pp > 1 else 1),
        seq_len=seq_len,
        recompute=_recompute(row.get("recompute", "")),
        recomputed_blocks=_recomputed_blocks(row, pp * max(1, stages_per_rank)),
        offload=_is_true(row, "offload"),
        compiled="compile" in row.get("notes", "").lower(),
        attention_kernel=_attention_kernel(row.get("notes", "").lower()),
        fused=not re.search(r"\beager\b", row.get("notes", ""), re.IGNORECASE),
        loss=_loss(row.get("notes", "").lower()),
        keeps=_keeps(row.get("keeps", "")),
        states_in_16_bits="true" in row.get("precision", "").lower(),
    )
    for held, recomputed in zip(blocks_per_rank(layout), recomputed_per_rank(layout), strict=True):
        if recomputed > held:
            raise LayoutError(
                f"recomputed_blocks {row['recomputed_blocks']!r}",
                f"they are among the blocks of a stage, and a rank has {held:g}",
                "recompute=full, if all are",
            )
    return layout


def _cluster(row: Mapping[str, str]) -> Cluster:
    name, num_devices = row.get("gpu_type", ""), _count(row, "gpus")
    if is_cluster_file(name):
        return read_cluster(Path(name), num_devices=num_devices)
    device = named_device(name)
    if not num_devices:
        raise LayoutError("gpus is empty", "it is the number of devices", "gpus=8")
    return Cluster(device=device, num_devices=num_devices)


def _default_micro_batch(seq_len: int, share: float) -> float:
    """Sequences with some ``DEFAULT_TOKENS`` tokens, at most a replica's share of a step; 0 is an unknown share."""
    wanted = max(1, DEFAULT_TOKENS // seq_len)
    return min(wanted, max(1, math.floor(share))) if share else wanted


def _model(row: Mapping[str, str], *, trust_python: bool) -> ModelShape:
    name = row.get("model", "")
    given = {column: value for column in _SHAPE if (value := _count(row, column))}
    if is_model_file(name):
        tied = {"tied": row["tied"]} if row.get("tied") else {}
        return _model_of_file(name, given | tied, seq_len=_count(row, "seq_len"), trust_python=trust_python)
    if "lora" in name.lower() or "nf4" in row.get("precision", ""):
        raise LayoutError(
            f"model {name!r}, of which only adapters are trained", "all parameters are trained", "the model alone"
        )
    preset = find_preset(name)
    if preset is None:
        shape = _own_model(name, given, has_experts=_count(row, "ep") > 1 or "moe" in name.lower())
    else:
        shape = replace(preset, **given)
        if "hidden" in given or "heads" in given:
            shape = replace(shape, head_dim=_head_dim(shape.hidden, shape.heads))
    return replace(shape, tied=_is_true(row, "tied")) if row.get("tied") else shape


def _model_of_file(name: str, given: Mapping[str, int | str], *, seq_len: int, trust_python: bool) -> ModelShape:
    if given:
        columns = ", ".join(f"{column}={value}" for column, value in given.items())
        raise LayoutError(f"model {name!r} with {columns}", "a file describes the whole shape", "the file alone")
    return read_model(name, seq_len=seq_len, trust_python=trust_python)


def _own_model(name: str, given: Mapping[str, int], *, has_experts: bool) -> ModelShape:
    missing = [column for column in ("layers", "hidden", "heads") if column not in given]
    if missing:
        rule = f"it is a preset or a file, or layers, hidden and heads are given; {', '.join(missing)} are not"
        raise LayoutError(f"model {name!r}", rule, _near(name, PRESETS))
    if has_experts:
        raise LayoutError(f"model {name!r} with experts", "a model with experts is a preset", _near(name, PRESETS))
    hidden, heads = given["hidden"], given["heads"]
    ffn = given.get("ffn", 4 * hidden)
    return ModelShape(
        layers=given["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=given.get("kv_heads", heads),
        head_dim=_head_dim(hidden, heads),
        ffn=ffn,
        gated=ffn != 4 * hidden,
        vocab=given.get("vocab", 51200),
        tied=ffn == 4 * hidden,
    )


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise LayoutError(f"heads {heads} for hidden {hidden}", "heads divide hidden", "a divisor")
    return hidden // heads


def _precision(text: str, device: Device) -> Precision:
    if not text:
        return "bf16" if "bf16" in device.tflops else "fp16"
    for precision in _PRECISIONS:
        if precision in text.lower():
            return precision
    raise LayoutError(f"precision {text!r}", f"it has one of {', '.join(_PRECISIONS)} in it", "bf16")


def _recompute(text: str) -> Recompute:
    if text.lower() in _FULL:
        return "full"
    if _SELECTIVE.fullmatch(text.lower()):
        return "selective"
    if text.lower() in _NONE:
        return "none"
    if text.lower() == "partial":
        return "partial"
    raise LayoutError(f"recompute {text!r}", "it is full, selective, partial or none", "full")


def _numbers(row: Mapping[str, str], column: str, rule: str) -> tuple[int, ...]:
    text = row.get(column, "")
    if not re.fullmatch(r"(\d{1,9}(,\d{1,9})*)?", text.replace(" ", ""), re.ASCII):
        raise LayoutError(f"{column} {text!r}", rule, f"{column}=1,1")
    return tuple(int(count) for count in text.split(",")) if text else ()


def _recomputed_blocks(row: Mapping[str, str], stages: int) -> tuple[int, ...]:
    """A number for each of ``stages``; none if there are none."""
    counts = _numbers(row, "recomputed_blocks", "it is a number for each stage, or one for all of them")
    return counts * stages if len(counts) == 1 else counts


def _attention_kernel(notes: str) -> AttentionKernel:
    if "stored scores" in notes:
        return "stored"
    if "flashattention-1" in notes:
        return "flash-1"
    return "flash-2" if "flashattention-2" in notes else "new"


def _zero(text: str, default: int) -> int:
    if not text:
        return default
    if text not in map(str, ZERO_STAGES):
        raise LayoutError(f"zero {text!r}", "the ZeRO stage is 0, 1, 2 or 3, or empty", "zero=1")
    return int(text)


def _cut(text: str, layers_per_stage: tuple[int, ...]) -> Cut:
    if layers_per_stage and text in ("", "given"):
        return "given"
    for cut in _CUTS:
        if text == cut:
            return cut
    if text:
        raise LayoutError(
            f"cut {text!r}", "it is balanced, equal or empty, or given with layers_per_stage", "cut=balanced"
        )
    return "equal"


def _is_true(row: Mapping[str, str], column: str) -> bool:
    text = row.get(column, "")
    if text not in ("", "false", "true"):
        raise LayoutError(f"{column} {text!r}", "it is true, false or empty", f"{column}=true")
    return text == "true"


def _loss(notes: str) -> Loss:
    if "fused loss" in notes:
        return "fused"
    return "in place" if "loss in place" in notes else "plain"


def _keeps(text: str) -> tuple[Kept, ...]:
    given = {each.strip() for each in text.split(",")} - {""}
    if unknown := sorted(given - set(KEPT)):
        raise LayoutError(
            f"keeps {unknown[0]!r}", f"it has some of {', '.join(KEPT)}, or is empty", nearest_name(unknown[0], KEPT)
        )
    return tuple(each for each in KEPT if each in given)


def _schedule(text: str) -> Schedule | None:
    for schedule in STAGES_PER_RANK:
        if text == schedule:
            return schedule
    if text:
        raise LayoutError(
            f"schedule {text!r}", f"it is {', '.join(STAGES_PER_RANK)} or empty", nearest_name(text, STAGES_PER_RANK)
        )
    return None


def _near(name: str, known: Mapping[str, object]) -> str:
    return nearest_name(name.lower(), known)


def _number(row: Mapping[str, str], column: str) -> float:
    text = row.get(column) or ""
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0) or (text and value == 0):
        raise LayoutError(f"{column} {text!r}", "it is a number above 0, or empty", f"{column}=1")
    return value


def _count(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)
    if not (value.is_integer() and value < 2**53):
        raise LayoutError(f"{column} {row[column]!r}", "it is a whole number above 0, or empty", f"{column}=1")
    return int(value)
