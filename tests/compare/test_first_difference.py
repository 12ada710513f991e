"""Planted divergences, each made by two real runs, are found by replaying at most two steps of both."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from divergences import find, search, train
from pool import Pool

from unisono.compare import first_difference
from unisono.compare.alignment import first_mismatch
from unisono.compare.divergence_text import divergence_lines
from unisono.compare.first_difference import FirstDifference, find_first_difference
from unisono.compare.replay_child import replay_as_child
from unisono.compare.replayable import ReplayableRun, read_run
from unisono.compare.step_record import Entry, ReplayRequest
from unisono.data.order.permutation import Permutation
from unisono.errors import CheckpointError, ConfigError, DataError

SECOND = Permutation(tiny.SAMPLES, seed=0)(np.arange(8, 16)).tolist()  # samples of step 2
THIRD = Permutation(tiny.SAMPLES, seed=0)(np.arange(16, 24)).tolist()


def test_a_run_that_was_started_again_can_start_from_its_seed(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=3)
    tiny.complete(tmp_path / "run", steps=4)
    assert read_run(tmp_path / "run").start_points[0] is None


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is planted in B, and what has to be found: parts of the operator, of the tensor and of a cause."""

    plant: dict[str, Any]
    step: int
    phase: str
    layer: str = ""
    operator: str = ""
    tensor: str = ""
    because: str = ""
    samples: tuple[int, ...] = ()
    ranks: tuple[int, int] = (1, 1)
    rank: int | None = 0
    a: dict[str, Any] = field(default_factory=dict)


PLANTED = {
    "a weight by 1 ulp": Planted(
        plant={"flipped": "model/up.weight"}, step=3, phase="weights at start", layer="up", tensor="model/up.weight"
    ),
    "a moment by 1 ulp": Planted(
        plant={"flipped": "optim/exp_avg_sq/down.weight"},
        step=3,
        phase="weights at start",
        layer="down",
        tensor="optim/exp_avg_sq/down.weight",
    ),
    "order of samples": Planted(plant={"seed": 1}, step=1, phase="data", tensor="sample ids", because="row 0"),
    "a label": Planted(
        plant={"spoilt": (SECOND[5], "targets")}, step=2, phase="data", tensor="targets", samples=(SECOND[5],)
    ),
    "weight of a token": Planted(
        plant={"spoilt": (SECOND[3], "weights")}, step=2, phase="data", tensor="weights", samples=(SECOND[3],)
    ),
    "seed of dropout": Planted(plant={"reseeded": 123}, step=1, phase="random state", tensor="torch"),
    "rate of dropout": Planted(
        plant={"net": {"rate": 0.2}},
        step=1,
        phase="forward",
        layer="drop",
        operator="aten.bernoulli_",  # as dropout is on the CPU
        because="drop is Dropout(p=0.1, inplace=False) in A, Dropout(p=0.2, inplace=False) in B",
    ),
    "epsilon of a norm": Planted(
        plant={"net": {"eps": 1e-6}},
        step=1,
        phase="forward",
        layer="norm",
        operator="aten.native_layer_norm",
        because="1e-05 in A, [16], 1e-06 in B",
    ),
    "approximation of an activation": Planted(
        plant={"net": {"approximate": "tanh"}},
        step=1,
        phase="forward",
        layer="act",
        operator="aten.gelu",
        because="approximate='tanh'",
    ),
    "another activation": Planted(
        plant={"net": {"activation": "relu"}},
        step=1,
        phase="forward",
        layer="act",
        operator="aten.gelu",
        because="where B has aten.relu",
    ),
    "weight decay": Planted(
        plant={"optim": {"weight_decay": 0.2}},
        step=1,
        phase="optimizer",
        because="weight_decay of group 0: 0.1 in A, 0.2 in B",
    ),
    "learning rate of one step": Planted(plant={"rate": "once"}, step=2, phase="optimizer", because="lr of group 0"),
    "beta2": Planted(plant={"optim": {"beta2": 0.999}}, step=1, phase="optimizer", because="betas of group 0"),
    "limit of the gradient norm": Planted(
        plant={"optim": {"clip_norm": 0.05}}, step=1, phase="optimizer", because="clip_norm: 0.1 in A, 0.05 in B"
    ),
    "reduction of the loss": Planted(plant={"objective": "mean"}, step=1, phase="loss", operator="aten.div.Tensor"),
    "scale of attention": Planted(
        plant={"net": {"scale": 0.31}},
        step=1,
        phase="forward",
        layer="attention",
        operator="aten.mul",
        because="0.3 in A, 0.31 in B",
    ),
    "a masked token": Planted(
        plant={"net": {"masked": 4}}, step=1, phase="forward", layer="attention", operator="aten."
    ),
    "a buffer": Planted(plant={"net": {"shift": 1e-3}}, step=1, phase="weights at start", tensor="model/shift"),
    "precision of a layer": Planted(
        plant={"net": {"is_low": True}}, step=1, phase="forward", layer="up", because="aten._to_copy"
    ),
    "code of a layer": Planted(
        plant={"net": {"change": 1.0001}}, step=1, phase="forward", layer="scale", because="is 1.0 in A, 1.0001 in B"
    ),
    "gradient of a layer": Planted(
        plant={"gradient": "up"}, step=1, phase="backward", because="where B has aten.mul.Tensor(1.001)"
    ),
    "gradient of a rank left out": Planted(
        plant={"left_out": 1}, step=1, phase="gradient synchronisation", tensor="embedding.weight", ranks=(2, 2)
    ),
    "forward pass of one rank": Planted(
        plant={"spoilt_rank": 1}, step=1, phase="forward", layer="down", ranks=(2, 2), rank=1
    ),
    "accumulation, divided twice": Planted(
        a={"net": {"rate": 0.0}},
        plant={"net": {"rate": 0.0}, "plan": {"micro_batch": 4}, "objective": "halved"},
        step=1,
        phase="loss",
        tensor="loss",
        rank=None,
    ),
    "gradient left out, one rank and two": Planted(
        a={"net": {"rate": 0.0}},
        plant={"net": {"rate": 0.0}, "left_out": 1},
        step=1,
        phase="gradient synchronisation",
        tensor="embedding.weight",
        ranks=(1, 2),
        rank=None,
    ),
}
QUICK = {"a weight by 1 ulp", "a label", "epsilon of a norm", "weight decay", "gradient of a rank left out", "a buffer"}
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in PLANTED]


def text_of(found: FirstDifference) -> str:
    return "\n".join(divergence_lines(found))


@pytest.mark.parametrize("name", CASES)
def test_a_planted_divergence(pool: Pool, tmp_path: Path, name: str) -> None:
    case = PLANTED[name]
    found = search(tmp_path, pool, case.a, case.plant, ranks=case.ranks)
    text = text_of(found)
    assert found.verdict == "diverged", text
    assert found.replayed_steps <= 2, text
    divergence = found.divergence
    assert divergence is not None
    where = divergence.step, divergence.phase, divergence.layer if case.layer else ""
    assert where == (case.step, case.phase, case.layer), text
    assert case.operator in divergence.operator, text
    assert case.tensor in divergence.tensor, text
    assert any(case.because in sentence for sentence in [*divergence.because, ""]), text
    assert divergence.rank == case.rank, text
    if case.samples:
        assert divergence.samples == case.samples, text
    assert "does not repeat the run" not in text


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "accumulation": (1, {"micro_batch": 2}),
    "dp_shard": (2, {"dp_shard": 2, "micro_batch": 2}),
    "zero1": (2, {"dp_shard": 2, "zero": 1, "micro_batch": 2}),
    "tp": (2, {"tp": 2}),
    "tp-sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2, "micro_batch": 2}),
    "bf16": (1, {"precision": "bf16"}),
}
# ranks with parts of the sequences have few outputs whole: the next tensor that can be compared is named
FOUND = {"tp-sequence": ("forward", "norm"), "cp": ("gradient synchronisation", "embedding")}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in ("dp", "dp_shard") else pytest.mark.full) for name in LAYOUTS]
)
def test_layouts(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Without a fault they differ by rounding alone; a fault of one layout is found."""
    ranks, changes = LAYOUTS[layout]
    for name, there in (("a", {}), ("b", changes), ("c", changes)):
        given = {"tiny": there, **({"fault": "blocks.1.ffn"} if name == "c" else {})}
        pool.run(train, str(tmp_path / name), given, ranks=1 if name == "a" else ranks)
    a = {tmp_path / "a": ({"tiny": {}}, 1)}
    alike = find(tmp_path / "alike", pool, {**a, tmp_path / "b": ({"tiny": changes}, ranks)})
    assert (alike.verdict, alike.is_rounded, alike.replayed_steps) == ("identical", True, 0)
    # from here on both are replayed although the histories are alike up to rounding
    monkeypatch.setattr(first_difference, "_LOSS_ROUNDINGS", 0.0)
    monkeypatch.setattr(first_difference, "_NORM_ROUNDINGS", 0.0)
    faulty = {tmp_path / "c": ({"tiny": changes, "fault": "blocks.1.ffn"}, ranks)}
    found = find(tmp_path / "faulty", pool, {**a, **faulty})
    assert found.divergence is not None, text_of(found)
    assert (found.divergence.phase, found.divergence.layer) == FOUND.get(layout, ("forward", "blocks.1.ffn"))
    assert (found.divergence.rank, found.replayed_steps <= 2) == (None, True)
    alike = find(tmp_path / "again", pool, {**a, tmp_path / "b": ({"tiny": changes}, ranks)})
    assert (alike.verdict, alike.divergence) == ("not reproduced", None), text_of(alike)
    assert alike.replayed_steps


def test_runs_that_do_not_differ(pool: Pool, tmp_path: Path) -> None:
    found = search(tmp_path, pool, {}, {})
    assert (found.verdict, found.divergence, found.replayed_steps, found.common_steps) == ("identical", None, 0, 3)
    assert "no divergence" in text_of(found)


def test_few_checkpoints(pool: Pool, tmp_path: Path) -> None:
    """The steps between the checkpoint and the first that differs are made without a record."""
    found = search(tmp_path, pool, {"every": 0}, {"every": 0, "spoilt": (THIRD[1], "targets")})
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.phase, found.divergence.tensor) == (3, "data", "targets")
    assert (found.history_step, found.replayed_steps, found.run_up_steps) == (3, 2, 1)


def test_a_difference_long_before_it_shows(pool: Pool, tmp_path: Path) -> None:
    """The learning rate of step 1 moves the weights, and the losses hide it: states of the steps between tell."""
    for name in ("a", "b"):
        train(None, str(tmp_path / name), {"every": 0, "rate": "first" if name == "b" else "falls"})
    for path in (tmp_path / "b" / "events").glob("*.jsonl"):  # as if the losses of two steps had been the same
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        other = [json.loads(line) for line in (tmp_path / "a" / "events" / path.name).read_text().splitlines()]
        figures = {event["step"]: event for event in other if event["kind"] == "step"}
        for event in lines:
            if event["kind"] == "step" and event["step"] < 3:
                event |= {name: figures[event["step"]][name] for name in ("train/loss", "train/grad_norm")}
        path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    plants = {tmp_path / "a": ({"every": 0}, 1), tmp_path / "b": ({"every": 0, "rate": "first"}, 1)}
    found = find(tmp_path, pool, plants)
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.phase) == (1, "optimizer"), text_of(found)
    assert any("lr of group 0" in text for text in found.divergence.because)
    assert (found.history_step, found.replayed_steps, found.run_up_steps) == (3, 3, 1)
    assert "the replay of B does not repeat the run: the loss of step 2" in text_of(found)


def test_a_history_that_a_replay_does_not_repeat(pool: Pool, tmp_path: Path) -> None:
    train(None, str(tmp_path / "a"), {})
    train(None, str(tmp_path / "b"), {"net": {"eps": 1e-6}})
    found = find(tmp_path, pool, {tmp_path / "a": ({}, 1), tmp_path / "b": ({}, 1)})  # its code is that of A now
    assert (found.verdict, found.divergence, found.history_step) == ("not reproduced", None, 1)
    text = text_of(found)
    assert "the replay of B does not repeat the run: the loss of step 1" in text
    assert "no divergence in the replays, which the histories have" in text


def test_runs_that_cannot_be_compared(pool: Pool, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(None, str(tmp_path / name), {})
    plants = {tmp_path / "a": ({}, 1), tmp_path / "none": ({}, 1)}
    with pytest.raises(DataError, match="has no run"):
        find_first_difference(*plants, replay=_never, scratch=tmp_path)
    for path in (tmp_path / "b" / "events").glob("*.jsonl"):
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] != "step"]
        path.write_text("\n".join(kept) + '\n{"kind": "step", "step": "x"')
    with pytest.raises(DataError, match="has no steps"):
        find_first_difference(tmp_path / "a", tmp_path / "b", replay=_never, scratch=tmp_path)
    train(None, str(tmp_path / "late"), {"start": str(tmp_path / "a" / "checkpoints" / "step-00000002"), "seed": 0})
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000002")
    events = tmp_path / "late" / "events" / "rank00000.jsonl"
    events.write_text(re.sub(r'"train/loss":[0-9.]+', '"train/loss":1.5', events.read_text()))
    with pytest.raises(CheckpointError, match=r"can start at the steps 0, 1, .*late at the steps none, before step 3"):
        find_first_difference(tmp_path / "a", tmp_path / "late", replay=_never, scratch=tmp_path)


def test_long_histories_that_differ_at_their_end(tmp_path: Path) -> None:
    for name in ("a", "b"):
        events = tmp_path / name / "events" / "rank00000.jsonl"
        events.parent.mkdir(parents=True)
        ends: list[dict[str, Any]] = [{"step": 20_000, "train/loss": 1.0 + (name == "b")}, {"step": 1 << 50}]
        lines = [{"kind": "run_start"}, *({"kind": "step", "step": n, "train/loss": 1.0} for n in range(1, 20_000))]
        lines += [{"kind": "step", **each} for each in ends]
        events.write_text("\n".join(json.dumps({"attempt": 1, "t": 1.0, **line}) for line in lines))
    asked: list[ReplayRequest] = []

    def note(run: ReplayableRun, request: ReplayRequest) -> None:
        asked.append(request)
        raise ConfigError(given="", rule="", consequence="", nearest="")

    with pytest.raises(ConfigError):
        find_first_difference(tmp_path / "a", tmp_path / "b", replay=note, scratch=tmp_path / "scratch")
    assert [(each.record_steps, each.last_step) for each in asked] == [((19_999, 20_000), 20_000)]


def test_a_run_that_claims_many_ranks_starts_none(tmp_path: Path) -> None:
    events = tmp_path / "a/events/rank00000.jsonl"
    events.parent.mkdir(parents=True)
    lines = [{"kind": "run_start", "environment": {"world": 1 << 20}}, {"kind": "step", "step": 1, "train/loss": 1.0}]
    events.write_text("\n".join(json.dumps({"attempt": 1, "t": 1.0, **line}) for line in lines))
    request = ReplayRequest(run_dir="", resume="", record_dir=str(tmp_path / "records"), record_steps=(1,), last_step=1)
    with pytest.raises(ConfigError, match="a run of 1,048,576 ranks"):
        replay_as_child(read_run(tmp_path / "a"), request, script=None, flags=[], timeout_s=1.0)
    assert not (tmp_path / "request.json").exists()


def _never(run: ReplayableRun, request: ReplayRequest) -> None:
    raise AssertionError(run.run_dir)


def entry(operator: str, digest: int, **more: Any) -> Entry:
    fields: dict[str, Any] = {
        **{
            "kind": "operator",
            "phase": "forward",
            "micro_batch": 0,
            "layer": "x.y",
            "call": 0,
            "tensor": "",
            "place": 0,
        },
        **{"arguments": "", "shape": (), "dtype": "float32", "norm": 1.0, "max_abs": 1.0},
    }
    return Entry(**{**fields, "operator": operator, "digest": digest, **more})


def test_other_operators_with_the_same_results() -> None:
    """A layer that computes the same in another way is no divergence; one that does not is."""
    before, after = entry("aten.a", 1), entry("aten.z", 9, layer="")
    output = entry("", 5, kind="output")
    a = [before, entry("aten.b", 2), entry("aten.c", 5), output, after]
    b = [before, entry("aten.fused", 5), output, after]
    assert first_mismatch(a, b) is None
    assert first_mismatch(a, [*b[:2], entry("", 6, kind="output"), after]) == (1, 1)
    assert first_mismatch(a, a[:-1]) == (4, None)
    assert first_mismatch(a[:2], a) == (None, 2)
    other = entry("aten.z", 8, layer="")
    assert first_mismatch(a, [*b[:3], other]) == (4, 3)
    assert first_mismatch([before], [entry("aten.a", 1, dtype="float64")]) == (0, 0)
    ways = [[before, entry("aten.x", n, phase="loss"), entry("", 7, kind="loss", phase="loss"), after] for n in (3, 4)]
    ways[1][1:2] = [entry("aten.y", 4, phase="loss"), entry("aten.z", 7, phase="loss")]
    assert first_mismatch(*ways) is None
    assert first_mismatch(ways[0], [*ways[1][:3], entry("", 8, kind="loss", phase="loss"), after]) == (1, 1)
