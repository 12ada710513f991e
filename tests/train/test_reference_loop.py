"""The same curve as a plain loop in one process, whatever the accumulation and the number of processes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool

from unisono.data.order.permutation import Permutation

STEPS = 8


def plain_loop() -> list[float]:
    """Mean token loss over the global batch, written down without any of unisono's training code."""
    data, model = tiny.RaggedTokens(), tiny.model()
    decay = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2 or p is model.embedding.weight]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    order = Permutation(len(data), seed=0)
    losses = []
    for step in range(STEPS):
        batch = {k: torch.from_numpy(v) for k, v in data.read(order(np.arange(8 * step, 8 * step + 8))).items()}
        logits = model(batch["tokens"]).logits()
        each = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        loss = (each * batch["weights"].flatten()).sum() / batch["weights"].sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        for p in model.parameters():
            p.grad = p.grad * (1.0 / max(float(norm), 1.0)) if p.grad is not None else None
        warm = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * warm
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_equals_a_plain_loop(tmp_path: Path) -> None:
    # fp32 sums in another order: 1e-7 per step, amplified by eight steps of a small model
    assert tiny.complete(tmp_path / "run", steps=STEPS)["losses"] == pytest.approx(plain_loop(), rel=1e-5)


@pytest.mark.parametrize("micro_batch", [3, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))])
def test_accumulation_does_not_change_the_curve(tmp_path: Path, micro_batch: int) -> None:
    outcome = tiny.complete(tmp_path / "run", steps=STEPS, micro_batch=micro_batch)
    assert outcome["losses"] == pytest.approx(plain_loop(), rel=1e-5)


def on_ranks(world, run_dir: str, changes: dict) -> dict:
    return tiny.complete(run_dir, steps=STEPS, world=world, **changes)


@pytest.mark.parametrize(
    ("ranks", "micro_batch"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, 2), (4, 1)))]
)
def test_processes_and_accumulation_do_not_change_the_curve(
    tmp_path: Path, pool: Pool, ranks: int, micro_batch: int
) -> None:
    """Three ranks share eight samples as 3 + 3 + 2: their micro-batches are of different number, nothing hangs."""
    outcomes = pool.run(on_ranks, str(tmp_path / "run"), {"micro_batch": micro_batch}, ranks=ranks)
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(plain_loop(), rel=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_samples_of_a_step_do_not_depend_on_the_processes(tmp_path: Path, pool: Pool, ranks: int) -> None:
    alone = tiny.complete(tmp_path / "alone", steps=STEPS)["samples"]
    outcomes = pool.run(on_ranks, str(tmp_path / "run"), {}, ranks=ranks)
    together = [list(chain.from_iterable(parts)) for parts in zip(*(o["samples"] for o in outcomes), strict=True)]
    assert together == alone


class TwoHeads(torch.nn.Module):
    """Its second head sees a batch only when ``which`` says so: on some ranks it gets no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        return out + self.second(x) if which.any() else out


class Rows:
    fingerprint = "rows"

    def __len__(self) -> int:
        return 16

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)[indices]
        return {"x": x, "which": (indices == 5).astype(np.int64), "targets": x.sum(1, keepdims=True)}


def train_two_heads(world, run_dir: str, plan: dict) -> dict:
    from unisono.train.objectives import mean_squared_error

    return tiny.complete(
        run_dir, steps=4, world=world, network=TwoHeads(), data=Rows(), objective=mean_squared_error, **plan
    )


@pytest.mark.parametrize("plan", [{}, {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}], ids=str)
def test_parameters_no_sample_used_do_not_hang_and_do_not_differ(tmp_path: Path, pool: Pool, plan: dict) -> None:
    outcomes = pool.run(train_two_heads, str(tmp_path / "run"), {"micro_batch": 1, **plan}, ranks=2)
    if not plan:
        assert outcomes[0]["digest"] == outcomes[1]["digest"]
    alone = pool.run(train_two_heads, str(tmp_path / "alone"), {"micro_batch": 1}, ranks=1)[0]
    assert outcomes[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_lower_precisions_follow_the_curve(tmp_path: Path, precision: str) -> None:
    losses = tiny.complete(tmp_path / "run", steps=STEPS, precision=precision)["losses"]
    # bf16 has 8 significant bits: single losses may be off by a percent
    assert losses == pytest.approx(plain_loop(), rel=2e-2)


def test_debug_order_equals_the_prefetched_one(tmp_path: Path) -> None:
    assert (
        tiny.complete(tmp_path / "a", steps=4, num_workers=0)["samples"]
        == tiny.complete(tmp_path / "b", steps=4, num_workers=3)["samples"]
    )
