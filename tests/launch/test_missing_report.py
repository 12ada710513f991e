"""The launcher lets the report of a failed run be written where rank 0 was killed before it could."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from event_streams import write_events
from launching import run, start

from unisono.launch import missing_report
from unisono.launch.missing_report import write_missing_report

KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def make_run(run_dir: Path, *, report: str = "true") -> Path:
    """The folder of a run of which rank 0 was killed; returns the path of its report."""
    write_events(run_dir, lambda rank, step: {"forward": 0.06, "data_wait": 0.04})
    (run_dir / "config.toml").write_text(f"[observe]\nreport = {report}\n")
    return run_dir / "report.html"


def set_age(path: Path, run_dir: Path, *, seconds: float) -> None:
    """Make a file that much older than the last event of rank 0."""
    last_s = (run_dir / "events/rank00000.jsonl").stat().st_mtime
    os.utime(path, (last_s - seconds, last_s - seconds))


@pytest.mark.parametrize("is_there", [False, True])
def test_the_report_of_a_killed_run_is_written(tmp_path: Path, is_there: bool) -> None:
    report = make_run(tmp_path / "run")
    if is_there:
        report.write_text("of an earlier attempt")
        set_age(report, tmp_path / "run", seconds=5)
    code, said, _ = run(KILLED, tmp_path, num_processes=1, max_restarts=0)
    assert code == 1
    assert "DATA01: training waits for data" in report.read_text()
    assert said.splitlines()[-1] == "launch: no restart left of 0 (launch.max_restarts); the newest checkpoint is kept"


def test_what_goes_wrong_is_a_line_after_the_cause(tmp_path: Path) -> None:
    report = make_run(tmp_path / "run")
    report.mkdir()
    set_age(report, tmp_path / "run", seconds=5)
    code, said, _ = run(KILLED, tmp_path, num_processes=1, max_restarts=0)
    lines = said.splitlines()
    assert (code, len(list(report.iterdir()))) == (1, 0)
    assert "was killed by signal 9 (SIGKILL)" in lines[0]
    assert lines[-2] == "launch: no restart left of 0 (launch.max_restarts); the newest checkpoint is kept"
    assert lines[-1].startswith("launch: report.html was not written: ")
    assert "EISDIR" in lines[-1]
    assert lines[-1].endswith(f"; unisono report {tmp_path / 'run'} makes it of the events")


@pytest.mark.parametrize("ending", ["", "sys.exit(75)"])
def test_a_job_that_ends_well_has_written_its_own(tmp_path: Path, ending: str) -> None:
    report = make_run(tmp_path / "run")
    code, _, _ = run(ending, tmp_path, num_processes=1)
    assert code in (0, 75)
    assert not report.exists()


def test_a_report_that_is_not_wanted_or_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_report, "module_command", lambda *words: pytest.fail(f"{words} was started"))
    unwanted = make_run(tmp_path / "unwanted", report="false")
    assert write_missing_report(tmp_path / "unwanted", []) == ""
    assert not unwanted.exists()
    written = make_run(tmp_path / "written")
    written.write_text("by rank 0")
    set_age(written, tmp_path / "written", seconds=-1)
    assert write_missing_report(tmp_path / "written", []) == ""
    # not the folder of a run: of another program, of one that ended before its first step, without a valid configuration
    (tmp_path / "launch").mkdir()
    assert write_missing_report(tmp_path / "launch", []) == ""
    make_run(tmp_path / "early")
    (tmp_path / "early/config.toml").unlink()
    assert write_missing_report(tmp_path / "early", []) == ""
    make_run(tmp_path / "damaged")
    (tmp_path / "damaged/config.toml").write_text("[observe\n")
    assert write_missing_report(tmp_path / "damaged", []) == ""


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(missing_report, "module_command", lambda *words: [sys.executable, "-c", code])
    monkeypatch.setattr(missing_report, "_LIMIT_S", 2.0)
    assert "report.html was not written: not done after 2 s; " in write_missing_report(tmp_path, [])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_child_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.setattr(missing_report, "module_command", lambda *words: [str(tmp_path / "nosuch")])
    assert "report.html was not written: ENOENT" in write_missing_report(tmp_path, [])


def test_a_stop_signal_ends_the_report_and_leaves_the_exit_code(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    # a module that waits in place of the command, in a folder that the launcher's PYTHONPATH names
    slow = tmp_path / "slow/click"
    slow.mkdir(parents=True)
    waits = f"import time; open({str(tmp_path / 'run/waiting')!r}, 'w').close(); time.sleep(600)"
    (slow / "__init__.py").write_text(textwrap.dedent(waits))
    path = os.pathsep.join([str(slow.parent), *filter(None, sys.path)])
    launched = start(KILLED, tmp_path, num_processes=1, max_restarts=0, environ={"PYTHONPATH": path})
    launched.wait_for("waiting")
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.finish()
    assert code == 1
    assert "launch: report.html was not written: SIGTERM arrived; unisono report " in said
