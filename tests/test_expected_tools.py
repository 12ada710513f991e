"""A test that needs a program or a permission skips where there is none, and fails where CI has found it before."""

from __future__ import annotations

import os

import pytest
from netns import cable
from tools import missing


def outcome_without(monkeypatch: pytest.MonkeyPatch, expected: str, **absent: bool) -> type[BaseException]:
    """How a test with a cable ends without root, or without the programs."""
    monkeypatch.setenv("UNISONO_TESTS_EXPECT", expected)

    def which(name: str, path: str | None = None) -> str | None:
        return None if absent.get(name) else f"/sbin/{name}"

    monkeypatch.setattr("tools.shutil.which", which)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises((pytest.skip.Exception, pytest.fail.Exception)) as raised, cable(20):
        pass
    return raised.type


@pytest.mark.parametrize("absent", [{}, {"tc": True}, {"ip": True, "tc": True}])
def test_namespaces_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch, absent: dict[str, bool]) -> None:
    assert outcome_without(monkeypatch, "", **absent) is pytest.skip.Exception
    assert outcome_without(monkeypatch, "chromium", **absent) is pytest.skip.Exception
    assert outcome_without(monkeypatch, "ip tc netns", **absent) is pytest.fail.Exception


def test_a_program_that_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TESTS_EXPECT", "no-such-program")
    with pytest.raises(pytest.fail.Exception, match="promises no-such-program"):
        missing("sh", "no-such-program")
    assert missing("sh") == []
