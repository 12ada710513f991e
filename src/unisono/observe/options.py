"""Settings of the console, the trackers and the observation of training. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, nearest_name

SINK_GROUP: Final = "unisono.sinks"
BUILT_IN_SINKS: Final = ("csv", "tensorboard", "wandb", "mlflow")
HISTOGRAM_SINKS: Final = frozenset({"tensorboard", "wandb"})  # show the event ``histograms``
MAX_PROFILE_STEPS: Final = 100  # a trace of more would be of no use, and too large to be read
# each has some 200,000 calls of Python functions, for which a rank needs 0.4 GB and stands still for seconds
MAX_STACK_STEPS: Final = 5
TAP_EVERY_STEPS: Final = 100  # where a pattern has no cadence of its own
_TAP: Final = re.compile(r"([^@]+)(?:@([0-9]{1,15}))?")
_PROFILE_STEPS: Final = re.compile(r"(\+)?([0-9]{1,15}):([0-9]{1,15})(\+stacks)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveOptions:
    """Section ``observe`` of a configuration: console mode, trackers, and what is observed in training."""

    __repr__ = options_repr

    console: Literal["auto", "rich", "plain", "off"] = option(
        "auto",
        "Progress on rank 0: rich on a terminal and in a notebook, key=value lines elsewhere (auto), one of them, or off.",
    )
    trackers: tuple[str, ...] = option(
        ("csv",), "Where step and eval numbers also go: csv, tensorboard, wandb, mlflow, or an entry point."
    )
    report: bool = option(True, "Write report.html at the end of the run.")
    monitor_every_s: float = option(
        10.0, "Seconds between samples of the load of host, process and device; 0 = off.", ge=0.0
    )
    profile_steps: str = option(
        "",
        "Steps to profile on all ranks, A:B from A to before B, such as 100:103; +100:103 counts from where the run starts or "
        "resumes; 100:103+stacks with Python's stacks.",
    )

    taps: tuple[str, ...] = option(
        (),
        "Patterns of modules whose outputs, gradients and parameters are summarised, every 100 steps: blocks.*, **.relu; "
        "blocks.*@20 every 20; empty = none.",
    )
    verify_every_steps: int = option(
        0, "Steps between those that are computed twice, to find silent corruption; 0 = off.", ge=0
    )
    replay_nonfinite: bool = option(
        True, "Compute a step with a non-finite loss or gradient once more to find the first layer and operator."
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Trackers that are unknown or listed twice, steps to profile that are none, taps with a wrong cadence, by field name."""
        if self.profile_steps:
            try:
                parse_profile_steps(self.profile_steps)
            except ValueError as error:
                yield (
                    "profile_steps",
                    Problem(
                        given=f"profile_steps {self.profile_steps!r}",
                        rule=str(error),
                        consequence="no step would be profiled",
                        nearest=_nearest_steps(self.profile_steps),
                    ),
                )
        for tap in self.taps:
            try:
                parse_tap(tap)
            except ValueError as error:
                yield (
                    "taps",
                    Problem(
                        given=f"tap {tap!r}",
                        rule=str(error),
                        consequence="it would observe nothing",
                        nearest="observe.taps=['blocks.*'], or every 20 steps ['blocks.*@20']",
                    ),
                )
        for name, count in Counter(self.trackers).items():
            if count > 1:
                yield (
                    "trackers",
                    Problem(
                        given=f"tracker {name!r} is listed {count} times",
                        rule="each tracker is named once",
                        consequence="its numbers would be written twice",
                        nearest=f"list {name!r} once",
                    ),
                )
            if name not in BUILT_IN_SINKS and name not in (plugged := sink_plugins()):
                yield (
                    "trackers",
                    Problem(
                        given=f"unknown tracker {name!r}",
                        rule=f"a tracker is built in or an installed entry point of the group {SINK_GROUP!r}",
                        consequence="nothing would be tracked under that name",
                        nearest=nearest_name(name, [*BUILT_IN_SINKS, *plugged]),
                    ),
                )


def parse_profile_steps(text: str) -> tuple[int, int, bool, bool]:
    """First step, the step after the last, whether they count from where the run starts or resumes, and whether stacks are
    recorded. Raises ValueError with the rule that is broken."""
    found = _PROFILE_STEPS.fullmatch(text)
    if found is None:
        raise ValueError(
            "it is A:B, from step A to before step B, with + before it or not, and +stacks behind it or not"
        )
    first, end = int(found[2]), int(found[3])
    if not 2 <= first < end <= first + MAX_PROFILE_STEPS:
        raise ValueError(f"A is 2 or more, as step 1 warms up, and B is 1 to {MAX_PROFILE_STEPS} more")
    if found[4] is not None and end > first + MAX_STACK_STEPS:
        raise ValueError(
            f"with Python's stacks at most {MAX_STACK_STEPS} steps are profiled: each takes some 0.4 GB of each rank's memory"
        )
    return first, end, found[1] is not None, found[4] is not None


def _nearest_steps(text: str) -> str:
    """What to give in place of steps to profile that are none."""
    try:
        first, _, is_relative, _ = parse_profile_steps(text.removesuffix("+stacks"))
    except ValueError:
        return "observe.profile_steps='100:103', or with Python's stacks '100:103+stacks'"
    return f"observe.profile_steps='{'+' * is_relative}{first}:{first + MAX_STACK_STEPS}+stacks'"


def parse_tap(text: str) -> tuple[str, int]:
    """Pattern of modules, and the steps from one tap to the next. Raises ValueError with the rule that is broken."""
    found = _TAP.fullmatch(text)
    every_steps = int(found[2] or TAP_EVERY_STEPS) if found is not None else 0
    if found is None or not every_steps:
        raise ValueError(
            "it is a pattern of modules, with @N behind it or not, N being the steps from one tap to the next"
        )
    return found[1], every_steps


def sink_plugins() -> set[str]:
    """Names of the sinks that other installed packages provide as entry points."""
    from importlib.metadata import entry_points  # slow to import and seldom needed, and every --help runs this module

    return {entry.name for entry in entry_points(group=SINK_GROUP)}
