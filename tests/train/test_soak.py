"""Ranks, servers and the launcher are killed at random times, for ten minutes in all, or for one in a run that has a time budget.

A synchronous run ends with the bits of one that nobody disturbed: weights, optimizer, generators, position in the data, and the
losses of all steps. Of an asynchronous run, whose order is not determined, every sample counts exactly once. Where a server
is killed that has no replica, none counts twice, and none is missing but those of the pushes that the workers say were lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import soak_run
import torch
from soak import LIMIT_S, SLICE_S, WHOLE_S, Soaked, seed, soak
from tests.equality.results import of_run

from unisono.checkpoint import open_checkpoint
from unisono.kvstore.server.run_spec import RunSpec
from unisono.observe.events import events_path, read_events

pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT_S)]

RANKS = ["rank 0", "rank 1"]
SERVERS = ["server 0", "server 1"]
SETTINGS: dict[str, Any] = {
    "launch.num_processes": 2,
    "launch.num_threads": 1,
    "launch.max_restarts": 1000,
    "launch.timeout_s": 60,
    "plan.global_batch": 8,
    "plan.precision": "fp32",
    "train.eval_every_steps": 0,
    "checkpoint.every_steps": 2,
    "loader.worker_kind": "thread",  # of which the first case of each kind has processes instead
    "observe.console": "off",
    "observe.report": "false",
}
PROCESSES = {"loader.worker_kind": "process"}
COUNTING = {
    "optim.kind": "sgd",
    "optim.lr": 1.0,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.clip_norm": 0.0,
}
# a save waits for all workers: not too often
COUNTING |= {
    "checkpoint.every_steps": 5,
    "schedule.kind": "constant",
    "plan.sync": "dist_async",
    "launch.num_servers": 2,
}


@dataclass(frozen=True)
class Case:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    victims: tuple[str, ...] = (*RANKS, "launcher")


SYNCHRONOUS = [
    Case("sums", PROCESSES),
    Case("int8", {"plan.compression": "int8"}),
    Case("zero1", {"plan.dp_shard": 2, "plan.zero": 1}),
    Case("zero3", {"plan.dp_shard": 2, "plan.zero": 3}),
    Case("pp", {"plan.pp": 2, "plan.micro_batch": 4}),
    Case("tp", {"plan.tp": 2}),
    Case(
        "rounds",
        {"plan.sync": "dist_local", "plan.local_steps": 7, "plan.num_fragments": 2, "plan.outer_delay_steps": 1},
    ),
    # one rank: a plan of several refuses it
    Case("local", {"plan.sync": "local", "launch.num_processes": 1}, ("rank 0", "launcher")),
]
ASYNCHRONOUS = [
    # without a replica a killed server loses pushes, so that servers are killed only with one
    Case("replicas", {"launch.num_replicas": 2, **PROCESSES}, (*RANKS, *SERVERS, "launcher")),
    Case("bounded", {"launch.num_replicas": 2, "plan.staleness": 1}, (*RANKS, *SERVERS, "launcher")),
    Case("no replicas", {"plan.staleness": 3}),
]
# no worker is killed: it would forget which pushes were acknowledged to it, and could not say that they are lost
LOSING = [Case("snapshots", {"launch.snapshot_every_s": 1.5}, tuple(SERVERS))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cases, or of each kind at most two that the seed draws, and the seconds of each."""
    cases, num_drawn = {
        test_a_synchronous_run_ends_with_the_bits_of_an_undisturbed_one: (SYNCHRONOUS, 2),
        test_each_push_of_an_asynchronous_run_counts_once: (ASYNCHRONOUS, 1),
        test_a_killed_server_without_a_replica_loses_what_the_workers_say_and_no_more: (LOSING, 1),
    }[metafunc.function]
    share_s = WHOLE_S / len(SYNCHRONOUS + ASYNCHRONOUS + LOSING)
    if metafunc.config.getoption("budget_s") is not None:
        cases, share_s = random.Random(seed()).sample(cases, num_drawn), SLICE_S / 4
    metafunc.parametrize(("case", "seconds"), [pytest.param(case, share_s, id=case.name) for case in cases])


def soaked(folder: Path, case: Case, seconds: float, common: dict[str, Any]) -> tuple[Soaked, int]:
    """The finished run, and its number of steps: more than there are before the time is up."""
    steps = 8 * int((4 * seconds + 120) / 8)
    run = Soaked(folder, {**SETTINGS, **common, **case.settings, "train.steps": steps})
    draw = random.Random(f"{seed()} {case.name}")
    kills = soak(run, list(case.victims), seconds, steps, draw)
    print(
        f"{case.name}: {len(kills)} kills, {run.num_restarts()} restarts, {run.num_starts} starts of {steps} steps: {kills}"
    )
    launchers = sum(kill.endswith("launcher") for kill in kills)
    assert run.num_starts == 1 + launchers
    assert run.num_restarts() >= min(1, len(kills) - launchers)
    return run, steps


def test_a_synchronous_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, case: Case, seconds: float) -> None:
    run, steps = soaked(tmp_path, case, seconds, {})
    (tmp_path / "undisturbed").mkdir()
    # saving does not change a bit, so that this one saves its last step only
    whole = Soaked(tmp_path / "undisturbed", {**run.settings, "checkpoint.every_steps": steps})
    whole.start()
    whole.finish()
    found, expected = comparable(run.run_dir, steps), comparable(whole.run_dir, steps)
    assert sum(" train/loss" in name for name in expected) == run.settings["launch.num_processes"] * steps
    assert sum(" tensor model" in name for name in expected) >= 20
    assert sum(" tensor optim" in name for name in expected) >= 40
    assert {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)} == set()


def comparable(run_dir: Path, steps: int) -> dict[str, str]:
    """Losses of all steps, and everything in the last checkpoint."""
    kept = (f"checkpoint {steps} ", "step ", "rank 1 step ")
    return {name: value for name, value in of_run(run_dir).items() if name.startswith(kept)}


def test_each_push_of_an_asynchronous_run_counts_once(tmp_path: Path, case: Case, seconds: float) -> None:
    run, steps = soaked(tmp_path, case, seconds, COUNTING)
    (last,) = (run.run_dir / "checkpoints").glob(f"step-{steps:08d}")
    snapshot = open_checkpoint(last)
    assert float(snapshot.tensor("meter/weight_total")) == 8 * steps
    # the gradient of a shard of 4 samples is divided by 4
    each = torch.full((soak_run.NUM_COUNTED,), -8 * steps / soak_run.NUM_COUNTED / 4)
    values = {name: snapshot.tensor(name) for name in snapshot.names() if name.startswith("model/")}
    assert len(values) == 4
    for value in values.values():
        torch.testing.assert_close(value, each, rtol=0, atol=0)


def test_a_killed_server_without_a_replica_loses_what_the_workers_say_and_no_more(
    tmp_path: Path, case: Case, seconds: float
) -> None:
    run, steps = soaked(tmp_path, case, seconds, COUNTING)
    (last,) = (run.run_dir / "checkpoints").glob(f"step-{steps:08d}")
    snapshot = open_checkpoint(last)
    # the queue hands out again what server 0 forgot with its own values
    assert float(snapshot.tensor("meter/weight_total")) == 8 * steps
    values = {
        name.removeprefix("model/"): snapshot.tensor(name) for name in snapshot.names() if name.startswith("model/")
    }
    placement = RunSpec(table={k: (tuple(v.shape), v.dtype) for k, v in values.items()}, num_servers=2).placement()
    server_of = {chunk.key: chunk.server for chunk in placement.chunks}
    assert sorted(server_of.values()) == [0, 0, 1, 1]
    said = lost_pushes(run)
    for name, value in values.items():
        # no sample counts twice
        assert (value >= -8 * steps / soak_run.NUM_COUNTED / 4).all(), (name, value)
        # a shard's 4 gradients are divided by 4, so that one that is applied makes the sum smaller by 1
        missing = 2 * steps + int(value.sum())
        assert 0 <= missing <= (0 if server_of[name] == 0 else said[1]), (name, missing, said)
    print(f"{case.name}: the workers say that {said} pushes to servers 0 and 1 were lost")
    assert sum(said) > 0


def lost_pushes(run: Soaked) -> list[int]:
    """Of each server: how many acknowledged pushes it has lost, as the workers say in their events."""
    lost = [0, 0]
    for rank in range(2):
        for event in read_events(events_path(run.run_dir, rank)).events:
            if event["kind"] == "servers" and "has lost" in event["message"]:
                words = event["message"].split()
                lost[int(words[1])] += int(words[words.index("lost") + 1])
    return lost
