"""The report as text, and in a headless browser: it draws, runs nothing but its own script, and asks the network for nothing."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from modes import FILE, left, mode_of
from report_pages import CHROMIUM, charts, in_browser, words
from tools import missing

from unisono.errors import DataError
from unisono.observe.events import EventLog, events_path
from unisono.report import write_report

EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"


def make_run(run_dir: Path, *, evil: str = "plain", killed: bool = False) -> Path:
    """A run of two attempts: killed at step 35, resumed from 30, done at 60."""
    path = events_path(run_dir, 0)
    clock = iter(range(10**6))

    def log_of(attempt: int, rank: int = 0) -> EventLog:
        return EventLog(
            events_path(run_dir, rank),
            rank=rank,
            run_id="demo",
            attempt=attempt,
            wall_clock=lambda: 1.8e9 + next(clock),
            monotonic_clock=lambda: float(next(clock)),
        )

    def steps(log: EventLog, first: int, last: int) -> None:
        for n in range(first, last + 1):
            loss = math.nan if n == 13 else 4.0 / n
            fields: dict[str, Any] = {"train/loss": loss, "train/lr": 1e-3 / n, "train/grad_norm": 1.0 / n}
            fields |= {"perf/step_s": 0.125, "perf/tokens_per_s": 4096.0, "perf/tokens_per_s_device": 2048.0}
            fields |= {
                "time/forward_frac": 0.3,
                "time/backward_frac": 0.5,
                "time/data_wait_frac": 0.2,
                "perf/mfu": 0.25,
            }
            log.emit("step", step=n, steps_total=60, **fields)
            if n % 10 == 0:
                log.emit("eval", step=n, **{"eval/loss": 5.0 / n, "eval/bits_per_byte": 7.0 / n, f"eval/{evil}": 1.0})
                log.emit("checkpoint_saved", step=n, path=run_dir / evil)

    start: dict[str, Any] = {
        "config": {"model": {"dim": 64, "note": evil}, "data": {"seq_len": 256, "hf_token": "canary"}},
        "origins": {"model.dim": "/home/me/train.toml:3", "data.seq_len": "default"},
        "environment": {"torch": "2.13.0", evil: evil},
        "launch": {"threads": 1, "env": {"OMP_NUM_THREADS": "1"}},
        "plan_text": "dp 2\nprecision fp32",
    }
    with log_of(1) as log:
        log.emit("run_start", **start)
        steps(log, 1, 35)
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":36,')
    with log_of(2) as log:
        log.emit("run_start", **start)
        log.emit("resumed", step=30, path=run_dir / "checkpoints" / "30")
        steps(log, 31, 60)
        log.emit("skipped_step", step=45, loss=math.nan, grad_norm=2.0)
        log.emit("warning", code="DATA01", message=evil)
        if not killed:
            log.emit("run_end", reason="finished", step=60)
            log.emit("sample", step=60, prompt="def ", text=f"def f():\n\treturn {evil}\x1b[31m")
    with log_of(2, rank=1) as log:
        steps(log, 1, 60)
        log.emit("checkpoint_failed", step=50, error="disk of node 2 is full")
    return run_dir


def test_report_says_what_happened(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    assert path == tmp_path / "report.html"
    assert mode_of(path) == left(FILE)
    page = path.read_text()
    text = words(page)
    assert re.search(
        r"Run demo Finished 60 of 60 steps in [\dmh]+ \(2 attempts\), train loss 0\.06667, eval loss 0\.08333, "
        r"0\.117 bits per byte, 4\.1k tokens/s, 1 step skipped; time: 80% compute, 20% data wait\. "
        r"What to change NUM01 \(likely\): the loss is NaN or infinite in some steps costs 2% of the time ",
        text,
    )
    assert "rank00000.jsonl: left out 1 incomplete line(s) (43): a write was cut short" in text
    assert "2048" not in text
    assert "2.05k tokens/s per device" in text
    assert "25% MFU" in text
    assert re.search(r"resumed at step 30 from \S+/checkpoints/30", text)
    assert "step 45 skipped on all ranks: loss nan, gradient norm 2" in text
    assert re.search(r"2 1 checkpoint_failed checkpoint at step 50 failed: disk of node 2 is full", text)
    assert "after step 60; prompt: def" in text
    assert "def f(): return plain" in text
    assert "Environment torch 2.13.0" in text
    assert "env.OMP_NUM_THREADS 1" in text
    assert "model.dim 64 /home/me/train.toml:3" in text
    assert "data.seq_len 256 default" in text
    assert "data.hf_token [redacted]" in text
    assert "canary" not in page
    assert re.search(r"Ranks .* 0 60 125 ms 20% 0% 1 60 125 ms 20% 0%", text)


def test_curves_have_each_step_once_and_no_nan(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    drawn = charts(page)
    train, evaluation = drawn["loss"]["data"]
    assert train["x"] == list(range(1, 61))
    assert train["y"][12] is None
    assert train["y"][59] == pytest.approx(4 / 60, rel=1e-5)
    assert evaluation["x"] == [10, 20, 30, 40, 50, 60]
    assert [shape["x0"] for shape in drawn["loss"]["layout"]["shapes"]] == [30]  # where it went on
    titles = [chart["layout"]["title"]["text"] for chart in drawn.values() if "title" in chart["layout"]]
    assert titles == [
        "",
        "Loss (dotted: restarts)",
        "Bits per byte (eval)",
        "plain (eval)",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Step time",
        "MFU",
    ]
    assert [bar["x"][0] for bar in drawn["time"]["data"]] == [50.0, 30.0, 20.0]


def test_report_of_a_killed_run(tmp_path: Path) -> None:
    text = words(write_report(make_run(tmp_path, killed=True)).read_text())
    assert "Interrupted after 60 of 60 steps" in text


def test_report_of_a_run_that_only_started(tmp_path: Path) -> None:
    with EventLog(events_path(tmp_path, 0), rank=0, run_id="r", attempt=1) as log:
        log.emit("run_start", steps_total=10)
    text = words(write_report(tmp_path).read_text())
    assert "Interrupted after 0 of 10 steps" in text
    assert "No step was logged." in text


def test_report_replaces_an_older_one(tmp_path: Path) -> None:
    make_run(tmp_path)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first
    assert sorted(os.listdir(tmp_path)) == ["events", "report.html"]


@pytest.mark.parametrize(
    ("content", "given"), [(None, "does not exist"), (b"", "holds no event"), (b"torn", "holds no event")]
)
def test_folder_without_events(tmp_path: Path, content: bytes | None, given: str) -> None:
    path = events_path(tmp_path, 0)
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        write_report(tmp_path)
    (problem,) = caught.value.problems
    assert problem.given == f"{path} {given}"
    assert problem.rule == "a report is made from the events of rank 0 in the run folder"
    assert problem.consequence == "no report was written"
    assert problem.nearest == "give the folder of a run (run.dir), or start one: unisono train"


def test_nothing_a_run_says_becomes_markup(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, evil=EVIL)).read_text()
    assert EVIL not in page
    assert "<img" not in page
    assert page.count("<script") == 3
    assert "\x1b" not in page
    assert "return </script><script>document.title" in words(page)  # shown as the text it is


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    own = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)  # without plotly and what calls it
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", own)
    assert "default-src 'none'" in own


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the report is NOT tested in a browser",
)
def test_report_in_a_browser(tmp_path: Path) -> None:
    """All charts draw; what the run says stays text; script that got in unescaped would still be stopped by the policy."""
    path = write_report(make_run(tmp_path / "run", evil=EVIL))
    slipped_in = "<script>document.title='pwned'</script>"
    path.write_text(path.read_text().replace("<h2>Curves</h2>", f"{slipped_in}<h2>Curves</h2>"))
    page, complaints = in_browser(path, tmp_path / "profile")
    assert "<title>Run demo</title>" in page
    assert 'data-drawn="10"' in page
    assert len(re.findall(r'class="[^"]*js-plotly-plot"', page)) == 10
    assert len(re.findall(r'<path class="js-line"', page)) >= 8  # curves, not empty axes
    assert len(complaints) == 1
    assert "Content Security Policy" in complaints[0]
