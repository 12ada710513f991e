"""Rules of runs with parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from unisono.diagnose.figures import (
    has_enough_readings,
    lower_median,
    milliseconds,
    setting_text,
    severity_of,
    shares_of,
)
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import Floats, RunFacts
from unisono.observe.link_events import LinkTraffic

_BUSY_FRAC: Final = 0.8  # of the time, for a server to be what workers wait for
_MIN_WINDOWS: Final = 8
_MIN_CORRELATION: Final = 0.7
_LEAST_RATIO: Final = 1.2  # of the largest lag over the smallest, for periods to differ in it
_SHOWN_SERVERS: Final = 4
_MOST_SERVERS: Final = 64


def busiest_server(facts: RunFacts) -> LinkTraffic | None:
    """The server that is busy for the largest share of the time, if that is enough to keep workers waiting."""
    servers = [link for rank in facts.ranks for link in rank.links if link.wall_s > 0]
    if facts.steps_together or not servers:
        return None
    busiest = max(servers, key=lambda link: link.busy_s / link.wall_s)
    return busiest if busiest.busy_s >= _BUSY_FRAC * busiest.wall_s else None


def server_bound(facts: RunFacts) -> Iterator[Finding]:
    """SRV01: workers wait for a parameter server that is busy nearly all the time."""
    server = busiest_server(facts)
    if server is None or not has_enough_readings(facts):
        return
    cost = lower_median(shares_of(facts, "comm_exposed"))
    if severity := severity_of(cost, 0.10, 0.25):
        cores = server.cpu_s / server.busy_s
        by_cpu = cores >= 0.7
        num_servers = facts.settings.get("launch.num_servers")
        more = num_servers + 1 if isinstance(num_servers, int) and 0 < num_servers < _MOST_SERVERS else 0
        yield Finding(
            id="SRV01",
            title=f"workers wait for the parameter server {server.peer}",
            severity=severity,
            cost_frac=cost,
            confidence=0.85,
            evidence=(
                f"each step waits {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)} for servers",
                f"{server.peer} is busy {server.busy_s / server.wall_s:.0%} of the time with "
                f"{server.served_s / server.busy_s:.1f} requests at once; it computes on {cores:.1f} cores"
                + ("" if by_cpu else ", so it waits for its network, its replica or other processes"),
                *_server_rates(facts),
                *setting_text(facts, "launch.num_servers"),
            ),
            advice="more servers share the parameters (launch.num_servers), on cores or hosts of their own; "
            + ("plan.compression=none computes less" if by_cpu else "plan.compression sends less"),
            patch={"launch.num_servers": more} if more else {},
            expected_gain=cost / more if more else 0.0,
        )


def _server_rates(facts: RunFacts) -> Iterator[str]:
    """Bytes a second that all workers together exchange with each server, which its network carries; the busiest first."""
    rates: dict[str, float] = {}
    for link in (link for rank in facts.ranks for link in rank.links if link.wall_s > 0 and link.served_s > 0):
        rates[link.peer] = rates.get(link.peer, 0.0) + (link.sent_bytes + link.received_bytes) / link.wall_s
    shown = sorted(rates.items(), key=lambda item: -item[1])[:_SHOWN_SERVERS]
    if shown:
        yield "bytes a second, there and back: " + ", ".join(f"{peer} {rate / 1e6:,.3g} MB/s" for peer, rate in shown)


def stale_updates(facts: RunFacts) -> Iterator[Finding]:
    """STALE01: the loss is the noisier, the more pushes of other workers lie between a worker's pull and its push. Of each period
    the root mean square counts."""
    training = facts.training
    if facts.steps_together or len(training.lags) < _MIN_WINDOWS:
        return
    noise = _noise(training.steps, training.losses, training.lag_steps)
    known = np.isfinite(noise)
    lags, noise = training.lags[known], noise[known]
    if len(lags) < _MIN_WINDOWS or np.max(lags) < _LEAST_RATIO * np.min(lags) or np.ptp(noise) == 0:
        return
    correlation = float(np.corrcoef(_average_ranks(lags.round(1)), _average_ranks(noise))[0, 1])
    low, high = noise[lags <= np.median(lags)], noise[lags > np.median(lags)]
    if correlation < _MIN_CORRELATION or not len(high) or np.median(high) < 1.5 * np.median(low):
        return
    is_unbounded = facts.settings.get("plan.staleness") == "none"
    # as in the periods with the least lag: the bound counts steps, each of which has a push of every worker
    patch: dict[str, Any] = {"plan.staleness": int(np.min(lags) / len(facts.ranks))} if is_unbounded else {}
    yield Finding(
        id="STALE01",
        title="stale gradients make the loss noisy",
        severity="warning",
        cost_frac=0.0,
        confidence=min(0.9, correlation),
        evidence=(
            f"between a pull and its push come {np.min(lags):.1f} to {np.max(lags):.1f} pushes of other workers (root mean "
            "square of a period)",
            f"where they are more, the loss varies {np.median(high) / np.median(low):.1f} times as much (rank correlation "
            f"{correlation:.2f} over {len(lags)} periods)",
        ),
        advice="a bound (plan.staleness), a learning rate that falls with the lag (plan.staleness_lr_decay), a lower optim.lr, "
        "or workers that are equally fast",
        patch=patch,
    )


def _noise(steps: Any, losses: Floats, ends: Any) -> Floats:
    """Deviation of the losses from a line through them, in the steps up to each of ``ends`` [periods]; NaN for fewer than 8."""
    noise = np.full(len(ends), np.nan)
    begin = -1
    for period, end in enumerate(ends):
        chosen = (steps > begin) & (steps <= end) & np.isfinite(losses)
        begin = end
        if chosen.sum() >= 8:
            where, values = steps[chosen].astype(np.float64), losses[chosen]
            noise[period] = float(np.std(values - np.polyval(np.polyfit(where, values, 1), where)))
    return noise


def _average_ranks(values: Floats) -> Floats:
    """The rank of each value, from 0 for the smallest; equal values have the mean of theirs (Spearman)."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
