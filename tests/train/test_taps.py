"""Taps: their figures are those of a plain loop over the whole batch, under every layout, and they change no bit of a run."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import nn

from unisono import ObserveOptions
from unisono.data.order.permutation import Permutation
from unisono.dist import JobSpec, World
from unisono.errors import ConfigError
from unisono.observe.options import parse_tap
from unisono.optim import OptimOptions
from unisono.train import taps as taps_module

SIZES = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
MOE = {**SIZES, "num_experts": 4, "num_experts_per_token": 2, "ffn_dim": 16}
PATTERNS = ("embedding", "blocks.*", "blocks.*.*.*", "norm")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "accumulation": (1, {"micro_batch": 2}),
    "uneven": (3, {"global_batch": 8, "micro_batch": 2}),
    "dp_shard": (2, {"dp_shard": 2}),
    "zero1": (2, {"dp_shard": 2, "zero": 1, "micro_batch": 2}),
    "hybrid": (4, {"dp_shard": 2, "micro_batch": 1}),
    "tp": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),  # two ranks have the same head of keys
    "tp-sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "tp-dp_shard": (4, {"tp": 2, "dp_shard": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2, "micro_batch": 2}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "micro_batch": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved", "micro_batch": 2}),
    "pp-tp": (4, {"pp": 2, "tp": 2, "micro_batch": 2}),
    "pp-dp_shard": (4, {"pp": 2, "dp_shard": 2, "micro_batch": 2}),
    "recompute": (2, {"dp_shard": 2, "recompute": "full"}),
    "ep": (2, {"dp_shard": 2, "ep": 2}),
}
QUICK = {"dp", "accumulation", "dp_shard", "tp", "tp-sequence", "cp", "pp", "recompute"}


def tapped(world: World, run_dir: str, sizes: dict, changes: dict) -> list[dict]:
    """The tap events of a run, those of one step merged."""
    with tiny.trainer(run_dir, world=world, steps=2, sizes=sizes, weight_decay=0.1, **changes) as run:
        run.tap(*PATTERNS, every=1)
        for _ in run:
            assert not any(module._forward_hooks for module in run.model.modules() if type(module) is nn.SiLU)
    return events(run_dir) if world.rank == 0 else []


def events(run_dir: Path | str, rank: int = 0) -> list[dict]:
    return [event for event in tiny.events(run_dir, rank) if event["kind"] == "tap"]


@cache
def alone(folder: Path, experts: bool) -> list[dict]:
    return tapped(World(JobSpec()), str(folder), MOE if experts else SIZES, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taps")


def require_alike(ours: dict, theirs: dict, where: str, *, shapes: bool) -> None:
    assert ours.keys() == theirs.keys(), where
    scale = max(abs(theirs["min"]), abs(theirs["max"]))
    for figure, expected in theirs.items():
        found = ours[figure]
        if figure == "gradient":
            require_alike(found, expected, f"{where} gradient", shapes=shapes)
        elif figure == "shape":
            assert not shapes or found == expected, (where, figure)
        elif isinstance(expected, float):
            tolerance = 1e-4 * scale if figure in ("min", "max") else 1e-9
            if figure == "zero_frac" and where.endswith("gradient"):
                tolerance = (
                    0.05  # the first token attends to itself alone: gradients of its query are zeros or rounding errors
                )
            relative = 2e-3 if figure == "update_frac" else 1e-4
            assert math.isclose(found, expected, rel_tol=relative, abs_tol=tolerance), (where, figure, found, expected)
        else:
            assert found == expected, (where, figure, found, expected)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[] if plan in QUICK else pytest.mark.full) for plan in PLANS]
)
def test_figures_are_those_of_one_process(pool: Pool, folder: Path, tmp_path: Path, plan: str) -> None:
    ranks, changes = PLANS[plan]
    experts = plan == "ep"
    expected = alone(folder / str(experts), experts)
    found = pool.run(tapped, str(tmp_path), MOE if experts else SIZES, changes, ranks=ranks)[0]
    require_same(found, expected, plan)


def require_same(found: list[dict], expected: list[dict], plan: str) -> None:
    assert [event["step"] for event in found] == [event["step"] for event in expected] == [1, 2]
    for ours, theirs in zip(found, expected, strict=True):
        missing = theirs["modules"].keys() - ours["modules"].keys()
        # in a pipeline, modules without parameters outside of blocks are left out; there are none here
        assert not missing, missing
        for path, figures in theirs["modules"].items():
            if (
                plan == "ep" and ".ffn." in path
            ):  # which rows an expert layer pads, and the choice of equal scores, depend on the ranks
                continue
            for place, row in figures.items():
                if plan == "tp4" and place == "gradient" and path.endswith((".k", ".v")):
                    assert place not in ours["modules"][path]  # each of two ranks has a part of it
                    continue
                require_alike(ours["modules"][path][place], row, f"{path} {place}", shapes=False)
        assert list(ours["parameters"]) == list(theirs["parameters"])
        for name, figures in theirs["parameters"].items():
            require_alike(ours["parameters"][name], figures, name, shapes=True)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["regional", "model"])
def test_figures_of_a_compiled_model(folder: Path, tmp_path: Path, mode: str) -> None:
    found = tapped(World(JobSpec()), str(tmp_path), SIZES, {"compile": mode})
    require_same(found, alone(folder / "False", False), "compile")


@pytest.mark.full
def test_other_steps_stay_compiled(tmp_path: Path) -> None:
    """A tapped step runs without compiled code, and no code is compiled again after it."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with tiny.trainer(tmp_path, steps=5, compile="regional") as run:
        run.tap("blocks.*.*", every=2)
        graphs = [counters["stats"]["unique_graphs"] for _ in run]
    assert graphs[0] > 0
    assert len(set(graphs)) == 1


def test_figures_are_those_of_a_plain_loop(folder: Path) -> None:
    """The first step, without unisono's loop, hooks or optimizer."""
    model = tiny.model(**SIZES)
    outputs: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            outputs[path] = output

        return hook

    for path, module in model.named_modules():
        if path in ("embedding", "norm", "blocks.2", "blocks.1.attention.k", "blocks.3.ffn.up"):
            module.register_forward_hook(keep(path))
    rows = Permutation(tiny.SAMPLES, seed=0)(np.arange(8))
    batch = {name: torch.from_numpy(entry) for name, entry in tiny.RaggedTokens().read(rows).items()}
    logits = model(batch["tokens"]).logits()
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
    (losses * batch["weights"].flatten()).sum().div(batch["weights"].sum()).backward()
    event = alone(folder / "False", False)[0]
    for path, output in outputs.items():
        assert output.grad is not None
        for place, tensor in (("output", output.detach()), ("gradient", output.grad)):
            found = event["modules"][path][place]
            assert (found["numel"], found["dtype"]) == (tensor.numel(), "float32")
            assert found["norm"] == pytest.approx(float(tensor.norm()), rel=1e-4), path
            assert (found["min"], found["max"]) == pytest.approx((float(tensor.min()), float(tensor.max())), rel=1e-3)
            assert found["zero_frac"] == pytest.approx(float((tensor == 0).float().mean()))
            assert found["nonfinite"] == 0
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in event["parameters"]:
            assert parameter.grad is not None
            found = event["parameters"][name]
            assert found["gradient"]["norm"] == pytest.approx(float(parameter.grad.norm()), rel=1e-4)
            assert found["norm"] == pytest.approx(float(parameter.detach().norm()), rel=1e-5)
    options = OptimOptions(lr=1e-2)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-2 / 2,  # the first of two steps of warm-up
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    ).step()
    for name, parameter in model.named_parameters():
        if name in event["parameters"]:
            ratio = float((parameter.detach() - before[name]).norm() / before[name].norm())
            assert event["parameters"][name]["update_frac"] == pytest.approx(ratio, rel=1e-3), name


def bits(world: World, run_dir: str, every: int, changes: dict) -> str:
    with tiny.trainer(run_dir, world=world, steps=4, **changes) as run:
        if every:
            run.tap("**", every=every)
        list(run)
        return tiny.digest(run)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"dropout": 0.1, "micro_batch": 4}),
        (2, {"dropout": 0.1}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(2, {"dp_shard": 2}), (2, {"pp": 2, "micro_batch": 2}), (2, {"tp": 2, "dropout": 0.1})]
        ),
    ],
)
def test_a_tapped_run_has_the_same_bits(pool: Pool, tmp_path: Path, ranks: int, changes: dict) -> None:
    plain = pool.run(bits, str(tmp_path / "plain"), 0, changes, ranks=ranks)
    assert pool.run(bits, str(tmp_path / "tapped"), 2, changes, ranks=ranks) == plain
    assert [event["step"] for event in events(tmp_path / "tapped")] == [2, 4]


@pytest.mark.parametrize("kind", ["sgd", "lamb", "lars"])
def test_the_share_of_an_update_with_other_optimizers(tmp_path: Path, kind: str) -> None:
    with tiny.trainer(tmp_path / "run", steps=3, kind=kind, lr=0.1) as run:
        run.tap("blocks.*", every=3)
        steps = iter(run)
        next(steps), next(steps)
        kept = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        next(steps)
        after = dict(run.model.named_parameters())
    (event,) = events(tmp_path / "run")
    for name, figures in event["parameters"].items():
        ratio = float((after[name].detach() - kept[name]).norm() / kept[name].norm())
        assert figures["update_frac"] == pytest.approx(ratio, rel=1e-3), name


class Half(nn.Module):
    """A layer of whose units half never become active."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
        with torch.no_grad():
            self.first.weight[:4], self.first.bias[:4] = 0.0, -1.0
            self.first.weight[4:], self.first.bias[4:] = 1.0, 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.first(inputs)))[:, 0]


class Points:
    fingerprint = "points-1"

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0).random((64, 4), dtype=np.float32)
        return {"inputs": rng[indices], "targets": rng[indices].sum(1)}


def dead(world: World, run_dir: str) -> list[dict]:
    torch.manual_seed(0)
    with tiny.trainer(run_dir, world=world, steps=2, network=Half(), data=Points(), objective=nn.MSELoss()) as run:
        run.tap("relu", "first", every=1)
        list(run)
    return events(run_dir)


def test_dead_channels(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(dead, str(tmp_path), ranks=2)[0]
    assert [event["modules"]["relu"]["output"]["dead_frac"] for event in found] == [0.5, 0.5]
    assert found[0]["modules"]["relu"]["output"]["zero_frac"] == 0.5
    assert found[0]["modules"]["first"]["output"]["dead_frac"] == 0.0


def test_the_channels_of_images_are_their_second_dim() -> None:
    figures = taps_module._Figures(torch.device("cpu"))
    image = torch.ones(2, 3, 4, 4)
    image[:, 1] = 0
    figures.add(image)
    assert figures.alive.tolist() == [1, 0, 1]


def test_a_skipped_step_says_so(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run", steps=1, data=tiny.PoisonedFrom(0), max_skips=9) as run:
        run.tap("blocks.*", every=1)
        next(iter(run))
    (event,) = events(tmp_path / "run")
    assert event["skipped"] is True
    assert event["parameters"]["blocks.0.ffn.up.weight"]["update_frac"] == 0.0
    assert event["parameters"]["blocks.0.ffn.up.weight"]["gradient"]["nonfinite"] > 0
    assert event["modules"]["blocks.0"]["output"]["nonfinite"] == 0


def test_taps_of_the_configuration(tmp_path: Path) -> None:
    observe = ObserveOptions(console="off", trackers=(), report=False, taps=("blocks.1@2", "norm@3", "blocks.0"))
    tiny.complete(tmp_path / "run", steps=6, observe=observe)
    found = events(tmp_path / "run")
    assert [(event["step"], list(event["modules"])) for event in found] == [
        (2, ["blocks.1"]),
        (3, ["norm"]),
        (4, ["blocks.1"]),
        (6, ["blocks.1", "norm"]),
    ]
    assert all(name.startswith("blocks.1.") for name in found[0]["parameters"])


@pytest.mark.parametrize("tap", ["blocks.*@", "blocks.*@0", "@20", "blocks.*@20@5", "blocks.*@-1", ""])
def test_a_cadence_that_is_none(tmp_path: Path, tap: str) -> None:
    observe = ObserveOptions(console="off", trackers=(), report=False, taps=(tap,))
    with pytest.raises(ConfigError, match="with @N behind it or not"):
        tiny.trainer(tmp_path / "run", observe=observe)


def test_a_tap_without_a_cadence_is_every_hundred_steps() -> None:
    assert parse_tap("blocks.*") == ("blocks.*", 100)
    assert parse_tap("**.up@7") == ("**.up", 7)


def test_many_modules_are_written_as_several_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps_module, "_ENTRIES_PER_EVENT", 4)
    with tiny.trainer(tmp_path / "run", steps=1) as run:
        run.tap("**", every=1)
        list(run)
    found = events(tmp_path / "run")
    assert len(found) > 3
    assert all(len(event["modules"]) <= 4 >= len(event["parameters"]) for event in found)
    assert sum(len(event["parameters"]) for event in found) == len(list(run.model.parameters()))
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("patterns", "every", "text"),
    [(("block.*",), 1, "a tap of 'block.*'"), (("blocks.*",), 0, "a tap every 0 steps")],
)
def test_a_tap_that_observes_nothing_is_refused(
    tmp_path: Path, patterns: tuple[str, ...], every: int, text: str
) -> None:
    with tiny.trainer(tmp_path / "run", steps=1) as run, pytest.raises(ConfigError, match=text.replace("*", r"\*")):
        run.tap(*patterns, every=every)
