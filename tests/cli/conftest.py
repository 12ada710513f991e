"""A working folder for each test, one trained run to look at, and a copy of it for those who change it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import Desk, make_desk


@pytest.fixture(scope="session")
def shared_desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Where the trained run was made; its cache is that of every desk of this session."""
    return make_desk(tmp_path_factory.mktemp("desk"), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def desk(shared_desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A working folder of this test alone: what one test writes, another does not find."""
    return make_desk(tmp_path_factory.mktemp("desk"), shared_desk.cache)


@pytest.fixture(scope="session")
def trained(shared_desk: Desk) -> Path:
    """A finished run of four steps, to be read only."""
    run_dir = shared_desk.folder / "trained"
    done = shared_desk.train(run_dir, "--set=checkpoint.every_steps=2")
    assert done.code == 0, done.err
    return run_dir


@pytest.fixture
def mine(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be changed."""
    return shutil.copytree(trained, tmp_path / "mine")
