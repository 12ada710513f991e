"""Worker processes that cannot be started end a run only where processes were asked for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from unisono.data.loading.loader import Loader
from unisono.data.loading.worker_tuning import WorkerSetting
from unisono.data.options import LoaderOptions
from unisono.errors import DataError

GHOST = """
import numpy as np

class Numbers:
    fingerprint = "ghost"

    def __len__(self):
        return 100

    def read(self, indices):
        return {"x": np.array(indices)}
"""


@pytest.fixture
def ghost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of a module that only this process has."""
    module = ModuleType("unisono_test_ghost")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(GHOST, module.__dict__)
    return module.__dict__["Numbers"]()


def batches(data: Any, setting: WorkerSetting | None, **options: Any) -> list[list[int]]:
    with Loader(data, seed=0, global_batch=8, micro_batch=4, options=LoaderOptions(**options)) as loader:
        if setting is not None:
            loader._tuner.setting = setting
        steps = loader.iterate(0, 12)
        return [np.concatenate([part["x"] for part in step.micro_batches]).tolist() for step in steps]


def test_a_trial_of_processes_leaves_the_order_as_it_is(ghost: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = batches(ghost, None, num_workers=0)
    assert batches(ghost, WorkerSetting(kind="process", workers=2)) == expected
    assert "worker processes are not tried, threads go on: data set or transform: ModuleNotFoundError" in caplog.text


def test_processes_that_were_asked_for_are_an_error(ghost: Any) -> None:
    with pytest.raises(DataError, match="No module named 'unisono_test_ghost'"):
        batches(ghost, None, num_workers=2, worker_kind="process")
