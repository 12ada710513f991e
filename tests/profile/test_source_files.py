"""Whose a file is: folders of the user's that are named as the library or torch are the user's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from traces import TraceBuilder

import unisono
from unisono.profile import source_files
from unisono.profile.host_events import is_library
from unisono.profile.summary import summarise_trace
from unisono.profile.sync_watch import SyncWatch

OWN = Path(unisono.__file__).parent
TORCH = Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("source", "is_own"),
    [
        (f"{OWN}/train/metrics_reader.py:5", True),
        ("unisono/train/metrics_reader.py(5): read", True),
        ("/venv/lib/python3.13/site-packages/unisono/gone.py:5", True),
        ("/home/me/unisono/projects/loop.py:5", False),
        ("/home/me/unisono/train/metrics_reader.py:5", False),
        ("unisono/projects/loop.py(5): train", False),
        ("", False),
    ],
)
def test_what_is_of_this_library(source: str, is_own: bool) -> None:
    assert source_files.is_own(source) == is_own
    assert source_files.marked(source).endswith("(of unisono)") == is_own


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (f"{TORCH}/nn/modules/module.py(1): forward", True),
        ("torch/nn/modules/gone.py(1): forward", True),
        ("/venv/lib/python3.13/site-packages/torch/nn/modules/module.py(1): forward", True),
        ("/home/me/site/torch/mine/loop.py(5): train", False),
        ("torch/mine/loop.py(5): train", False),
        ("unisono/train/step.py(5): loss", True),
        ("/home/me/unisono/train/step.py(5): mine", False),
        ("threading.py(1): run", True),
        ("<built-in method item>", True),
    ],
)
def test_functions_that_read_for_their_caller(frame: str, expected: bool) -> None:
    assert is_library(frame) == expected


@pytest.mark.parametrize("file", ["unisono/projects/loop.py", "unisono/profile/loop.py", "site/torch/mine/loop.py"])
def test_reads_of_a_user_s_file_in_a_folder_named_so(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("def read(tensor):\n    return tensor.item()\n")
    spec = importlib.util.spec_from_file_location("loop", path)
    assert spec is not None
    assert spec.loader is not None
    loop: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    with SyncWatch(lambda: "forward") as watch:
        loop.read(torch.ones(1))
    assert [point.source for point in watch.points()] == [f"{path}:2"]


def test_functions_of_a_trace_in_a_folder_named_so(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 1000)
    trace.frame("/home/me/unisono/projects/loop.py(4): accuracy", 10, 90).frame("torch/_tensor.py(9): item", 20, 60)
    trace.op("aten::_local_scalar_dense", 30, 10)
    (point,) = summarise_trace(trace.read(tmp_path)).syncs
    assert point.source == "/home/me/unisono/projects/loop.py(4): accuracy"
