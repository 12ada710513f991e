from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modes import FILE, left, mode_of

from unisono.errors import ConfigError
from unisono.observe.tracked import TrackedEvents, event_metrics, event_text, histogram_bins, run_settings, tracker_id


def test_bins_of_a_histogram_cover_what_it_counts() -> None:
    histogram = {"zeros": 3, "exponent": -1, "negative": [2, 0], "positive": [0, 5]}
    assert histogram_bins(histogram) == ([-1.0, -0.5, 0.5, 1.0, 2.0], [2, 3, 0, 5])
    assert histogram_bins(histogram | {"zeros": 0, "negative": [0, 0]}) == ([1.0, 2.0], [5])
    assert histogram_bins({"zeros": 4, "exponent": -40, "negative": [], "positive": []}) == (
        [-(2.0**-40), 2.0**-40],
        [4],
    )
    assert histogram_bins({"zeros": 0, "exponent": -40, "negative": [], "positive": []}) == ([], [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), st.integers(0, 2), st.integers(-40, 20))
def test_bins_rise_and_lose_no_value(pairs: list[tuple[int, int]], zeros: int, exponent: int) -> None:
    negative, positive = [n for n, _ in pairs], [p for _, p in pairs]
    edges, counts = histogram_bins({"zeros": zeros, "exponent": exponent, "negative": negative, "positive": positive})
    assert edges == sorted(set(edges))
    assert len(edges) == (len(counts) + 1 if counts else 0)
    assert sum(counts) == zeros + sum(negative) + sum(positive)
    assert not counts or (counts[0] and counts[-1])


def test_settings_are_those_of_the_file_by_dotted_name(tmp_path: Path) -> None:
    assert run_settings(tmp_path) == {}
    (tmp_path / "config.toml").write_text(
        '[optim]\nlr = 0.5\nfreeze = ["a"]\n[plan.deep]\nx = true\nname = "y"\nn = 3\n'
    )
    found = run_settings(tmp_path)
    assert found == {
        "optim.lr": 0.5,
        "optim.freeze": '["a"]',
        "plan.deep.x": True,
        "plan.deep.name": "y",
        "plan.deep.n": 3,
    }
    (tmp_path / "config.toml").write_text("[optim\n")
    assert run_settings(tmp_path) == {}


def test_an_id_stays_and_is_not_that_of_a_run_of_the_same_name_elsewhere(tmp_path: Path) -> None:
    first = tracker_id(tmp_path, "my run/é")
    assert first[:-8] == "my-run---"
    assert tracker_id(tmp_path, "my run/é") == first
    assert mode_of(tmp_path / "tracker_id") == left(FILE)
    (tmp_path / "other").mkdir()
    assert tracker_id(tmp_path / "other", "my run/é") != first


@pytest.mark.parametrize("content", [b"", b"a b", b"\xff\xfe", b"x" * 300])
def test_an_id_that_is_none_is_made_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tracker_id").write_bytes(content)
    made = tracker_id(tmp_path, "r")
    assert made.startswith("r-")
    assert tracker_id(tmp_path, "r") == made
    assert os.listdir(tmp_path) == ["tracker_id"]


@pytest.mark.parametrize(
    ("plant", "reason"),
    [(Path.mkdir, "EISDIR"), (os.mkfifo, "EPERM, not a regular file"), (lambda path: path.symlink_to("x"), "a link")],
)
def test_what_is_no_file_in_place_of_the_id_is_named(tmp_path: Path, plant: Callable[[Path], Any], reason: str) -> None:
    plant(tmp_path / "tracker_id")
    with pytest.raises(ConfigError, match=rf"tracker_id cannot be read: {reason}"):
        tracker_id(tmp_path, "r")


def test_the_sample_at_the_end_of_a_run_is_a_text(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 3, "prompt": "Once", "text": " upon"}
    assert event_text(sample, tmp_path) == ("end_of_run/sample", "Once upon")
    assert event_text({"kind": "step", "step": 3}, tmp_path) is None


def test_a_run_whose_name_is_a_number_has_no_such_metric() -> None:
    assert event_metrics({"kind": "step", "run": "NaN", "step": 1, "a": 1}) == {"a": 1.0}


def system(step: Any, t: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"kind": "system", "step": step, "t": t, "rank": 0, "host": "n1", **fields}


def test_samples_of_a_step_are_one_when_the_next_one_is_read() -> None:
    means = TrackedEvents()
    first, second = {"kind": "step", "step": 1}, {"kind": "step", "step": 2}
    assert means.see(system(0, a=9.0)) == []
    assert means.see(system(1, 3.0, a=1.0, b=4.0)) == []  # the step goes on behind the host
    assert means.see(first) == [{"kind": "system", "step": 0, "t": 0.0, "rank": 0, "a": 9.0}, first]
    assert means.see(system(1, 5.0, a=2.0, c="NaN")) == []
    assert means.see(system(0, a=5.0)) == []  # given already
    assert means.see(second) == [{"kind": "system", "step": 1, "t": 5.0, "rank": 0, "a": 1.5, "b": 4.0}, second]
    assert means.see(system(2, a=7.0)) == []
    end = {"kind": "run_end", "step": 2}
    assert [event["step"] for event in means.see(end)] == [2, 2]
    assert means.see(system(2, a=8.0)) == []  # while the run ends
    assert means.rest() == []


def test_samples_of_an_attempt_without_a_step_are_given_to_no_tracker() -> None:
    means = TrackedEvents()
    assert means.see(system(0, a=9.0)) == []
    assert means.see({"kind": "run_end", "step": 0}) == [{"kind": "run_end", "step": 0}]
    assert means.rest() == []


def test_samples_before_the_state_was_loaded_are_left_out() -> None:
    means = TrackedEvents()
    assert means.see(system(0, a=9.0)) == []
    resumed, step = {"kind": "resumed", "step": 7}, {"kind": "step", "step": 8}
    assert means.see(resumed) == [resumed]
    assert means.see(system(7, a=1.0)) == []
    assert [event.get("a") for event in means.see(step)] == [1.0, None]


@pytest.mark.parametrize("step", [None, "x", -3, [1]])
def test_a_sample_of_no_step_is_left_out(step: Any) -> None:
    means = TrackedEvents()
    assert means.see(system(step, a=1.0)) == []
    assert means.see({"kind": "step", "step": 1}) == [{"kind": "step", "step": 1}]


def links(step: Any, **fields: Any) -> dict[str, Any]:
    return {"kind": "links", "step": step, "t": 1.0, "steps": 100, "wall_s": 9.0, "axes": [{"axis": "dp"}], **fields}


def test_a_links_event_has_the_shares_alone_and_follows_the_step(tmp_path: Path) -> None:
    assert event_metrics(links(4, **{"comm/dp_used_frac": 0.5})) == {"comm/dp_used_frac": 0.5}
    tracked = TrackedEvents()
    assert tracked.see(links(4)) == []
    assert tracked.see(links(4, **{"comm/dp_used_frac": 0.5})) == []
    assert [event["step"] for event in tracked.see({"kind": "step", "step": 3})] == [3]
    shown = {"kind": "links", "step": 4, "t": 1.0, "comm/dp_used_frac": 0.5}
    assert tracked.see({"kind": "step", "step": 4}) == [{"kind": "step", "step": 4}, shown]
    # that of the end comes after the last step
    assert tracked.see(links(4, **{"comm/tp_used_frac": 0.25})) == [
        {"kind": "links", "step": 4, "t": 1.0, "comm/tp_used_frac": 0.25}
    ]
    assert tracked.rest() == []


def test_a_tap_has_a_metric_for_each_figure_and_follows_its_step() -> None:
    output = {"dtype": "float32", "norm": 2.0, "dead_frac": 0.25}
    figures = {"norm": 3.0, "update_frac": None, "gradient": {"norm": "NaN"}}
    tap = {"kind": "tap", "step": 4, "t": 1.0, "skipped": False}
    tap |= {
        "modules": {"blocks.1": {"output": output, "gradient": {"norm": 0.5}}},
        "parameters": {"blocks.1.w": figures},
    }
    tracked = TrackedEvents()
    assert tracked.see(tap) == []
    step, shown = tracked.see({"kind": "step", "step": 4})
    assert (step, math.isnan(shown.pop("tap/blocks.1.w/gradient_norm"))) == ({"kind": "step", "step": 4}, True)
    assert shown == {
        **{"kind": "tap", "step": 4, "t": 1.0},
        **{"tap/blocks.1/output_norm": 2.0, "tap/blocks.1/dead_frac": 0.25, "tap/blocks.1/gradient_norm": 0.5},
        "tap/blocks.1.w/norm": 3.0,
    }
    assert tracked.see({**tap, "skipped": True}) == []


def test_links_of_steps_that_are_made_again_are_left_out() -> None:
    tracked = TrackedEvents()
    assert tracked.see({"kind": "step", "step": 1}) == [{"kind": "step", "step": 1}]
    assert tracked.see(links(9, **{"comm/dp_used_frac": 0.5})) == []
    resumed, step = {"kind": "resumed", "step": 7}, {"kind": "step", "step": 20}
    assert tracked.see(resumed) == [resumed]
    assert tracked.see(step) == [step]


@pytest.mark.parametrize("step", [None, "x", -3, [1]])
def test_links_of_no_step_are_left_out(step: Any) -> None:
    tracked = TrackedEvents()
    assert tracked.see(links(step, **{"comm/dp_used_frac": 0.5})) == []
    assert [event["step"] for event in tracked.see({"kind": "run_end", "step": 2})] == [2]
