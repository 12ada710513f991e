"""The description of a run, which every worker sends in its hello and which must be equal for all.

A server starts without knowledge of the model: it learns the run from the first hello or from a snapshot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.errors import CommError
from unisono.kvstore.server.placement import CHUNK_BYTES, ChunkPlacement, place_chunks
from unisono.kvstore.wire.frame import DTYPES, protocol_error

# bounds on the placement that a hello can make a server compute
_MOST_BYTES = 1 << 44
_MOST_CHUNKS = 1 << 22
_MOST_SERVERS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """``table``: shape and dtype by key. ``uncut_keys``: keys that stay one chunk. ``staleness``: clocks a worker may
    be ahead, None for any. ``num_batch_shards``: size of the work queue, 0 where workers share the work themselves;
    ``batch_shards_per_step``; ``batch_shards_per_save`` (0: one save, at the end). ``codec``: of pushes, and of pulls
    if it can compress values, as ``find_codec`` takes it. ``labels``: anything else that must be equal, by name."""

    table: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    num_servers: int
    uncut_keys: tuple[str, ...] = ()
    chunk_bytes: int = CHUNK_BYTES
    staleness: int | None = None
    num_batch_shards: int = 0
    batch_shards_per_step: int = 1
    batch_shards_per_save: int = 0
    codec: str = "none"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def job(self) -> int:
        """The number in every frame: a hash of the run id in ``labels``."""
        return int.from_bytes(hashlib.blake2b(self.labels.get("run", "").encode(), digest_size=8).digest(), "little")

    def placement(self) -> ChunkPlacement:
        """The placement of all chunks."""
        return place_chunks(self.table, self.num_servers, self.chunk_bytes, self.uncut_keys)

    def to_json(self) -> dict[str, Any]:
        return {  # sent and stored names of the first release
            "table": {
                key: [list(shape), str(dtype).removeprefix("torch.")] for key, (shape, dtype) in self.table.items()
            },
            "servers": self.num_servers,
            "whole": sorted(self.uncut_keys),
            "chunk_bytes": self.chunk_bytes,
            "staleness": self.staleness,
            "units": self.num_batch_shards,
            "units_per_step": self.batch_shards_per_step,
            "units_per_save": self.batch_shards_per_save,
            "codec": self.codec,
            "about": dict(self.labels),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunSpec:
        """The inverse of ``to_json``. Raises CommError for invalid content."""
        try:
            staleness = content["staleness"]
            table = {str(key): (_shape(shape), _dtype(dtype)) for key, (shape, dtype) in content["table"].items()}
            nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in table.values())
            if nbytes > _MOST_BYTES:
                raise ValueError(f"a table of {nbytes} bytes, over {_MOST_BYTES}")
            servers, chunk_bytes = _count(content["servers"]), _count(content["chunk_bytes"])
            if servers > _MOST_SERVERS or nbytes > _MOST_CHUNKS * chunk_bytes:
                raise ValueError(f"{servers} servers for {nbytes} bytes in chunks of {chunk_bytes}")
            return cls(
                table=table,
                num_servers=servers,
                uncut_keys=tuple(sorted(str(key) for key in content["whole"])),
                chunk_bytes=chunk_bytes,
                staleness=None if staleness is None else _count(staleness),
                num_batch_shards=_count(content["units"]),
                batch_shards_per_step=_count(content["units_per_step"]),
                batch_shards_per_save=_count(content["units_per_save"]),
                codec=str(content["codec"]),
                labels={str(name): str(value) for name, value in content["about"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            rule = "it has table, servers, whole, chunk_bytes, staleness, units, units_per_step, units_per_save, codec and about"
            refusal = protocol_error(f"a hello that cannot be read: {error!r}", rule, "the worker was refused")
            raise refusal from error

    def require_equal(self, other: RunSpec, who: str) -> None:
        """Raise CommError naming the first difference."""
        own, others = self.to_json(), other.to_json()
        for key in sorted(self.table.keys() | other.table.keys()):
            mine, theirs = own["table"].get(key), others["table"].get(key)
            if mine != theirs:
                raise _different(
                    who, f"key {key!r} as {_text(theirs)}", f"it is {_text(mine)} for the workers before it"
                )
        for name in sorted(self.labels.keys() | other.labels.keys()):
            mine, theirs = own["about"].get(name), others["about"].get(name)
            if mine != theirs:
                raise _different(who, f"{name} {theirs}", f"it is {mine} for the workers before it")
        for name in own.keys() - {"table", "about"}:
            if own[name] != others[name]:
                raise _different(who, f"{name} = {others[name]}", f"it is {own[name]} for the workers before it")


def _text(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {entry[1]}"


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_count(extent) for extent in value)


def _dtype(name: Any) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype that frames carry")
    return getattr(torch, name)


def _different(who: str, given: str, rule: str) -> CommError:
    return CommError(
        given=f"{who} has {given}",
        rule=rule,
        consequence="it was refused, so that no tensor is added to a different one",
        nearest="start all workers with one configuration and one version of the model",
    )
