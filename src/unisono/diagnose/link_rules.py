"""Rules of links that are slower than an earlier measurement."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.diagnose.figures import is_timed, least_wait_frac, milliseconds, severity_of, step_s
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import LinkTraffic, RunFacts

_LEAST_COST = 0.02  # of a step: below it a slow link costs nothing that can be measured
_ADVICE = {
    "shared memory": "sums use the same cores as other processes: end those, or use fewer threads (launch.num_threads)",
    "nccl": "look at the links of that interface (unisono doctor --nodes, ibstat, nvidia-smi nvlink -s), and at "
    "NCCL_SOCKET_IFNAME, NCCL_IB_HCA and other NCCL_ variables",
}
_NETWORK_ADVICE = (
    "look at that network: other traffic, a link that fell back to a lower rate (ethtool), an interface that is not the fast one "
    "(unisono launch --interface); unisono doctor --bench measures it again"
)


def slow_link(facts: RunFacts) -> Iterator[Finding]:
    """COMM03: sums of gradients take longer than the link was measured to need (``unisono doctor --bench``).

    Only their exposed part is measured, which is at most their time: the rate computed from it is an upper bound of the link's.
    """
    if not is_timed(facts) or len(facts.ranks) < 2 or not facts.steps_together:
        return
    links = [link for rank in facts.ranks for link in rank.links if link.measured_bytes_per_s and link.steps]
    share = least_wait_frac(facts, "comm_exposed_dp")
    if not links or share <= 0:
        return
    link = min(links, key=lambda link: link.measured_bytes_per_s)
    expected = _seconds(link) / step_s(facts)  # share of the time of a step
    lost = 1.0 - expected / share
    severity = severity_of(lost, 0.2, 0.4)
    cost = share - expected
    if severity is None or cost < _LEAST_COST:
        return
    name, rate = link.peer.partition(":")[0], link.measured_bytes_per_s
    over = f"{name} on {link.interface}" if link.interface else name
    yield Finding(
        id="COMM03",
        title=f"the link is slower than it was: {over}",
        severity=severity,
        cost_frac=cost,
        confidence=0.7,
        evidence=(
            f"{link.sent_bytes / link.steps / 1e6:.3g} MB a step over {over} take {milliseconds(facts, share)} that no "
            f"computation hides, so at most {rate * expected / share / 1e6:,.3g} MB/s",
            f"unisono doctor --bench measured {rate / 1e6:,.3g} MB/s, which is {milliseconds(facts, expected)}",
        ),
        advice=_ADVICE.get(name, _NETWORK_ADVICE),
    )


def _seconds(link: LinkTraffic) -> float:
    """Seconds that the traffic of a step takes at the measured rate."""
    return link.sent_bytes / link.steps / link.measured_bytes_per_s
