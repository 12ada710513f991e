"""Silent corruption: single bits flip in a live run, and each is found, or the run ends with equal bits."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from flips import Flip, Injector, seeded
from pool import Pool

from unisono.checkpoint import list_checkpoints
from unisono.dist import World
from unisono.errors import ConfigError, CorruptionError

STEP = 2  # the verified step
VERIFIED = replace(tiny.QUIET, verify_every_steps=STEP)
RUN: dict[str, Any] = {"steps": 3, "micro_batch": 2}


def injected(run_dir: str | Path, flip: Flip, world: World | None = None, **changes: Any) -> dict[str, Any]:
    """A run in which a bit flips: what was found, what was flipped, and the state at the end."""
    options = {**RUN, "observe": VERIFIED, "every_steps": STEP, **changes}
    try:
        with tiny.trainer(run_dir, world=world, **options) as run:
            injector = Injector(run, flip)
            for _ in run:
                injector.at_rest()
            outcome = {"digest": tiny.digest(run)}
    except CorruptionError as error:
        outcome = {"error": str(error), "ranks": list(error.ranks)}
    return outcome | {"target": injector.target}


def several(world: World, root: str, flips: list[Flip], changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [injected(f"{root}/{number}", flip, world, **changes) for number, flip in enumerate(flips)]


def clean(world: World, run_dir: str, changes: dict[str, Any]) -> str:
    return tiny.complete(run_dir, world=world, **{**RUN, **changes})["digest"]


def committed(run_dir: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(run_dir / "checkpoints") if entry.state == "committed"]


def corruptions(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in tiny.events(run_dir) if event["kind"] == "corruption"]


def check_all(pool: Pool, root: Path, flips: list[Flip], ranks: int) -> Counter[str]:
    """Every flip was found, on its rank, and its state was not saved; or the run has the bits of one without it."""
    expected = pool.run(clean, str(root / "clean"), {}, ranks=ranks)[0]
    every = pool.run(several, str(root / "flips"), flips, {}, ranks=ranks, timeout_s=1500)
    counts: Counter[str] = Counter()
    for number, flip in enumerate(flips):
        folder, outcomes = root / "flips" / str(number), [each[number] for each in every]
        assert outcomes[flip.rank]["target"], flip  # it did flip
        if "error" not in outcomes[0]:
            assert [outcome["digest"] for outcome in outcomes] == [expected] * ranks, flip
            counts[f"{flip.kind}: masked"] += 1
            continue
        assert [outcome["ranks"] for outcome in outcomes] == [[flip.rank]] * ranks, (flip, outcomes)
        assert not any(step >= flip.step for step in committed(folder)), flip
        (event,) = corruptions(folder)
        assert (event["step"] - flip.step) in (0, -1), event
        assert (event["ranks"], event["certain"]) == ([flip.rank], True)
        if flip.kind in ("weight", "moment"):
            assert (event["source"], event["tensor"]) == ("memory", outcomes[flip.rank]["target"]), flip
        elif flip.when != "update":
            assert event["tensor"] == outcomes[flip.rank]["target"], flip
        counts[f"{flip.kind}: found"] += 1
    print(f"{ranks} rank(s): {json.dumps(counts)}")
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_flips_are_found_or_change_nothing(pool: Pool, tmp_path: Path, ranks: int) -> None:
    counts = check_all(pool, tmp_path, list(seeded(20, step=STEP, ranks=ranks, seed=ranks)), ranks)
    assert counts.total() == 20


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "count"), [(1, 700), (2, 300)])
def test_a_thousand_flips(pool: Pool, tmp_path: Path, ranks: int, count: int) -> None:
    counts = check_all(pool, tmp_path, list(seeded(count, step=STEP, ranks=ranks, seed=17 * ranks)), ranks)
    assert counts.total() == count
    assert sum(number for name, number in counts.items() if name.endswith("found")) >= 0.9 * count
