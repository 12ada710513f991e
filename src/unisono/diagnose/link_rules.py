"""Rules of links that are slower than an earlier measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from unisono.diagnose.figures import (
    has_enough_readings,
    median_last_arriver_wait_frac,
    milliseconds,
    severity_of,
    step_s,
)
from unisono.diagnose.finding import Finding, Severity
from unisono.diagnose.run_facts import RankFacts, RunFacts
from unisono.observe.link_events import AxisTraffic, AxisUse, LinkTraffic, uses_by_axis

_LEAST_COST: Final = 0.02  # of a step: below it a slow link costs nothing that can be measured
_LEAST_EXPECTED: Final = 0.05  # of a step: below it ranks also wait for each other's interruptions about as long
# what shows that a link is slow even if less is expected: so much of a step, and so many times what is expected
_FAR_COST, _FAR_TIMES = 0.25, 10.0
_MOSTLY_BYTES: Final = (
    4.0  # times the latency, from which on it is bytes that take the time; ranks wait longer for small messages
)
_ADVICE = {
    "shared memory": "sums use the same cores as other processes: end those, or use fewer threads (launch.num_threads)",
    "nccl": "look at the links of that interface (unisono doctor --nodes, ibstat, nvidia-smi nvlink -s), and at "
    "NCCL_SOCKET_IFNAME, NCCL_IB_HCA and other NCCL_ variables",
}
_NETWORK_ADVICE = (
    "look at that network: other traffic, a link that fell back to a lower rate (ethtool), an interface that is not the fast one "
    "(unisono launch --interface); unisono doctor --bench measures it again"
)


@dataclass(frozen=True, slots=True)
class _SlowLink:
    """Shares of the time of a step: waited along ``axis``, and ``expected`` for its traffic."""

    axis: str
    use: AxisUse
    share: float
    expected: float

    @property
    def severity(self) -> Severity | None:
        return severity_of(1.0 - self.expected / self.share, 0.2, 0.4)


def slow_link(facts: RunFacts) -> Iterator[Finding]:
    """COMM03: what ranks exchange along an axis takes longer than the link was measured to need (``unisono doctor --bench``).

    Only the exposed part is measured, which is at most all of it: the rate computed from it is an upper bound of the link's.
    Traffic is not judged where the number of messages takes the time rather than their bytes: a rank comes to each a little
    earlier or later than the others, which the measurement does not. Where little is exchanged, only a wait counts that is many
    times what is expected.
    """
    if not has_enough_readings(facts) or len(facts.ranks) < 2 or not facts.steps_together:
        return
    slow = max(_slow_links(facts), key=lambda link: link.share - link.expected, default=None)
    severity = None if slow is None else slow.severity
    if slow is None or severity is None:
        return
    use, main = slow.use, slow.use.main
    rate = use.wire_bytes / use.expected_s
    over = f"{main.transport} on {main.interface}" if main.interface else main.transport
    along = "" if slow.axis == "dp" else f" along {slow.axis}"
    yield Finding(
        id="COMM03",
        title=f"the link{along} is slower than it was: {over}",
        severity=severity,
        cost_frac=slow.share - slow.expected,
        confidence=0.7,
        evidence=(
            f"{use.wire_bytes / main.steps / 1e6:.3g} MB a step over {over} take {milliseconds(facts, slow.share)} that no "
            f"computation hides, so at most {rate * slow.expected / slow.share / 1e6:,.3g} MB/s",
            f"unisono doctor --bench measured {rate / 1e6:,.3g} MB/s, which is {milliseconds(facts, slow.expected)}",
        ),
        advice=_ADVICE.get(main.transport, _NETWORK_ADVICE),
    )


def _slow_links(facts: RunFacts) -> Iterator[_SlowLink]:
    """Axes whose measured link is waited for longer than expected."""
    of_ranks = [_uses(rank) for rank in facts.ranks]
    for axis in dict.fromkeys(axis for uses in of_ranks for axis in uses):
        known = [uses[axis] for uses in of_ranks if axis in uses and uses[axis].expected_s and uses[axis].main.steps]
        if not known:
            continue
        use = max(known, key=lambda use: use.expected_s / use.main.steps)
        share = median_last_arriver_wait_frac(facts, f"comm_exposed_{axis}")
        expected = use.expected_s / use.main.steps / step_s(facts)
        link = _SlowLink(axis, use, share, expected)
        if share - expected < _LEAST_COST or link.severity is None:
            continue
        is_far = share >= _FAR_COST and share >= _FAR_TIMES * expected
        is_bytes = use.expected_s >= _MOSTLY_BYTES * use.expected_latency_s
        if is_bytes and (round(expected, 4) >= _LEAST_EXPECTED or is_far):
            yield link


def _uses(rank: RankFacts) -> dict[str, AxisUse]:
    """Use by axis; of a run of an earlier release, which told of the sums of gradients only, that of ``dp``."""
    if rank.axes:
        return uses_by_axis(rank.axes)
    links = [link for link in rank.links if link.measured_bytes_per_s and link.steps and link.sent_bytes]
    if not links:
        return {}
    return uses_by_axis([_as_axis(min(links, key=lambda link: link.measured_bytes_per_s))])


def _as_axis(link: LinkTraffic) -> AxisTraffic:
    return AxisTraffic(
        axis="dp",
        group="dp_replicate",
        transport=link.peer.partition(":")[0],
        interface=link.interface,
        steps=link.steps,
        wall_s=link.wall_s,
        payload_bytes=link.sent_bytes,
        wire_bytes=link.sent_bytes,
        expected_s=link.sent_bytes / link.measured_bytes_per_s,
    )
