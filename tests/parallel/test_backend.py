"""What a plan sets in torch for the whole process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from unisono.parallel import device
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan


def plan(kind: str) -> Plan:
    return derive_plan(PlanOptions(device=kind), world_size=1, device=kind, native_bf16=False)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "_deterministic_for_cpu", False)
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


def test_a_plan_for_an_accelerator_ends_what_one_for_the_cpu_began() -> None:
    device.set_backend(plan("cpu"))
    device.set_backend(plan("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    device.set_backend(plan("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_the_user_set_stays() -> None:
    torch.use_deterministic_algorithms(True)
    device.set_backend(plan("cpu"))
    device.set_backend(plan("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
