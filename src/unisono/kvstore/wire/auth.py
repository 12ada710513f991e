"""Mutual authentication: both sides prove that they hold the job's secret before either accepts a request.

    server   {nonce, epoch}
    client   {nonce, role, worker, incarnation, job, epoch, proof}
    server   {proof}

In the JSON ``epoch`` is the server's restart count, ``incarnation`` the worker's.
A proof is HMAC-SHA256 under the secret over a label of its direction, both nonces and every field above, so a recorded
exchange is useless a second time, in the other direction, or for another worker. The following frames are not signed:
an attacker who can alter packets is kept out by TLS only (``tls``). Before the proof is checked, a peer can make this
side hold at most 4 KiB.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from unisono.errors import CommError
from unisono.exit_codes import USER_ERROR
from unisono.kvstore.wire.channel import Channel, ConnectionLost
from unisono.kvstore.wire.frame import Limits, Op, error_frame, json_frame, read_error, read_json

ROLES = ("worker", "server")
_UNAUTHENTICATED_BYTES = 4096
_NONCE = re.compile(r"[0-9a-f]{64}")
_RANGES = {"worker": 2**32, "incarnation": 2**32, "job": 2**64, "epoch": 2**32}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who one end of a connection is: ``role`` is "worker" or "server", ``job`` the hash of the run id.

    ``address`` is that of the other end, for the texts of errors.
    """

    role: str
    index: int
    worker_restart_count: int
    job: int
    address: str


class AuthError(CommError):
    """The other side lacks the secret or a valid certificate, or reports that of this side. A retry does not help."""

    exit_code = USER_ERROR


def preauth_limits(limits: Limits) -> Limits:
    """The limits before the peer has proved itself."""
    return Limits(
        max_payload_bytes=_UNAUTHENTICATED_BYTES,
        max_entries=0,
        message_s=limits.handshake_s,
        handshake_s=limits.handshake_s,
    )


def server_handshake(
    channel: Channel, secret: bytes, restart_count: int, address: str, limits: Limits
) -> tuple[Identity, int]:
    """The server's part: returns the peer and the highest server restart count it has seen. Raises AuthError or
    ConnectionLost."""
    mine = secrets.token_hex(32)
    channel.send(json_frame(Op.HELLO, {"nonce": mine, "epoch": restart_count}))
    answer = _hello(channel, limits)
    role, theirs, proof = (answer.get(name) for name in ("role", "nonce", "proof"))
    numbers = [answer.get(name) for name in _RANGES]
    good = role in ROLES and _is_nonce(theirs) and _is_nonce(proof)
    good = good and all(type(n) is int and 0 <= n < top for n, top in zip(numbers, _RANGES.values(), strict=True))
    bound = [mine, theirs, role, *numbers, restart_count]
    if not good or not hmac.compare_digest(str(proof), _proof(secret, "client", bound)):
        refusal = AuthError(
            given=f"the proof that came from {address} is wrong",
            rule="a peer shows with every connection that it holds the job's secret",
            consequence="the connection is closed",
            nearest="start both sides with the same UNISONO_SECRET_FILE, or with unisono launch",
        )
        channel.send(error_frame(refusal))
        raise refusal
    channel.send(json_frame(Op.HELLO, {"proof": _proof(secret, "server", bound)}))
    worker, worker_restart_count, job, seen = (int(str(n)) for n in numbers)
    return Identity(str(role), worker, worker_restart_count, job, address), seen


def client_handshake(channel: Channel, secret: bytes, me: Identity, seen: int, limits: Limits) -> int:
    """The client's part: prove, check the server's proof, return its restart count. ``seen`` is the highest known so
    far.

    Raises AuthError for a wrong proof, on either side; ConnectionLost when the connection ends or the server is an old
    one.
    """
    offer = _hello(channel, limits)
    theirs, restart_count = offer.get("nonce"), offer.get("epoch")
    if not _is_nonce(theirs) or type(restart_count) is not int or not 0 <= restart_count < _RANGES["epoch"]:
        raise _nonsense(me.address)
    mine = secrets.token_hex(32)
    known = max(seen, restart_count)
    bound = [theirs, mine, me.role, me.index, me.worker_restart_count, me.job, known, restart_count]
    named = {"nonce": mine, "role": me.role, "worker": me.index, "incarnation": me.worker_restart_count, "job": me.job}
    channel.send(json_frame(Op.HELLO, named | {"epoch": known, "proof": _proof(secret, "client", bound)}))
    proof = _hello(channel, limits).get("proof")
    if not _is_nonce(proof) or not hmac.compare_digest(str(proof), _proof(secret, "server", bound)):
        raise AuthError(
            given=f"the server at {me.address} gave a wrong proof",
            rule="a server shows with every connection that it holds the job's secret",
            consequence="nothing was sent to it",
            nearest="see what else listens at that address; start both sides with the same secret",
        )
    if restart_count < seen:
        raise ConnectionLost(
            given=f"the server at {me.address} is of restart {restart_count}, and restart {seen} has been seen",
            rule="a server that was replaced takes no more requests",
            consequence="this worker did not join it",
            nearest="end the old server process",
        )
    return restart_count


def _hello(channel: Channel, limits: Limits) -> dict[str, Any]:
    try:
        frame = channel.receive(wait_s=limits.handshake_s)
    except ConnectionLost as error:
        if channel.received_bytes or error.__cause__ is not None:
            raise
        frame = None
    if frame is None:
        raise ConnectionLost(
            given="the other side sent nothing: it is busy, has ended, or waits for TLS",
            rule="a server says hello first, unless it is under TLS",
            consequence="the connection is closed",
            nearest="the same launch.tls for servers and workers",
        )
    if frame.op not in (Op.HELLO, Op.ERROR):
        raise _nonsense("the other side")
    if frame.op is Op.ERROR:
        raise AuthError(*read_error(frame).problems)
    return read_json(frame)


def _proof(secret: bytes, direction: str, bound: list[Any]) -> str:
    text = json.dumps(["unisono wire 1", direction, *bound]).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def _is_nonce(text: object) -> bool:
    return isinstance(text, str) and _NONCE.fullmatch(text) is not None


def _nonsense(who: str) -> ConnectionLost:
    return ConnectionLost(
        given=f"{who} did not say hello as it should, or not in time",
        rule="a connection begins with the exchange of proofs",
        consequence="the connection is closed",
        nearest="see what else uses this port; use the same release of unisono on both sides",
    )
