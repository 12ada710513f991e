"""Rules of training health, on events with exactly known losses, gradients and taps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_streams import COMPUTE, SETTINGS, findings, only, series
from numpy.typing import NDArray

from unisono.diagnose import RunFacts, TrainingFacts
from unisono.diagnose.training_rules import loss_spikes


def noisy(count: int, level: float = 2.0) -> list[float]:
    return (level + 0.1 * np.random.default_rng(0).standard_normal(count)).tolist()


@pytest.mark.parametrize(("at", "severity"), [((120,), "warning"), (tuple(range(60, 200, 20)), "critical"), ((), None)])
def test_losses_that_jump(tmp_path: Path, at: tuple[int, ...], severity: str | None) -> None:
    losses = noisy(200)
    for step in at:
        losses[step - 1] = 9.0
    settings = {**SETTINGS, "train.spike_sigmas": 0.0}
    found = findings(tmp_path, lambda rank, step: COMPUTE, steps=200, fields_of=series(loss=losses), settings=settings)
    assert [(one.id, one.severity) for one in found] == ([("NUM02", severity)] if severity else [])
    if severity:
        assert found[0].patch == {"train.spike_sigmas": 8.0}
        assert f"{len(at)} of 200 steps: {at[0]}" in found[0].evidence[0]
        assert "9, the 50 steps before it 2" in found[0].evidence[1]


def test_a_step_that_the_guard_skipped_is_no_jump(tmp_path: Path) -> None:
    losses = noisy(200)
    losses[119] = losses[149] = 9.0

    def skipped(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "skipped_step", "loss": 9.0, "grad_norm": 1.0, "samples": []}] if step == 120 else []

    finding = only(tmp_path, lambda rank, step: COMPUTE, steps=200, fields_of=series(loss=losses), extra=skipped)
    assert (finding.id, finding.evidence[0]) == ("NUM02", "1 of 199 steps: 150")


def test_a_falling_loss_does_not_jump(tmp_path: Path) -> None:
    losses = [10 * math.exp(-step / 40) + noise - 2 for step, noise in enumerate(noisy(300))]
    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=300, fields_of=series(loss=losses)) == []


def stats(norms: Mapping[str, Any]) -> Any:
    """Statistics of gradients every ten steps; ``norms``: by parameter, the norm at a step."""

    def events(rank: int, step: int) -> list[dict[str, Any]]:
        layers = {name: {"norm": norm(step), "max": norm(step), "nonfinite": 0} for name, norm in norms.items()}
        return [{"kind": "gradient_stats", "layers": layers}] if step % 10 == 0 else []

    return events


def test_gradients_that_grow(tmp_path: Path) -> None:
    norms = [1.05**step for step in range(1, 101)]
    grown = stats({"head": lambda step: 1.0, "blocks.1.ffn": lambda step: 1.05**step})
    finding = only(tmp_path, lambda rank, step: COMPUTE, steps=100, fields_of=series(grad_norm=norms), extra=grown)
    assert (finding.id, finding.severity) == ("NUM03", "warning")
    assert "50 times that of the first" in finding.evidence[0]
    assert finding.evidence[1] == "blocks.1.ffn has grown most, 81 times"


def test_gradients_of_a_warm_up_do_not_grow(tmp_path: Path) -> None:
    norms = [min(step, 30) / 30 for step in range(1, 101)]
    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=100, fields_of=series(grad_norm=norms)) == []


def test_parameters_without_gradients(tmp_path: Path) -> None:
    norms = stats(
        {"a": lambda step: 1.0, "b": lambda step: 2.0, "blocks.0.gate": lambda step: 0.0 if step > 10 else 1.0}
    )
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=norms)
    assert (finding.id, finding.severity) == ("NUM04", "warning")
    assert finding.evidence[0] == "1 of 3: blocks.0.gate"
    assert "in steps 20, 30, 40, the median of those with a gradient is 1" in finding.evidence[1]


def test_most_parameters_without_gradients(tmp_path: Path) -> None:
    norms = stats({"a": lambda step: 1.0, **{f"blocks.{n}.gate": lambda step: 0.0 for n in range(3)}})
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=norms)
    assert finding.evidence[0] == "3 of 4: blocks.0.gate, blocks.1.gate, blocks.2.gate"


@pytest.mark.parametrize(
    ("evals", "train_falls", "severity"),
    [
        ((3.0, 2.5, 2.6, 2.8), True, "critical"),
        ((3.0, 2.5, 2.52, 2.56), True, "warning"),
        ((3.0, 2.5, 2.6, 2.8), False, None),  # training has become worse too: no overfitting
        ((3.0, 2.9, 2.8, 2.7), True, None),
        ((3.0, 2.9, 2.5, 2.8), True, None),  # one evaluation is no trend
    ],
)
def test_overfitting(tmp_path: Path, evals: tuple[float, ...], train_falls: bool, severity: str | None) -> None:
    def evaluations(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": evals[step // 10 - 1]}] if step % 10 == 0 else []

    losses = [3 - step / 50 if train_falls else 2 + step / 50 for step in range(1, 41)]
    settings = {**SETTINGS, "train.early_stop_patience": 0}
    found = findings(
        tmp_path, lambda rank, step: COMPUTE, fields_of=series(loss=losses), extra=evaluations, settings=settings
    )
    assert [(one.id, one.severity) for one in found] == ([("NUM05", severity)] if severity else [])
    if severity:
        assert found[0].patch == {"train.early_stop_patience": 3}
        assert "eval loss 2.5 at step 20" in found[0].evidence[0]


@pytest.mark.parametrize(("patience", "ids"), [(0, ["NUM05"]), (1, ["NUM05"]), (2, []), (3, [])])
def test_a_run_that_stops_by_itself_is_no_overfitting(tmp_path: Path, patience: int, ids: list[str]) -> None:
    evals = (3.0, 2.5, 2.6, 2.8)

    def evaluations(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": evals[step // 10 - 1]}] if step % 10 == 0 else []

    found = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        fields_of=series(loss=[3 - step / 50 for step in range(1, 41)]),
        extra=evaluations,
        settings={**SETTINGS, "train.early_stop_patience": patience},
    )
    assert [one.id for one in found] == ids


def tap(step: int, *, dead: Mapping[str, float], updates: Mapping[str, float], skipped: bool = False) -> dict[str, Any]:
    return {
        "kind": "tap",
        "step": step,
        "skipped": skipped,
        "modules": {path: {"output": {"dead_frac": share}} for path, share in dead.items()},
        "parameters": {name: {"shape": [4, 4], "update_frac": share} for name, share in updates.items()}
        | {"bias": {"shape": [4], "update_frac": 9.0}, "frozen": {"shape": [4, 4]}},
    }


def every_tenth(event: Any) -> Any:
    return lambda rank, step: [event(step)] if step % 10 == 0 else []


@pytest.mark.parametrize(
    ("share", "severity"), [(lambda step: 0.6, "warning"), (lambda step: 0.95, "critical"), (lambda step: 0.3, None),
                            (lambda step: 0.95 if step < 30 else 0.1, None)],
)  # fmt: skip
def test_units_that_are_dead(tmp_path: Path, share: Any, severity: str | None) -> None:
    events = every_tenth(lambda step: tap(step, dead={"blocks.0.relu": share(step), "blocks.1": 0.0}, updates={}))
    found = findings(tmp_path, lambda rank, step: COMPUTE, extra=events)
    assert [(one.id, one.severity) for one in found] == ([("NUM06", severity)] if severity else [])
    if severity:
        assert found[0].evidence == (
            f"in steps 20, 30, 40, channels that are 0 for the whole batch: {share(40):.0%} of blocks.0.relu",
        )


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (lambda step: 2e-6, "low"),
        (lambda step: 0.4, "high"),
        (lambda step: 1e-3, None),
        (lambda step: 1e-3 if step == 10 else 1e-7, None),  # the end of a schedule
        (lambda step: 0.4 if step == 10 else 1e-3, None),  # its begin
    ],
)
def test_updates_that_are_too_small_or_large(tmp_path: Path, ratio: Any, text: str | None) -> None:
    events = every_tenth(lambda step: tap(step, dead={}, updates={"a": ratio(step), "b": ratio(step), "c": 0.02}))
    settings = {**SETTINGS, "optim.lr": 0.01}
    found = findings(tmp_path, lambda rank, step: COMPUTE, extra=events, settings=settings)
    assert [one.id for one in found] == (["NUM07"] if text else [])
    if text:
        assert found[0].title == f"the learning rate is too {text} for the weights"
        assert f"{ratio(40):.2g} of its norm, in 4 taps" in found[0].evidence[0]
        low, high = {"low": ("0.5", "50"), "high": ("2.5e-06", "0.00025")}[text]
        assert found[0].evidence[2] == f"optim.lr is 0.01; {low} to {high} is worth a try"


def test_taps_of_skipped_steps_do_not_count(tmp_path: Path) -> None:
    events = every_tenth(lambda step: tap(step, dead={"relu": 1.0}, updates={"a": 0.0}, skipped=True))
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=events) == []


def corrupt(**changes: Any) -> Any:
    """Rank 0 has written of silent corruption in step 7."""
    event = {
        "kind": "corruption",
        "source": "memory",
        "ranks": [1],
        "hosts": ["node-b"],
        "tensor": "model/a",
        "certain": True,
    }
    event |= {"evidence": "its bits changed", **changes}
    return lambda rank, step: [event] if (rank, step) == (0, 7) else []


def test_silent_corruption(tmp_path: Path) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt())
    assert (finding.id, finding.ranks, finding.severity) == ("SDC01", (1,), "critical")
    assert finding.evidence == ("step 7, memory, model/a: its bits changed",)
    assert "test memory and devices of node-b" in finding.advice


def test_what_is_critical_without_a_cost_comes_before_what_is_slow(tmp_path: Path) -> None:
    found = findings(tmp_path, lambda rank, step: {**COMPUTE, "data_wait": 0.025}, extra=corrupt())
    assert [finding.id for finding in found] == ["SDC01", "DATA01"]


def test_corruption_of_one_of_two_copies(tmp_path: Path) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt(ranks=[1, 0], certain=False, source="replica"))
    assert (finding.ranks, finding.confidence) == ((0, 1), 0.7)
    assert finding.title == "silent corruption on one of several ranks"
    assert "three replicas" in finding.advice


@pytest.mark.parametrize(
    "damage",
    [
        {"ranks": "all", "hosts": 3, "tensor": None, "evidence": []},
        {"ranks": [-1, "x", 1 << 70, True, None], "hosts": [None, {}, ["a"]], "certain": "yes"},
        {"tensor": "x" * 10**5, "ranks": list(range(5000))},
    ],
)
def test_a_corruption_event_of_another_form_does_no_harm(tmp_path: Path, damage: dict[str, Any]) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt(**damage))
    assert finding.id == "SDC01"
    assert all(len(text) < 2000 for text in finding.evidence)


def skip(loss: Any, **origin: Any) -> Any:
    """Step 7 was skipped, and rank 1 found its origin."""

    def events(rank: int, step: int) -> list[dict[str, Any]]:
        if step != 7:
            return []
        skipped = {"kind": "skipped_step", "loss": loss, "grad_norm": "NaN", "rank_loss": 1.0, "samples": [1, 2]}
        found = {"kind": "nonfinite", "reproduced": True, "value": "nan", "tensor": "", "layer": "", "operator": ""}
        return [skipped, *([found | {"samples": [4, 2], **origin}] if rank == 1 and origin else [])]

    return events


@pytest.mark.parametrize(
    ("origin", "evidence", "advice"),
    [
        (
            {"where": "input", "tensor": "inputs"},
            "batch entry 'inputs'; samples 4, 2",
            "fix or drop these samples: batch entry 'inputs' holds nan before any layer",
        ),
        (
            {"where": "forward", "layer": "blocks.3.ffn", "operator": "aten.div.Tensor", "input_value": "finite"},
            "the result of aten.div.Tensor in blocks.3.ffn, forward pass; samples 4, 2",
            "look at blocks.3.ffn (aten.div.Tensor), whose inputs are finite",
        ),
        (
            {"where": "forward", "layer": "a", "operator": "aten._softmax.default", "input_value": "inf"},
            "the result of aten._softmax.default in a, forward pass; samples 4, 2",
            "look at a (aten._softmax.default), whose inputs hold inf",
        ),
        (
            {"where": "forward", "layer": "a", "operator": ""},
            "a result in a, forward pass; samples 4, 2",
            "look at a: an epsilon",
        ),
        (
            {"where": "forward", "operator": "aten.div.Tensor"},
            "the result of aten.div.Tensor in the model's own forward pass; samples 4, 2",
            "look at the model's own forward pass (aten.div.Tensor): an epsilon",
        ),
        (
            {"where": "loss", "operator": "aten.log.default", "samples": []},
            "the result of aten.log.default, loss function",
            "look at the objective (aten.log.default)",
        ),
        (
            {"where": "parameter", "tensor": "head.weight", "samples": []},
            "parameter head.weight",
            "the weights that the run",
        ),
    ],
)
def test_the_origin_of_a_step_that_is_no_number(tmp_path: Path, origin: dict, evidence: str, advice: str) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=skip("NaN", **origin))
    assert (finding.id, finding.ranks, finding.confidence) == ("NUM01", (1,), 0.95)
    assert finding.evidence[1] == f"step 7, rank 1: first nan: {evidence}"
    assert finding.advice.startswith(advice)


def test_a_gradient_that_is_no_number(tmp_path: Path) -> None:
    origin = {"where": "backward", "layer": "norm", "operator": "aten.div.Tensor"}
    finding = only(tmp_path / "found", lambda rank, step: COMPUTE, extra=skip(2.0, **origin))
    assert (finding.id, finding.title) == ("NUM01", "the gradient is NaN or infinite in some steps")
    assert findings(tmp_path / "scale", lambda rank, step: COMPUTE, extra=skip(2.0)) == []  # fp16 finds its loss scale


@pytest.mark.parametrize(
    ("loss", "eval_loss", "settings", "found"),
    [
        (lambda step: 4.0, 4.05, {}, True),
        (lambda step: 4.0, 4.05, {"model.pretrained": "x"}, False),
        (lambda step: 4.0, 5.0, {}, False),  # NUM05's, or other data
        (lambda step: 4.0 - min(step, 100) / 100, 3.0, {}, False),  # it has learned, and is flat now
        (lambda step: 4.0 - step / 400, 3.45, {}, False),  # it learns
    ],
)
def test_a_model_that_does_not_learn(tmp_path: Path, loss: Any, eval_loss: float, settings: dict, found: bool) -> None:
    losses = [loss(step) + noise - 2 for step, noise in enumerate(noisy(220), start=1)]
    events = lambda rank, step: [{"kind": "eval", "eval/loss": eval_loss}] if step % 50 == 0 else []  # noqa: E731
    result = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        steps=220,
        fields_of=series(loss=losses),
        extra=events,
        settings={**SETTINGS, **settings},
    )
    assert [one.id for one in result] == (["NUM08"] if found else [])


@pytest.mark.parametrize(
    ("evals", "losses", "severity"),
    [
        ((2.0, 2.0, 2.0, 2.0), {}, None),
        ((2.0, math.nan, math.inf, 2.0), {}, "warning"),
        ((math.nan,) * 4, {}, "critical"),
        ((2.0, 2.0, 2.0, math.nan), {}, "warning"),  # after the last step
        ((2.0, 2.0, 2.0, math.nan), {40: math.nan}, None),
        ((2.0, math.nan, 2.0, 2.0), {20: math.nan}, "warning"),  # a bad batch was skipped
        ((2.0, math.nan, 2.0, 2.0), {21: math.nan}, None),  # of the same parameters
    ],
)
def test_evaluations_that_are_no_number(
    tmp_path: Path, evals: tuple[float, ...], losses: dict[int, float], severity: str | None
) -> None:
    def evaluations(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": evals[step // 10 - 1]}] if step % 10 == 0 else []

    steps = [losses.get(step, 2.5) for step in range(1, 41)]
    found = findings(tmp_path, lambda rank, step: COMPUTE, fields_of=series(loss=steps), extra=evaluations)
    assert [(one.id, one.severity) for one in found] == ([("NUM09", severity)] if severity else [])
    bad = [10 * place for place, value in enumerate(evals, start=1) if not math.isfinite(value)]
    if found:
        assert found[0].evidence[0] == f"{len(bad)} of 4 evaluations; their steps: {', '.join(map(str, bad))}"
        assert f"eval loss nan at step {bad[0]}, where the train loss is finite: 2.5" in found[0].evidence[1]
        assert found[0].advice.startswith("look at the held-out data")


def test_a_loss_that_is_no_number_has_a_rank_and_samples(tmp_path: Path) -> None:
    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        own = math.nan if rank == 1 else 3.0
        row = {
            "kind": "skipped_step",
            "loss": math.nan,
            "grad_norm": math.nan,
            "rank_loss": own,
            "samples": [10 * rank, 10 * rank + 1],
        }
        return [row] if step == 7 else []

    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=extra)
    assert (finding.id, finding.ranks, finding.severity) == ("NUM01", (1,), "warning")
    assert finding.evidence == (
        "1 of 40 steps were skipped: 7",
        "step 7: the sum of rank 1's own losses is nan; its samples are 10, 11",
    )


def test_the_search_for_a_loss_scale_is_no_finding(tmp_path: Path) -> None:
    row = {"kind": "skipped_step", "loss": 3.0, "grad_norm": math.inf, "rank_loss": 3.0, "samples": []}
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=lambda rank, step: [row] if step < 9 else []) == []


def plain_spikes(losses: NDArray[np.float64]) -> list[int]:
    """Places of losses above the median of the 50 before them, by 8 of their deviations and by a fifth."""
    found: list[int] = []
    for place in range(50, len(losses)):
        before = losses[place - 50 : place]
        if not math.isfinite(losses[place]) or np.isnan(before).any():
            continue
        middle = float(np.median(before))
        deviation = 1.4826 * float(np.median(np.abs(before - middle)))
        if losses[place] > middle + 8 * deviation and losses[place] > 1.2 * middle:
            found.append(place)
    return found


@pytest.mark.parametrize("kind", ["noise", "steps", "negative", "with NaN", "with infinities", "falling"])
def test_spikes_are_those_of_sorted_windows(kind: str) -> None:
    draw = np.random.default_rng(0)
    losses = draw.normal(3.0, 0.1, 20_000) + 5 * (draw.random(20_000) < 0.01)
    match kind:
        case "steps":  # many equal values
            losses = np.round(losses)
        case "negative":
            losses = losses - 4.0
        case "with NaN":
            losses[draw.integers(0, 20_000, 40)] = math.nan
        case "with infinities":
            losses[draw.integers(0, 20_000, 40)] = math.inf
        case "falling":
            losses = losses / np.arange(1, 20_001)
        case _:
            pass
    with np.errstate(invalid="ignore"):
        expected = plain_spikes(losses)
    assert expected
    facts = RunFacts(ranks=(), training=TrainingFacts(steps=np.arange(1, 20_001), losses=losses))
    (finding,) = loss_spikes(facts)
    first = ", ".join(str(place + 1) for place in expected[:5])
    assert finding.evidence[0].startswith(f"{len(expected)} of 20000 steps: {first}")
