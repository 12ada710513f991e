"""Rendezvous: the ranks prove to rank 0 that they belong to the job, and it to them; then all join under a fresh prefix.

Rank 0 (under MXNet's tracker the scheduler) serves the job's store at the master address. Every other rank connects and
both sides prove that they hold the job's secret (``authentication``); only then does either say more (``job_store``). All ranks
ask to join, and when the last has come each gets the same new key prefix. A rank is a connection that lives: one that
died is not waited for, and one that is there is not replaced. So an attempt never meets the dead of an earlier one.

torchrun's own store (a TCPStore that anyone may read and write) already listens at the master address. There rank 0 serves
at another address, and the ranks look up only that, host and port, in torchrun's store. What they find proves itself too.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from unisono.dist.address import address_towards, free_port, refuse_every_interface, require_private_ranks
from unisono.dist.authentication import HANDSHAKE_S, REFUSALS, AuthenticationRefused, PeerError, authenticate
from unisono.dist.job_store import JobStore
from unisono.dist.jobspec import LOOPBACK, JobSpec
from unisono.dist.secret import job_secret
from unisono.dist.store_server import StoreServer
from unisono.errors import CommError, LaunchError

_LOG = logging.getLogger("unisono")
_POLL_S = 0.005
_SLOW_POLL_S = 0.05
_DNS_POLL_S = 0.2
_ABOUT_SECRET = ("proof", "secret", "no secret", "server")  # reasons to refuse a process
_ONE_SECRET = "the same UNISONO_SECRET_FILE (32 bytes, mode 0600) on every host"
_NOT_JOINED = "this rank has not joined, and has sent neither the secret nor data"


def open_store(job: JobSpec, timeout_s: float, environ: Mapping[str, str] = os.environ, *, name: str = "") -> JobStore:
    """A connection to the job's store, on which both sides have proved themselves. Rank 0 serves it, unless a scheduler does.

    ``name`` is this process's among the members, its rank by default. Raises LaunchError if the port is taken, the address
    does not belong to this host or the two sides do not hold the same secret; ConfigError for a public address; CommError
    after ``timeout_s`` seconds without an answer, as ``wait_until_resolved`` says.
    """
    name, secret = name or f"rank {job.rank}", job_secret(job, environ)
    deadline = time.monotonic() + timeout_s
    wait_until_resolved(job, timeout_s)
    if job.rank == 0 and name == "rank 0" and not has_scheduler(job):
        listener, published = _listen(job, deadline)
        store = serve_store(job, listener, secret, name)
        if published is not None:
            published.set(_ADDRESS_KEY, "{}:{}".format(*listener.getsockname()[:2]))
        return store
    started, reason, published, address = time.monotonic(), "", None, None
    about_secret = False  # what the last try failed of
    while True:
        try:
            if job.shared_store and not has_scheduler(job) and published is None:
                published = _launchers_store(job, deadline)
            address = _address(job, published)
            sock = socket.create_connection(address, timeout=min(HANDSHAKE_S, max(0.001, deadline - time.monotonic())))
            try:
                require_private_ranks(str(sock.getpeername()[0]))
                authenticate(sock, secret, name, job.run_id, job.world_size)
                return JobStore(sock, secret)
            except BaseException:
                sock.close()
                raise
        except AuthenticationRefused as refused:
            # a port that is looked up may be an earlier attempt's, or one that an unauthenticated peer wrote there
            if refused.reason not in ("taken", "full") and published is None:
                raise _refusal(job, name, refused) from None
            reason, about_secret = _reason(job, refused), refused.reason in _ABOUT_SECRET
        except (OSError, PeerError, RuntimeError, UnicodeError) as error:
            reason, about_secret = _first_line(error), False
        if time.monotonic() > deadline:
            if published is None:
                raise _no_store(job, timeout_s, reason, at=_host(job), server=_server(job))
            raise _no_rank_0(job, address, timeout_s, reason, about_secret=about_secret)
        time.sleep(_POLL_S if time.monotonic() - started < 1 else _SLOW_POLL_S)


def serve_store(job: JobSpec, listener: socket.socket, secret: bytes | None, name: str) -> JobStore:
    """Serve the store of ``job`` on ``listener``, which it owns from then on; returns this process's own connection.

    Warns if the job has no secret: one process of a job serves its store, so that the warning comes once.
    """
    if secret is None and job.world_size > 1:
        _LOG.warning(
            "this job has no secret, so its %d ranks trust their hosts and the network between them; "
            "UNISONO_SECRET_FILE names one (docs/security.md, Ranks of a job)",
            job.world_size,
        )
    own, theirs = socket.socketpair()
    server = StoreServer(listener, theirs, secret, run_id=job.run_id, world_size=job.world_size, owner_name=name)
    return JobStore(own, secret, server)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What the ranks of one attempt share once all have joined.

    - ``store``: the job's store under a key prefix that no earlier attempt has used.
    - ``label``: that prefix, and the names of the groups since: what the proofs of a group are about.
    - ``key``: with which the ranks prove their connections in a process group; None in a job without a secret.
    - ``restart_count``: that of rank 0.
    - ``address``: this host's, towards the other ranks.
    """

    store: Store
    label: str
    key: bytes | None
    restart_count: int
    address: str

    def of_group(self, name: str) -> Rendezvous:
        """The same for a group of its own."""
        return replace(self, store=PrefixStore(f"group/{name}", self.store), label=f"{self.label}/{name}")


def join_ranks(job: JobSpec, timeout_s: float, store: JobStore | None = None) -> tuple[Rendezvous, JobStore | None]:
    """Join all ranks of the job, at ``store`` or at one that is opened and returned.

    Raises CommError, naming the ranks that did not arrive within ``timeout_s`` seconds, and as ``open_store``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.001, deadline - time.monotonic())
        opened = open_store(job, left_s) if store is None else None
        own = store or opened
        assert own is not None
        try:
            return _meet(own, job, timeout_s, left_s), opened
        except DistError as error:
            _close(opened)
            # rank 0 may be about to leave an earlier rendezvous of these processes
            if opened is None or job.rank == 0 or time.monotonic() > deadline:
                raise _left(job, error) from error
            time.sleep(_SLOW_POLL_S)
        except BaseException:
            _close(opened)
            raise


def _close(store: JobStore | None) -> None:
    if store is not None:
        store.close()


def _meet(store: JobStore, job: JobSpec, timeout_s: float, left_s: float) -> Rendezvous:
    prefix, restart_count, missing = store.join(job.restart_count, left_s)
    if missing:
        raise _absent(job, missing, timeout_s, [] if store.server is None else store.server.refused())
    return Rendezvous(
        store=PrefixStore(prefix, store),
        label=prefix,
        key=store.group_key(prefix),
        restart_count=restart_count,
        address=store.address,
    )


# --- where rank 0 is -------------------------------------------------------------------------------------------------

_ADDRESS_KEY = "rank 0"


def has_scheduler(job: JobSpec) -> bool:
    """Whether a scheduler of MXNet's tracker serves the job's store, not rank 0."""
    return job.source == "dmlc" and job.shared_store


def _host(job: JobSpec) -> str:
    """Where the store is served: on loopback if all ranks are on this host. Our launcher has chosen the address already."""
    return LOOPBACK if job.is_local and job.source != "unisono" else job.master_addr


def _listen(job: JobSpec, deadline: float) -> tuple[socket.socket, PrefixStore | None]:
    """Rank 0's listener, and the store in which its port has to be published."""
    if job.shared_store:
        published = _launchers_store(job, deadline)
        host = LOOPBACK if job.is_local else address_towards(job.master_addr)
        require_private_ranks(host)
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET), published
    if job.listen_fd is None:
        return listen_at_master(job, "rank 0"), None
    try:
        listener = socket.socket(fileno=job.listen_fd)
    except (OSError, OverflowError, ValueError) as error:
        raise LaunchError(
            given=f"UNISONO_LISTEN_FD={job.listen_fd}, which is no socket of this process ({error})",
            rule="rank 0 inherits the socket at which the ranks meet",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest="unset UNISONO_LISTEN_FD, or start the process with unisono launch",
        ) from error
    # children of this process must not keep the port open
    listener.set_inheritable(False)
    require_private_ranks(str(listener.getsockname()[0]))
    return listener, None


def wait_until_resolved(job: JobSpec, timeout_s: float) -> None:
    """Wait until this host resolves the master address: a name can appear later, as in Kubernetes.

    Not on a rank 0 that is to listen there: its host has the address. Raises CommError after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while job.rank != 0 or job.shared_store:
        try:
            socket.getaddrinfo(job.master_addr, job.master_port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                reason, server = f"the name does not resolve on this host: {error}", _store_holder(job)
                wrong = f"MASTER_ADDR, here {job.master_addr!r}"
                nearest = f"set {wrong}, to a name or address of the host of {server} that this host resolves"
                raise _no_store(job, timeout_s, reason, at=job.master_addr, server=server, nearest=nearest) from None
        time.sleep(_DNS_POLL_S)


def _launchers_store(job: JobSpec, deadline: float) -> PrefixStore:
    timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    try:
        store = TCPStore(job.master_addr, job.master_port, None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        reason, at = _first_line(error), job.master_addr
        raise _no_store(job, timeout.total_seconds(), reason, at=at, server="the launcher") from error
    return PrefixStore(f"unisono/{job.run_id}", store)


def _address(job: JobSpec, published: PrefixStore | None) -> tuple[str, int]:
    if published is None:
        return _host(job), job.master_port
    if not published.check([_ADDRESS_KEY]):
        raise PeerError("rank 0 has not written its address into the launcher's store")
    host, _, port = published.get(_ADDRESS_KEY).decode(errors="replace").rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise PeerError("what the launcher's store has as the address of rank 0 is no HOST:PORT")
    return host, int(port)


# --- errors ----------------------------------------------------------------------------------------------------------


def _store_holder(job: JobSpec) -> str:
    """Who keeps a store at the master address, for an error: torchrun's own holds rank 0's address."""
    return "the launcher" if job.shared_store and not has_scheduler(job) else _server(job)


def _server(job: JobSpec) -> str:
    """Who serves the job's store, for an error."""
    return "the scheduler" if has_scheduler(job) else "rank 0"


def _reason(job: JobSpec, refused: AuthenticationRefused) -> str:
    if refused.reason == "server":
        return "what listens there has no proof that it holds the job's secret"
    return f"{_server(job)} refuses this process, which {REFUSALS[refused.reason]}"


def _refusal(job: JobSpec, name: str, refused: AuthenticationRefused) -> LaunchError:
    about_secret = refused.reason in _ABOUT_SECRET
    return LaunchError(
        given=f"{name} of {job.world_size} at {job.master_addr}:{job.master_port}: {_reason(job, refused)}",
        rule="the ranks of a job hold one secret and prove it to each other before anything else is said"
        if about_secret
        else "all processes that meet at a port are of one job",
        consequence=_NOT_JOINED,
        nearest=f"unisono launch, or {_ONE_SECRET}" if about_secret else "a MASTER_PORT that no other job uses",
    )


def _no_store(job: JobSpec, timeout_s: float, reason: str, *, at: str, server: str, nearest: str = "") -> CommError:
    return CommError(
        given=f"rank {job.rank} of {job.world_size} found no store at {at}:{job.master_port} in "
        f"{timeout_s:.3g} s ({reason})",
        rule=f"{server} keeps a store open there while the job runs",
        consequence="this rank cannot join and has not trained",
        nearest=nearest or f"see why {server} did not start, and that its host and port can be reached from here",
    )


def _no_rank_0(
    job: JobSpec, address: tuple[str, int] | None, timeout_s: float, reason: str, *, about_secret: bool
) -> CommError:
    """The launcher's store is there, at the master address, and rank 0 does not answer at the one that it wrote into it."""
    at = "" if address is None else " at {}:{}".format(*address)
    return CommError(
        given=f"rank {job.rank} of {job.world_size} found no rank 0{at} in {timeout_s:.3g} s ({reason})",
        rule=f"rank 0 serves the job's store and writes its address into the launcher's, at {job.master_addr}:{job.master_port}",
        consequence="this rank cannot join and has not trained",
        nearest=_ONE_SECRET
        if about_secret
        else "see why rank 0 did not start, and that its host can be reached from here",
    )


def _left(job: JobSpec, error: Exception) -> CommError:
    return CommError(
        given=f"{_server(job)} left before all {job.world_size} ranks had joined (seen from rank {job.rank}: "
        f"{_first_line(error)})",
        rule="all ranks join before the first step",
        consequence="no step was made",
        nearest=f"see the log of {_server(job)}",
    )


def _absent(job: JobSpec, ranks: list[int], timeout_s: float, refused: list[str]) -> CommError:
    names = ", ".join(str(rank) for rank in ranks[:16]) + (" …" if len(ranks) > 16 else "")
    one = len(ranks) == 1
    return CommError(
        given=f"rank{'' if one else 's'} {names} of {job.world_size} did not arrive within {timeout_s:g} s "
        f"(seen from rank {job.rank})" + "".join(f"; {line}" for line in refused),
        rule="all ranks join before the first step",
        consequence="no step was made",
        nearest=f"see the log of rank {ranks[0]}; if it is only slow to start, raise launch.timeout_s",
    )


def listen_at_master(job: JobSpec, who: str) -> socket.socket:
    """A socket that listens at the master address only, for the process ``who``; on loopback if all ranks are on this host.

    Raises LaunchError, and ConfigError for all interfaces at once or a public address.
    """
    at = f"{job.master_addr}:{job.master_port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            job.master_addr, job.master_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            given=f"the master address {job.master_addr!r} does not resolve on this host ({error})",
            rule=f"{who} listens at the master address",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest=f"set MASTER_ADDR to a name or address of the host {who} runs on",
        ) from error
    refuse_every_interface(str(address[0]), f"the master address {job.master_addr!r}")
    require_private_ranks(str(address[0]))
    listener = socket.socket(family, kind, proto)
    try:
        if _host(job) != job.master_addr:
            with socket.socket(family, kind, proto) as probe:
                probe.bind((address[0], 0))  # the address is this host's, or an error
            # all ranks are here: nobody else needs the port
            listener.close()
            listener, address = socket.socket(socket.AF_INET, kind, proto), (LOOPBACK, job.master_port)
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
                nearest=f"MASTER_PORT={free_port(str(address[0]), listener.family)} is free now",
            ) from error
        raise LaunchError(
            given=f"{who} cannot listen at {at} ({error.strerror})",
            rule=f"the master address is one of the host that {who} runs on",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest="set MASTER_ADDR to an address of this host (127.0.0.1 when all ranks are here)",
        ) from error
    return listener


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
