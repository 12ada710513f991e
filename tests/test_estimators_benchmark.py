"""The benchmark of memory estimators: whom it asks of which runs, what stands for a peak, and that it goes on without a peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of what is installed

from benchmarks.planner import estimators  # noqa: E402
from benchmarks.planner.estimators import SIMULATE, Run, megatron_arguments, published, published_by_megatron  # noqa: E402


def test_runs_are_those_whose_parallelism_an_estimator_speaks_of() -> None:
    runs = list(published())
    assert len(runs) > 20
    for run in runs:
        alone = run.layout.num_devices == 1
        assert set(run.asked) == {"options", "Accelerate" if alone else "DeepSpeed"}
        assert run.layout.pp == 1
    assert {tuple(run.asked) for run in published_by_megatron()} == {("Megatron-LM",)}
    assert len({run.name for run in [*runs, *published_by_megatron()]}) == len(runs) + 6


@pytest.mark.full
def test_a_peer_that_is_not_there_is_named_and_the_others_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate", reason="the one estimator that the tests' environment has")
    monkeypatch.setattr(estimators, "interpreter", lambda name, cache: sys.executable)
    (tmp_path / "megatron-core-0.19.2").mkdir()  # a folder without its modules
    (alone,) = [run for run in published() if run.layout.num_devices == 1][:1]
    sharded = next(run for run in published() if run.layout.num_devices > 1)
    estimates, versions, not_run = estimators.others([alone, sharded, next(published_by_megatron())], tmp_path)
    assert set(estimates) == set(versions) == {"Accelerate"}
    assert "deepspeed" in not_run["DeepSpeed"]
    assert set(not_run) == {"DeepSpeed", "Megatron-LM"}
    said = capsys.readouterr().err
    assert "DeepSpeed did not run" in said
    assert "Megatron-LM did not run" in said
    states, peak = estimates["Accelerate"][alone.name]
    # its count for 16 bits is 8 bytes of a parameter; norms are parameters too, of which shapes know nothing
    assert states == pytest.approx(8 * alone.layout.model.params, rel=1e-3)
    assert peak is None


def test_states_stand_for_a_peak_that_is_not_estimated() -> None:
    layout = next(published()).layout
    runs = [
        Run(
            group="g",
            name=name,
            layout=layout,
            measured={"states": 10.0, "peak": 20.0},
            ours={SIMULATE: {"states": 10.0, "peak": peak}},
        )
        for name, peak in (("one", 22.0), ("two", 16.0))
    ]
    found = estimators.scores(runs, {"A": {"one": [12.0, None]}, "B": {"one": [10.0, 30.0], "two": [10.0, 10.0]}})["g"]
    assert set(found["states"]) == {SIMULATE, "A", "B"}
    assert set(found["peak"]) == {SIMULATE, "A, states alone", "B"}
    assert found["states"]["A"] == {"median": pytest.approx(0.2), "least": 1.2, "most": 1.2, "layouts": 1}
    assert found["peak"]["A, states alone"]["median"] == pytest.approx(0.4)
    assert found["peak"]["B"] == {"median": 0.5, "least": 0.5, "most": 1.5, "layouts": 2}
    assert found["peak"][SIMULATE]["median"] == pytest.approx(0.15)


def test_ours_of_megatrons_tests_need_no_peer() -> None:
    for run in published_by_megatron():
        assert run.ours[SIMULATE]["states"] == pytest.approx(run.measured["states"], rel=0.05)
        arguments = megatron_arguments(run.layout, gated=False)
        assert arguments["data_parallel_size"] == 2
        assert arguments["num_micro_batches"] == (2 if run.layout.tp == 4 else 4)
        assert json.loads(json.dumps(arguments)) == arguments
