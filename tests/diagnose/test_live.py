"""Faults injected into real runs of one or two ranks: each is found, with its rank and cause.

Injected faults take at least 30 % of a step. Costs and thresholds are tested exactly in ``test_rules``.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from pool import Pool

from unisono.data.options import default_cache_dir
from unisono.diagnose import Finding, diagnose, read_run, utilization_rules
from unisono.errors import ConfigError
from unisono.kvstore.allreduce import buckets
from unisono.kvstore.allreduce.shared_memory import SharedMemoryAllReduce
from unisono.measure.calibration import CALIBRATION_FILE, SHARED_MEMORY, LinkRate, add_to_calibration
from unisono.measure.ceiling import PeakFlops
from unisono.measure.links import probe_all_reduce
from unisono.observe.host_memory import PeakMemory
from unisono.parallel import timed_collectives
from unisono.train import loop_assembly, setup
from unisono.train.run_checkpoints import RunCheckpoints

SLEEP_S = 0.08
STEPS = 16
# of one collective of a group: about 0.1 s a step in all
PAUSES_S = {"tp": 0.008, "cp": 0.03, "shard": 0.012, "ep": 0.01}


class Data(tiny.RaggedTokens):
    """Reading takes ``sleep_s`` a batch."""

    def __init__(self, sleep_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._sleep_s = sleep_s

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(self._sleep_s)
        return super().read(indices)


def train(world: Any, run_dir: str, fault: str, rank: int | None, plan: dict[str, Any]) -> None:
    """A tiny run with a ``fault`` on ``rank``, or on all, under options of its ``plan``. Each of two faults can name its rank:
    ``loader@0 and compute@1``."""

    def here(name: str) -> bool:
        place = re.search(rf"{name}\S*@([0-9])", fault)
        return (rank if place is None else int(place[1])) in (None, world.rank)

    # each sample is read once
    samples, poison = 4 * world.world_size * STEPS, 5 if "nan" in fault else None
    data = Data(SLEEP_S if "loader" in fault and here("loader") else 0.0, samples=samples, poison=poison)
    options: dict[str, Any] = {
        "num_workers": 0,
        "data": data,
        "steps": STEPS,
        "global_batch": 4 * world.world_size,
        **plan,
    }
    if "save" in fault:
        options |= {"every_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        if "memory" in fault:
            patch.setattr(loop_assembly, "host_memory_limit_bytes", lambda: int(0.95 * PeakMemory().read()))
        if "call" in fault:  # all samples in one call make nearly the rate of a product
            peak = PeakFlops(value=1e9, kind="measured", name="a device")
            patch.setattr(setup, "peak_flops", lambda *_, **options: peak)
            options |= {"flops_per_token": 0.95 * peak.value * 0.06 / (8 * 7.5)}
        if "slower link" in fault:  # than it was measured to be
            patch.setenv("XDG_CACHE_HOME", f"{run_dir}-cache")
            rates = [
                LinkRate(
                    operation="all_reduce",
                    transport=SHARED_MEMORY,
                    ranks=2,
                    hosts=(socket.gethostname(),),
                    nbytes=nbytes,
                    seconds=seconds,
                    spread_frac=0.01,
                )
                for nbytes, seconds in ((4, 1e-5), (1 << 16, 1e-3))
            ]
            add_to_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE, links=rates)
        if "measured" in fault:
            patch.setenv("XDG_CACHE_HOME", f"{run_dir}-cache")
            measure_links(world)
        if "save" in fault and here("save"):
            patch.setattr(RunCheckpoints, "save", slowly(RunCheckpoints.save))
        if "exchange" in fault:
            options |= {"network": Heavy()}
            patch.setattr(buckets, "SharedMemoryAllReduce", refuse)  # gradients go over Gloo, as between hosts
        with tiny.trainer(run_dir, world=world, **options) as run, ExitStack() as stack:
            if "compute" in fault and here("compute"):
                run.model.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
            if fault in PAUSES_S:
                slow_group(patch, fault)
            if "division" in fault and here("division"):
                run.model.blocks[1].ffn.register_forward_hook(
                    lambda layer, args, out: 0 * out / 0 if run.state.step == 6 else out
                )
            if "inactive" in fault:
                run.model.blocks[1].ffn.up.register_forward_hook(lambda layer, args, out: (out - 9).relu())
            if "dead" in fault:
                run.model.blocks[1].ffn.register_forward_hook(lambda layer, args, output: 0 * output)
            if "exploding" in fault:
                grows = iter(range(10**6))
                run.model.blocks[0].register_full_backward_hook(
                    lambda layer, into, out: (into[0] * 1.05 ** next(grows), *into[1:])
                )
            if "slows down" in fault and here("slows down"):
                run.model.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S * (run.state.step >= 48)))
            if "stopped" in fault and here("stopped"):
                stack.enter_context(stopped_half_of_the_time())
            if "leak" in fault and here("leak"):
                kept: list[Any] = []
                run.model.register_forward_pre_hook(lambda *_: kept.append(torch.ones(2**19)))  # 2 MiB: THE LEAK
            if "uneven" in fault:
                for block in (each for each in run.model.blocks if hasattr(each, "ffn")):  # those of this stage
                    block.ffn.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S / 4))
            if "call" in fault:  # each takes time, however many samples it has
                run.model.register_forward_pre_hook(lambda *_: time.sleep(0.06))
            if "garbage" in fault and here("garbage"):
                heap = [[] for _ in range(10**6)]  # what each full collection walks through
                run.model.register_forward_pre_hook(lambda *_: make_garbage(heap))
            if "reads" in fault and here("reads"):
                run.model.register_forward_pre_hook(lambda *_: read_numbers())
            if "stages" in fault:  # as long as the micro-batch is large
                forward = run.model.forward
                patch.setattr(
                    run.model,
                    "forward",
                    lambda tokens, **k: (time.sleep(SLEEP_S / 2 * len(tokens)), forward(tokens, **k))[1],
                )
            if "link" in fault:
                sync = run._loop.runner.train_step.sync  # pyright: ignore[reportPrivateUsage]
                patch.setattr(type(sync), "wait", slowly(type(sync).wait))
            run.fit()


def measure_links(world: Any) -> None:
    """As ``unisono doctor --bench`` does, with smaller sums."""
    given: dict[str, Any] = {
        "hosts": [socket.gethostname()] * 2,
        "device": torch.device("cpu"),
        "sizes": (4, 1 << 20),
    }
    by_torch = probe_all_reduce(
        world, lambda tensor: dist.all_reduce(tensor, group=world.group), transport="gloo", budget_s=0.2, **given
    )
    memory = SharedMemoryAllReduce(world)
    by_memory = probe_all_reduce(world, memory.all_reduce, transport=SHARED_MEMORY, budget_s=0.2, **given)
    memory.close()
    if world.rank == 0:
        add_to_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE, links=[*by_torch, *by_memory])
    world.barrier()


class Heavy(torch.nn.Module):
    """Many parameters, and hardly any computation that could hide the exchange of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2**22))

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.weight.mean() + tokens.new_zeros(len(tokens), tiny.SEQ_LEN, tiny.VOCAB, dtype=torch.float32)


def refuse(world: Any) -> None:
    raise ConfigError(given="workers on several hosts", rule="", consequence="", nearest="")


def read_numbers() -> None:
    for each in torch.ones(40):
        each.item()


def make_garbage(heap: list[Any]) -> None:
    """Many more objects, which are kept: Python decides to collect."""
    heap += [[] for _ in range(50_000)]


@contextmanager
def stopped_half_of_the_time() -> Generator[None]:
    """Inside, another process stops this one for 40 ms of each 80, as a busy host would."""
    duty = """
import itertools, os, signal, sys, time
for number in itertools.cycle((signal.SIGSTOP, signal.SIGCONT)):
    os.kill(int(sys.argv[1]), number)
    time.sleep(0.04)
"""
    command = [sys.executable, "-S", "-c", duty, str(os.getpid())]
    other = subprocess.Popen(command)
    try:
        yield
    finally:
        other.kill()  # it can only be while this process runs
        other.wait()


def slowly(function: Any) -> Any:
    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(SLEEP_S)
        return function(*args, **options)

    return slow


def slow_group(patch: pytest.MonkeyPatch, name: str) -> None:
    """Each collective of the group takes longer."""
    timed_wait = timed_collectives.timed_wait

    @contextmanager
    def slow(group: Any) -> Generator[None]:
        with timed_wait(group):
            time.sleep(PAUSES_S[name] * (group.group_desc == name))
            yield

    patch.setattr(timed_collectives, "timed_wait", slow)


def found(
    pool: Pool,
    folder: Path,
    fault: str,
    *,
    ranks: int = 2,
    rank: int | None = None,
    limits: Mapping[str, float] | None = None,
    **plan: Any,
) -> dict[str, Finding]:
    pool.run(train, str(folder / "run"), fault, rank, plan, ranks=ranks, **(limits or {}))
    return {finding.id: finding for finding in diagnose(read_run(folder / "run"))}


def assert_no_others(findings: Mapping[str, Finding], injected: Collection[str]) -> None:
    """Whatever else was found costs little beside a fault: neighbours on this machine can slow a rank of such a small model."""
    most = max(findings[code].cost_frac for code in injected)
    assert all(code in injected or finding.cost_frac < most / 4 for code, finding in findings.items()), findings


@pytest.mark.parametrize(
    ("fault", "ranks", "rank", "code"),
    [
        ("loader", 1, None, "DATA01"),
        ("loader", 2, None, "DATA01"),
        ("loader", 2, 1, "DATA02"),
        ("compute", 2, 0, "BAL01"),
        ("compute", 2, 1, "BAL01"),
        ("compute stopped", 2, 1, "BAL01"),
        ("link", 2, None, "COMM01"),
        ("save", 1, None, "CKPT01"),
    ],
)
def test_a_fault_is_found(pool: Pool, tmp_path: Path, fault: str, ranks: int, rank: int | None, code: str) -> None:
    findings = found(pool, tmp_path, fault, ranks=ranks, rank=rank)
    assert_no_others(findings, {code})
    assert findings[code].ranks == (() if rank is None else (rank,))
    assert findings[code].cost_frac > 0.3


def test_a_link_that_has_become_slower(pool: Pool, tmp_path: Path) -> None:
    findings = found(pool, tmp_path, "slower link")
    assert (findings["COMM03"].severity, findings["COMM03"].ranks) == ("critical", ())
    assert findings["COMM03"].title == f"the link is slower than it was: {SHARED_MEMORY}"
    assert findings["COMM03"].cost_frac > 0.3


@pytest.mark.parametrize(("plan", "group"), [({}, "dp_replicate"), ({"dp_shard": 2}, "shard"), ({"tp": 2}, "tp")])
def test_a_healthy_link_that_was_measured(pool: Pool, tmp_path: Path, plan: dict[str, Any], group: str) -> None:
    findings = found(pool, tmp_path, "none, measured", **plan)
    assert "COMM03" not in findings, findings["COMM03"]
    for rank in read_run(tmp_path / "run").ranks:
        (traffic,) = [each for each in rank.axes if each.group == group]
        assert traffic.steps == STEPS
        # sums of the same numbers in two orders
        assert 0 < traffic.expected_latency_s <= traffic.expected_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("group", "plan", "axis"),
    [
        ("tp", {"tp": 2}, "tp"),
        ("tp", {"tp": 2, "sequence_parallel": True}, "tp"),
        ("cp", {"cp": 2}, "cp"),
        ("shard", {"dp_shard": 2}, "dp"),
        ("ep", {"dp_shard": 2, "ep": 2, "sizes": {"num_experts": 4}}, "ep"),
    ],
)
def test_the_axis_that_steps_wait_for(pool: Pool, tmp_path: Path, group: str, plan: dict[str, Any], axis: str) -> None:
    finding = found(pool, tmp_path, group, **plan)["COMM01"]
    assert finding.title == f"steps wait for communication along {axis}"
    assert finding.cost_frac > 0.3


def test_exchanges_that_no_computation_hides(pool: Pool, tmp_path: Path) -> None:
    findings = found(pool, tmp_path, "exchange", observe=replace(tiny.QUIET, profile_steps="4:7"))
    assert (findings["COMM02"].severity, findings["COMM02"].ranks) == ("critical", ())
    assert "all_reduce over 2 ranks" in findings["COMM02"].evidence[1]
    assert "COMM01" in findings


def test_a_rank_that_becomes_slower(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "slows down", rank=1, steps=60)["BAL02"]
    assert (finding.ranks, finding.severity) == ((1,), "warning")  # there are no samples of the monitor


@pytest.mark.full
def test_more_micro_batches_shorten_the_bubble(pool: Pool, tmp_path: Path) -> None:
    plan = {"pp": 2, "global_batch": 16, "micro_batch": 16, "schedule": "gpipe", "steps": 12}
    before = found(pool, tmp_path / "before", "stages", **plan)["PP01"]
    assert before.patch == {"plan.micro_batch": 2}
    assert before.cost_frac > 0.3
    after = found(pool, tmp_path / "after", "stages", **plan | {"micro_batch": 2})
    assert "PP01" not in after, after["PP01"]


def test_memory_that_is_nearly_full(pool: Pool, tmp_path: Path) -> None:
    assert found(pool, tmp_path, "memory", ranks=1)["MEM01"].severity == "critical"


def test_memory_that_grows(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "leak", rank=1, steps=240)["MEM03"]
    assert (finding.ranks, finding.severity) == ((1,), "critical")
    assert 1 < float(finding.evidence[0].split(" by ")[1].split()[0]) < 3  # MiB a step
    assert "unisono profile RUN_DIR --now" in finding.evidence[2]


@pytest.mark.full
def test_the_line_whose_memory_grows(pool: Pool, tmp_path: Path) -> None:
    observe = replace(tiny.QUIET, profile_steps="4:7+stacks")
    limits = {"timeout_s": 180.0, "comm_timeout_s": 120.0}  # ranks summarise traces with stacks, one before the other
    finding = found(pool, tmp_path, "leak", rank=1, steps=240, observe=observe, limits=limits)["MEM03"]
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# 2 MiB: THE LEAK")
    )
    assert finding.ranks == (1,)
    assert finding.evidence[2].endswith(f" of {__file__}:{line} stay: 2 MiB a step")


def test_memory_that_is_left_for_larger_micro_batches(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utilization_rules, "_SMALL_MODEL", 0)
    given = {"ranks": 1, "micro_batch": 1, "global_batch": 8}
    before = found(pool, tmp_path / "before", "call", **given)
    assert "UTIL01" in before
    assert before["MEM04"].patch == {"plan.micro_batch": 8}
    after = found(pool, tmp_path / "after", "call", **given | {"micro_batch": 8})
    assert not {"UTIL01", "MEM04"} & set(after)


def test_stages_of_different_length(pool: Pool, tmp_path: Path) -> None:
    plan = {"pp": 2, "micro_batch": 1, "sizes": {"num_layers": 4}, "layers_per_stage": (3, 1)}
    findings = found(pool, tmp_path, "uneven", **plan)
    assert "BAL01" in findings, findings
    finding = findings["BAL01"]
    assert finding.ranks == (0,)
    assert finding.cost_frac > 0.3
    assert "the forward pass" in finding.evidence[1]
    assert "layers of its stage" in finding.advice


def test_a_layer_that_is_dead(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "dead", gradient_stats_every_steps=2)["NUM04"]
    assert "blocks.1.ffn" in finding.evidence[0]
    assert "blocks.0" not in finding.evidence[0]


def test_a_layer_whose_gradient_explodes(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "exploding", ranks=1, steps=120, gradient_stats_every_steps=5)["NUM03"]
    assert "embed" in finding.evidence[1]  # what its first block passes on


def test_garbage_collection_of_one_rank(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "garbage", rank=1)["GC01"]
    assert finding.cost_frac > 0.1
    assert finding.ranks == (1,)


def test_a_rank_that_reads_numbers_from_tensors(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "reads", rank=1, observe=replace(tiny.QUIET, profile_steps="4:7"))["SYNC01"]
    assert (finding.severity, finding.ranks) == ("critical", (1,))


@pytest.mark.parametrize(
    ("faults", "ranks"),
    [
        ("loader@1 and compute@1", {"DATA02": (1,), "BAL01": (1,)}),
        ("loader@0 and compute@1", {"DATA02": (0,), "BAL01": (1,)}),
        ("link and compute@1", {"COMM01": (), "BAL01": (1,)}),
        ("save and loader", {"CKPT01": (), "DATA01": ()}),
        ("nan and compute@0", {"NUM01": None, "BAL01": (0,)}),
        ("dead and loader@1", {"NUM04": (), "DATA02": (1,)}),
    ],
)
def test_two_faults_at_once(pool: Pool, tmp_path: Path, faults: str, ranks: dict[str, tuple[int, ...] | None]) -> None:
    findings = found(pool, tmp_path, faults, gradient_stats_every_steps=2 if "dead" in faults else 0)
    assert set(ranks) <= set(findings), findings
    assert_no_others(findings, ranks)
    for code, expected in ranks.items():
        assert expected is None or findings[code].ranks == expected


def test_samples_that_are_no_numbers(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "nan")["NUM01"]
    (rank,) = finding.ranks
    (skipped,) = [event for event in tiny.events(tmp_path / "run", rank) if event["kind"] == "skipped_step"]
    assert 5 in skipped["samples"]
    assert f"the sum of rank {rank}'s own losses is nan" in finding.evidence[1]


def test_the_layer_that_is_no_number(pool: Pool, tmp_path: Path) -> None:
    finding = found(pool, tmp_path, "division", rank=1)["NUM01"]
    assert finding.ranks == (1,)
    assert (
        "rank 1: first nan: the result of aten.div.Tensor in blocks.1.ffn, forward pass; samples" in finding.evidence[2]
    )
    assert finding.advice.startswith("look at blocks.1.ffn (aten.div.Tensor)")


def test_units_that_are_dead(pool: Pool, tmp_path: Path) -> None:
    observe = replace(tiny.QUIET, taps=("**.up@4",))
    finding = found(pool, tmp_path, "inactive", observe=observe)["NUM06"]
    assert finding.evidence[0].endswith("100% of blocks.1.ffn.up")


def test_a_learning_rate_that_is_too_low(pool: Pool, tmp_path: Path) -> None:
    observe = replace(tiny.QUIET, taps=("blocks.*@4",))
    finding = found(pool, tmp_path, "none", ranks=1, lr=1e-9, observe=observe)["NUM07"]
    assert finding.title == "the learning rate is too low for the weights"


@pytest.mark.parametrize("lr", [1e-9, 1e-2])
def test_a_model_that_does_not_learn(pool: Pool, tmp_path: Path, lr: float) -> None:
    data = tiny.RaggedTokens(samples=8)  # which a sound run knows by heart
    findings = found(pool, tmp_path, "none", ranks=1, lr=lr, steps=220, eval_every_steps=50, eval_data=data, data=data)
    assert ("NUM08" in findings) == (lr < 1e-5)


def test_a_held_out_sample_that_is_no_number(tmp_path: Path) -> None:
    held_out = tiny.RaggedTokens(samples=8, poison=3)
    with tiny.trainer(tmp_path / "run", steps=4, eval_every_steps=2, eval_data=held_out) as run:
        run.fit()
    findings = {finding.id: finding for finding in diagnose(read_run(tmp_path / "run"))}
    assert findings["NUM09"].evidence[0] == "2 of 2 evaluations; their steps: 2, 4"
    assert "NUM01" not in findings


def test_evaluations_are_a_phase_of_their_own(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run", steps=4, eval_every_steps=2, eval_data=Data(SLEEP_S)) as run:
        run.fit()
    shares = [event["time/eval_frac"] for event in tiny.events(tmp_path / "run") if event["kind"] == "step"]
    assert shares[2] > 0.3
    assert shares[0] == shares[1] == shares[3] == 0
