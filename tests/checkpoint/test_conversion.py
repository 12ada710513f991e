"""A checkpoint written again says the same, in other files or with less in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from unisono.checkpoint import convert, open_checkpoint, verify
from unisono.dist import JobSpec, World
from unisono.errors import CheckpointError


def trained(folder: Path, **changes: object) -> Path:
    with tiny.trainer(folder, steps=2, world=World(JobSpec()), **changes) as run:
        list(run)
    return folder / "checkpoints" / "step-00000002"


def test_other_files_hold_the_same_and_resume(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    before = open_checkpoint(source)
    folder = convert(source, tmp_path / "other" / "checkpoints", files=3)
    after = open_checkpoint(folder)
    assert verify(folder) == []
    assert len(list(folder.glob("shard-*"))) == 3
    assert (after.names(), after.meta, after.step) == (before.names(), before.meta, before.step)
    for name in before.names():
        assert torch.equal(after.tensor(name), before.tensor(name)), name
    ends = []
    for run_dir in (tmp_path / "run", tmp_path / "other"):
        with tiny.trainer(run_dir, steps=4, world=World(JobSpec())) as run:
            assert run.state.step == 2
            list(run)
            ends.append(tiny.digest(run))
    assert ends[0] == ends[1]


def test_less_in_it(tmp_path: Path) -> None:
    source = trained(tmp_path / "run", ema_decay=0.5)
    before = open_checkpoint(source)
    kept = open_checkpoint(convert(source, tmp_path / "model", files=1, keep_optimizer=False))
    assert kept.names() == [name for name in before.names() if name.startswith(("ema/", "model/"))]
    averaged = open_checkpoint(convert(source, tmp_path / "average", files=2, average=True))
    assert averaged.names() == [name for name in before.names() if name.startswith("model/")]
    for name in averaged.names():
        assert torch.equal(averaged.tensor(name), before.tensor(name.replace("model/", "ema/"))), name
    assert not torch.equal(averaged.tensor("model/norm.weight"), before.tensor("model/norm.weight"))


def test_refusals(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        convert(source, tmp_path / "out", files=1, average=True)
    with pytest.raises(CheckpointError, match="a committed checkpoint is never overwritten"):
        convert(source, source.parent, files=1)
    assert verify(source) == []
    (shard,) = source.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "out", files=1)
    assert not (tmp_path / "out").exists()
