"""Which samples a micro-batch has: arithmetic on step, rank and sample order, without reading data.

A batch shard is one rank's share of one step, numbered ``step * world_size + rank``. A slot is a row of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.data.dataset import Ids
from unisono.data.loading.batch_builder import MicroBatchSpec
from unisono.data.order.samplers import SampleOrder
from unisono.data.order.step_schedule import StepSchedule

_CACHED_SAMPLES, _CACHED_STEPS = 4096, 256  # limits of what one call of the sample order computes
_NO_IDS, _NO_FLAGS = np.empty(0, np.int64), np.empty(0, np.bool_)


@dataclass(slots=True)  # not frozen: that doubles the time of making one
class ShardSamples:
    """Samples of a batch shard; not modified.

    ``sample_ids`` and ``occurrences`` are those of slots ``first_slot`` on of the step; ``slots`` are the shard's own, its
    neighbours may be partners in a pair.
    """

    first_slot: int
    slots: range
    step_slots: int
    step_samples: int  # slots of the step that are not padding
    sample_ids: Ids
    occurrences: Ids

    @property
    def own_ids(self) -> Ids:
        """Ids in the shard's own slots."""
        return self.sample_ids[self.slots.start - self.first_slot : self.slots.stop - self.first_slot]


class SpecSource:
    """Makes the specs of batch shards. ``pairs``: neighbouring slots (0, 1), (2, 3), … of a step are mixed."""

    def __init__(
        self, schedule: StepSchedule, order: SampleOrder, *, micro_batch: int, world_size: int, pairs: bool
    ) -> None:
        self._schedule, self._order = schedule, order
        self._micro_batch, self._world_size, self._pairs = micro_batch, world_size, pairs
        self._cache: tuple[range, list[ShardSamples]] = (range(0), [])

    def samples(self, batch_shard: int, stride: int) -> ShardSamples:
        """Samples of a batch shard. ``stride``: the distance to the shard that is asked for next."""
        shards, samples = self._cache
        if batch_shard not in shards:
            # One call of the order costs about the same for one shard as for hundreds: compute the stretch around this one.
            shard_size = max(1, self._schedule.global_batch // self._world_size)
            length = stride * min(_CACHED_STEPS, max(1, _CACHED_SAMPLES // shard_size))
            first = batch_shard - batch_shard % length + batch_shard % stride
            shards = range(first, first + length, stride)
            samples = self._compute(shards)
            self._cache = (shards, samples)
        return samples[shards.index(batch_shard)]

    def specs(self, batch_shard: int, stride: int) -> list[MicroBatchSpec]:
        """The micro-batches of a batch shard; the last may be smaller, and an empty shard has none."""
        samples = self.samples(batch_shard, stride)
        starts = range(samples.slots.start, samples.slots.stop, self._micro_batch)
        rows = [range(low, min(low + self._micro_batch, samples.slots.stop)) for low in starts]
        return [self._spec(batch_shard // self._world_size, samples, slots) for slots in rows]

    def _compute(self, shards: range) -> list[ShardSamples]:
        places: list[tuple[int, range, int, int]] = []
        positions: list[Ids] = []
        for shard in shards:
            step, rank = divmod(shard, self._world_size)
            step_positions, step_samples = self._schedule.positions(step)
            shard_slots = rank_range(len(step_positions), rank, self._world_size)
            low, high = shard_slots.start, shard_slots.stop
            if self._pairs:
                low, high = _with_partners(shard_slots, len(step_positions))
            places.append((low, shard_slots, len(step_positions), step_samples))
            positions.append(step_positions[low:high])
        ids, occurrences = self._order.samples_at(np.concatenate(positions))
        samples: list[ShardSamples] = []
        begin = 0
        for place, part in zip(places, positions, strict=True):  # np.split takes three times as long
            end = begin + len(part)
            samples.append(ShardSamples(*place, ids[begin:end], occurrences[begin:end]))
            begin = end
        return samples

    def _spec(self, step: int, samples: ShardSamples, own_slots: range) -> MicroBatchSpec:
        partner_rows, pair_ids, is_first = _NO_IDS, _NO_IDS, _NO_FLAGS
        # a slice where no partners are read: gathering by index takes twice as long
        rows: slice | Ids = slice(own_slots.start - samples.first_slot, own_slots.stop - samples.first_slot)
        if self._pairs:
            slots = np.arange(own_slots.start, own_slots.stop)
            partner = np.where((slots ^ 1) < samples.step_slots, slots ^ 1, slots)
            is_first = slots % 2 == 0
            pair_ids = step * self._schedule.global_batch + slots - ~is_first
            first, last = _with_partners(own_slots, samples.step_slots)
            slots = np.concatenate([slots, np.arange(first, own_slots.start), np.arange(own_slots.stop, last)])
            partner_rows = np.argsort(slots)[np.searchsorted(np.sort(slots), partner)]
            rows = slots - samples.first_slot
        is_filler = np.zeros(len(own_slots), np.bool_)
        if own_slots.stop > samples.step_samples:
            is_filler[max(0, samples.step_samples - own_slots.start) :] = True
        return MicroBatchSpec(
            step=step,
            num_rows=len(own_slots),
            sample_ids=samples.sample_ids[rows].copy(),  # a data set may modify or return them
            occurrences=samples.occurrences[rows],
            is_filler=is_filler,
            partner_rows=partner_rows,
            pair_ids=pair_ids,
            is_first=is_first,
        )


def rank_range(total: int, rank: int, world_size: int) -> range:
    """Split ``range(total)`` into contiguous parts, one per rank; sizes differ by at most one, larger ones first.

    Args:
        total: Number of items.
        rank: Rank whose part is returned, from 0 to ``world_size`` - 1.
        world_size: Number of ranks.
    """
    base, extra = divmod(total, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def _with_partners(slots: range, step_slots: int) -> tuple[int, int]:
    """``slots`` widened to whole pairs (0, 1), (2, 3), …"""
    return slots.start - slots.start % 2, min(step_slots, slots.stop + slots.stop % 2) if slots else slots.stop
