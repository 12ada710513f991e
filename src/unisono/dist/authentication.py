"""Mutual authentication of the processes of a job, before anything else is exchanged.

    server   {nonce, has_secret}
    member   {nonce, has_secret, name, run_id, world_size, proof}
    server   {proof}, or {refusal}

A proof is HMAC-SHA256 under the job's secret over a label of its direction, both nonces and the fields of the member, so
a recorded exchange is useless a second time, in the other direction or for another rank. Without a secret the proofs are
made with an empty one: they then show only that both sides speak of the same job. What follows is not signed.

Every message is a frame: its length in four bytes, then msgpack. A length is checked before anything is allocated, and is
at most 4 KiB from a peer that has not proved itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

LENGTH = struct.Struct("<I")
MAX_UNAUTHENTICATED_BYTES = 4096
HANDSHAKE_S = 5.0

NONCE_BYTES = 32

Refusal = Literal["proof", "secret", "no secret", "run", "size", "name", "taken", "full"]

# what a refused connection did: "rank 0 refuses this process, which had no secret, …", "3 connections had no secret, …"
REFUSALS: dict[Refusal, str] = {
    "proof": "made a wrong proof of the job's secret",
    "secret": "had a secret, where this job has none",
    "no secret": "had no secret, where this job has one",
    "run": "belonged to another run",
    "size": "belonged to a job of another size",
    "name": "had a name that this job does not have",
    "taken": "had the name of a process that is connected already",
    "full": "came when no more connections were taken",
}

_T = TypeVar("_T")


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's first message."""

    nonce: bytes
    has_secret: bool


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member says of itself; ``name`` is such as ``rank 3``."""

    nonce: bytes
    has_secret: bool
    name: str
    run_id: str
    world_size: int
    proof: bytes


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's proof, or why it refuses this member."""

    proof: bytes = b""
    refusal: Refusal | None = None


class AuthenticationRefused(Exception):
    """The two sides do not belong together, for a reason that is no accident of the network."""

    def __init__(self, reason: Refusal | Literal["server"]) -> None:
        super().__init__(reason)
        self.reason: Refusal | Literal["server"] = reason


class PeerError(Exception):
    """The other side does not speak as it should, or not in time."""


def prove(secret: bytes | None, direction: Literal["member", "server"], challenge: Challenge, hello: Hello) -> bytes:
    """The proof of one direction over everything that was said."""
    said = [challenge.nonce.hex(), hello.nonce.hex(), hello.name, hello.run_id, hello.world_size]
    return hmac.digest(secret or b"", json.dumps(["unisono ranks 1", direction, *said]).encode(), hashlib.sha256)


def make_challenge(secret: bytes | None) -> Challenge:
    """A challenge with a new nonce."""
    return Challenge(secrets.token_bytes(NONCE_BYTES), secret is not None)


def check_hello(
    secret: bytes | None, challenge: Challenge, hello: Hello, run_id: str, world_size: int
) -> Refusal | None:
    """The server's part: why this member is refused, or None."""
    if hello.has_secret != challenge.has_secret:
        return "no secret" if challenge.has_secret else "secret"
    good = len(hello.nonce) == NONCE_BYTES and hmac.compare_digest(
        hello.proof, prove(secret, "member", challenge, hello)
    )
    if not good:
        return "proof"
    if hello.run_id != run_id:
        return "run"
    return None if hello.world_size == world_size else "size"


def authenticate(sock: socket.socket, secret: bytes | None, name: str, run_id: str, world_size: int) -> None:
    """The member's part, on a new connection.

    Raises AuthenticationRefused, or PeerError when the other side is not a server of a job.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    challenge = receive(sock, Challenge, deadline)
    if len(challenge.nonce) != NONCE_BYTES:
        raise PeerError("its nonce is of another length")
    hello = Hello(secrets.token_bytes(NONCE_BYTES), secret is not None, name, run_id, world_size, b"")
    if challenge.has_secret != hello.has_secret:
        # no proof and no run id: the server only counts why this rank does not join, and tells its own user
        with suppress(PeerError):
            send(sock, msgspec.structs.replace(hello, run_id=""), deadline)
            receive(sock, Verdict, deadline)
        raise AuthenticationRefused("no secret" if challenge.has_secret else "secret")
    send(sock, msgspec.structs.replace(hello, proof=prove(secret, "member", challenge, hello)), deadline)
    verdict = receive(sock, Verdict, deadline)
    if verdict.refusal is not None:
        raise AuthenticationRefused(verdict.refusal)
    if not hmac.compare_digest(verdict.proof, prove(secret, "server", challenge, hello)):
        raise AuthenticationRefused("server")


# --- frames ----------------------------------------------------------------------------------------------------------


def frame(message: Any) -> bytes:
    """``message`` as it is sent."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def send(sock: socket.socket, message: Any, deadline: float) -> None:
    """Send one message. Raises PeerError when the other side is gone or does not read until ``deadline`` (monotonic)."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(frame(message))
    except OSError as error:
        raise PeerError(f"the connection broke ({error})") from error


def receive(sock: socket.socket, kind: type[_T], deadline: float, *, max_bytes: int = MAX_UNAUTHENTICATED_BYTES) -> _T:
    """The next message. Raises PeerError when none has come until ``deadline``, however steadily bytes trickle in, or when it
    is not of the kind or larger than ``max_bytes``."""
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size, deadline))
    if length > max_bytes:
        raise PeerError(f"it announces {length} bytes where {max_bytes} are allowed")
    try:
        return msgspec.msgpack.decode(_exactly(sock, length, deadline), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError("what it says cannot be read") from error


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError(f"it sent {len(data)} of {count} bytes, and no more within the time for an answer")
        try:
            sock.settimeout(left)
            more = sock.recv(count - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerError(f"the connection broke ({error})") from error
        if not more:
            raise PeerError("it closes the connection")
        data += more
    return bytes(data)
