"""Metrics by name against scikit-learn and scipy, over any division into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.errors import ConfigError, DataError
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
