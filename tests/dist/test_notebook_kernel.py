"""The notebook whose kernel a process is, and the folder that its runs get."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from unisono.dist.notebook import in_notebook, notebook_name
from unisono.train.setup import default_run_dir


def test_a_run_of_a_notebook_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert in_notebook()
    assert notebook_name() is None
    assert default_run_dir() == Path("runs/notebook")
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/a/console-1-4711")
    assert notebook_name() is None
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/a/two towers.ipynb")
    assert default_run_dir() == Path("runs/two towers")
    monkeypatch.setattr(sys.modules["__main__"], "__vsc_ipynb_file__", "/home/a/gan.ipynb", raising=False)
    assert default_run_dir() == Path("runs/gan")


def test_a_run_of_a_script_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["folder/train.py"])
    assert default_run_dir() == Path("runs/train")
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert default_run_dir() == Path("runs/first")
