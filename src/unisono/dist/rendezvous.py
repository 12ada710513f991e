"""Rendezvous: the ranks connect to one store and agree on a key prefix that no earlier attempt has used.

Two properties of torch 2.13 shape this module. ``TCPStore`` listens on every interface even when given 127.0.0.1, so
we bind the socket and pass it in. And a store that outlives an attempt (torchrun's) still holds the peer addresses of
dead processes, with which a restarted group does not come up. Restart counts do not help, because those of two hosts
may differ. So the ranks of one attempt agree on a fresh prefix:

    every rank writes a fresh token     hello/<rank> = token
    rank 0 offers what it sees          offer = {nonce, tokens}     (a new nonce whenever a token changes)
    a rank that finds its own token     ack/<rank> = nonce
    rank 0, when all have acked         go = nonce

A stale token is never acknowledged, because only the dead process would recognise it. The same exchange shows which
ranks never arrived.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from unisono.dist.jobspec import JobSpec
from unisono.errors import CommError, LaunchError

_POLL_S = 0.005
_SLOW_POLL_S = 0.05


def open_store(job: JobSpec, timeout_s: float) -> TCPStore:
    """Connect to the job's store. Rank 0 serves it, at the master address only, unless the launcher already does.

    Raises LaunchError if the port is taken or the address does not belong to this host, CommError after ``timeout_s`` seconds
    without an answer.
    """
    timeout = timedelta(seconds=timeout_s)
    serves = job.rank == 0 and not job.shared_store
    listen_fd = None
    if serves:
        listen_fd = job.listen_fd if job.listen_fd is not None else listen_at_master(job, "rank 0").detach()
        # children of this process must not keep the port open
        os.set_inheritable(listen_fd, False)
    try:
        # world_size None: the store does not wait for ranks; the handshake does, and can name the missing ones
        return TCPStore(
            job.master_addr,
            job.master_port,
            None,
            serves,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except RuntimeError as error:
        raise CommError(
            given=f"rank {job.rank} of {job.world_size} found no store at {job.master_addr}:{job.master_port} in "
            f"{timeout_s:g} s ({_first_line(error)})",
            rule=f"{'the launcher' if job.shared_store else 'rank 0'} keeps a store open there while the job runs",
            consequence="this rank cannot join and has not trained",
            nearest="see why rank 0 did not start, and that its host and port can be reached from here",
        ) from error


def fresh_prefix(store: Store, job: JobSpec, timeout_s: float) -> tuple[PrefixStore, int]:
    """A key prefix that all ranks of this attempt share and no earlier one has used, and rank 0's restart count.

    Raises CommError, naming the ranks that did not arrive within ``timeout_s`` seconds.
    """
    lobby = PrefixStore(f"unisono/{job.run_id}", store)
    deadline = time.monotonic() + timeout_s
    if job.rank == 0:
        nonce, restart_count = _offer_prefix(lobby, job, deadline, timeout_s), job.restart_count
    else:
        nonce, restart_count = _accept_prefix(lobby, job, deadline, timeout_s)
    return PrefixStore(f"unisono/{job.run_id}/{restart_count}.{nonce}", store), restart_count


def _offer_prefix(lobby: Store, job: JobSpec, deadline: float, timeout_s: float) -> str:
    hello = [f"hello/{rank}" for rank in range(1, job.world_size)]
    ack = [f"ack/{rank}" for rank in range(1, job.world_size)]
    tokens: list[str] = []
    nonce = ""
    started = time.monotonic()
    while True:
        if lobby.check(hello):
            seen = [lobby.get(key).decode() for key in hello]
            if seen != tokens:
                tokens, nonce = seen, secrets.token_hex(8)
                lobby.set("offer", json.dumps({"nonce": nonce, "epoch": job.restart_count, "tokens": ["", *tokens]}))
            if lobby.check(ack) and all(lobby.get(key).decode() == nonce for key in ack):
                lobby.set("go", nonce)
                return nonce
        if time.monotonic() > deadline:
            answered = [lobby.check([key]) and bool(nonce) and lobby.get(key).decode() == nonce for key in ack]
            arrived = [lobby.check([key]) for key in hello]
            # before the first offer a rank can only have written its hello
            present = answered if nonce else arrived
            raise _absent(job, [rank for rank, here in enumerate(present, 1) if not here], timeout_s)
        time.sleep(_POLL_S if time.monotonic() - started < 1 else _SLOW_POLL_S)


def _accept_prefix(lobby: Store, job: JobSpec, deadline: float, timeout_s: float) -> tuple[str, int]:
    token = secrets.token_hex(8)
    lobby.set(f"hello/{job.rank}", token)
    acked, restart_count = "", job.restart_count
    started = time.monotonic()
    while True:
        if lobby.check(["offer"]):
            offer = json.loads(lobby.get("offer"))
            tokens: list[str] = offer["tokens"]
            if len(tokens) == job.world_size and tokens[job.rank] == token and offer["nonce"] != acked:
                acked, restart_count = str(offer["nonce"]), int(offer["epoch"])
                lobby.set(f"ack/{job.rank}", acked)
        if acked and lobby.check(["go"]) and lobby.get("go").decode() == acked:
            return acked, restart_count
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, job.world_size) if not lobby.check([f"hello/{rank}"])]
            raise _absent(job, missing or [0], timeout_s)
        time.sleep(_POLL_S if time.monotonic() - started < 1 else _SLOW_POLL_S)


def _absent(job: JobSpec, ranks: list[int], timeout_s: float) -> CommError:
    names = ", ".join(str(rank) for rank in ranks[:16]) + (" …" if len(ranks) > 16 else "")
    one = len(ranks) == 1
    return CommError(
        given=f"rank{'' if one else 's'} {names} of {job.world_size} did not arrive within {timeout_s:g} s "
        f"(seen from rank {job.rank})",
        rule="all ranks join before the first step",
        consequence="no step was made",
        nearest=f"see the log of rank {ranks[0]}; if it is only slow to start, raise the timeout",
    )


def listen_at_master(job: JobSpec, who: str) -> socket.socket:
    """A socket that listens at the master address only, for the process ``who``. Raises LaunchError."""
    at = f"{job.master_addr}:{job.master_port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            job.master_addr, job.master_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LaunchError(
            given=f"the master address {job.master_addr!r} does not resolve on this host ({error.strerror})",
            rule=f"{who} listens at the master address",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest=f"set MASTER_ADDR to a name or address of the host {who} runs on",
        ) from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                given=f"{who} was told to listen at {at}, and another process already does",
                rule="a job has a port that nothing else uses",
                consequence="the ranks would join another job, so nothing was started",
                nearest=f"MASTER_PORT={_free_port(family, str(address[0]))} is free now",
            ) from error
        raise LaunchError(
            given=f"{who} cannot listen at {at} ({error.strerror})",
            rule=f"the master address is one of the host that {who} runs on",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest="set MASTER_ADDR to an address of this host (127.0.0.1 when all ranks are here)",
        ) from error
    return listener


def _free_port(family: int, host: str) -> int:
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
