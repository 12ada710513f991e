"""What is compared: short runs of a tiny model over every axis, kind, codec, precision and optimizer, and data commands.

Settings are spelled with the option keys of the first release, so that a later checkout also shows that it reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]

BASE: Settings = {
    "run.dir": "run",
    "model.layers": 2,
    "model.dim": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "data.corpus": "inputs/corpus",
    "data.seq_len": 64,
    "data.eval_frac": 0.2,
    "loader.workers": 0,
    "plan.device": "cpu",
    "plan.precision": "fp32",
    "plan.global_batch": 8,
    "train.steps": 4,
    "train.eval_every": 3,
    "train.eval_samples": 8,
    "train.gradient_stats_every": 2,
    "checkpoint.every_steps": 2,
    "observe.console": "plain",
    "observe.trackers": [],
    "launch.threads": 1,
    "sample.tokens": 0,
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command. ``settings`` are written to a TOML file that stands for ``CONFIG`` in ``argv``.

    With ``ranks`` that many processes run it as torchrun would start them; 0 is one process that no launcher numbers.
    """

    argv: tuple[str, ...]
    settings: Settings | None = None
    ranks: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    code: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Stages in one working folder. Compared are the run folders ``runs``, the ``files`` that match, and what commands other than
    ``train`` print.

    With ``carry`` = n there is one more comparison: the first n stages by the checkout before, the rest by the one after.
    ``wire``: the only stage is an asynchronous run of one worker, with a server of its own or of the other checkout.
    """

    name: str
    stages: tuple[Stage, ...]
    runs: tuple[str, ...] = ("run",)
    files: tuple[str, ...] = ()
    carry: int = 0
    wire: bool = False


def train(ranks: int = 1, *, plan_file: str = "", environ: Settings | None = None, **settings: Any) -> Stage:
    """``unisono train`` with ``BASE`` and these settings; ``plan_tp=2`` is ``plan.tp = 2``."""
    named = {name.replace("_", ".", 1): value for name, value in settings.items()}
    argv = ("train", *(("--plan", plan_file) if plan_file else ()), "CONFIG")
    merged = {**BASE, **named}
    if plan_file:  # the file then says all of this section
        merged = {name: value for name, value in merged.items() if not name.startswith("plan.")}
    return Stage(argv=argv, settings=merged, ranks=ranks, environ=dict(environ or {}))


def one(name: str, ranks: int = 1, **settings: Any) -> Case:
    return Case(name=name, stages=(train(ranks, **settings),))


def then(name: str, *stages: Stage, carry: int = 0, runs: tuple[str, ...] = ("run",)) -> Case:
    return Case(name=name, stages=stages, carry=carry, runs=runs)


def data(name: str, *commands: str, files: tuple[str, ...] = ("out/*",), carry: int = 0) -> Case:
    """``unisono data`` commands, words parted by blanks."""
    stages = tuple(Stage(argv=("data", *command.split())) for command in commands)
    return Case(name=name, stages=stages, runs=(), files=files, carry=carry)


_MORE = {"train_steps": 7, "schedule_kind": "constant"}  # after 4 steps, whose schedule is the same
_FEWER = {"train_steps": 4, "schedule_kind": "constant"}
_LOCAL = {"plan_sync": "dist_local", "train_steps": 9, "train_gradient_stats_every": 0}
_PICTURES = {
    "parts_model": "convolutions",
    "parts_data": "pictures",
    "parts_objective": "cross_entropy",
    "parts_transform": "noise",
    "parts_metrics": ["top2"],
}
_MOE = {"model_experts": 4, "model_ffn_dim": 64}
_ASYNC = {"plan_sync": "dist_async", "train_gradient_stats_every": 0}

CASES: tuple[Case, ...] = (
    # one process
    one("single", model_dropout=0.1, train_ema_decay=0.9, sample_tokens=8),
    one("accumulation", plan_micro_batch=2, train_steps=6, schedule_kind="wsd", schedule_warmup_steps=2),
    one("bf16", plan_precision="bf16", model_dropout=0.1),
    one("fp16", plan_precision="fp16", train_loss_scale=2.0**15, train_steps=8, train_ema_decay=0.9),
    one("recompute-full", plan_recompute="full", model_dropout=0.1),
    one("recompute-selective", plan_recompute="selective", plan_precision="bf16", model_dropout=0.1),
    one("compile", plan_compile="regional", train_gradient_stats_every=0),
    one("moe", **_MOE, model_balance="loss", model_capacity_factor=1.0),
    one("packing-offsets", data_packing="offsets", loader_workers=-1),
    one("packing-best-fit", data_packing="best_fit", data_boundaries="ignore", loader_workers=1, model_tied=False),
    one("epochs", **_PICTURES, plan_global_batch=20, train_steps=6, loader_last_batch="pad", loader_workers=1),
    # optimizers and schedules
    one("sgd", optim_kind="sgd", optim_nesterov=True, schedule_kind="linear", schedule_warmup_steps=2),
    one("adam", optim_kind="adam", optim_weight_decay=0.01, schedule_kind="step", schedule_step_every_steps=2),
    one("lamb", optim_kind="lamb", schedule_kind="polynomial", optim_decay_exclude=["*_norm.weight"]),
    one("lars", optim_kind="lars", schedule_kind="inverse_sqrt", schedule_warmup_steps=2, optim_lr=1.0),
    # axes
    one("dp", 2, plan_micro_batch=2, model_dropout=0.1),
    one("dp-uneven", 3),
    one("dp-batch-norm", 2, **_PICTURES, train_ema_decay=0.9),
    one("zero1", 2, plan_dp_shard=2, plan_zero=1),
    one("zero2", 2, plan_dp_shard=2, plan_zero=2, plan_recompute="full"),
    one("zero3", 2, plan_dp_shard=2, plan_precision="bf16", train_ema_decay=0.9, plan_micro_batch=2),
    one("zero3-fp16", 2, plan_dp_shard=2, plan_precision="fp16", train_loss_scale=2.0**15, train_steps=6),
    one("zero3-lamb", 2, plan_dp_shard=2, optim_kind="lamb"),
    one("hybrid", 4, plan_dp_shard=2),
    one("tp", 2, plan_tp=2, model_dropout=0.1, plan_micro_batch=4),
    one("sequence-parallel", 2, plan_tp=2, plan_sequence_parallel=True, plan_precision="bf16", optim_kind="lamb"),
    one("gpipe", 2, plan_pp=2, plan_schedule="gpipe", plan_micro_batch=2, model_dropout=0.1),
    one("1f1b", 2, plan_pp=2, plan_micro_batch=2, plan_recompute="full"),
    one("interleaved", 2, plan_pp=2, plan_schedule="interleaved", plan_micro_batch=2, model_layers=4),
    one("zbv", 2, plan_pp=2, plan_schedule="zbv", plan_micro_batch=2, model_layers=4),
    one("pp-of-any-model", 2, **{**_PICTURES, "parts_model": "perceptron"}, plan_pp=2, plan_micro_batch=2),
    one("cp", 2, plan_cp=2, plan_micro_batch=4),
    one("ep", 2, plan_dp_shard=2, plan_ep=2, **_MOE),
    one("tp-fsdp", 4, plan_tp=2, plan_dp_shard=2),
    one("pp-tp", 4, plan_tp=2, plan_pp=2, plan_sequence_parallel=True, plan_micro_batch=4),
    one("cp-fsdp-bf16", 4, plan_cp=2, plan_dp_shard=2, plan_precision="bf16"),
    # codecs
    one("codec-fp16", 2, plan_compression="fp16"),
    one("codec-bf16", 2, plan_compression="bf16"),
    one("codec-int8", 2, plan_compression="int8"),
    one("codec-1bit", 2, plan_compression="1bit", plan_micro_batch=2),
    one("codec-2bit", 2, plan_compression="2bit:0.5"),
    one("codec-topk", 2, plan_compression="topk:0.05"),
    one("codec-powersgd", 2, plan_compression="powersgd:2"),
    # kinds
    one("local-sgd", 2, **_LOCAL, plan_local_steps=2, plan_outer_lr=1.0, plan_outer_momentum=0.0),
    one("diloco", 2, **_LOCAL, plan_local_steps=3, plan_compression="int8"),
    one("fragments", 2, **_LOCAL, plan_local_steps=4, plan_fragments=2, plan_overlap_steps=1),
    one("async", **_ASYNC, plan_staleness=0, plan_damping=True, plan_micro_batch=2),
    one("async-replicas", 0, **_ASYNC, launch_processes=1, launch_servers=2, launch_replicas=2, optim_kind="lamb"),
    # the launcher, kills, elasticity, resuming
    then(
        "kill",
        train(
            0,
            launch_processes=2,
            launch_numa="off",
            checkpoint_asynchronous=False,
            train_steps=6,
            environ={"UNISONO_FAULT": "backward@3:1"},
        ),
    ),
    then("elastic-dp", train(2, **_FEWER), train(3, **_MORE), train(1, **{**_MORE, "train_steps": 9}), carry=1),
    then(
        "elastic-plan",
        train(2, **_FEWER, plan_dp_shard=2, train_ema_decay=0.9),
        train(2, **_MORE, plan_tp=2, train_ema_decay=0.9),
        train(1, **{**_MORE, "train_steps": 9}, train_ema_decay=0.9),
        carry=1,
    ),
    *(
        then(
            f"resume-{name}",
            train(ranks, **_FEWER, **settings),
            train(ranks, **_MORE, **settings, run_resume="strict"),
            carry=1,
        )
        for name, ranks, settings in (
            ("single", 1, {"model_dropout": 0.1, "train_ema_decay": 0.9}),
            ("fp16", 2, {"plan_dp_shard": 2, "plan_precision": "fp16", "train_loss_scale": 2.0**15}),
            ("pp-tp", 4, {"plan_pp": 2, "plan_tp": 2, "plan_micro_batch": 2, "model_dropout": 0.1}),
            ("codec", 2, {"plan_compression": "topk:0.05"}),
            (
                "fragments",
                2,
                {
                    "plan_sync": "dist_local",
                    "plan_local_steps": 4,
                    "plan_fragments": 2,
                    "plan_overlap_steps": 1,
                    "train_gradient_stats_every": 0,
                },
            ),
            ("async", 1, _ASYNC),
        )
    ),
    then(
        "strategy-file",
        train(2, plan_tp=2, plan_sequence_parallel=True, plan_micro_batch=2, plan_recompute="full"),
        train(2, plan_file="run/plan.json", run_dir="again"),
        runs=("run", "again"),
        carry=1,
    ),
    # record files and packing
    data(
        "records",
        "convert inputs/rows.jsonl out/rows.mindrecord --json",
        "convert inputs/payloads.jsonl out/payloads.rec --json",
        "convert inputs/rows.jsonl out/rows.csv",
        "shard out/payloads.rec --into out/part --shards 3",
        "verify out/payloads.rec --json",
        "inspect out/payloads.rec --json",
        "cat out/payloads.rec --index 7 --json",
        "inspect out/rows.mindrecord --json",
        "cat out/rows.mindrecord --index 49 --json",
        "convert out/payloads.rec back/payloads.mindrecord",
        "convert out/rows.mindrecord back/rows.jsonl",
        files=("out/*", "back/*"),
        carry=4,
    ),
    data(
        "packing",
        "pack inputs/pictures out/raw.rec --workers 0",
        "pack inputs/pictures out/made.rec --resize 24 --tiles --encoding jpeg --split train=3/4 --split test=1/4 --shuffle 3",
        "pack inputs/corpus out/tokens.bin --kind text --workers 2",
        "pack inputs/rows.jsonl out/packed.mindrecord --kind rows",
        "verify out/made-train.rec --json",
        "stats out/made-train.rec --json",
        "cat out/raw.rec --index 3 --json",
        "inspect out/packed.mindrecord --json",
        "convert out/raw.rec back/raw.mindrecord",
        files=("out/*", "back/*"),
        carry=4,
    ),
    Case(
        name="wire",
        stages=(train(0, **_ASYNC),),
        wire=True,
    ),
)


def toml(settings: Settings) -> str:
    """Flat settings as a TOML file; JSON's spelling of strings, numbers, booleans and lists is TOML's."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())
