"""Settings of the console and the trackers. Imports no torch."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveOptions:
    """Section ``observe`` of a configuration: console mode and trackers."""

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

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Trackers that are unknown or listed twice, by field name."""
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


def sink_plugins() -> set[str]:
    """Names of the sinks that other installed packages provide as entry points."""
    from importlib.metadata import entry_points  # slow to import and seldom needed, and every --help runs this module

    return {entry.name for entry in entry_points(group=SINK_GROUP)}
