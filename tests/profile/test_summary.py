"""Summaries of traces whose times are known exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from traces import TraceBuilder

from unisono.profile import RankProfile, summarise_trace
from unisono.profile.communication import bus_factor, collective_kind
from unisono.profile.memory import HeldMemory
from unisono.profile.rank_profile import Clock, CompileCounts
from unisono.profile.summary import ProfiledRun

FLOATS = {"Input Dims": [[4]], "Input type": ["float"]}


def facts(**mesh: int) -> ProfiledRun:
    """What a run of two ranks knows of its window."""
    held = HeldMemory(
        at_start={"parameters": 100, "gradients": 0, "optimizer": 200, "other": 7},
        gradients_bytes=40,
        planned={"parameters": 100, "gradients": 40, "optimizer": 200},
        limit_bytes=10_000,
    )
    return ProfiledRun(
        rank=1, world_size=2, device="cpu", mesh=mesh or {"dp": 2}, held=held, compiled=CompileCounts(), clock=Clock()
    )


def phases(profile: RankProfile) -> dict[str, float]:
    return {phase.name: round(phase.total_s * 1e6, 3) for phase in profile.phases}


def test_what_watches_operators_is_none(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).op("PythonDispatchMode", 10, 50).op("aten::mm", 20, 30)
    profile = summarise_trace(trace.read(tmp_path))
    assert [(op.name, round(op.total_s * 1e6)) for op in profile.operators] == [("aten::mm", 30)]


def test_own_time_of_nested_operators(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::linear", 0, 100, dims=[[8, 4]])
    trace.op("aten::addmm", 10, 60, dims=[[6], [8, 4], [4, 6]]).op("aten::expand", 12, 5).op("aten::t", 75, 10)
    trace.op("aten::addmm", 200, 30, dims=[[6], [9, 4], [4, 6]]).op("aten::other_thread", 20, 50, tid=2)
    profile = summarise_trace(trace.read(tmp_path))
    times = {op.name: (op.calls, round(op.total_s * 1e6), round(op.self_s * 1e6)) for op in profile.operators}
    assert times == {
        "aten::addmm": (2, 90, 85),
        "aten::other_thread": (1, 50, 50),
        "aten::linear": (1, 100, 30),
        "aten::t": (1, 10, 10),
        "aten::expand": (1, 5, 5),
    }
    assert profile.operators[0].shapes == ("[[6], [8, 4], [4, 6]]", "[[6], [9, 4], [4, 6]]")
    assert [(p.m, p.k, p.n, p.calls) for p in profile.products] == [(8, 4, 6, 1), (9, 4, 6, 1)]
    assert profile.num_steps == 0


def test_passes_through_the_phases_of_the_first_step(tmp_path: Path) -> None:
    trace = TraceBuilder(baseTimeNanoseconds=5_000_000_000).step(7, 100, 100).step(8, 200, 100)
    trace.span("unisono phase bubble", 110, 80).span("unisono phase forward", 120, 20)
    trace.span("unisono phase forward", 150, 10).span("unisono phase forward", 210, 20)
    trace.span("unisono phase h2d", 130, 20, tid=2)
    run = replace(facts(), clock=Clock(offset_s=2.0, base_ns=5_000_000_000))
    profile = summarise_trace(trace.read(tmp_path), run)
    spans = [(span.name, round(1e6 * span.start_s), round(1e6 * span.wall_s)) for span in profile.spans]
    assert spans == [("bubble", 10, 80), ("forward", 20, 20), ("forward", 50, 10)]
    assert profile.began_s == pytest.approx(3.0001, abs=1e-9)


def test_only_steps_count(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::mm", 0, 50).step(7, 100, 100).step(8, 200, 100)
    trace.op("aten::mm", 120, 20).op("aten::mm", 220, 30).op("aten::mm", 310, 50)
    profile = summarise_trace(trace.read(tmp_path))
    assert [(step.step, step.start_s, step.wall_s) for step in profile.steps] == [(7, 0, 1e-4), (8, 1e-4, 1e-4)]
    assert [(op.calls, round(op.total_s * 1e6)) for op in profile.operators] == [(2, 50)]
    assert profile.wall_s == pytest.approx(2e-4)


def test_phases_leave_out_phases_inside_them(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000)
    trace.span("unisono phase bubble", 100, 500).span("unisono phase forward", 150, 200).span(
        "unisono phase comm_exposed_tp", 200, 50
    )
    trace.span("unisono phase optimizer", 700, 100)
    profile = summarise_trace(trace.read(tmp_path), facts())
    assert phases(profile) == {
        "bubble": 300,
        "forward": 150,
        "optimizer": 100,
        "comm_exposed_tp": 50,
        "other": 400,
    }


def test_phases_of_a_foreign_trace(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 2000).span("enumerate(DataLoader)#_Single.__next__", 0, 100)
    trace.op("aten::mm", 100, 200).op(
        "autograd::engine::evaluate_function: MmBackward0", 1000, 300, seq=1, backward=True
    )
    trace.op("aten::mm", 1010, 200).span("Optimizer.step#SGD.step", 1500, 50).op("aten::add_", 1510, 20)
    profile = summarise_trace(trace.read(tmp_path))
    assert phases(profile) == {"backward": 300, "forward": 200, "data_wait": 100, "optimizer": 50, "other": 1350}


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_reduce", 2, 1.0),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 0, 0.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_factors_of_nccl_tests(kind: str, ranks: int, factor: float) -> None:
    assert bus_factor(kind, ranks) == factor


def test_names_of_collectives() -> None:
    names = ["allreduce", "all_reduce", "_allgather_base", "_reduce_scatter_base", "all_to_allv", "allreduce_coalesced"]
    kinds = ["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
    assert [collective_kind(name) for name in names] == kinds


def test_collectives_of_kernels(tmp_path: Path) -> None:
    """Four ranks gather 4 MB in 4 ms, of which 3 ms run beside a product: 1 GB/s, by the bus 0.75 GB/s."""
    trace = TraceBuilder().step(1, 0, 20_000)
    args = {"In msg nelems": 500_000, "Out msg nelems": 2_000_000, "dtype": "BFloat16", "Group size": 4}
    args |= {"Collective name": "_allgather_base", "Process Group Description": "dp_shard"}
    trace.launch(0, 1, "ncclDevKernel_AllGather_RING_LL", 1_000, 4_000, **args).launch(5, 2, "gemm", 2_000, 9_000)
    profile = summarise_trace(trace.read(tmp_path))
    (row,) = profile.collectives
    assert (row.name, row.axis, row.group_size, row.calls, row.num_bytes) == ("all_gather", "dp_shard", 4, 1, 4_000_000)
    assert (row.algorithm_bytes_per_s, row.bus_bytes_per_s) == (pytest.approx(1e9), pytest.approx(0.75e9))
    (overlap,) = profile.overlaps
    assert (overlap.total_s, overlap.exposed_s) == (pytest.approx(4e-3), pytest.approx(1e-3))
    # 10 of 20 ms with a kernel, none of them short
    launch = profile.launch
    assert (launch.compute_s, launch.work_s) == (pytest.approx(0.02), pytest.approx(0.01))
    assert (launch.num_kernels, launch.num_short) == (2, 0)


def test_two_collectives_at_a_time_count_once(tmp_path: Path) -> None:
    trace = TraceBuilder(distributedInfo={"rank": 0, "world_size": 2}).step(1, 0, 10_000).op("aten::mm", 0, 4_000)
    for start in (1_000, 2_000):
        trace.add(
            "gloo:all_reduce",
            start,
            3_000,
            cat="user_annotation",
            tid=50,
            **{"Input Dims": [[1000]], "Input type": ["float"]},
        )
    profile = summarise_trace(trace.read(tmp_path))
    (row,), (overlap,) = profile.collectives, profile.overlaps
    assert (row.calls, row.num_bytes, row.group_size) == (2, 8_000, 2)
    assert (overlap.total_s, overlap.exposed_s) == (pytest.approx(4e-3), pytest.approx(1e-3))


def test_the_axis_is_that_which_the_host_waits_for(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 10_000).span("unisono phase comm_exposed_tp", 1_000, 500)
    for start in (1_100, 3_000):
        trace.add(
            "gloo:all_reduce",
            start,
            300,
            cat="user_annotation",
            tid=50,
            **FLOATS,
        )
    trace.add("gloo:send", 5_000, 300, cat="user_annotation", tid=50, **FLOATS)
    profile = summarise_trace(trace.read(tmp_path), facts(dp=2, tp=2, pp=1))
    assert {(row.name, row.axis) for row in profile.collectives} == {
        ("all_reduce", "tp"),
        ("all_reduce", "dp"),
        ("send", "pp"),
    }


def test_sums_through_shared_memory(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 10_000).span("unisono collective all_reduce dp 2 4000", 1_000, 2_000)
    profile = summarise_trace(trace.read(tmp_path), facts())
    (row,) = profile.collectives
    assert (row.name, row.axis, row.group_size, row.num_bytes, row.can_overlap) == ("all_reduce", "dp", 2, 4000, False)
    assert row.bus_bytes_per_s == pytest.approx(2e6)
    assert profile.overlaps == ()  # they are not meant to


def test_time_of_calls_on_the_cpu(tmp_path: Path) -> None:
    """Of 1,000 µs without 200 that wait: two operators of 300 and 50 µs work, short ones and gaps do not."""
    trace = TraceBuilder().step(1, 0, 1000).span("unisono phase data_wait", 0, 200)
    trace.op("aten::linear", 300, 320).op("aten::addmm", 310, 300).op("aten::t", 305, 4).op("aten::add", 700, 9)
    trace.op("aten::mul", 800, 50)
    launch = summarise_trace(trace.read(tmp_path), facts()).launch
    assert (launch.compute_s, launch.work_s) == (pytest.approx(800e-6), pytest.approx((300 + 50 + 16) * 1e-6))
    assert (launch.num_operators, launch.num_short) == (5, 1)


def test_forward_operators_in_the_backward_pass_are_recompute(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000).op("aten::mm", 0, 100, seq=1)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 200, 500, seq=1, backward=True)
    trace.op("MmBackward0", 205, 490, seq=1, backward=True)
    trace.op("aten::linear", 210, 100, seq=2).op("aten::mm", 220, 80, seq=3).op("aten::gelu", 320, 40, seq=4)
    trace.op("aten::mm", 400, 200)  # the gradient itself
    assert summarise_trace(trace.read(tmp_path)).recompute_s == pytest.approx(140e-6)


def test_recompute_on_a_device_is_the_time_of_its_kernels(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 200, 500, seq=1, backward=True, tid=9)
    trace.op("aten::mm", 210, 100, seq=2, tid=9)
    trace.add("cudaLaunchKernel", 220, 5, cat="cuda_runtime", tid=9, correlation=4)
    trace.add("gemm", 400, 77, cat="kernel", pid=0, tid=20, correlation=4)
    profile = summarise_trace(trace.read(tmp_path))
    assert profile.recompute_s == pytest.approx(77e-6)
    assert {op.name: round(op.device_s * 1e6) for op in profile.operators}["aten::mm"] == 77
    assert [(kernel.name, kernel.calls) for kernel in profile.kernels] == [("gemm", 1)]


def test_reads_from_tensors_and_their_functions(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000).frame("own.py(3): train", 0, 1000).frame("own.py(9): loss_of", 100, 100)
    trace.frame("torch/_tensor.py(40): item", 110, 50).frame("<built-in method item>", 115, 20)
    trace.op("aten::item", 120, 10).op("aten::_local_scalar_dense", 121, 8)
    trace.add("cudaStreamSynchronize", 122, 5, cat="cuda_runtime")
    trace.frame("own.py(20): finished", 205, 5).op("aten::nonzero", 300, 10)
    trace.span("Optimizer.step#Adam.step", 400, 50).op("aten::_local_scalar_dense", 410, 2)
    found = summarise_trace(trace.read(tmp_path)).syncs
    assert {(point.kind, point.source, point.calls) for point in found} == {
        ("aten::_local_scalar_dense", "own.py(9): loss_of", 1),
        ("aten::nonzero", "own.py(3): train", 1),
    }


def test_an_accelerator_waits_in_the_optimizer_too(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000).span("Optimizer.step#Adam.step", 400, 50)
    trace.op("aten::_local_scalar_dense", 410, 2).launch(500, 1, "k", 600, 5)
    (point,) = summarise_trace(trace.read(tmp_path)).syncs
    assert (point.phase, point.calls) == ("optimizer", 1)


def attention(trace: TraceBuilder, names: list[str]) -> TraceBuilder:
    for at, name in enumerate(names):
        trace.op(f"aten::{name}", 100 * at, 50, dims=[[2, 4, 8, 8]], seq=at)
    for at in range(len(names)):
        trace.op("autograd::engine::evaluate_function: X", 5_000 + 100 * at, 30, seq=at, backward=True)
    return trace


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["matmul", "div", "masked_fill", "softmax", "matmul"], ["attention"]),
        (["bmm", "mul", "add", "softmax", "dropout", "transpose", "bmm"], ["attention"]),
        (["einsum", "softmax", "einsum"], ["attention"]),
        (["linear", "softmax", "matmul"], []),  # a router of experts
        (["matmul", "softmax", "linear"], []),
        (["matmul", *["relu"] * 9, "softmax", "matmul"], []),
        (["scaled_dot_product_attention"], []),
        (["pow", "mean", "add", "rsqrt", "mul", "mul"], ["norm"]),
        (["mean", "sub", "pow", "mean", "add", "sqrt", "div", "mul", "add"], ["norm"]),
        (["var_mean", "sub", "add", "rsqrt", "mul"], ["norm"]),
        (["rms_norm", "layer_norm"], []),
        (["mean", "linear", "exp"], []),
    ],
)
def test_operators_that_a_fused_one_replaces(tmp_path: Path, names: list[str], kinds: list[str]) -> None:
    found = summarise_trace(attention(TraceBuilder().step(1, 0, 9_000), names).read(tmp_path)).patterns
    assert [pattern.kind for pattern in found] == kinds


def test_the_time_of_a_pattern_has_its_backward_pass(tmp_path: Path) -> None:
    names = ["matmul", "mul", "softmax", "matmul"]
    (pattern,) = summarise_trace(attention(TraceBuilder().step(1, 0, 9_000), names).read(tmp_path)).patterns
    assert (pattern.calls, pattern.total_s) == (1, pytest.approx(4 * 80e-6))
    assert pattern.element_s == pytest.approx(2 * 80e-6)
    assert (pattern.example, pattern.shapes) == (tuple(names), "[[2, 4, 8, 8]]")


def test_an_optimizer_s_root_is_no_norm(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 9_000).span("Optimizer.step#Adafactor.step", 0, 2_000)
    found = summarise_trace(attention(trace, ["pow", "mean", "rsqrt", "mul"]).read(tmp_path)).patterns
    assert found == ()


def test_compilations(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000).span("_compile.compile_inner (dynamo_timed)", 100, 300)
    counts = summarise_trace(trace.read(tmp_path)).compiled
    assert (counts.compilations, counts.total_s) == (1, pytest.approx(3e-4))


def test_memory_by_category(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000)
    trace.span("unisono phase data_wait", 0, 100).memory(50, 1, 10)
    trace.span("unisono phase forward", 100, 200).memory(150, 2, 1000).memory(200, 3, 500)
    trace.span("unisono phase backward", 300, 200).memory(350, 4, 40).memory(400, 2, -1000)
    trace.span("unisono phase optimizer", 500, 100).memory(550, 5, 30).memory(590, 5, -30).memory(595, 99, -3)
    memory = summarise_trace(trace.read(tmp_path), facts()).memory
    # at 350: batch, both activations, and the gradient that the step allocates
    assert memory.at_peak == {"parameters": 100, "gradients": 40, "optimizer": 200, "activations": 1500, "other": 17}
    assert memory.peak_bytes == 1857
    assert memory.planned["gradients"] == 40
    assert memory.timeline[-1][1:] == (100, 40, 200, 500, 14)
    assert len(memory.timeline) == 8


def test_memory_of_a_device_counts_what_no_tensor_holds(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000).span("unisono phase forward", 0, 500)
    trace.memory(10, 1, 5).memory(100, 2, 1000, total=3000, device=1).memory(200, 2, -1000, total=2000, device=1)
    memory = summarise_trace(trace.read(tmp_path), facts()).memory
    assert memory.at_peak == {"parameters": 100, "gradients": 40, "optimizer": 200, "activations": 960, "other": 1700}
    foreign = summarise_trace(trace.read(tmp_path)).memory
    assert (foreign.peak_bytes, foreign.at_peak) == (3000, {})


def test_long_timelines_keep_their_peaks(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 5000)
    for at in range(2_000):
        trace.memory(at, at, 100 if at != 1_234 else 10_000).memory(at + 0.5, at, -100 if at != 1_234 else -10_000)
    memory = summarise_trace(trace.read(tmp_path)).memory
    assert len(memory.timeline) == 500
    assert max(row[1] for row in memory.timeline) == memory.peak_bytes == 10_000


def test_a_trace_of_nothing_but_names(tmp_path: Path) -> None:
    trace = TraceBuilder().add("thread", 0, 1, cat="other")
    profile = summarise_trace(trace.read(tmp_path))
    assert (profile.num_events, profile.operators, profile.wall_s) == (1, (), 0)
