"""``JobStore``: a rank's connection to the store of its job, for torch's process groups and for unisono itself."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.dist.authentication import PeerError, receive, send
from unisono.dist.store_server import MAX_MESSAGE_BYTES, StoreServer

# a request that waits is repeated after so long: in between, another thread has its turn
_TURN_S = 1.0
_MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - 2**16  # the rest is for the key
# a server that is alive answers within
_ANSWER_S = 20.0


class JobStore(dist.Store):
    """Implements torch's ``Store`` interface in Python; no C++ store is behind it.

    Args:
        sock: A connection on which both sides have proved themselves.
        secret: The job's secret; None where it has none.
        server: The server, in the process that serves the store.

    ``is_open`` tells whether the server answered the last request and ``close`` has not been called.
    """

    def __init__(self, sock: socket.socket, secret: bytes | None, server: StoreServer | None = None) -> None:
        super().__init__()
        self._sock, self._secret, self.server = sock, secret, server
        self._lock = threading.Lock()
        self.is_open = True
        # torch holds the C++ half alone, which cannot call a Python half that is gone
        _OPEN.add(self)

    def join(self, restart_count: int, timeout_s: float) -> tuple[str, int, list[int]]:
        """Meet all ranks: a fresh key prefix, rank 0's restart count and no missing ranks; or the ranks that did not come
        within ``timeout_s``. Raises DistNetworkError if the server ends."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            answer = self._ask("join", restart_count, max(0.0, min(left, _TURN_S)))
            if "prefix" in answer:
                return str(answer["prefix"]), int(answer["restart_count"]), []
            if left <= 0:
                return "", 0, [int(rank) for rank in answer["missing"]]

    def group_key(self, prefix: str) -> bytes | None:
        """The key of proofs between the ranks that joined under ``prefix``; None where the job has no secret."""
        return None if self._secret is None else hmac.digest(self._secret, f"groups {prefix}".encode(), hashlib.sha256)

    @property
    def address(self) -> str:
        """This host's address on the way to the other ranks."""
        return str(self._sock.getsockname()[0]) if self.server is None else self.server.address

    def wait_for_end(self) -> None:
        """Return when the server has ended."""
        with contextlib.suppress(RuntimeError):
            # nobody sets this key: the wait ends when the server does
            while not self._ask("wait", ["the end"], _TURN_S):
                pass

    def leave(self) -> None:
        """Say that this process ends as it should, then close."""
        with contextlib.suppress(RuntimeError):
            self._ask("bye")
        self.close()

    def close(self) -> None:
        """End the connection, and with it the server in the process that serves. May be called twice."""
        self.is_open = False
        # a fork may hold a copy of the descriptor
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self.server is not None:
            self.server.join_thread()
        self._sock.close()
        _OPEN.discard(self)

    # --- torch's interface ---------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        while (value := self._ask("get", key)) is None:  # it may be deleted in between
            self.wait([key])
        return value

    def add(self, key: str, value: int) -> int:
        return self._ask("add", key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask("compare_set", key, _bytes(expected_value), _bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def num_keys(self) -> int:
        return self._ask("num_keys")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # torch's stub lacks the property
        timeout = self.timeout if timeout is None else timeout  # pyright: ignore[reportAttributeAccessIssue]
        timeout_s = timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self._ask("wait", keys, max(0.0, min(deadline - time.monotonic(), _TURN_S))):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"wait timed out after {timeout_s:g} s for {', '.join(keys)[:300]}")

    def clone(self) -> JobStore:
        """This store: threads take turns on its connection."""
        return self

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            if not self.is_open:
                raise dist.DistNetworkError("the store of this job is closed")
            deadline = time.monotonic() + _TURN_S + _ANSWER_S
            try:
                send(self._sock, request, deadline)
                answer = receive(self._sock, object, deadline, max_bytes=MAX_MESSAGE_BYTES)
            except PeerError as error:
                self.is_open = False  # an answer that comes later would be taken for another one
                self._sock.close()
                raise dist.DistNetworkError(f"the store of this job does not answer: {error}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise dist.DistStoreError(str(answer["error"]))
        return answer


_OPEN: set[JobStore] = set()


def _bytes(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    if len(data) > _MAX_VALUE_BYTES:
        raise ValueError(f"{len(data)} bytes for the store; a value has at most {_MAX_VALUE_BYTES}")
    return data
