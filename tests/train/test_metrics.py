"""Metrics by name against scikit-learn and scipy, over any division into batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono import ObserveOptions, PlanOptions, Trainer, TrainOptions, from_map_style
from unisono.errors import ConfigError, DataError
from unisono.observe.events import read_events
from unisono.train.metric_kinds import NUMBERS, larger_is_better, metric_classes, metric_kind
from unisono.train.metrics import AUC_BINS, METRICS, SPEARMAN_BINS, as_metrics, find_metric

skm = pytest.importorskip("sklearn.metrics", reason="NOT CHECKED: the extra 'dev' (scikit-learn) is not installed")
RNG = np.random.default_rng(0)


def value(name: str, outputs: Any, targets: Tensor, weights: Tensor | None = None) -> Any:
    """Over three uneven batches, as an evaluation adds them up."""
    metric = find_metric(name)
    assert metric is not None
    total = torch.zeros(metric.size, dtype=torch.float64)
    for rows in (slice(0, 50), slice(50, 51), slice(51, None)):
        batch = {"targets": targets[rows]} | ({"weights": weights[rows]} if weights is not None else {})
        total += metric.sums(outputs[rows], batch, torch.tensor(0.0), torch.tensor(0.0))
    return metric.value(total.tolist())


def classes(count: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Logits that are right more often than not, targets, whole weights; and what is predicted."""
    targets = RNG.integers(0, count, 400)
    logits = RNG.normal(size=(400, count)) + 1.5 * np.eye(count)[targets]
    weights = RNG.integers(0, 3, 400).astype(np.float32)
    return torch.from_numpy(logits), torch.from_numpy(targets), torch.from_numpy(weights), logits.argmax(1)


@pytest.mark.parametrize("weighted", [False, True])
def test_two_classes(weighted: bool) -> None:
    logits, targets, weights, predicted = classes(2)
    given, how = (weights, {"sample_weight": weights}) if weighted else (None, {})
    assert value("f1", logits, targets, given) == pytest.approx(skm.f1_score(targets, predicted, **how))
    assert value("f1:2", logits, targets, given) == pytest.approx(
        skm.f1_score(targets, predicted, average="macro", **how)
    )
    assert value("mcc", logits, targets, given) == pytest.approx(skm.matthews_corrcoef(targets, predicted, **how))
    score = (logits[:, 1] - logits[:, 0]).numpy()
    exact = skm.roc_auc_score(targets, score, **how)
    assert value("auc", logits, targets, given) == pytest.approx(exact, abs=1e-4)
    assert value("auc", torch.from_numpy(score)[:, None], targets, given) == value("auc", logits, targets, given)


@pytest.mark.parametrize("weighted", [False, True])
def test_several_classes(weighted: bool) -> None:
    logits, targets, weights, predicted = classes(4)
    given, how = (weights, {"sample_weight": weights}) if weighted else (None, {})
    assert value("mcc:4", logits, targets, given) == pytest.approx(skm.matthews_corrcoef(targets, predicted, **how))
    assert value("f1:4", logits, targets, given) == pytest.approx(
        skm.f1_score(targets, predicted, average="macro", **how)
    )
    table = value("confusion:4", logits, targets, given)
    expected = skm.confusion_matrix(targets, predicted, **how)
    assert table == {f"{t}/{p}": expected[t, p] for t in range(4) for p in range(4)}


def test_auc_of_equal_scores_and_of_one_class() -> None:
    """Binned scores are exact where no two different ones share a bin, and equal scores count half."""
    scores = RNG.integers(-3, 4, 300).astype(np.float64)
    targets = (RNG.random(300) < 0.4).astype(np.int64)
    found = value("auc", torch.from_numpy(scores), torch.from_numpy(targets))
    assert found == pytest.approx(skm.roc_auc_score(targets, scores), rel=1e-12)
    assert np.isnan(value("auc", torch.from_numpy(scores), torch.ones(300, dtype=torch.int64)))
    assert find_metric("auc").size == 2 * AUC_BINS


def test_spearman() -> None:
    from scipy.stats import spearmanr

    targets = RNG.integers(0, 26, 300) / 5  # similarity scores of 0 to 5, as in STS-B
    predictions = np.clip(np.round(targets + RNG.normal(size=300), 1), 0, 5)
    exact = spearmanr(targets, predictions).statistic
    assert value("spearman:0:5", torch.from_numpy(predictions)[:, None], torch.from_numpy(targets)) == pytest.approx(
        exact, rel=1e-12
    )
    smooth = targets + RNG.normal(size=300)
    found = value("spearman:-5:10", torch.from_numpy(smooth), torch.from_numpy(targets))
    assert found == pytest.approx(spearmanr(targets, smooth).statistic, abs=3 / SPEARMAN_BINS)


def test_token_accuracy_leaves_out_ignored_tokens() -> None:
    logits, targets = torch.from_numpy(RNG.normal(size=(60, 7, 5))), torch.from_numpy(RNG.integers(0, 5, (60, 7)))
    targets[RNG.random((60, 7)) < 0.3] = -100
    counted = targets != -100
    expected = skm.accuracy_score(targets[counted], logits.argmax(-1)[counted])
    assert value("token_accuracy", logits, targets) == pytest.approx(expected)


def test_more_classes_than_the_metric_counts() -> None:
    logits, targets, *_ = classes(4)
    with pytest.raises(DataError) as raised:
        value("mcc", logits, targets)
    assert str(raised.value) == (
        "logits of 4 classes for a metric of 2\n"
        "  rule: the metric counts every class that the model can predict\n"
        "  so:   the metric has no value\n"
        "  try:  the metric with 4 classes, such as f1:4 or mcc:4"
    )


@pytest.mark.parametrize(
    "name", ["mcc:1", "mcc:x", "confusion", "confusion:1", "spearman", "spearman:5:0", "spearman:nan:1", "auc:2"]
)
def test_names_that_are_no_metric(name: str) -> None:
    assert find_metric(name) is None


def test_metrics_by_name() -> None:
    own = METRICS["mae"]
    assert as_metrics(["accuracy", "f1:3"]).keys() == {"accuracy", "f1:3"}
    assert as_metrics({"hits": "accuracy", "error": own}) == {"hits": METRICS["accuracy"], "error": own}
    assert as_metrics("mcc") == {"mcc": METRICS["mcc"]}
    with pytest.raises(ConfigError) as caught:
        as_metrics(["acuracy", "f1:1"])
    first, second = caught.value.problems
    assert first.given == "the metric 'acuracy'"
    assert first.rule.startswith("a metric is a Metric, or named by one of perplexity, ")
    assert first.consequence == "evaluations would not have it, and nothing was started"
    assert "accuracy" in first.nearest
    assert second.given == "the metric 'f1:1'"


def test_each_of_several_numbers_has_an_error_in_its_own_unit() -> None:
    targets, weights = torch.from_numpy(RNG.normal(size=(400, 2))), torch.from_numpy(RNG.integers(0, 3, 400))
    outputs = targets + torch.from_numpy(RNG.normal(size=(400, 2))) / 2
    scale = (10.0, 0.1)
    rules = {
        "mae": skm.mean_absolute_error,
        "rmse": skm.root_mean_squared_error,
        "r2": skm.r2_score,
    }
    for name, rule in rules.items():
        metric = find_metric(name, scale=scale)
        assert metric is not None
        batches = [
            {"targets": targets[rows], "weights": weights[rows].float()} for rows in (slice(0, 7), slice(7, None))
        ]
        total = sum(
            metric.sums(outputs[rows], batch, torch.tensor(0.0), torch.tensor(0.0))
            for rows, batch in zip((slice(0, 7), slice(7, None)), batches, strict=True)
        )
        expected = rule(
            targets * torch.tensor(scale),
            outputs * torch.tensor(scale),
            sample_weight=weights,
            multioutput="raw_values",
        )
        assert metric.value(total.tolist()) == pytest.approx({"0": expected[0], "1": expected[1]})  # type: ignore[union-attr]


def refused(name: str, outputs: Tensor, targets: Tensor) -> str:
    with pytest.raises(DataError) as caught:
        value(name, outputs, targets)
    return str(caught.value)


@pytest.mark.parametrize("name", ["accuracy", "top5", "f1", "f1:3", "mcc", "confusion:2"])
def test_metrics_of_classes_refuse_numbers(name: str) -> None:
    assert refused(name, torch.randn(60, 1), torch.randn(60)) == (
        "targets of float32 for a metric of classes\n"
        "  rule: it compares the largest of the logits [B, …, C] with integer targets [B, …]\n"
        "  so:   the metric has no value\n"
        "  try:  mae, rmse or r2 for numbers, auc for one logit of two classes, or a Metric of your own"
    )
    one = refused(name, torch.randn(60, 1), torch.zeros(60, dtype=torch.int64))
    assert one.startswith("outputs [50, 1], without a number for each class, for a metric of classes\n")
    flat = refused(name, torch.randn(60), torch.zeros(60, dtype=torch.int64))
    assert flat.startswith("outputs [50], without a number for each class, for a metric of classes\n")
    several = refused(name, torch.randn(60, 2), torch.zeros(60, 3, dtype=torch.int64))
    assert several.startswith("outputs [50, 2] and targets [50, 3] for a metric of classes\n")


@pytest.mark.parametrize("name", ["mae", "rmse", "r2", "spearman:0:1"])
def test_metrics_of_numbers_refuse_classes(name: str) -> None:
    assert refused(name, torch.randn(60, 2), torch.zeros(60, dtype=torch.int64)) == (
        "outputs [50, 2] and targets [50] for a metric of numbers\n"
        "  rule: it compares each target with one predicted number\n"
        "  so:   the metric has no value\n"
        "  try:  accuracy or f1:<classes> for classes, or a Metric of your own"
    )


@pytest.mark.parametrize("name", ["f1", "f1:2", "mcc", "confusion:2"])
def test_a_metric_of_fewer_classes_is_refused(name: str) -> None:
    logits, targets, _, _ = classes(3)
    assert refused(name, logits, targets).startswith("logits of 3 classes for a metric of 2\n")


def test_every_built_in_metric_has_a_kind() -> None:
    kinds = {
        name: metric_kind(name) for name in [*METRICS, "top3", "f1:3", "mcc:3", "confusion:3", "spearman:0:1", "own"]
    }
    assert [name for name, kind in kinds.items() if kind == NUMBERS] == ["mae", "rmse", "r2", "spearman:0:1"]
    assert [name for name, kind in kinds.items() if not kind] == ["bits_per_byte", "own"]
    counts = {name: metric_classes(name) for name in kinds}
    assert {name: count for name, count in counts.items() if count} == (
        {"f1": 2, "mcc": 2, "auc": 2, "f1:3": 3, "mcc:3": 3, "confusion:3": 3}
    )


def test_which_metrics_are_to_be_large() -> None:
    names = [
        *METRICS,
        "loss",
        "eval/accuracy",
        "top3",
        "f1:3",
        "spearman:0:1",
        "confusion:2",
        "topic",
        "own",
        "eval/own",
    ]
    known = {name: larger_is_better(name) for name in names}
    small = ["perplexity", "bits_per_byte", "mae", "rmse", "loss"]
    assert [name for name, is_large in known.items() if is_large is None] == ["confusion:2", "topic", "own", "eval/own"]
    assert [name for name, is_large in known.items() if is_large is False] == small


class Refuses:
    """Runs on 12 samples with held-out data; ``fit`` must end before the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, objective: Any, metrics: Any, *, outputs: int = 1, targets: Any = 0.5) -> Trainer:
        data = [(torch.randn(4), targets) for _ in range(12)]
        return Trainer(
            torch.nn.Linear(4, outputs),
            from_map_style([{"input": x, "targets": y} for x, y in data]),
            PlanOptions(global_batch=4, device="cpu", precision="fp32"),
            objective=objective,
            metrics=metrics,
            eval_data=[{"input": x, "targets": y} for x, y in data],
            options=TrainOptions(steps=2),
            run_dir=self.folder,
            observe=ObserveOptions(console="off", trackers=(), report=False),
        )


@pytest.mark.parametrize(
    ("objective", "metrics", "wrong", "takes", "targets"),
    [
        ("mean_squared_error", ["r2", "accuracy", "f1"], ("accuracy", "f1"), "classes", "numbers"),
        (torch.nn.MSELoss(), {"hits": "accuracy"}, ("accuracy",), "classes", "numbers"),
        ("cross_entropy", ["mae", "accuracy", "r2"], ("mae", "r2"), "numbers", "classes"),
        (torch.nn.CrossEntropyLoss(), "spearman:0:1", ("spearman:0:1",), "numbers", "classes"),
    ],
)
def test_metrics_of_another_kind_than_the_objective(
    tmp_path: Path, objective: Any, metrics: Any, wrong: tuple[str, ...], takes: str, targets: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Refuses(tmp_path).run(objective, metrics)
    name = objective if isinstance(objective, str) else type(objective).__name__
    assert [(p.given, p.rule) for p in caught.value.problems] == [
        (f"the metric {m!r} with the objective {name}", f"{m} compares {takes}, and the targets are {targets}")
        for m in wrong
    ]


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.squeeze(-1) - batch["targets"]).square().mean()


def likelihood(outputs: Tensor, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, batch["targets"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objective": squares, "metrics": ["accuracy"]}, "targets of float32 for a metric of classes"),
        (
            {"objective": likelihood, "metrics": ["mae"], "outputs": 3, "targets": 1},
            "outputs [4, 3] and targets [4] for a",
        ),
        ({"objective": "cross_entropy", "metrics": ["f1:2"], "outputs": 3, "targets": 1}, "logits of 3 classes for a"),
        (
            {"objective": "cross_entropy", "metrics": ["bits_per_byte"], "outputs": 3, "targets": 1},
            "metric 'bits_per_byte' on",
        ),
    ],
)
def test_metrics_are_tried_before_the_first_step(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught, Refuses(tmp_path).run(**given) as run:
        run.fit()
    assert str(caught.value).startswith(said)
    kinds = [event["kind"] for event in read_events(run.events.path).events]
    assert "run_start" in kinds
    assert not {"step", "eval"} & set(kinds)


def test_trying_metrics_changes_no_bit_and_no_generator(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head, self.modes = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3), []

        def forward(self, input: Tensor) -> Tensor:
            self.modes.append(self.training)
            noisy = input + 0.1 * torch.rand(())  # also in an evaluation
            return self.head(torch.nn.functional.dropout(self.norm(noisy), training=self.training))

    generator = torch.Generator().manual_seed(1)
    data = [{"input": torch.randn(4, generator=generator), "targets": n % 3} for n in range(12)]
    losses = {}
    for name, metrics in {"with": ["accuracy"], "without": []}.items():
        model = Net()
        with Trainer(
            model,
            data,
            PlanOptions(global_batch=4, device="cpu", precision="fp32"),
            objective="cross_entropy",
            metrics=metrics,
            eval_data=data,
            options=TrainOptions(steps=3),
            run_dir=tmp_path / name,
            observe=ObserveOptions(console="off", trackers=(), report=False),
        ) as run:
            run.fit()
            losses[name] = [e["train/loss"] for e in read_events(run.events.path).events if e["kind"] == "step"]
        assert model.modes[: 4 if metrics else 3] == [False] * bool(metrics) + [True] * 3
    assert losses["with"] == losses["without"]
    assert len(losses["with"]) == 3
