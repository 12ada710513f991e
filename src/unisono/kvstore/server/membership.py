"""Connected peers and their restart counts, and barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

from unisono.errors import CommError
from unisono.kvstore.wire.auth import Peer


class PeerTable:
    """Connections of workers or of servers. A peer may have several, and is gone with its last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, int] = {}
        self._open: dict[tuple[int, int], int] = {}

    def connect(self, peer: Peer) -> None:
        """Add a connection. Raises CommError when a newer process of the peer is known."""
        with self._lock:
            self._check(peer)
            self._newest[peer.index] = peer.worker_restart_count
            key = peer.index, peer.worker_restart_count
            self._open[key] = self._open.get(key, 0) + 1

    def disconnect(self, peer: Peer) -> bool:
        """Remove a connection; returns whether it was the last."""
        with self._lock:
            key = peer.index, peer.worker_restart_count
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
            return key not in self._open

    @property
    def num_ever_connected(self) -> int:
        """The number of peers that have connected so far."""
        with self._lock:
            return len(self._newest)

    def check(self, peer: Peer) -> None:
        """Raise CommError when a newer process of the peer has taken over."""
        with self._lock:
            self._check(peer)

    def _check(self, peer: Peer) -> None:
        newest = self._newest.get(peer.index, 0)
        if peer.worker_restart_count < newest:
            raise CommError(
                given=f"{peer.role} {peer.index} in its incarnation {peer.worker_restart_count}",
                rule=f"a {peer.role} has one incarnation at a time, and {newest} has taken over",
                consequence="nothing of the older one is applied",
                nearest="let the older process end",
            )


class NumberedBarriers:
    """Barriers of all live workers, with increasing numbers.

    A worker at one barrier has passed all earlier ones. So arriving twice, because an answer was lost, counts once, and
    a server that has lost its state does not wait for workers that passed before.
    """

    def __init__(self, live: Callable[[], Set[int]]) -> None:
        self._live = live
        self._change = threading.Condition()
        self._at: dict[int, int] = {}  # by worker: the highest it has arrived at
        self._passed = -1
        self._closed = False

    def arrive(self, worker: int, number: int) -> None:
        """Return when all live workers have arrived at ``number``. Raises CommError when the server stops first."""
        with self._change:
            self._at[worker] = max(number, self._at.get(worker, -1))
            self._open(number)
            while self._passed < number:
                if self._closed:
                    raise CommError(
                        given=f"barrier {number} on a server that is stopping",
                        rule="a barrier opens when all live workers have arrived",
                        consequence="the wait has ended without the others",
                        nearest="connect again: the launcher starts the server from its last snapshot",
                    )
                self._change.wait()
                self._open(number)

    def recheck(self) -> None:
        """Re-evaluate the live workers after one has left."""
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        """Let every waiting call raise CommError."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _open(self, number: int) -> None:
        if number > self._passed and all(self._at.get(worker, -1) >= number for worker in self._live()):
            self._passed = number
            self._change.notify_all()
