"""``unisono doctor``: a table, JSON, and the exit code of a host on which no run works."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk

from unisono.doctor import storage


def test_the_table_and_json(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RINGS", "0 1")
    done = desk.here("doctor", "--run-dir", str(tmp_path))
    assert (
        "ENV02   warning  variables that were renamed or removed: NCCL_RINGS=0 1\n        try: unset NCCL_RINGS"
        in done.out
    )
    checks = desk.here("doctor", "--run-dir", str(tmp_path), "--json").json["checks"]
    assert {check["code"]: check["status"] for check in checks}["ENV02"] == "warning"


def test_a_failure_is_an_exit_code(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SECOND_PROCESS", "print(1)")
    done = desk.here("doctor", "--run-dir", str(tmp_path))
    assert done.code == 2
    assert "DISK03  FAILURE  locks" in done.out
