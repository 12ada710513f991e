"""Who is at the other end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: ``role`` is "worker" or "server", ``job`` the hash of run id and key table."""

    role: str
    worker: int
    incarnation: int
    job: int
    address: str
