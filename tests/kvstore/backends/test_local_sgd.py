"""Local steps against a plain simulation of all workers in one process, exact resume, and the refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor

from unisono.errors import CheckpointError, ConfigError
from unisono.kvstore import LocalSGD, LocalSGDConfig, create_kvstore
from unisono.kvstore.backends.local_sgd import split_into_fragments

SHAPES = {"a": (3, 2), "b": (4,), "c": (2, 2), "d": (5,)}
STEPS = 20
RATE = 0.1


def start() -> dict[str, Tensor]:
    sizes = {key: torch.Size(shape).numel() for key, shape in SHAPES.items()}
    return {key: torch.linspace(-1, 1, sizes[key], dtype=torch.float64).view(SHAPES[key]) for key in SHAPES}


def train(parameters: dict[str, Tensor], rank: int, step: int) -> None:
    """One inner step: gradient descent on a worker's own quadratic."""
    for number, value in enumerate(parameters.values()):
        value.sub_(RATE * (value * (1 + rank) - number - 0.1 * step * (rank - 0.5)))


def simulate(workers: int, rounds: LocalSGDConfig) -> list[dict[str, Tensor]]:
    """The published algorithm, written for all workers at once and key by key."""
    local = [start() for _ in range(workers)]
    outer, momentum = start(), {key: torch.zeros_like(value) for key, value in start().items()}
    homes = split_into_fragments(outer, rounds.num_fragments)
    sent: dict[tuple[int, str], Tensor] = {}
    for step in range(STEPS):
        for rank, parameters in enumerate(local):
            train(parameters, rank, step)
        done = step + 1
        for number, keys in enumerate(homes):
            offset = (number + 1) * rounds.local_steps // rounds.num_fragments
            if done >= offset and (done - offset) % rounds.local_steps == 0:
                for key in keys:
                    arrives = done + rounds.outer_delay_steps
                    sent[arrives, key] = sum((outer[key] - each[key] for each in local), torch.zeros(1)) / workers
        for key in [key for when, key in sent if when == done]:
            delta = sent.pop((done, key))
            momentum[key] = rounds.outer_momentum * momentum[key] + delta
            outer[key] = outer[key] - rounds.outer_lr * (delta + rounds.outer_momentum * momentum[key])
            for each in local:
                each[key].copy_(rounds.local_weight * each[key] + (1 - rounds.local_weight) * outer[key])
    return local


def run(world, rounds: LocalSGDConfig, resume_at: int = STEPS) -> dict[str, Any]:
    parameters = start()
    local = LocalSGD(parameters, world, rounds)
    for step in range(STEPS):
        if step == resume_at:  # another process goes on from here
            state, parameters = local.state_dict(), {key: value.clone() for key, value in parameters.items()}
            local = LocalSGD(parameters, world, rounds)
            local.load_state_dict(state)
        train(parameters, world.rank, step)
        local.after_step(step)
    return {key: value.numpy() for key, value in parameters.items()}


CASES = {
    "LocalSGD": LocalSGDConfig(local_steps=4, outer_lr=1.0, outer_momentum=0.0),
    "DiLoCo": LocalSGDConfig(local_steps=5),
    "2 fragments": LocalSGDConfig(local_steps=5, num_fragments=2),
    "2 fragments with overlap": LocalSGDConfig(local_steps=5, num_fragments=2, outer_delay_steps=3),
    "3 fragments, own share 0.2": LocalSGDConfig(local_steps=4, num_fragments=3, outer_delay_steps=1, mix=0.2),
}


def run_all(world) -> dict[str, dict[str, Any]]:
    return {name: run(world, rounds) for name, rounds in CASES.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_the_plain_simulation(pool: Pool, ranks: int) -> None:
    outcomes = pool.run(run_all, ranks=ranks)
    for name, rounds in CASES.items():
        for got, want in zip(outcomes, simulate(ranks, rounds), strict=True):
            for key in SHAPES:
                np.testing.assert_allclose(got[name][key], want[key].numpy(), rtol=1e-12, atol=1e-12, err_msg=name)


def resumed_at(world) -> list[dict[str, Any]]:
    rounds = CASES["2 fragments with overlap"]
    return [run(world, rounds, resume_at) for resume_at in (STEPS, 7, 9, 11)]


def test_resume_is_bit_equal(pool: Pool) -> None:
    for whole, *resumed in pool.run(resumed_at):
        assert all(np.array_equal(whole[key], each[key]) for each in resumed for key in SHAPES)


def test_workers_are_equal_at_a_boundary(pool: Pool) -> None:
    one, other = pool.run(run, CASES["DiLoCo"])  # the last step ends at one
    assert all(np.array_equal(one[key], other[key]) for key in SHAPES)
    apart = pool.run(run, LocalSGDConfig(local_steps=6))
    assert not np.array_equal(apart[0]["a"], apart[1]["a"])


def half_precision(world) -> list[torch.dtype]:
    parameters = {"h": torch.ones(4, dtype=torch.bfloat16), "w": torch.ones(4)}
    local = LocalSGD(parameters, world, LocalSGDConfig(local_steps=1, outer_lr=1.0, outer_momentum=0.0))
    for value in parameters.values():
        value.mul_(1 + world.rank)
    assert local.after_step(0)
    assert [value.tolist() for value in parameters.values()] == [[1.5] * 4] * 2
    return [value.dtype for value in local.state_dict().values()]


def test_half_precision_is_averaged_in_single(pool: Pool) -> None:
    assert pool.run(half_precision) == [[torch.float32] * 4] * 2


def test_fragments_are_runs_of_about_equal_size() -> None:
    sizes = dict(zip("abcdef", (1, 1, 8, 2, 2, 6), strict=True))
    parameters = {key: torch.zeros(size) for key, size in sizes.items()}
    assert split_into_fragments(parameters, 1) == [list("abcdef")]
    assert split_into_fragments(parameters, 2) == [list("abc"), list("def")]
    assert split_into_fragments(parameters, 6) == [[key] for key in "abcdef"]
    with pytest.raises(ConfigError, match="7 fragments of 6 parameters"):
        split_into_fragments(parameters, 7)


def test_rounds_say_all_that_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LocalSGDConfig(local_steps=4, outer_lr=0.0, num_fragments=5, outer_delay_steps=4, outer_momentum=1.0)
    text = str(caught.value)
    for part in (
        "outer_lr = 0.0",
        "num_fragments 5 with local_steps 4",
        "outer_delay_steps 4 with",
        "outer_momentum = 1.0",
    ):
        assert part in text
    assert "local_steps is at least 1" not in text
    with pytest.raises(ConfigError, match=r"mix = 0\.5\n.*only with outer_delay_steps"):
        LocalSGDConfig(local_steps=4, mix=0.5)


def other_cut(world) -> str:
    state = LocalSGD(start(), world, LocalSGDConfig(local_steps=4, num_fragments=2)).state_dict()
    with pytest.raises(CheckpointError) as caught:
        LocalSGD(start(), world, LocalSGDConfig(local_steps=4)).load_state_dict(state)
    return str(caught.value)


def test_another_cut_is_not_loaded(pool: Pool) -> None:
    (text,) = pool.run(other_cut, ranks=1)
    assert "saved local steps that differ in" in text
    assert "(here 1)" in text


# --- as a store ----------------------------------------------------------------------------------------------------


def through_a_store(world, kind: str, rounds: LocalSGDConfig | None) -> dict[str, Any]:
    store: Any = create_kvstore(kind, world, local_sgd=rounds)  # type: ignore[arg-type]
    store.init(start())
    # dist_sync adds what dist_local averages
    store.set_optimizer(
        "sgd", lr=RATE / (world.world_size if kind == "dist_sync" else 1), momentum=0.0, weight_decay=0.0
    )
    for step in range(STEPS):
        pulled = {key: store.pull(key).wait() for key in SHAPES}
        store.push({key: value * (1 + world.rank) - 0.1 * step for key, value in pulled.items()})
    return {key: store.pull(key).wait().numpy() for key in SHAPES}


@pytest.mark.full
def test_averaging_every_step_of_sgd_is_dist_sync(pool: Pool) -> None:
    local = pool.run(through_a_store, "dist_local", LocalSGDConfig(local_steps=1, outer_lr=1.0, outer_momentum=0.0))
    sync = pool.run(through_a_store, "dist_sync", None)
    for got, want in zip(local, sync, strict=True):
        for key in SHAPES:
            np.testing.assert_allclose(got[key], want[key], rtol=1e-6, atol=1e-6)


def test_between_boundaries_the_store_is_this_workers_own(pool: Pool) -> None:
    one, other = pool.run(through_a_store, "dist_local", LocalSGDConfig(local_steps=7))
    assert not np.array_equal(one["a"], other["a"])
    one, other = pool.run(through_a_store, "dist_local", LocalSGDConfig(local_steps=5))
    assert np.array_equal(one["a"], other["a"])


def refusals(world) -> list[str]:
    store = create_kvstore("dist_local", world, local_sgd=LocalSGDConfig(local_steps=2))
    store.init({"a": torch.zeros(1), "b": torch.zeros(1)})
    calls = [
        lambda: store.push("a", torch.ones(1)),
        lambda: store.set_optimizer("sgd") or (store.push("a", torch.ones(1)) and store.push("a", torch.ones(1))),
        store.state_dict,
        lambda: store.init("c", torch.zeros(1)),
    ]
    texts: list[str] = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_refusals(pool: Pool) -> None:
    (texts,) = pool.run(refusals, ranks=1)
    for text, part in zip(
        texts,
        [
            "a push without an optimizer",
            "a second push of 'a' before 'b'",
            "state in the middle of a step that has pushed a",
            "init of c after the first push",
        ],
        strict=True,
    ):
        assert part in text


def without_steps(world) -> str:
    store = create_kvstore("dist_local", world, local_sgd=LocalSGDConfig(local_steps=2))
    store.init("a", torch.zeros(1))
    state = store.state_dict()
    del state["steps"]
    with pytest.raises(CheckpointError) as caught:
        store.load_state_dict(state)
    return str(caught.value)


def test_a_state_of_another_kind_is_not_loaded(pool: Pool) -> None:
    (text,) = pool.run(without_steps, ranks=1)
    assert "a saved state without 'steps'" in text
