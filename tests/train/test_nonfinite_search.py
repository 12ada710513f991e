"""A skipped step is computed once more: rank, layer, operator and samples of what is not finite first, and no bit changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from pool import Pool
from torch import nn

from unisono.data.order.permutation import Permutation
from unisono.diagnose import diagnose, read_run
from unisono.dist import World

BAD = 3  # the step, from 1, that is not finite
SIZES = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"micro_batch": 2}),
    "dp": (2, {}),
    "dp_shard": (2, {"dp_shard": 2, "micro_batch": 2}),
    "zero1": (2, {"dp_shard": 2, "zero": 1, "micro_batch": 2}),
    "hybrid": (4, {"dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "tp-sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2, "micro_batch": 2}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "micro_batch": 2}),
    "pp-dp_shard": (4, {"pp": 2, "dp_shard": 2, "micro_batch": 2}),
    "recompute": (2, {"dp_shard": 2, "recompute": "full"}),
}
QUICK = {"alone", "dp", "dp_shard", "zero1", "tp", "pp"}
ALL = [pytest.param(layout, marks=[] if layout in QUICK else pytest.mark.full) for layout in LAYOUTS]
SILENT = replace(tiny.QUIET, replay_nonfinite=False)


def samples_of(step: int) -> list[int]:
    """The samples of ``step``, from 1, in order."""
    return Permutation(tiny.SAMPLES, seed=0)(np.arange(8 * step - 8, 8 * step)).tolist()


def break_layer(run: Any, fault: str) -> None:
    """From now on the layer does what ``fault`` says, in step ``BAD``."""

    def now() -> bool:
        return run.state.step == BAD - 1

    modules = defaultdict(nn.Identity, run.model.named_modules())  # a stage lacks the layers of others
    if fault == "division":  # 0 / 0 and x / 0
        modules["blocks.2.ffn"].register_forward_hook(lambda layer, args, out: out / 0 if now() else out)
    elif fault == "masked":  # a softmax of which every position is masked
        modules["blocks.1.attention.out"].register_forward_hook(
            lambda layer, args, out: out.masked_fill(out == out, -torch.inf).softmax(-1) if now() else out
        )
    elif fault == "overflow":
        modules["blocks.1.attention.out"].register_forward_hook(
            lambda layer, args, out: (1e30 * out).square() if now() else out
        )
    elif fault == "gradient":  # finite, with a derivative that is not
        modules["blocks.1.ffn.up"].register_forward_hook(
            lambda layer, args, out: out + (0 * out).abs().sqrt() if now() else out
        )
    elif fault == "embedding":

        def spoil(_layer: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
            if not now() or run.world.rank != run.world.world_size - 1:
                return out
            mask = torch.zeros_like(out)
            mask[1] = torch.nan
            return out + mask

        modules["embedding"].register_forward_hook(spoil)


def train(world: World, run_dir: str, fault: str, changes: dict, steps: int = 5) -> dict:
    data = tiny.RaggedTokens(poison=samples_of(BAD)[5] if fault == "sample" else None)
    with tiny.trainer(run_dir, world=world, steps=steps, sizes=SIZES, data=data, dropout=0.1, **changes) as run:
        if fault in ("division", "overflow", "masked", "gradient", "embedding"):
            break_layer(run, fault)
        skipped = [step.index for step in run if step.skipped]
        return {"digest": tiny.digest(run), "skipped": skipped}


def found(run_dir: Path, ranks: int) -> list[dict]:
    return [event for rank in range(ranks) for event in tiny.events(run_dir, rank) if event["kind"] == "nonfinite"]


@pytest.mark.parametrize("layout", ALL)
def test_a_layer_that_divides_by_zero(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    outcomes = pool.run(train, str(tmp_path), "division", changes, ranks=ranks)
    assert [outcome["skipped"] for outcome in outcomes] == [[BAD]] * ranks
    events = found(tmp_path, ranks)
    assert events
    for event in events:
        assert (event["step"], event["updates_since"], event["reproduced"]) == (BAD, 0, True)
        assert (event["where"], event["layer"], event["operator"]) == ("forward", "blocks.2.ffn", "aten.div.Tensor")
        assert set(event["samples"]) <= set(samples_of(BAD))
        assert event["samples"]


@pytest.mark.parametrize("layout", ALL)
def test_a_gradient_that_is_not_finite(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    outcomes = pool.run(train, str(tmp_path), "gradient", changes, ranks=ranks)
    assert outcomes[0]["skipped"] == [BAD]
    events = found(tmp_path, ranks)
    assert {(event["where"], event["layer"]) for event in events} == {("backward", "blocks.1.ffn.up")}
    assert {event["operator"] for event in events} == {"aten.div.Tensor"}


@pytest.mark.parametrize("layout", ["dp", pytest.param("hybrid", marks=pytest.mark.full), "dp_shard", "pp"])
def test_one_sample_of_one_rank(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    pool.run(train, str(tmp_path), "sample", changes, ranks=ranks)
    events = found(tmp_path, ranks)
    rank_of = {"dp": {1}, "dp_shard": {1}, "hybrid": {2}, "pp": {0, 1}}  # stages see the same samples
    assert {event["rank"] for event in events} == rank_of[layout]
    for event in events:
        assert (event["where"], event["tensor"], event["value"]) == ("input", "weights", "nan")
        assert event["samples"] == [samples_of(BAD)[5]]
        assert event["num_samples"] == 1


@pytest.mark.parametrize("layout", ["alone", "dp"])
def test_a_layer_that_spoils_one_row(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    pool.run(train, str(tmp_path), "embedding", changes, ranks=ranks)
    (event,) = found(tmp_path, ranks)
    first = 4 * (ranks - 1)  # of the samples of the last rank
    assert (event["rank"], event["layer"], event["where"]) == (ranks - 1, "embedding", "forward")
    assert event["samples"] == [samples_of(BAD)[first + 1]]


def test_a_layer_that_overflows(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path), "overflow", {}, ranks=1)
    (event,) = found(tmp_path, 1)
    assert (event["layer"], event["operator"], event["value"]) == (
        "blocks.1.attention.out",
        "aten.pow.Tensor_Scalar",
        "inf",
    )
    assert event["input_value"] == "finite"


def test_nan_of_infinite_inputs(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path), "masked", {}, ranks=1)
    (event,) = found(tmp_path, 1)
    assert (event["layer"], event["operator"], event["value"], event["input_value"]) == (
        "blocks.1.attention.out",
        "aten._softmax.default",
        "nan",
        "inf",
    )
    (finding,) = [one for one in diagnose(read_run(tmp_path)) if one.id == "NUM01"]
    assert "whose inputs hold inf: an attention row with every position masked" in finding.advice


class Ratio(nn.Module):
    """Divides in its own forward pass, outside of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.is_broken = nn.Linear(4, 1), lambda: False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.last(inputs)[:, 0]
        return (out - out) / (out - out) if self.is_broken() else out


def test_the_forward_pass_of_the_model_itself(tmp_path: Path) -> None:
    network = Ratio()
    with tiny.trainer(tmp_path, steps=5, network=network, data=Points(), objective=nn.MSELoss()) as run:
        network.is_broken = lambda: run.state.step == BAD - 1
        list(run)
    (event,) = found(tmp_path, 1)
    assert (event["where"], event["layer"], event["operator"]) == ("forward", "", "aten.div.Tensor")
    (finding,) = [one for one in diagnose(read_run(tmp_path)) if one.id == "NUM01"]
    assert finding.advice.startswith("look at the model's own forward pass (aten.div.Tensor)")


@pytest.mark.parametrize("layout", ALL)
def test_the_search_changes_no_bit(pool: Pool, tmp_path: Path, layout: str) -> None:
    fault = "division" if layout == "alone" else "sample"
    ranks, changes = LAYOUTS[layout]
    searched = pool.run(train, str(tmp_path / "searched"), fault, {**changes, "ema_decay": 0.9}, ranks=ranks)
    silent = pool.run(
        train, str(tmp_path / "silent"), fault, {**changes, "ema_decay": 0.9, "observe": SILENT}, ranks=ranks
    )
    assert found(tmp_path / "searched", ranks)
    assert not found(tmp_path / "silent", ranks)
    assert searched == silent
    assert searched[0]["skipped"] == [BAD]


class Normed(nn.Module):
    """A layer with statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))[:, 0]


class Points:
    fingerprint = "points-1"

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.random.default_rng(0).random((64, 4), dtype=np.float32)[indices]
        return {"inputs": rows, "targets": rows.sum(1)}


def train_normed(world: World, run_dir: str, changes: dict) -> str:
    torch.manual_seed(0)
    with tiny.trainer(
        run_dir, world=world, steps=5, network=Normed(), data=Points(), objective=nn.MSELoss(), **changes
    ) as run:
        run.model.last.register_forward_hook(lambda layer, args, out: out / 0 if run.state.step == BAD - 1 else out)
        list(run)
        return tiny.digest(run)


def train_experts(world: World, run_dir: str, changes: dict) -> str:
    sizes = {"num_experts": 4, "num_experts_per_token": 2, "ffn_dim": 16}
    data = tiny.RaggedTokens(poison=samples_of(BAD)[5])
    with tiny.trainer(run_dir, world=world, steps=5, sizes=sizes, data=data, **changes) as run:
        list(run)
        return tiny.digest(run)


@pytest.mark.parametrize("train_it", [train_normed, train_experts])
def test_buffers_are_as_before_the_search(pool: Pool, tmp_path: Path, train_it: Any) -> None:
    searched = pool.run(train_it, str(tmp_path / "searched"), {}, ranks=2)
    assert found(tmp_path / "searched", 2)
    assert searched == pool.run(train_it, str(tmp_path / "silent"), {"observe": SILENT}, ranks=2)


def test_every_second_power_of_non_finite_steps_is_searched(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path, steps=12, data=tiny.PoisonedFrom(0), max_skips=99) as run:
        run.model.register_forward_hook(lambda model, args, out: out._replace(hidden=out.hidden / 0))
        steps = iter(run)
        for _ in range(11):
            next(steps)
    assert [event["step"] for event in found(tmp_path, 1)] == [1, 2, 4, 8]


def test_an_overflow_of_the_loss_scale_is_not_searched(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path, steps=12, precision="fp16", loss_scale=2.0**24) as run:
        assert any([step.skipped for step in run])
    assert found(tmp_path, 1) == []


def test_a_spike_is_not_searched(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path, steps=30, spike_sigmas=3.0) as run:
        run.model.norm.register_forward_hook(lambda layer, args, out: 50 * out if run.state.step == 28 else out)
        assert any([step.skipped for step in run])
    assert found(tmp_path, 1) == []


def test_a_step_that_was_read_later_is_loaded_again(tmp_path: Path) -> None:
    """As on an accelerator, which is read after several steps."""
    with tiny.trainer(tmp_path, steps=4, data=tiny.RaggedTokens(poison=samples_of(BAD)[5]), dropout=0.1) as run:
        run._loop.runner.metrics_reader.every = 4  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        list(run)
    (event,) = found(tmp_path, 1)
    assert (event["step"], event["updates_since"], event["samples"]) == (BAD, 1, [samples_of(BAD)[5]])


def test_a_step_that_is_finite_the_second_time(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path, steps=4) as run:
        calls = iter(range(99))
        run.model.norm.register_forward_hook(lambda layer, args, out: out / 0 if next(calls) == 1 else out)
        assert [step.skipped for step in run] == [False, True, False, False]
    (event,) = found(tmp_path, 1)
    assert (event["step"], event["reproduced"]) == (2, False)
    assert event["reason"] == "every tensor was finite when the step was computed again"


def test_a_search_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    class Broken(tiny.RaggedTokens):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            batch = super().read(indices)
            batch["weights"][np.isin(indices, samples_of(3) + samples_of(4))] = np.nan
            return batch

    with tiny.trainer(tmp_path, steps=4, data=Broken(), max_skips=9) as run:
        seen: set[int] = set()

        def once(_layer: nn.Module, _args: Any) -> None:
            if run.state.step in seen:
                raise RuntimeError("called twice")
            seen.add(run.state.step)

        run.model.norm.register_forward_pre_hook(once)
        assert [step.skipped for step in run] == [False, False, True, True]
        assert torch.is_grad_enabled()
    (event,) = found(tmp_path, 1)  # step 4 would be the second one, and is not searched any more
    assert event["reason"] == "RuntimeError: called twice"


def test_parameters_that_are_not_finite(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path, steps=3, max_skips=2) as run:
        with torch.no_grad():
            run.model.blocks[1].ffn.up.weight[0, 0] = torch.nan
        next(iter(run))
    (event,) = found(tmp_path, 1)
    assert (event["where"], event["layer"], event["tensor"]) == (
        "parameter",
        "blocks.1.ffn.up",
        "blocks.1.ffn.up.weight",
    )


class WithMask(nn.Module):
    """Attention whose own mask has infinities, as sound models have, before a layer that is at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.last = nn.Identity(), nn.Linear(4, 1)
        self.log = nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = inputs[:, :, None] - inputs[:, None]
        hidden = self.mask(torch.log(torch.ones(4, 4).tril()))  # a module that returns infinities
        mixed = (scores + hidden).softmax(-1) @ inputs[..., None]
        return self.last(mixed[..., 0])[:, 0]


def test_infinities_of_a_mask_are_no_origin(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tiny.trainer(tmp_path, steps=4, network=WithMask(), data=Points(), objective=nn.MSELoss()) as run:
        run.model.last.register_forward_hook(
            lambda layer, args, out: out + (0 * out).sqrt() if run.state.step == BAD - 1 else out
        )
        list(run)
    (event,) = found(tmp_path, 1)
    assert (event["where"], event["layer"]) == ("backward", "last")
