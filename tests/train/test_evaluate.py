"""Metrics are exact under any number of ranks; averages of weights, early stopping, the held-out pass as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool

from unisono.errors import DataError
from unisono.train import next_token
from unisono.train.metrics import METRICS, Metric, f1, find_metric, top_k

HELD_OUT = 11


def metrics() -> dict[str, Metric]:
    return {"bits_per_byte": METRICS["bits_per_byte"], "perplexity": METRICS["perplexity"], "f1": f1(tiny.VOCAB),
            "accuracy": METRICS["accuracy"], "top3": top_k(3)}  # fmt: skip


def by_hand() -> dict[str, float]:
    """Every metric from all logits at once."""
    data, model = tiny.RaggedTokens(HELD_OUT), tiny.model().eval()
    batch = {k: torch.from_numpy(v) for k, v in data.read(np.arange(HELD_OUT)).items()}
    with torch.no_grad():
        logits = model(batch["tokens"]).logits().flatten(0, 1).double()
    targets, weights = batch["targets"].flatten(), batch["weights"].flatten().double()
    losses = F.cross_entropy(logits, targets, reduction="none") * weights
    chosen = logits.argmax(-1)
    scores = []
    for c in range(tiny.VOCAB):
        hit = float((weights * ((chosen == c) & (targets == c))).sum())
        both = float((weights * (chosen == c)).sum() + (weights * (targets == c)).sum())
        scores += [2 * hit / both] if both else []
    loss = float(losses.sum() / weights.sum())
    top3 = (logits.topk(3).indices == targets[:, None]).any(-1)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": float(losses.sum()) / math.log(2) / float(weights.sum()),
        "accuracy": float((weights * (chosen == targets)).sum() / weights.sum()),
        "top3": float((weights * top3).sum() / weights.sum()),
        "f1": sum(scores) / len(scores),
    }


def evaluated(world, run_dir: str) -> dict[str, float]:
    data = tiny.RaggedTokens(HELD_OUT)
    with tiny.trainer(run_dir, steps=1, world=world, num_eval_samples=0, metrics=metrics(), micro_batch=2) as run:
        return run.evaluate(data)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_metrics_are_exact_under_uneven_ranks(tmp_path: Path, pool: Pool, ranks: int) -> None:
    for values in pool.run(evaluated, str(tmp_path / "run"), ranks=ranks):
        assert values == pytest.approx(by_hand(), rel=1e-6)


def test_a_rank_without_a_share_takes_part(tmp_path: Path, pool: Pool) -> None:
    values = pool.run(evaluated_one, str(tmp_path / "run"), ranks=3)
    assert values[0] == values[1] == values[2]


def evaluated_one(world, run_dir: str) -> float:
    with tiny.trainer(run_dir, steps=1, world=world, micro_batch=1) as run:
        return run.evaluate(tiny.RaggedTokens(1))["loss"]


def test_limits_and_names() -> None:
    assert find_metric("top7") is not None
    assert find_metric("f1:3") is not None
    assert [find_metric(name) for name in ("top0", "f1:1", "topx", "nothing")] == [None] * 4


def test_bits_per_byte_needs_the_bytes() -> None:
    with pytest.raises(DataError) as raised:
        METRICS["bits_per_byte"].sums(None, {"targets": torch.zeros(1)}, torch.tensor(1.0), torch.tensor(1.0))
    assert str(raised.value).startswith(
        "metric 'bits_per_byte' on batches with targets\n  rule: it divides by the bytes"
    )


def test_ones_own_metric(tmp_path: Path) -> None:
    longest = Metric(
        size=1,
        sums=lambda _out, batch, _loss, _weight: batch["weights"].sum().double()[None],
        value=lambda total: total[0],
    )
    with tiny.trainer(tmp_path / "run", steps=1, metrics={"tokens": longest}, num_eval_samples=0) as run:
        value = run.evaluate(tiny.RaggedTokens(HELD_OUT))["tokens"]
    assert value == float(tiny.RaggedTokens(HELD_OUT).read(np.arange(HELD_OUT))["weights"].sum())


def test_evaluation_changes_nothing_in_training(tmp_path: Path) -> None:
    plain = tiny.complete(tmp_path / "plain", steps=4, dropout=0.3)
    with tiny.trainer(tmp_path / "watched", steps=4, dropout=0.3, eval_data=tiny.RaggedTokens(HELD_OUT)) as run:
        for _step in run:
            run.evaluate()
        assert tiny.digest(run) != ""
        weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    with tiny.trainer(tmp_path / "plain", steps=4, dropout=0.3) as again:
        assert again.state.step == plain["step"]
        for name, p in again.model.named_parameters():
            assert torch.equal(p, weights[name])


def test_the_average_of_weights_is_used_and_left(tmp_path: Path) -> None:
    decay = 0.75
    with tiny.trainer(tmp_path / "run", steps=3, ema_decay=decay) as run:
        expected = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        for _ in run:
            for name, p in run.model.named_parameters():
                expected[name] += (1 - decay) * (p.detach() - expected[name])
        weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        with run.averaged_weights():
            for name, p in run.model.named_parameters():
                torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-7)
        assert all(torch.equal(p, weights[n]) for n, p in run.model.named_parameters())


def test_a_save_under_way_is_not_touched_by_the_average(tmp_path: Path) -> None:
    """Evaluation swaps averages into the parameters while the newest checkpoint is still being written."""
    from unisono.checkpoint import open_checkpoint

    with tiny.trainer(tmp_path / "run", steps=2, ema_decay=0.5, every_steps=2, eval_data=tiny.RaggedTokens(3)) as run:
        run.fit()
        weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    saved = open_checkpoint(tmp_path / "run/checkpoints/step-00000002")
    for name, p in weights.items():
        assert torch.equal(saved.tensor(f"model/{name}"), p)


def test_early_stop_ends_saves_and_says_so(tmp_path: Path) -> None:
    # a learning rate that destroys the model: the held-out loss only rises
    with tiny.trainer(
        tmp_path / "run", steps=50, lr=3.0, clip_norm=0.0, eval_every_steps=2, early_stop_patience=2,
        eval_data=tiny.RaggedTokens(HELD_OUT), max_skips=50,
    ) as run:  # fmt: skip
        result = run.fit()
    assert result.reason == "early_stop"
    assert result.step < 50
    assert (tmp_path / f"run/checkpoints/step-{result.step:08d}/COMMIT").exists()
    (event,) = [e for e in tiny.events(tmp_path / "run") if e["kind"] == "early_stop"]
    assert event["best_loss"] < event["loss"]


def broken_when_held_out(*losses: float) -> Callable[..., Any]:
    """The objective of token models; in evaluations the loss is the next of ``losses``, and the last of them from there on."""
    given = list(losses)

    def objective(outputs: Any, batch: Any) -> Any:
        loss, weight = next_token(outputs, batch)
        if not torch.is_grad_enabled():
            loss = weight * given[0]
            if len(given) > 1:
                given.pop(0)
        return loss, weight

    return objective


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_is_the_worst_and_the_run_is_saved(tmp_path: Path, loss: float) -> None:
    folder = tmp_path / "run"
    settings: dict[str, Any] = {"eval_every_steps": 1, "every_steps": 1, "keep_last": 1, "keep_best": 1,
                                "early_stop_patience": 3, "eval_data": tiny.RaggedTokens(3)}  # fmt: skip
    with tiny.trainer(folder, steps=3, objective=broken_when_held_out(loss, 2.5, loss), **settings) as run:
        result = run.fit()
        assert run.best == folder / "checkpoints/step-00000002"
    assert (result.reason, result.step) == ("finished", 3)
    assert not [event for event in tiny.events(folder) if event["kind"] == "checkpoint_failed"]
    with tiny.trainer(folder, steps=9, objective=broken_when_held_out(loss), **settings) as run:
        assert (run.state.step, run.state.best_loss, run.state.evaluations_without_gain) == (3, 2.5, 1)
        assert run.fit().reason == "early_stop"
    (event,) = [event for event in tiny.events(folder) if event["kind"] == "early_stop"]
    assert (event["step"], event["best_loss"]) == (5, 2.5)


def test_a_run_without_a_finite_held_out_loss_ends_with_its_state_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with tiny.trainer(
        folder, steps=9, objective=broken_when_held_out(math.nan), eval_every_steps=1, early_stop_patience=2,
        every_steps=1, eval_data=tiny.RaggedTokens(3),
    ) as run:  # fmt: skip
        assert run.fit().reason == "early_stop"
        assert run.best is None
    assert (folder / "checkpoints/step-00000002/COMMIT").exists()
    (event,) = [event for event in tiny.events(folder) if event["kind"] == "early_stop"]
    assert event["best_loss"] is None
    assert math.isnan(float(event["loss"]))


@pytest.mark.full
def test_early_stop_counts_on_after_a_resume(tmp_path: Path) -> None:
    settings = {"eval_every_steps": 1, "early_stop_patience": 5, "eval_data": tiny.RaggedTokens(HELD_OUT), "lr": 3.0,
                "clip_norm": 0.0, "max_skips": 50, "steps": 20}  # fmt: skip
    with tiny.trainer(tmp_path / "whole", **settings) as run:
        whole = run.fit().step
    with tiny.trainer(tmp_path / "parts", **settings) as run:
        for step in run:
            run.evaluate()
            if step.index == 3:
                break
    with tiny.trainer(tmp_path / "parts", **settings) as run:
        assert run.fit().step == whole
