"""Faults in real runs that only a profile shows: each is found with its place, and is gone without the fault."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from unisono.diagnose import Finding, diagnose, read_run, read_trace_facts
from unisono.observe.options import ObserveOptions


def found(
    folder: Path, network: nn.Module, *, window: str = "4:7", body: Any = None, **changes: Any
) -> dict[str, Finding]:
    """The findings of a run of ``network``; ``body(run, step)`` is called in its loop."""
    observe = ObserveOptions(console="off", trackers=(), report=False, profile_steps=window)
    options: dict[str, Any] = {"steps": 8, "num_workers": 0, "network": network, "data": Rows(), "objective": squares}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "QUIET", observe)
        with tiny.trainer(folder, **options | changes) as run:
            for step in run:
                if body is not None:
                    body(run, step)
    return {finding.id: finding for finding in diagnose(read_run(folder))}


class Rows:
    """Random rows of 32 numbers."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return 256

    def read(self, indices: Any) -> dict[str, Any]:
        rows = torch.randn(256, 32, 32, generator=torch.Generator().manual_seed(0)).numpy()
        return {"inputs": rows[indices]}


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.square().mean(), torch.tensor(float(len(outputs)))


class Wide(nn.Module):
    """Two large products: nothing to complain about, also where other processes use the cores in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 8192), nn.GELU(), nn.Linear(8192, 32))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def test_a_model_without_faults(tmp_path: Path) -> None:
    assert found(tmp_path / "run", Wide()) == {}


def read_often(run: Any, step: Any) -> None:
    for _ in range(5):
        step.stats[0].item()  # THE LINE
    float(step.loss)


def test_reads_in_the_loop_name_their_line(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", Wide(), window="4:7+stacks", body=read_often)["SYNC01"]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# THE LINE" in text)
    assert finding.evidence[1] == f"{__file__}:{line} (item): 5 a step"
    assert "6 times a step" in finding.evidence[0]


def test_reads_without_stacks_are_counted(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", Wide(), body=read_often)["SYNC01"]
    assert "6 times a step" in finding.evidence[0]
    assert "--stacks" in finding.evidence[-1]


class Tiny(nn.Module):
    """Hundreds of products of tiny matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs[0, :4, :4]
        for _ in range(200):
            rows = rows @ self.weight
        return rows


def test_tiny_products(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", Tiny())["LAUNCH01"]
    assert finding.cost_frac > 0.5


class Recompiling(Wide):
    """Compiled for each length, of which there is a new one in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(lambda rows: rows * 2 + 1, backend="eager", dynamic=False)
        self.length = 2

    def forward(self, inputs: Tensor) -> Tensor:
        self.length += 1
        return super().forward(inputs) + self.compiled(inputs[:, : self.length]).mean()


@pytest.mark.full
def test_recompiles(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", Recompiling(), global_batch=4)["COMP01"]
    assert finding.evidence[0].startswith("3 compilations in 3 steps of steps 4 to 6")


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_recompute_of_a_model_that_fits(tmp_path: Path, recompute: str) -> None:
    sizes = {"num_layers": 2, "dim": 64, "vocab_size": tiny.VOCAB}
    findings = found(
        tmp_path / "run",
        tiny.model(**sizes),
        data=tiny.RaggedTokens(samples=64),
        objective=tiny.next_token,
        recompute=recompute,
    )
    assert ("RECOMP01" in findings) == (recompute == "full")
    if recompute == "full":
        assert findings["RECOMP01"].patch == {}


class Attention(nn.Module):
    """Attention and norm by hand, or by torch's fused operators."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.project = nn.Linear(32, 96)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, inputs: Tensor) -> Tensor:
        long = inputs.repeat(1, 12, 1)  # [B, 384, 32]
        if self.fused:
            q, k, v = self.project(nn.functional.rms_norm(long, (32,), self.scale)).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)
        normed = long * torch.rsqrt(long.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        q, k, v = self.project(normed).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / 32**0.5
        return scores.masked_fill(scores.isnan(), 0.0).softmax(-1) @ v


@pytest.mark.parametrize("fused", [False, True])
def test_attention_by_hand(tmp_path: Path, fused: bool) -> None:
    findings = found(tmp_path / "run", Attention(fused=fused))
    assert ("FUSE01" in findings) == (not fused)
    if not fused:
        assert findings["FUSE01"].evidence[0].startswith("3 times of steps 4 to 6: matmul, div,")


class Norm(nn.Module):
    """A norm by hand, or torch's fused operator, and a product."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.project = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, inputs: Tensor) -> Tensor:
        long = inputs.repeat(1, 200, 1)  # [B, 6400, 32]
        if self.fused:
            return self.project(nn.functional.rms_norm(long, (32,), self.scale))
        return self.project(long * torch.rsqrt(long.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale)


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_by_hand(tmp_path: Path, fused: bool) -> None:
    findings = found(tmp_path / "run", Norm(fused=fused))
    assert ("FUSE02" in findings) == (not fused)


def test_a_trace_of_another_program(tmp_path: Path) -> None:
    """A plain loop under torch.profiler: the same attention is found."""
    model = Attention(fused=False)
    inputs = torch.randn(8, 32, 32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            model(inputs).square().mean().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    findings = {finding.id: finding for finding in diagnose(read_trace_facts(path))}
    assert findings["FUSE01"].evidence[0].startswith("2 times of the trace: matmul, div,")


class SlowRows(Dataset[Tensor]):
    """Rows whose transform takes 12 ms, and is many operators where it runs on the thread that trains."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.012)
        row = torch.full((64,), float(index))
        for _ in range(20):
            row = row * 1.0
        return row


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("marked", [False, True])
def test_another_program_that_waits_for_its_loader(tmp_path: Path, workers: int, marked: bool) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    steps = schedule(wait=1, warmup=1, active=6, repeat=1) if marked else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=steps) as profiler:
        for rows in DataLoader(SlowRows(), batch_size=8, num_workers=workers):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    facts = read_trace_facts(path)
    (profiled,) = facts.profiles
    assert bool(profiled.steps) == marked
    # without marks, the updates of the optimizer are the steps
    assert profiled.num_steps == (6 if marked else 8)
    findings = {finding.id: finding for finding in diagnose(facts)}
    assert "num_workers of the DataLoader" in findings["DATA01"].advice
    # the loader's own operators and its waits are no calls of the training's operators
    assert profiled.launch.num_operators < 100 * profiled.num_steps
    assert profiled.launch.compute_s + profiled.loader_wait_s == pytest.approx(profiled.wall_s)


def test_a_fast_loader_is_no_finding(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for rows in DataLoader(np.ones((8, 2048, 512), np.float32), batch_size=None):  # pyright: ignore[reportArgumentType]
            model(rows).square().mean().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    assert "DATA01" not in [finding.id for finding in diagnose(read_trace_facts(path))]
