"""Predicted memory beside what estimators of others say of the same runs, and what was measured. Prints JSON.

    python -m benchmarks.planner.estimators [--cache DIR] [--published]

Three sets of runs: published ones under FSDP2 and on one device (``published_runs.csv``), published tests of Megatron-LM, and
ranks that are really executed here (``executed_memory``). Ours are ``unisono plan simulate``, which knows shapes alone, and for
executed ranks also ``unisono train --dry-run``. An estimator is asked only of runs that have the parallelism it speaks of:

    DeepSpeed    ZeRO 2 and 3: states, of mixed precision with gradients in 16 and in 32 bits. Nothing of activations.
    Accelerate   one device: states with Adam. Nothing of activations.
    Megatron-LM  tensor and pipeline parallelism: states in 18 bytes, or in 6 and 12 that data ranks share; activations.

Each runs in an environment of its own under ``--cache``, made by pip the first time. Those that cannot be made are named in the
result; the rest is compared without them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contestants import ROOT, interpreter
from benchmarks.parallel.ranks import run_ranks
from benchmarks.planner.executed_memory import LAYOUTS, settings_of, trace
from benchmarks.planner.fitting import ROWS
from benchmarks.planner.published_memory import bytes_of_tensors, is_comparable, published_layout
from benchmarks.workload import run_config

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import MemoryParts, peak_memory

SIMULATE, COUNTED, TRACED = (
    "unisono plan simulate",
    "unisono plan simulate, allocator left out",
    "unisono train --dry-run",
)
PEERS = ("DeepSpeed", "Accelerate", "Megatron-LM")
# has the module of the estimator, in wheels for another Python; the module itself asks for none
MEGATRON, MEGATRON_PYTHON = "megatron-core==0.19.2", "3.12"
_GIB = 2**30

# Megatron-LM's functional tests gpt3_7b_tp4_pp1_memory_speed and gpt3_7b_tp1_pp4_memory_speed, main branch of September 2026:
# mem-allocated-bytes between steps and mem-max-allocated-bytes, from the second step on, by device
_MEGATRON_SHAPE = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=16384, gated=False, vocab=131072
)
_MEGATRON_TP = {
    "a100-80": (20_634_103_808, 58_188_115_968),
    "h100": (20_663_519_232, 57_143_791_616),
    "gb200": (20_663_463_936, 58_217_476_096),
}
_MEGATRON_PP = {
    "a100-80": (24_510_808_064, 60_489_064_448),
    "h100": (24_540_168_192, 60_518_293_504),
    "gb200": (24_540_168_192, 60_518_293_504),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run whose memory was measured.

    Attributes:
        group: The set that it is of.
        name: Its name within the result.
        layout: As ``unisono plan simulate`` knows it.
        measured: Bytes of ``states`` and ``peak``, as far as they are known.
        ours: What we predict, by estimator, of the same.
        asked: What the estimators of others are asked for it, by estimator (``benchmarks.peers.estimate_memory``).
    """

    group: str
    name: str
    layout: Layout
    measured: Mapping[str, float]
    ours: Mapping[str, Mapping[str, float]]
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])


def simulated(layout: Layout, peak: str) -> dict[str, float]:
    """The states and the peak of a layout by shapes: ``total``, as the allocator reserves it, or ``counted``."""
    parts: MemoryParts = peak_memory([layout])
    return {"states": float(parts.states[0]), "peak": float(getattr(parts, peak)[0])}


def gpt_options(shape: ModelShape) -> dict[str, Any]:
    """Options of the built-in GPT of a shape."""
    return {
        "num_layers": shape.layers,
        "dim": shape.hidden,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "ffn_dim": shape.ffn,
        "vocab_size": shape.vocab,
        "tied": shape.tied,
    }


def megatron_arguments(layout: Layout, *, gated: bool) -> dict[str, Any]:
    """The arguments of Megatron-LM that its estimator reads."""
    model = layout.model
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "kv_channels": model.head_dim,
        "num_attention_heads": model.heads,
        "group_query_attention": True,
        "num_query_groups": model.kv_heads,
        "ffn_hidden_size": model.ffn,
        "swiglu": gated,
        "normalization": "RMSNorm" if gated else "LayerNorm",
        "padded_vocab_size": model.vocab,
        "untie_embeddings_and_output_weights": not model.tied,
        "multi_latent_attention": False,
        "num_experts": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_latent_size": None,
        "mtp_num_layers": None,
        "world_size": layout.num_devices,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.stages_per_rank or None,
        "expert_tensor_parallel_size": layout.tp,
        "expert_model_parallel_size": 1,
        "data_parallel_size": layout.dp,
        "use_distributed_optimizer": layout.dp > 1,
        "seq_length": layout.seq_len,
        "micro_batch_size": int(layout.micro_batch),
        "sequence_parallel": False,
        "recompute_granularity": None,
        "num_micro_batches": int(layout.num_micro_batches),
    }


def published() -> Iterator[Run]:
    """Published runs that say how they were run: peaks, of reserved memory but those of torchtune, which are of active memory."""
    with ROWS.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                layout = published_layout(row)
            except LayoutError:
                continue
            if not is_comparable(row):
                continue
            is_active = "*active*" in row["notes"]
            alone = layout.num_devices == 1
            options = {"options": gpt_options(layout.model)}
            yield Run(
                group="published, one device" if alone else "published, FSDP2",
                name=f"row {number}: {row['model']} on {layout.num_devices} {layout.device.name}",
                layout=layout,
                measured={"peak": float(row["peak_mem_gib"]) * _GIB},
                ours={SIMULATE: simulated(layout, "counted") | {"peak": bytes_of_tensors(layout)}}
                if is_active
                else {SIMULATE: simulated(layout, "total"), COUNTED: simulated(layout, "counted")},
                asked=options
                | (
                    {"Accelerate": {"precision": "bfloat16"}}
                    if alone
                    else {"DeepSpeed": {"devices": layout.num_devices, "zero": 3}}
                ),
            )


def published_by_megatron() -> Iterator[Run]:
    """Published tests of Megatron-LM: allocated memory, of states between steps and at the peak."""
    tests: tuple[tuple[str, Mapping[str, tuple[int, int]], dict[str, Any]], ...] = (
        ("tp", _MEGATRON_TP, {"tp": 4, "micro_batch": 2}),
        ("pp", _MEGATRON_PP, {"pp": 4, "stages_per_rank": 8, "micro_batch": 1}),
    )
    for axis, by_device, split in tests:
        for device, (states, peak) in by_device.items():
            layout = Layout(
                model=_MEGATRON_SHAPE,
                device=DEVICES[device],
                precision="bf16",
                num_devices=8,
                global_batch=8,
                seq_len=8192,
                **split,
            )
            yield Run(
                group=f"Megatron-LM's tests, {axis}",
                name=f"{axis} on {device}",
                layout=layout,
                measured={"states": states, "peak": peak},
                ours={SIMULATE: simulated(layout, "counted")},
                asked={"Megatron-LM": megatron_arguments(layout, gated=False)},
            )


def executed() -> Iterator[Run]:
    """Ranks that are executed here: live bytes of the rank that has most."""
    alone = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner.executed_memory", "--layouts", "one"],
        capture_output=True,
        check=True,
        text=True,
    )
    measured = {1: [alone.stdout.splitlines()]}
    measured[2] = [lines for _, lines in run_ranks(["-m", "benchmarks.planner.executed_memory", "--layouts", "two"])]
    for ranks, layouts in zip(measured, LAYOUTS.values(), strict=True):
        for name, *answers in zip(layouts, *measured[ranks], strict=True):
            by_rank = [json.loads(answer) for answer in answers]
            layout = _layout_of(name, ranks)
            yield Run(
                group="executed ranks",
                name=name,
                layout=layout,
                measured={what: max(each[what] for each in by_rank) for what in ("states", "peak")},
                ours={TRACED: trace(name, ranks), SIMULATE: simulated(layout, "counted")},
                asked={"options": gpt_options(layout.model)} | _asked_of_executed(name, layout),
            )


def _layout_of(name: str, ranks: int) -> Layout:
    """The layout of a run that is executed."""
    from unisono.train.build import build_data, build_model

    config = run_config(settings_of(name))
    plan = config.plan
    options: Any = build_model(config, build_data(config).tokenizer).options
    shape = ModelShape(
        layers=options.num_layers,
        hidden=options.dim,
        heads=options.num_heads,
        kv_heads=options.num_kv_heads,
        head_dim=options.dim // options.num_heads,
        ffn=options.hidden_ffn,
        gated=True,
        vocab=options.vocab_size,
        tied=options.tied,
    )
    return Layout(
        model=shape,
        device=DEVICES["h100"],  # of which only the memory counts, which is above what is executed
        precision="bf16",
        num_devices=ranks,
        tp=plan.tp or 1,
        pp=plan.pp or 1,
        dp_shard=plan.dp_shard if plan.dp_shard > 1 else 1,
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
        seq_len=config.data.seq_len,
        recompute=plan.recompute,
    )


def _asked_of_executed(name: str, layout: Layout) -> dict[str, Any]:
    if layout.num_devices == 1:
        return {"Accelerate": {"precision": "float32"}}  # parameters and gradients are in 32 bits
    if layout.dp_shard > 1:
        return {"DeepSpeed": {"devices": layout.num_devices, "zero": 2 if "zero 2" in name else 3}}
    return {"Megatron-LM": megatron_arguments(layout, gated=True)}


def ask(runs: Sequence[Run], estimators: Sequence[str], python: str, megatron: Path) -> dict[str, Any]:
    """What estimators say in their environment, with their versions. Raises CalledProcessError with what they wrote."""
    given = {
        "estimators": estimators,
        "runs": {run.name: run.asked for run in runs if run.asked},
        "megatron": str(megatron),
    }
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-m", "benchmarks.peers.estimate_memory", json.dumps(given)]
    return json.loads(subprocess.run(command, env=environ, capture_output=True, check=True, text=True).stdout)


def megatron_folder(cache: Path) -> Path:
    """A folder with the modules of Megatron-LM. Raises CalledProcessError where pip cannot get it."""
    folder = cache / MEGATRON.replace("==", "-")
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip += ["--python-version", MEGATRON_PYTHON, "--ignore-requires-python", "--only-binary=:all:"]
            subprocess.run([*pip, "--target", f"{part}/it", MEGATRON], check=True, capture_output=True, text=True)
            os.rename(f"{part}/it", folder)
    return folder


def others(runs: Sequence[Run], cache: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Estimates of others by estimator and run, their versions, and why others did not run."""
    estimates: dict[str, Any] = {}
    versions: dict[str, str] = {}
    not_run: dict[str, str] = {}
    for name in PEERS:
        try:
            folder = megatron_folder(cache) if name == "Megatron-LM" else cache
            said = ask(runs, [name], interpreter("estimators", cache), folder)
        except (subprocess.CalledProcessError, OSError) as error:
            wrote = str(getattr(error, "stderr", None) or error).strip().splitlines()
            not_run[name] = wrote[-1]
            print(f"{name} did not run: {not_run[name]}", file=sys.stderr)
            continue
        estimates |= said["estimates"]
        versions |= said["versions"]
    return estimates, versions, not_run


def scores(runs: Sequence[Run], estimates: Mapping[str, Mapping[str, Sequence[float | None]]]) -> dict[str, Any]:
    """By set, by what was measured and by estimator: errors. States stand for the peak where an estimator has no peak."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in runs:
        said = dict(run.ours)
        for name, by_run in estimates.items():
            if run.name in by_run:
                states, peak = by_run[run.name]
                assert states is not None
                said[f"{name}, states alone" if peak is None else name] = {"states": states, "peak": peak or states}
        for what, measured in run.measured.items():
            for name, predicted in said.items():
                if what == "states" and name == COUNTED:
                    continue
                label = name.removesuffix(", states alone") if what == "states" else name
                by_estimator = ratios.setdefault(run.group, {}).setdefault(what, {})
                by_estimator.setdefault(label, []).append(predicted[what] / measured)
    return {
        group: {what: {name: _errors(found) for name, found in by_name.items()} for what, by_name in by_what.items()}
        for group, by_what in ratios.items()
    }


def _errors(ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(abs(ratio - 1) for ratio in ratios),
        "least": min(ratios),
        "most": max(ratios),
        "layouts": len(ratios),
    }


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    parser.add_argument("--published", action="store_true", help="only published runs")
    arguments = parser.parse_args()
    runs = [*published(), *published_by_megatron()]
    if not arguments.published:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-cache-") as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            runs += executed()
    estimates, versions, not_run = others(runs, arguments.cache)
    rows = [
        {
            "group": run.group,
            "run": run.name,
            "measured": run.measured,
            "ours": run.ours,
            "others": {name: by_run[run.name] for name, by_run in estimates.items() if run.name in by_run},
        }
        for run in runs
    ]
    result = {"errors": scores(runs, estimates), "not_run": not_run, "versions": versions, "rows": rows}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
