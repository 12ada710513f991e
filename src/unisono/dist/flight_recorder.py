"""The last collectives of this process, from torch's Flight Recorder: the only module that uses its private interface.

The recorder is a ring buffer of torch (2000 collectives unless ``TORCH_FR_BUFFER_SIZE`` says otherwise; 0 turns it off). Tested
with torch 2.13, whose recorder has the collectives of Gloo too; before, it had those of NCCL alone. It has no sends and
receives of Gloo. With another torch that lacks it there are no groups, and a hang is explained by stacks alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.dist.rank_dump import Collective, GroupState

# of one group: what a diagnosis looks through for the first collective that ranks did not issue alike
_MAX_COLLECTIVES = 200


def group_states() -> list[GroupState]:
    """The groups in which this process has issued collectives, the one with the newest last; each with its last ones."""
    dump = _dump(collectives=True)
    status = cast("Mapping[str, Mapping[str, str]]", dump.get("pg_status", {}))
    entries = cast("Sequence[Mapping[str, Any]]", dump.get("entries", ()))
    of_group: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            name, description = entry["process_group"]
            found = of_group.pop((name, description), [])
            found.append(entry)
            of_group[name, description] = found
    ranks = _ranks_by_name()
    states: list[GroupState] = []
    for (name, description), found in of_group.items():
        counts = status.get(str(found[-1]["pg_id"]), {})
        entered = max(int(counts.get("last_enqueued_collective", 0)), int(found[-1]["collective_seq_id"]))
        states.append(
            GroupState(
                name=name,
                description=description,
                ranks=tuple(ranks.get(name, ())),
                num_entered=entered,
                collectives=tuple(_collective(entry) for entry in found[-_MAX_COLLECTIVES:]),
            )
        )
    return states


def num_issued() -> int:
    """Collectives that this process has issued in all groups; it grows while a rank makes progress."""
    status = cast("Mapping[str, Mapping[str, str]]", _dump(collectives=False).get("pg_status", {}))
    return sum(int(counts.get("last_enqueued_collective", 0)) for counts in status.values())


def _dump(*, collectives: bool) -> Mapping[str, Any]:
    c10d: Any = getattr(distributed_c10d, "torch", None)
    c10d = getattr(getattr(c10d, "_C", None), "_distributed_c10d", None)
    # of torch before 2.13: NCCL's alone
    read = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if read is None or not dist.is_initialized():
        return {}
    text: str | bytes = read(collectives, False)  # not only those under way
    return json.loads(text)


def _ranks_by_name() -> dict[str, list[int]]:
    """The global ranks of each group of this process, by torch's name of the group."""
    world: Any = getattr(distributed_c10d, "_world", None)
    if world is None:
        return {}
    return {world.pg_names[group]: sorted(ranks) for group, ranks in list(world.pg_group_ranks.items())}


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).rpartition(":")[2],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        dtypes=tuple(entry["input_dtypes"]),
        # of Gloo the recorder keeps the state "scheduled"; it retires what has completed
        state="completed" if entry["retired"] else str(entry["state"]),
    )
