"""Whole files of what runs and profilers leave: a run's folder, and a trace. ``fuzz.FORMATS`` mutates them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from event_streams import write_events
from traces import TraceBuilder

from unisono.dist.rank_dump import Collective, GroupState, RankDump, StackFrame, ThreadStack, dump_path
from unisono.measure.calibration import LinkRate, MatmulRate, StorageRate, add_to_calibration
from unisono.profile import read_trace, summarise_trace
from unisono.profile.rank_profile import profile_folder

NEW_S = 4e9  # later than any file of a test


def run_folder(folder: Path) -> None:
    """A run of two ranks that was profiled, hangs in its second attempt, and was measured by ``doctor --bench``."""
    run = folder / "run"
    write_events(run, lambda rank, step: {"forward": 0.06, "data_wait": 0.02 * rank}, steps=12, extra=_events)
    _profile(run)
    frame = StackFrame(file="/home/a/train.py", line=3, function="main", is_users=True)
    for rank in range(2):
        each = Collective(number=3 + rank, name="all_reduce", sizes=((4,),), dtypes=("Float",), state="scheduled")
        group = GroupState(name="0", description="dp", ranks=(0, 1), num_entered=3 + rank, collectives=(each,))
        dump = RankDump(
            rank=rank,
            restart_count=1,
            reason="no progress",
            step=2,
            at_s=NEW_S,
            quiet_s=30.0,
            threads=(ThreadStack(name="main", frames=(frame,)),),
            groups=(group,),
        )
        (run / "logs").mkdir(exist_ok=True)
        dump_path(run / "logs", rank).write_bytes(msgspec.json.encode(dump))
    cause = {"kind": "signal", "ranks": [1], "sentence": "rank 1 ended", "evidence": ["signal 9"], "words": "killed"}
    attempts = [{"attempt": 0, "cause": cause, "started_at": "2026-01-01T00:00:00+00:00", "duration_s": 3.5}]
    (run / "launch.json").write_text(json.dumps({"attempt": 0, "attempts": attempts}))
    link = LinkRate(
        operation="all_reduce",
        transport="gloo",
        ranks=2,
        hosts=("a", "b"),
        nbytes=1 << 20,
        seconds=0.1,
        spread_frac=0.1,
    )
    storage = StorageRate(
        host="a", folder="/a", write_bytes_per_s=1e9, read_bytes_per_s=1e9, opens_per_s=1e4, spread_frac=0.1
    )
    matmul = MatmulRate(tflops=0.1, size=1024, repeats=5, spread_frac=0.1)
    add_to_calibration(folder / "calibration.json", matmul={"cpu": matmul}, links=[link], storage=[storage])


def _events(rank: int, step: int) -> list[dict[str, Any]]:
    if step % 4:
        return []
    layers = {"blocks.0": 1.0, "blocks.1": 0.5}
    tapped = {
        "name": "blocks.0",
        "what": "output",
        "shape": [2, 3],
        "dtype": "float32",
        "min": 0.0,
        "max": 1.0,
        "norm": 1.0,
    }
    return [
        {"kind": "eval", "eval/loss": 1.5, "train/loss": 1.0},
        {"kind": "gradient_stats", "layers": layers},
        {"kind": "tap", "taps": [tapped]},
        {
            "kind": "links",
            "steps": 4,
            "wall_s": 0.4,
            "links": [{"peer": "gloo", "sent_bytes": 1e6, "pushes": 2, "lag_square_total": 3}],
            "axes": [
                {"axis": axis, "group": axis, "transport": "gloo", "ranks": 2, "hosts": 1, "collectives": 3}
                | {"payload_bytes": 1e6, "wire_bytes": 1e6, "expected_s": 0.02, "expected_latency_s": 1e-4}
                for axis in ("dp", "tp")
            ],
        },
        {"kind": "skipped_step", "loss": "NaN", "grad_norm": 1.0, "samples": [1, 2]},
        {"kind": "nonfinite", "reproduced": True, "where": "forward", "layer": "a", "operator": "aten.div", "samples": [1]},
    ]  # fmt: skip


def _profile(run: Path) -> None:
    path = run.parent / "profiled.json"
    trace(run.parent, path.name)

    profile = summarise_trace(read_trace(path))
    path.unlink()
    target = profile_folder(run, 3) / "rank-0.json"
    target.parent.mkdir(parents=True)
    target.write_bytes(profile.to_bytes())


def trace(folder: Path, name: str = "trace.json") -> None:
    """Two steps with operators, a kernel, a collective, allocations, and Python's stacks."""
    made = TraceBuilder(distributedInfo={"rank": 0, "world_size": 2})
    for step in range(2):
        at = 1000.0 * step
        made.step(step, at, 900).frame("train.py(3): main", at, 900)
        made.op("aten::linear", at + 10, 90, dims=[[4, 8], [8, 8], []], seq=2 * step)
        made.op("aten::mm", at + 20, 60, dims=[[4, 8], [8, 8]], seq=2 * step + 1)
        made.launch(at + 30, step + 1, "gemm", at + 40, 30)
        made.op("aten::_local_scalar_dense", at + 200, 20)
        made.op("autograd::engine::evaluate_function: MmBackward0", at + 300, 100, tid=2)
        made.op("aten::mm", at + 310, 60, dims=[[8, 4], [4, 8]], seq=2 * step, backward=True, tid=2)
        made.span("gloo:all_reduce", at + 420, 50, tid=3, **{"Input Dims": [[64]], "Input type": ["float"]})
        made.span("unisono phase forward", at + 5, 250).span("unisono collective all_reduce tp 2 4096", at + 205, 30)
        made.span("Optimizer.step#AdamW.step", at + 500, 100)
        made.memory(at + 25, 64, 4096).memory(at + 600, 64, -4096)
    made.write(folder / name)
