"""A bad step changes nothing: parameters, moments, step counts, averages stay bit-equal on all ranks; the data goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from pool import Pool

from unisono.data.order.permutation import Permutation
from unisono.errors import NumericsError
from unisono.train.guard import StepGuard


def poisoned_at(step: int) -> int:
    """A sample of the tiny run's ``step`` (from 0)."""
    return int(Permutation(tiny.SAMPLES, seed=0)(np.array([8 * step + 5]))[0])


def states(run_dir: str, poison: int, world=None, **changes: object) -> list[dict]:
    """Digest after every step, and whether it was skipped."""
    seen = []
    with tiny.trainer(run_dir, steps=4, world=world, data=tiny.RaggedTokens(poison=poison), **changes) as run:
        watched = {n: t for n, t in run.state.global_state().items() if n.startswith(("model/", "optim/", "ema/"))}
        for step in run:
            bits = b"".join(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in watched.values())
            seen.append({"bits": hash(bits), "skipped": step.skipped, "samples": step.sample_ids.tolist()})
    return seen


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb", "lars"])
def test_a_poisoned_step_leaves_every_bit(tmp_path: Path, kind: str) -> None:
    seen = states(str(tmp_path / "run"), poisoned_at(2), kind=kind, ema_decay=0.9)
    assert [step["skipped"] for step in seen] == [False, False, True, False]
    bits = [step["bits"] for step in seen]
    assert bits[2] == bits[1]
    assert bits[3] != bits[2]
    (event,) = [e for e in tiny.events(tmp_path / "run") if e["kind"] == "skipped_step"]
    assert event["step"] == 3
    assert poisoned_at(2) in event["samples"]


def test_the_first_step_can_be_the_bad_one(tmp_path: Path) -> None:
    assert [s["skipped"] for s in states(str(tmp_path / "run"), poisoned_at(0))] == [True, False, False, False]


def states_on(world, run_dir: str, poison: int) -> list[dict]:
    return [{**s, "bits": s["bits"]} for s in states(run_dir, poison, world)]


def test_all_ranks_skip_what_one_rank_saw(tmp_path: Path, pool: Pool) -> None:
    first, second = pool.run(states_on, str(tmp_path / "run"), poisoned_at(1), ranks=2)
    assert [s["skipped"] for s in first] == [s["skipped"] for s in second] == [False, True, False, False]


def test_too_many_skips_in_a_row_end_the_run_with_the_reason(tmp_path: Path) -> None:
    class Broken(tiny.RaggedTokens):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            batch = super().read(indices)
            batch["weights"][np.isin(indices, [poisoned_at(step) for step in (1, 2, 3)])] = np.nan
            return batch

    with (
        pytest.raises(NumericsError) as raised,
        tiny.trainer(tmp_path / "run", steps=10, data=Broken(), max_skips=3) as run,
    ):
        run.fit()
    assert str(raised.value) == (
        "3 steps in a row were skipped, the last one step 4 with loss nan and gradient norm nan\n"
        "  rule: at most 2 in a row (train.max_skips=3)\n"
        "  so:   the run ends; parameters are those of the last good step and the newest checkpoint is kept\n"
        "  try:  lower optim.lr, use a longer warm-up or plan.precision='fp32', or look at the samples of the "
        "skipped_step events"
    )


@pytest.mark.parametrize(("steps", "made"), [(10, 3), (2, 2)])
def test_a_run_of_skipped_steps_alone_is_not_finished(tmp_path: Path, steps: int, made: int) -> None:
    class Broken(tiny.RaggedTokens):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {**super().read(indices), "weights": np.full((len(indices), tiny.SEQ_LEN), np.nan, np.float32)}

    with (
        pytest.raises(NumericsError) as raised,
        tiny.trainer(tmp_path / "run", steps=steps, data=Broken(), max_skips=3) as run,
    ):
        run.fit()
    assert str(raised.value) == (
        f"all {made} steps of the run were skipped, the last one with loss nan and gradient norm nan\n"
        "  rule: a step counts if its loss and gradient norm are finite\n"
        "  so:   the run ends; no parameter has changed since its start\n"
        "  try:  look at the model's outputs on the samples of the first skipped_step event, or plan.precision='fp32'"
    )


def test_an_overflow_in_every_step_names_the_loss_scale(tmp_path: Path) -> None:
    with (
        pytest.raises(NumericsError, match=r"a lower train\.loss_scale, or more steps, in which it is halved"),
        tiny.trainer(tmp_path / "run", steps=2, precision="fp16", loss_scale=2.0**30) as run,
    ):
        run.fit()


def test_fp16_overflow_halves_the_scale_and_training_goes_on(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run", steps=12, precision="fp16", loss_scale=2.0**24) as run:
        skipped = [step.skipped for step in run]
        assert skipped[0]
        assert not skipped[-1]
        assert float(run.state.loss_scaler.value) == 2.0 ** (24 - sum(skipped))


def judge(guard: StepGuard, *pairs: tuple[float, float]) -> list[bool]:
    return [bool(guard.accept(torch.tensor(loss), torch.tensor(norm))) for loss, norm in pairs]


def test_spikes_are_skipped_and_stay_out_of_the_window() -> None:
    guard = StepGuard(torch.device("cpu"), sigmas=4.0, window=32)
    steady = [(2.0 + 0.01 * (i % 5), 1.0 + 0.01 * (i % 3)) for i in range(30)]
    assert all(judge(guard, *steady))
    assert judge(guard, (2.0, 50.0), (9.0, 1.0), (2.01, 1.01), (2.0, 50.0)) == [False, False, True, False]
    assert int(guard.skipped) == 3


def test_non_finite_values_do_not_blind_the_spike_rule() -> None:
    guard = StepGuard(torch.device("cpu"), sigmas=4.0, window=32)
    judge(guard, *[(2.0 + 0.01 * (i % 5), 1.0) for i in range(30)])
    assert judge(guard, (float("nan"), 1.0), (float("inf"), 1.0), (2.0, float("nan"))) == [False, False, False]
    assert judge(guard, (2.02, 1.0), (9.0, 1.0)) == [True, False]


def test_a_falling_loss_is_no_spike() -> None:
    guard = StepGuard(torch.device("cpu"), sigmas=4.0, window=32)
    assert all(judge(guard, *[(5.0 * 0.95**i, 1.0) for i in range(100)]))


def test_gradient_statistics_on_request(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=4, gradient_stats_every_steps=2)
    found = [e for e in tiny.events(tmp_path / "run") if e["kind"] == "gradient_stats"]
    assert [e["step"] for e in found] == [2, 4]
    norms = [layer["norm"] for layer in found[0]["layers"].values()]
    (step,) = [e for e in tiny.events(tmp_path / "run") if e["kind"] == "step" and e["step"] == 2]
    assert sum(n * n for n in norms) ** 0.5 == pytest.approx(step["train/grad_norm"], rel=1e-4)
    assert found[0]["layers"]["embedding.weight"]["nonfinite"] == 0
