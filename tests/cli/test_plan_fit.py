"""``unisono plan fit``: the ladder of measures, and the file that it writes."""

from __future__ import annotations

import json
import tomllib

import pytest
import torch
from commands import Desk

from unisono.measure.calibration import CALIBRATION_FILE, MatmulRate, add_to_calibration
from unisono.measure.ceiling import matmul_key
from unisono.observe.run_summary import short_time
from unisono.parallel.device import computes_bf16, find_device

SMALL = ("model.dim=32", "model.num_heads=4", "data.seq_len=64", "plan.global_batch=8", "plan.precision=fp32")
GIB = 2**30


def fit(desk: Desk, *arguments: str, settings: tuple[str, ...] = (), code: int = 0):
    outcome = desk.here("plan", "fit", "--json", *arguments, *(f"--set={setting}" for setting in (*SMALL, *settings)))
    assert outcome.code == code, outcome.err or outcome.out
    return json.loads(outcome.out)


def peaks(found: dict) -> list[int]:
    return [rung["peak_bytes"] for rung in found["rungs"] if "peak_bytes" in rung]


def test_what_fits_stays_as_it_is(desk: Desk) -> None:
    found = fit(desk)
    assert found["fits"]
    assert found["settings"] == {}
    assert len(found["rungs"]) == 1


def test_what_plan_calibrate_measured_gives_seconds_of_compute(desk: Desk) -> None:
    calibration = desk.cache / "unisono" / CALIBRATION_FILE
    calibration.unlink(missing_ok=True)  # what another test has measured
    (rung,) = fit(desk)["rungs"]
    assert rung["flops"] > 0
    assert rung["compute_s"] is None
    key = matmul_key(find_device("cpu", 0), torch.float32, threads=int(desk.environ["OMP_NUM_THREADS"]))[1]
    rate = MatmulRate(tflops=1e-3, size=256.0, repeats=5.0, spread_frac=0.0)
    add_to_calibration(calibration, matmul={key: rate})
    found = fit(desk)
    (timed,) = found["rungs"]
    assert timed == rung | {"compute_s": pytest.approx(rung["flops"] / 1e9)}
    assert found["sources"]["compute_s"].startswith("modelled, compute only: ")
    shown = desk.here("plan", "fit", *(f"--set={setting}" for setting in SMALL)).out
    assert f"; {short_time(timed['compute_s'])} a step (modelled, compute only); fits\n" in shown
    calibration.unlink()


@pytest.mark.full
def test_the_largest_micro_batch_that_fits_is_found_beside_the_plan(desk: Desk) -> None:
    assert fit(desk)["largest_micro_batch"] is None
    found = fit(desk, "--largest-micro-batch", settings=("plan.micro_batch=2",))
    assert found["settings"] == {}
    assert found["largest_micro_batch"] == 8
    most = max(peaks(found))
    found = fit(desk, "--largest-micro-batch", f"--memory-gib={0.7 * most / GIB}", settings=("plan.micro_batch=2",))
    assert found["largest_micro_batch"] == 4


@pytest.mark.full
def test_the_first_rung_that_fits_gets_the_largest_micro_batch_that_does(desk: Desk) -> None:
    most = peaks(fit(desk))[0]
    found = fit(desk, f"--memory-gib={0.5 * most / GIB}", "--apply=fit.toml")
    assert found["fits"]
    size = found["settings"]["plan.micro_batch"]
    last = {rung["settings"].get("micro_batch"): rung["peak_bytes"] for rung in found["rungs"]}
    assert last[size] <= found["budget_bytes"] < last.get(2 * size, most)
    measures = [rung["measure"] for rung in found["rungs"]]
    assert ("bf16" in measures) == computes_bf16(find_device("cpu", 0))
    assert "selective recompute" not in measures
    assert tomllib.loads((desk.folder / "fit.toml").read_text()) == {
        "plan": {name.removeprefix("plan."): value for name, value in found["settings"].items()}
    }
    trained = desk.here("train", "fit.toml", "--dry-run", "--json", *(f"--set={setting}" for setting in SMALL[:-1]))
    if "plan.precision" in found["settings"]:
        assert json.loads(trained.out)["ranks"][0]["peak_bytes"] == last[size]


@pytest.mark.full
def test_ranks_share_states_and_layers_when_nothing_else_helps(desk: Desk) -> None:
    found = fit(desk, "--processes=4", "--memory-gib=0.0000001", code=1)
    assert not found["fits"]
    measures = [rung["measure"] for rung in found["rungs"]]
    assert measures[-5:] == [
        "selective recompute",
        "full recompute",
        "states over all data ranks",
        "layers over 2 ranks",
        "layers over 4 ranks",
    ]
    assert found["rungs"][-1]["settings"] == {
        **({"precision": "bf16"} if "bf16" in measures else {}),
        "micro_batch": 1,
        "recompute": "full",
        "dp_shard": 0,
        "zero": 3,
        "tp": 4,
    }
    assert min(peaks(found)) < peaks(found)[0]


@pytest.mark.full
def test_a_rung_that_is_no_plan_is_passed_over_with_its_reason(desk: Desk) -> None:
    settings = ("model.num_heads=3", "model.num_kv_heads=3", "model.dim=48")
    found = fit(desk, "--processes=2", "--memory-gib=0.0000001", settings=settings, code=1)
    (layers,) = [rung for rung in found["rungs"] if rung["measure"] == "layers over 2 ranks"]
    assert layers["refused"]
    assert "peak_bytes" not in layers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--apply=there.toml",), "a file that exists is not overwritten"),
        (("--apply=none/new.toml",), "--apply none/new.toml\n  rule: the file is written into a folder that exists"),
        (("a.toml", "b.toml", "--apply=new.toml"), "the file that is written goes over one file"),
        (("--processes=3", "--set=plan.tp=2"), "the product of the mesh axes"),
        (("--memory-gib=nan",), "nan is no finite number"),
        (("--memory-gib=1e308",), "is not in the range"),
        (("--budget-s=nan",), "nan is no finite number"),
    ],
)
def test_what_is_refused(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    for name in ("there.toml", "a.toml", "b.toml"):
        (desk.folder / name).touch()
    outcome = desk.here("plan", "fit", *arguments)
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.full
def test_rungs_of_code_that_reads_values_are_measured_in_real_steps(desk: Desk) -> None:
    (desk.folder / "own.py").write_text(
        """
import torch
from unisono.train.config import Components, RunConfig

def objective(outputs, batch):
    losses = outputs[0].float().sum()
    return (losses if losses.item() > 0 else -losses), torch.tensor(1.0)

def config():
    return RunConfig(components=Components(objective=objective))
"""
    )
    settings = ("model.num_layers=1", "data.seq_len=16", "plan.global_batch=2", "plan.micro_batch=1")
    (rung,) = fit(desk, "own.py", "--trust-python", settings=settings)["rungs"]
    assert (rung["confidence"], rung["needs_values"]) == ("measured", "aten._local_scalar_dense.default")
    shown = desk.here(
        "plan", "fit", "own.py", "--trust-python", *(f"--set={setting}" for setting in (*SMALL, *settings))
    )
    assert "measured in a real step, of lower confidence" in shown.out
