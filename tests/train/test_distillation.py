"""A teacher: its terms are those of plain torch code under every layout, and it leaves no trace in what is trained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from unisono import CheckpointOptions, Distillation, DistillOptions, LoaderOptions, PlanOptions, Trainer, TrainOptions
from unisono.config import load_config
from unisono.data.dataset import from_map_style
from unisono.dist import World
from unisono.errors import ConfigError, DataError, PlanError
from unisono.measure.live_storages import LiveStorages
from unisono.models.distillation_loss import divergence_sum
from unisono.models.loss import LazyLogits
from unisono.optim import OptimOptions
from unisono.train.config import RunConfig
from unisono.train.objectives import cross_entropy, next_token

FEATURES = ("blocks.0=blocks.0", "blocks.1=blocks.2")


def teacher() -> nn.Module:
    """A larger model, whose outputs are far from uniform."""
    model = tiny.model(num_layers=3, dim=32, num_heads=4, num_kv_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def distilled(**changes: Any) -> Distillation:
    return Distillation(teacher, DistillOptions(**{"temperature": 3.0, "teacher_frac": 0.3, **changes}))


# --- the divergence ------------------------------------------------------------------------------------------------


def plain_divergence(student: Tensor, its: Tensor, weights: Tensor, temperature: float) -> Tensor:
    mine, taught = (F.log_softmax(logits.flatten(0, -2) / temperature, -1) for logits in (student, its))
    rows = F.kl_div(mine, taught, reduction="none", log_target=True).sum(-1)
    return (rows * weights.flatten()).sum() * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.0, 7.5])
@pytest.mark.parametrize("whole", [False, True])
def test_the_divergence_in_chunks_is_that_of_torch(temperature: float, whole: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 7, 8, generator=draw), torch.randn(50, 8, generator=draw)
    fixed = LazyLogits(torch.randn(5, 7, 12, generator=draw), torch.randn(50, 12, generator=draw), 9)
    weights = torch.rand(5, 7, generator=draw)
    weights[2, 3] = 0
    tensors = [(hidden @ weight.T)] if whole else [hidden, weight]
    mine, plain = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    outputs = mine[0] if whole else LazyLogits(mine[0], mine[1], 4)
    loss = divergence_sum(outputs, fixed.logits() if whole else fixed, weights, temperature)
    logits = plain[0] if whole else plain[0] @ plain[1].T
    expected = plain_divergence(logits, fixed.logits(), weights, temperature)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for gradient, other in zip(
        torch.autograd.grad(loss * 3, mine), torch.autograd.grad(expected * 3, plain), strict=True
    ):
        assert (gradient - other).abs().max() <= 1e-6 * other.abs().max()


def test_classes_that_a_model_excludes_have_no_part() -> None:
    draw = torch.Generator().manual_seed(2)
    mine, its = torch.randn(4, 6, generator=draw), torch.randn(4, 6, generator=draw)
    excluded = torch.tensor([0, 0, 0, 0, -torch.inf, -torch.inf])
    student = (mine + excluded).requires_grad_()
    loss = divergence_sum(student, its + excluded, torch.ones(4), 2.0)
    expected = plain_divergence(mine[:, :4], its[:, :4], torch.ones(4), 2.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


def test_no_more_than_a_chunk_of_logits_is_alive() -> None:
    rows, classes, dim, chunk = 2048, 4096, 8, 64
    hidden, weight = torch.randn(rows, dim, requires_grad=True), torch.randn(classes, dim, requires_grad=True)
    fixed = LazyLogits(torch.randn(rows, dim), torch.randn(classes, dim), chunk)
    peaks: list[int] = []
    for size in (chunk, rows):
        live = LiveStorages()
        with live:
            divergence_sum(LazyLogits(hidden, weight, size), fixed, torch.ones(rows), 2.0).backward()
        peaks.append(live.peak.bytes)
        hidden.grad = weight.grad = None
    chunks, whole = peaks
    assert chunks < 6 * chunk * classes * 4 + 4 * (hidden.nbytes + weight.nbytes)
    assert whole > 3 * rows * classes * 4  # at once


def test_outputs_of_other_classes_are_refused() -> None:
    with pytest.raises(DataError) as refused:
        divergence_sum(torch.randn(4, 6), torch.randn(4, 5), torch.ones(4), 2.0)
    assert "outputs [4, 5] for a student with outputs [4, 6]" in str(refused.value)
    assert "model.vocab_size=5" in str(refused.value)


# --- a run ---------------------------------------------------------------------------------------------------------


def losses(folder: Path | str, *, world: World | None = None, **changes: Any) -> list[dict[str, float]]:
    with tiny.trainer(folder, world=world, steps=4, num_workers=0, **changes) as run:
        return [step.losses | {"loss": step.loss} for step in run]


def plain_steps(order: list[list[int]], rates: list[float]) -> list[dict[str, float]]:
    """The same steps in a plain loop: the loss of the whole batch, of tokens that count."""
    student, its = tiny.model(), teacher().eval()
    data = tiny.RaggedTokens()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    found: list[dict[str, float]] = []
    for ids, rate in zip(order, rates, strict=True):
        batch = {name: torch.as_tensor(value) for name, value in data.read(torch.tensor(ids).numpy()).items()}
        mine, weights = student(batch["tokens"]).logits(), batch["weights"]
        with torch.no_grad():
            taught = its(batch["tokens"]).logits()
        own = (
            F.cross_entropy(mine.flatten(0, 1), batch["targets"].flatten(), reduction="none") * weights.flatten()
        ).sum()
        terms = {"ce": 0.7 * own, "kl": 0.3 * plain_divergence(mine, taught, weights, 3.0)}
        terms = {name: term / weights.sum() for name, term in terms.items()}
        found.append({name: term.item() for name, term in terms.items()} | {"loss": sum(terms.values()).item()})
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return found


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_the_terms_are_those_of_a_plain_loop(tmp_path: Path, micro_batch: int) -> None:
    changes = {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0, "micro_batch": micro_batch}
    with tiny.trainer(tmp_path, steps=4, num_workers=0, distill=distilled(), **changes) as run:
        steps = list(run)
        found = [step.losses | {"loss": step.loss} for step in steps]
    expected = plain_steps([step.sample_ids.tolist() for step in steps], [step.lr for step in steps])
    assert [list(each) for each in found] == [["ce", "kl", "loss"]] * 4
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "zero1": {"dp_shard": 2, "zero": 1, "micro_batch": 2},
    "recompute": {"dp_shard": 2, "recompute": "full"},
    "sequence": {"tp": 2, "sequence_parallel": True},
}
QUICK = ("dp", "dp_shard", "tp", "cp")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_no_layout_changes_the_terms(pool: Pool, tmp_path: Path, name: str) -> None:
    features = () if "tp" in LAYOUTS[name] else FEATURES
    one = losses(tmp_path / "one", distill=distilled(features=features), network=tiny.model(num_kv_heads=2))
    found = pool.run(two_ranks, str(tmp_path / "two"), LAYOUTS[name], features, ranks=2)
    for mine, theirs in zip(found[0], one, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-5)
    assert found[0] == found[1]


def two_ranks(world: World, folder: str, layout: dict[str, Any], features: tuple[str, ...]) -> list[dict[str, float]]:
    def network() -> nn.Module:
        return tiny.model(num_kv_heads=2)

    return losses(folder, world=world, distill=distilled(features=features), network=network, **layout)


def test_experts_of_two_ranks_have_the_terms_of_one(pool: Pool, tmp_path: Path) -> None:
    one = losses(tmp_path / "one", distill=distilled(features=FEATURES), network=expert_model())
    found = pool.run(two_ranks_with_experts, str(tmp_path / "two"), ranks=2)
    assert {"ce", "kl", "features", "loss"} <= one[0].keys()
    for mine, theirs in zip(found[0], one, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-5)
    assert found[0] == found[1]


def expert_model() -> nn.Module:
    return tiny.model(num_experts=4)


def two_ranks_with_experts(world: World, folder: str) -> list[dict[str, float]]:
    given = distilled(features=FEATURES)
    return losses(folder, world=world, distill=given, network=expert_model, dp_shard=2, ep=2)


PLAIN_SGD = {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}


class EvenTokens(tiny.RaggedTokens):
    """All tokens count, so that the mean of two ranks' losses is that of their samples together."""

    def read(self, ids: Any) -> dict[str, Any]:
        rows = super().read(ids)
        return {**rows, "weights": np.ones_like(rows["weights"])}


def test_models_that_are_averaged_after_each_step_are_taught_like_one(pool: Pool, tmp_path: Path) -> None:
    """``dist_local`` in rounds of one step of plain SGD is SGD on the mean of the ranks' gradients."""
    one = losses(tmp_path / "one", distill=distilled(), data=EvenTokens(), **PLAIN_SGD)
    found = pool.run(two_local_ranks, str(tmp_path / "two"), ranks=2)
    for first, second, both in zip(*found, one, strict=True):
        assert {name: (first[name] + second[name]) / 2 for name in both} == pytest.approx(both, rel=5e-5)
        assert first["kl"] != second["kl"]


def two_local_ranks(world: World, folder: str) -> list[dict[str, float]]:
    local = {"sync": "dist_local", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    return losses(folder, world=world, distill=distilled(), data=EvenTokens(), **local, **PLAIN_SGD)


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"precision": "bf16"}, {"precision": "fp16"}])
def test_recompute_and_precision(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = losses(tmp_path / "fp32", distill=distilled(features=FEATURES))
    found = losses(tmp_path / "other", distill=distilled(features=FEATURES), **changes)
    rel = 5e-2 if "precision" in changes else 1e-6
    for mine, theirs in zip(found, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


@pytest.mark.full
def test_compiled_blocks(tmp_path: Path) -> None:
    plain = losses(tmp_path / "off", distill=distilled())
    for mine, theirs in zip(losses(tmp_path / "on", distill=distilled(), compile="regional"), plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_teacher_is_no_part_of_what_is_trained(tmp_path: Path) -> None:
    its, student = teacher(), tiny.model()
    before = {name: value.clone() for name, value in its.state_dict().items()}
    names = list(student.state_dict())
    given = Distillation(its, DistillOptions(features=FEATURES))
    with tiny.trainer(tmp_path, network=student, distill=given, steps=2, num_workers=0) as run:
        steps = list(run)
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        saved = run.state.global_state()
        run.export(tmp_path / "inside")
    assert set(steps[0].losses) == {"ce", "kl", "features"}
    extra = sorted(name for name in saved if name.startswith("model/") and name.removeprefix("model/") not in names)
    assert extra == [f"model/distill_projections.layers.{n}.{kind}" for n in (0, 1) for kind in ("bias", "weight")]
    assert parameters == sum(parameter.numel() for parameter in tiny.model().parameters()) + 2 * (16 * 32 + 32)
    assert list(student.state_dict()) == names
    assert all(torch.equal(before[name], value) for name, value in its.state_dict().items())
    assert not its.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in its.parameters())
    run.export(tmp_path / "after")
    for folder in ("inside", "after"):
        assert b"distill_projections" not in (tmp_path / folder / "model.safetensors").read_bytes()


def test_an_evaluation_has_the_loss_of_the_task_alone(tmp_path: Path) -> None:
    data = tiny.RaggedTokens()
    with tiny.trainer(tmp_path, distill=distilled(), eval_data=data, steps=1, num_workers=0) as run:
        next(iter(run))
        value = run.evaluate()["loss"]
        batch = {name: torch.as_tensor(each) for name, each in data.read(torch.arange(len(data)).numpy()).items()}
        with torch.no_grad():
            loss, weight = next_token(run.model(batch["tokens"]), batch)
    assert value == pytest.approx((loss / weight).item(), rel=1e-5)


def test_a_run_that_was_stopped_has_the_same_losses(tmp_path: Path) -> None:
    changes = {"distill": distilled(features=FEATURES), "dropout": 0.1, "num_workers": 0}
    whole = tiny.complete(tmp_path / "whole", **changes)
    first = tiny.complete(tmp_path / "parts", stop_after=3, **changes)
    second = tiny.complete(tmp_path / "parts", resume="strict", **changes)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]


def test_another_teacher_is_told_when_a_run_is_resumed(tmp_path: Path) -> None:
    tiny.complete(tmp_path, stop_after=2, distill=distilled(), num_workers=0)
    other = teacher()
    nn.init.normal_(next(other.parameters()))
    changed = Distillation(other, DistillOptions(temperature=3.0, teacher_frac=0.4))
    tiny.complete(tmp_path, distill=changed, num_workers=0)
    (told,) = (event["differences"] for event in tiny.events(tmp_path) if event["kind"] == "resumed")
    assert [text.partition(" ")[0] for text in told] == ["distill.teacher", "distill.teacher_frac"]
    assert told[1] == "distill.teacher_frac 0.3 then, 0.4 now"
    tiny.complete(tmp_path / "none", stop_after=2, num_workers=0)
    tiny.complete(tmp_path / "none", distill=distilled(), num_workers=0)
    (told,) = (event["differences"] for event in tiny.events(tmp_path / "none") if event["kind"] == "resumed")
    assert "distill.temperature nothing then, 3.0 now" in told


# --- other tasks, by torch's own losses ----------------------------------------------------------------------------


def points(count: int = 24, *, seed: int = 0) -> list[tuple[Tensor, int]]:
    draw = torch.Generator().manual_seed(seed)
    return [(x, int(x[0] * x[1] > 0) + int(x[2] > 1)) for x in torch.randn(count, 4, generator=draw)]


def net(width: int = 8, outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs))


def small(folder: Path, objective: Any, **given: Any) -> Trainer:
    values: dict[str, Any] = {
        "model": net(),
        "data": from_map_style(points()),
        "plan": PlanOptions(device="cpu", precision="fp32", global_batch=8, micro_batch=given.pop("micro_batch", 8)),
        "distill": Distillation(net(16, seed=1)),
        "options": TrainOptions(steps=2, eval_every_steps=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "loader": LoaderOptions(num_workers=0),
        "observe": tiny.QUIET,
    }
    return Trainer(objective=objective, run_dir=folder, **(values | given))


def own_classes(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["targets"])


@pytest.mark.parametrize(
    ("objective", "name"), [("cross_entropy", "ce"), (nn.CrossEntropyLoss(), "ce"), (own_classes, "task")]
)
def test_objectives_of_classes(tmp_path: Path, objective: Any, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with small(tmp_path, objective, micro_batch=4) as run:
            step = next(iter(run))
    inputs, targets = (torch.stack([torch.as_tensor(p[n]) for p in points()])[step.sample_ids] for n in (0, 1))
    mine, its = net()(inputs), net(16, seed=1)(inputs)
    expected = {
        name: 0.5 * F.cross_entropy(mine, targets).item(),
        "kl": 0.5 * plain_divergence(mine, its, torch.ones(8) / 8, 2.0).item(),
    }
    assert step.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([10.0, 10.0, 10.0])),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(ignore_index=1, weight=torch.tensor([3.0, 1.0, 0.5])),
    ],
)
@pytest.mark.parametrize("micro_batch", [8, 2])
def test_a_row_counts_in_both_terms_alike(tmp_path: Path, loss: nn.CrossEntropyLoss, micro_batch: int) -> None:
    with small(tmp_path, loss, micro_batch=micro_batch) as run:
        step = next(iter(run))
    inputs, targets = (torch.stack([torch.as_tensor(p[n]) for p in points()])[step.sample_ids] for n in (0, 1))
    student, teacher = net()(inputs), net(16, seed=1)(inputs)
    weights = (targets != loss.ignore_index).float() * (1 if loss.weight is None else loss.weight[targets])
    assert (weights > 0).sum() > 0
    expected = {
        "ce": 0.5 * loss(student, targets).item(),
        "kl": 0.5 * plain_divergence(student, teacher, weights / weights.sum(), 2.0).item(),
    }
    assert step.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [nn.HuberLoss(), nn.L1Loss(), nn.SmoothL1Loss()])
def test_a_loss_of_torch_keeps_its_name(tmp_path: Path, loss: Any) -> None:
    pairs = [(x, torch.stack([x.sum(), x[0]])) for x, _ in points()]
    teacher = Distillation(net(16, outputs=2, seed=1))
    with small(tmp_path, loss, model=net(outputs=2), data=from_map_style(pairs), distill=teacher) as run:
        step = next(iter(run))
    inputs, targets = (torch.stack([pair[n] for pair in pairs])[step.sample_ids] for n in (0, 1))
    student = net(outputs=2)(inputs)
    assert step.losses == pytest.approx(
        {
            type(loss).__name__: 0.5 * loss(student, targets).item(),
            "teacher_mse": 0.5 * F.mse_loss(student, net(16, outputs=2, seed=1)(inputs)).item(),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss(), nn.SoftMarginLoss()])
def test_losses_of_several_labels_have_no_teacher(tmp_path: Path, loss: nn.Module) -> None:
    pairs = [(x, (x[:3] > 0).float()) for x, _ in points()]
    with pytest.raises(ConfigError) as refused:
        small(tmp_path, loss, data=from_map_style(pairs)).fit()
    assert f"a teacher with the objective {type(loss).__name__}" in str(refused.value)
    assert "losses of several labels per sample have none" in str(refused.value)


def test_mixed_classes_are_probabilities(tmp_path: Path) -> None:
    def mix(a: Any, b: Any, _rng: Any) -> Any:
        one = {"inputs": (a["inputs"] + b["inputs"]) / 2, "targets": torch.tensor([0.2, 0.3, 0.5]).numpy()}
        return one, one

    with small(tmp_path, "cross_entropy", pair_transform=mix) as run:
        assert set(next(iter(run)).losses) == {"ce", "kl"}


@pytest.mark.parametrize("objective", ["mean_squared_error", nn.MSELoss()])
def test_numbers_are_compared_by_squares(tmp_path: Path, objective: Any) -> None:
    pairs = [(x, torch.stack([x.sum(), x[0]])) for x, _ in points()]
    with small(
        tmp_path,
        objective,
        model=net(outputs=2),
        data=from_map_style(pairs),
        distill=Distillation(net(16, outputs=2, seed=1), DistillOptions(teacher_frac=0.25, features=("0=0",))),
        micro_batch=2,
    ) as run:
        step = next(iter(run))
    inputs, targets = (torch.stack([pair[n] for pair in pairs])[step.sample_ids] for n in (0, 1))
    mine, its = net(outputs=2)(inputs), net(16, outputs=2, seed=1)(inputs)
    assert step.losses["mse"] == pytest.approx(0.75 * F.mse_loss(mine, targets).item(), rel=1e-5)
    assert step.losses["teacher_mse"] == pytest.approx(0.25 * F.mse_loss(mine, its).item(), rel=1e-5)
    assert 0 < step.losses["features"] < 10


def test_features_of_images_are_compared_by_channel(tmp_path: Path) -> None:
    def convolutional(channels: int) -> nn.Module:
        torch.manual_seed(channels)
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), *pool, nn.Linear(channels, 3))

    pictures = [(torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(n)), n % 3) for n in range(24)]
    found: list[list[dict[str, float]]] = []
    for micro_batch in (8, 2):
        with small(
            tmp_path / str(micro_batch),
            "cross_entropy",
            model=convolutional(4),
            data=from_map_style(pictures),
            distill=Distillation(convolutional(6), DistillOptions(features=("0=0",))),
            micro_batch=micro_batch,
        ) as run:
            found.append([step.losses for step in run])
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"pp": 2, "micro_batch": 2}, "a teacher with plan.pp=2"),
        ({"tp": 2}, "distill.features with plan.tp=2"),
        ({"tp": 4}, "the teacher: "),
    ],
)
def test_layouts_that_cannot_have_a_teacher(pool: Pool, tmp_path: Path, changes: dict[str, Any], given: str) -> None:
    ranks = next(n for name, n in changes.items() if name in ("pp", "tp"))
    assert given in pool.run(refusal, str(tmp_path), changes, given.startswith("distill"), ranks=ranks)[0]


def refusal(world: World, folder: str, changes: dict[str, Any], with_features: bool) -> str:
    def network() -> nn.Module:
        return tiny.model(num_heads=8, num_kv_heads=8, dim=32)

    given = distilled(features=FEATURES if with_features else ())
    if changes.get("tp") == 4:
        given = Distillation(tiny.model)  # its two heads have no four parts
    with pytest.raises(PlanError) as refused:
        losses(folder, world=world, network=network, distill=given, **changes)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"compile": "regional"}, "distill.features with plan.compile 'regional'"),
        ({"objective": "model_loss"}, "a teacher with the objective model_loss"),
        ({"distill": distilled(features=("blocks.7=blocks.0",))}, "no module of the student is 'blocks.7'"),
        (
            {"distill": distilled(features=("blocks.*=blocks.*",))},
            "names 2 modules of the student and 3 of the teacher",
        ),
        ({"distill": distilled(features=("blocks.0",))}, "features 'blocks.0'"),
        ({"distill": distilled(temperature=0.0)}, "temperature"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], given: str) -> None:
    changes = {"distill": distilled(features=FEATURES), **changes}
    with pytest.raises((ConfigError, PlanError)) as refused:
        tiny.complete(tmp_path, num_workers=0, **changes)
    assert given in str(refused.value)


def test_a_dry_run_counts_the_teacher(tmp_path: Path) -> None:
    given = distilled(features=FEATURES)
    (alone,) = tiny.trainer(tmp_path / "alone", num_workers=0).dry_run(1)
    (taught,) = tiny.trainer(tmp_path / "taught", distill=given, num_workers=0).dry_run(1)
    assert "teacher" not in alone.peak.by_kind
    assert taught.peak.by_kind["teacher"] == sum(parameter.nbytes for parameter in teacher().parameters())
    assert taught.peak.bytes >= alone.peak.bytes + taught.peak.by_kind["teacher"]
    (half, _) = tiny.trainer(tmp_path / "half", distill=given, network=tiny.model, dp_shard=2, num_workers=0).dry_run(
        2, [0, 1]
    )
    assert half.peak.by_kind["teacher"] < 0.6 * taught.peak.by_kind["teacher"]


# --- what it is for ------------------------------------------------------------------------------------------------


def trained_loss(folder: Path, objective: Any, steps: int, **given: Any) -> float:
    """The held-out loss of a model after so many steps."""
    plan = PlanOptions(device="cpu", precision="fp32", global_batch=32)
    options = TrainOptions(steps=steps, eval_every_steps=0)
    with small(folder, objective, plan=plan, options=options, **given) as run:
        for _ in run:
            pass
        return run.evaluate()["loss"]


def held_out_loss(folder: Path, model: nn.Module, steps: int, seed: int, *, count: int, **given: Any) -> float:
    data, eval_data = from_map_style(points(count, seed=10 + seed)), from_map_style(points(2000, seed=99))
    return trained_loss(folder, cross_entropy, steps, model=model, data=data, eval_data=eval_data, seed=seed, **given)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_is_better_with_a_teacher(tmp_path: Path, seed: int) -> None:
    """The teacher has seen 4,000 points, the student sees 96 of them: a teacher's outputs tell more than their classes."""
    large = net(64, seed=7)
    taught = held_out_loss(tmp_path / "teacher", large, 600, seed, distill=None, count=4000)
    scores: dict[str, float] = {}
    for name, distill in (("alone", None), ("distilled", Distillation(large)), ("again", Distillation(large))):
        scores[name] = held_out_loss(tmp_path / name, net(16, seed=seed), 400, seed, distill=distill, count=96)
    assert scores["distilled"] < scores["alone"]
    assert scores["again"] == scores["distilled"]
    assert taught < scores["alone"]


def test_a_temperature_whose_square_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"distill\.temperature"):
        load_config(RunConfig, overrides=["distill.teacher=x", "distill.temperature=1e308"], environ={})


def sentences(count: int, seed: int) -> Any:
    """Sequences of a chain in which each token has likely and less likely followers."""
    chances = (2 * torch.randn(24, 24, generator=torch.Generator().manual_seed(5))).softmax(-1)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 24, (count, 17), generator=draw)
    for place in range(1, 17):
        tokens[:, place] = torch.multinomial(chances[tokens[:, place - 1]], 1, generator=draw)[:, 0]
    rows = [{"tokens": row[:-1], "targets": row[1:], "weights": torch.ones(16)} for row in tokens]
    return from_map_style(rows)


def language_loss(folder: Path, model: nn.Module, steps: int, seed: int, *, count: int, **given: Any) -> float:
    data, eval_data, optimizer = sentences(count, 10 + seed), sentences(500, 99), OptimOptions(lr=1e-2)
    given |= {"data": data, "eval_data": eval_data, "optimizer": optimizer, "seed": seed}
    return trained_loss(folder, next_token, steps, model=model, **given)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_small_language_model_is_better_with_a_teacher(tmp_path: Path, seed: int) -> None:
    """The teacher has seen 2,000 sequences, the student sees 64 of them, as often."""
    large = tiny.model(dim=32, num_heads=4, vocab_size=24)
    taught = language_loss(tmp_path / "teacher", large, 300, seed, count=2000, distill=None)
    scores: dict[str, float] = {}
    for name, distill in (("alone", None), ("distilled", Distillation(large))):
        student = tiny.model(num_layers=1, vocab_size=24)
        scores[name] = language_loss(tmp_path / name, student, 200, seed, count=64, distill=distill)
    assert taught < scores["distilled"] < scores["alone"]
