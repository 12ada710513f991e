"""Memory that several ranks share: on the CPU the ranks of a host, or of its container, use the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.diagnose.run_facts import RankFacts
from unisono.profile.rank_profile import RankProfile


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """The memory of an accelerator, or of a host whose ranks compute on the CPU; ``profiles`` are those of its ranks."""

    ranks: Sequence[RankFacts]
    profiles: Sequence[RankProfile] = ()

    @property
    def limit_bytes(self) -> float:
        """The memory there is, in bytes; 0 if not known."""
        limits = [*(rank.limit_bytes for rank in self.ranks), *(one.memory.limit_bytes for one in self.profiles)]
        return min((limit for limit in limits if limit > 0), default=0.0)

    @property
    def peak_bytes(self) -> float:
        """Most in use, in bytes: in the run, or in the profile if it saw more. An upper bound, as if the peaks of all ranks were
        at the same time, and each had its own shared memory."""
        in_run = sum(rank.peak_bytes for rank in self.ranks)
        return max(in_run, sum(profile.memory.peak_bytes for profile in self.profiles))

    @property
    def used_frac(self) -> float:
        """Most in use, as a share of the memory there is; 0 if not known."""
        limit = self.limit_bytes
        return self.peak_bytes / limit if limit else 0.0

    @property
    def activation_bytes(self) -> float:
        """Activations at the peak of the profile; of ranks without a profile, as many as the largest of the others."""
        sizes = [profile.memory.at_peak.get("activations", 0) for profile in self.profiles]
        return sum(sizes) + max(0, len(self.ranks) - len(sizes)) * max(sizes, default=0)


def memory_pools(ranks: Sequence[RankFacts], profiles: Sequence[RankProfile] = ()) -> list[MemoryPool]:
    """Each memory with its ranks, by the lowest of them. Ranks on CPUs whose host is not known count as of one host."""
    places = {rank.rank: (rank.host, -1) if rank.device == "cpu" else ("", rank.rank) for rank in ranks}
    for profile in profiles:
        places.setdefault(profile.rank, ("", -1 if profile.device == "cpu" else profile.rank))
    ranks_of: dict[tuple[str, int], list[RankFacts]] = {place: [] for place in places.values()}
    profiles_of: dict[tuple[str, int], list[RankProfile]] = {place: [] for place in places.values()}
    for rank in ranks:
        ranks_of[places[rank.rank]].append(rank)
    for profile in profiles:
        profiles_of[places[profile.rank]].append(profile)
    return [MemoryPool(ranks_of[place], profiles_of[place]) for place in ranks_of]
