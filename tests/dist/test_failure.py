"""Last words of a rank survive it, and broken ones do no harm."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from modes import FOLDER, PRIVATE, left, mode_of

from unisono.dist import JobSpec, read_failure, record_failure
from unisono.dist.failure import absent_ranks, error_cause
from unisono.errors import CheckpointError, CommError, DataError, PlanError

JOB = JobSpec(run_id="r", restart_count=4, rank=1, local_rank=1, world_size=2, local_world=2, source="unisono")


def boom(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_round_trip(tmp_path: Path) -> None:
    path = record_failure(tmp_path / "logs", JOB, boom("bad sample 7"), step=12, checkpoint="step-00000010")
    assert path.name == "failure-rank-1.json"
    assert (mode_of(path.parent), mode_of(path)) == (left(FOLDER), PRIVATE)
    assert json.loads(path.read_text())["epoch"] == 4  # the stored name
    failure = read_failure(path.parent, 1, 4)
    assert failure is not None
    assert failure.restart_count == 4
    assert (failure.step, failure.type, failure.message) == (12, "ValueError", "bad sample 7")
    assert failure.checkpoint == "step-00000010"
    assert "def boom" not in failure.traceback
    assert "raise ValueError(text)" in failure.traceback
    assert [each.name for each in path.parent.iterdir()] == ["failure-rank-1.json"]


def test_sameness_is_step_type_and_message(tmp_path: Path) -> None:
    def recorded(text: str, step: int | None):
        record_failure(tmp_path, JOB, boom(text), step=step)
        failure = read_failure(tmp_path, 1, 4)
        assert failure is not None
        return failure

    first = recorded("x", 3)
    assert recorded("x", 3).same_as(first)
    assert not recorded("x", 4).same_as(first)
    assert not recorded("y", 3).same_as(first)
    assert recorded("x", 4).same_error(first)
    assert not recorded("y", 3).same_error(first)


@pytest.mark.parametrize("content", [None, "", "{", '{"rank": 1}', "[]"])
def test_missing_or_torn_words_read_as_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "failure-rank-1.json").write_text(content)
    assert read_failure(tmp_path, 1, 4) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rank", "1"), ("rank", -1), ("rank", 10**400), ("epoch", None), ("at_monotonic_s", "x"), ("message", [])),
        *(
            ("memory", {"limit_bytes": float("inf")}),
            ("memory", {"limit_bytes": -1}),
            ("memory", {"limit_bytes": 10**400}),
        ),
        *(("absent", [10**400]), ("blamed", ["x"]), ("step", -1), ("traceback", None)),
    ],
)
def test_words_of_another_form_read_as_none(tmp_path: Path, name: str, value: object) -> None:
    path = record_failure(tmp_path, JOB, boom("x"), step=1)
    record = json.loads(path.read_text())
    assert read_failure(tmp_path, 1, 4) is not None
    path.write_text(json.dumps(record | {name: value}))
    assert read_failure(tmp_path, 1, 4) is None


def test_words_of_an_earlier_attempt_are_not_mixed_in(tmp_path: Path) -> None:
    record_failure(tmp_path, JOB, boom("old"), step=1)
    assert read_failure(tmp_path, 1, 5) is None


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


PARTS = {"given": "g", "rule": "r", "consequence": "c", "nearest": "n"}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (chained(CheckpointError(**PARTS), OSError(errno.EDQUOT, "Disk quota exceeded")), "disk_full"),
        (CheckpointError(**PARTS), "checkpoint"),
        (CommError(**PARTS), "communication"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "communication"),
        (DataError(**PARTS), "bad_data"),
        (chained(DataError(**PARTS), ValueError("row 3")), "bad_data"),
        (chained(DataError(**PARTS), NameError("x")), "program"),
        (PlanError(**PARTS), "configuration"),
        (FileNotFoundError(2, "No such file or directory"), "io"),
        (ValueError("x"), "program"),
    ],
)
def test_the_kind_of_an_error(error: Exception, cause: str) -> None:
    assert error_cause(error) == cause


def test_ranks_that_a_collective_names_as_absent() -> None:
    text = "rank 1 (pid 11) has ended; rank 12 waits in no collective; rank 3 waits in barrier"
    assert absent_ranks(text) == (1, 12)
