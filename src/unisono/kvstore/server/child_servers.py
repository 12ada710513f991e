"""Parameter servers as children of workers, for launchers that start workers only: torchrun, mpirun, srun, MXNet's
trackers.

A server's standard input is a pipe from its worker, and the server exits when the pipe closes: no server outlives its
worker. A finished worker waits until no worker is connected to its servers. A server that dies before that is restarted
at the same socket, which its worker keeps open, with the state of its snapshots or of its replica.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from unisono.dist.interpreter import module_command, module_path
from unisono.dist.secret import job_secret, secret_descriptor
from unisono.errors import LaunchError
from unisono.exit_codes import FATAL, USER_ERROR
from unisono.launch.resources import tuned_allocator

if TYPE_CHECKING:
    from unisono.dist import World

DRAIN = "UNISONO_DRAIN"  # set: on SIGTERM a server stays until its last worker has left

_MODULE = "unisono.kvstore.server.child_servers"
_WORD = "UNISONO_WORD_FD"  # a pipe on which a server reports that it listens


@contextmanager
def child_servers(
    world: World, count: int, *, tls: str = "", restarts: int = 0, more: Mapping[str, str] | None = None
) -> Generator[tuple[list[tuple[str, int]], bytes]]:
    """Start server processes, the n-th on the host of rank n modulo the number of ranks; yields addresses and secret. A
    collective.

    The servers' secret is that of the job. Where it has none, a new one is broadcast by the job's own collectives, on several
    hosts only under TLS: an eavesdropper then lacks a certificate of the folder ``tls``. A server that dies is restarted up
    to ``restarts`` times. ``more`` extends the
    servers' environment. On entry all servers listen; raises LaunchError on every rank if one exited instead. A normal
    exit waits until no worker is connected; an exit by an exception does not.
    """
    from unisono.kvstore.wire.frame_server import listen

    secret = job_secret(world.job, os.environ)
    if secret is None:
        _require_tls(world, tls)
        secret = bytes.fromhex(world.broadcast_json(secrets.token_hex(32)))
    mine = [server for server in range(count) if server % world.world_size == world.rank]
    children: list[_Child] = []
    common = {DRAIN: "1", **({"UNISONO_TLS": tls} if tls else {}), **(more or {})}
    with ExitStack() as stack:
        listeners = {server: stack.enter_context(listen(_address(world), tls=bool(tls))) for server in mine}
        answers = world.all_gather_json({server: listener.getsockname()[:2] for server, listener in listeners.items()})
        by_server = {
            int(server): (str(host), int(port)) for answer in answers for server, (host, port) in answer.items()
        }
        addresses = [by_server[server] for server in range(count)]
        common["UNISONO_SERVER_ADDRESSES"] = ",".join(f"{host}:{port}" for host, port in addresses)
        for server, listener in listeners.items():
            children.append(_Child(server, listener, secret, restarts, common))
            stack.callback(children[-1].end)
        ended = world.all_gather_json({child.server: code for child in children if (code := child.begun()) is not None})
        if wrong := [f"server {server} with exit code {code}" for codes in ended for server, code in codes.items()]:
            raise LaunchError(
                given=f"{', '.join(wrong)} ended before it listened",
                rule="all servers listen before the first worker connects",
                consequence="no worker of this job began",
                nearest="see above what that server said",
            )
        yield addresses, secret
        for child in children:
            child.drain()
        for child in children:
            child.wait()


def _require_tls(world: World, tls: str) -> None:
    if not (tls or world.job.is_local):
        raise LaunchError(
            given=f"parameter servers on several hosts in a job that {world.job.source} started, and neither UNISONO_SECRET_FILE "
            "nor launch.tls",
            rule="servers and workers prove to each other that they belong to one job",
            consequence="anyone on the network could read the parameters and change them, so nothing was started",
            nearest="on every host: umask 077; head -c 32 /dev/urandom > secret (one file, copied or in a shared folder); "
            "UNISONO_SECRET_FILE=secret",
        )


def child_environ() -> dict[str, str]:
    """This process's environment without its rank variables, with its module path and the launcher's defaults."""
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("UNISONO_") and name not in numbers
    }
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**tuned_allocator(), **inherited, **threads, "PYTHONPATH": module_path()}


def exit_with_parent() -> None:
    """Exit at once when standard input closes."""

    def watch() -> None:
        # not through sys.stdin: its lock would be held while the interpreter ends
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="unisono-starter", daemon=True).start()


def kill_process(process: subprocess.Popen[str]) -> None:
    """Kill the process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class _Child:
    """A server at ``listener``. It is restarted whenever it dies, up to ``restarts`` times, with the next restart
    count."""

    def __init__(
        self, server: int, listener: socket.socket, secret: bytes, restarts: int, environ: Mapping[str, str]
    ) -> None:
        self.server, self._listener, self._secret = server, listener, secret
        self._restarts, self._environ = restarts, environ
        self._restart_count, self._is_leaving = 0, False
        self._lock = threading.Lock()
        self._settled, self._ended = threading.Event(), None
        self._process = self._start()
        self._watcher = threading.Thread(target=self._restart_when_dead, name="unisono-server-child", daemon=True)
        self._watcher.start()

    def begun(self) -> int | None:
        """Wait until it listens, then None; or until it has exited, then its exit code."""
        self._settled.wait()
        return self._ended

    def drain(self) -> None:
        """Let it exit once its last worker has left, without a restart."""
        with self._lock:
            self._is_leaving = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until it has exited."""
        self._watcher.join()

    def end(self) -> None:
        """Kill the server and wait until it has exited."""
        with self._lock:
            self._is_leaving = True
            kill_process(self._process)
        self.wait()

    def _restart_when_dead(self) -> None:
        while True:
            if os.read(self._word, 1):
                self._settled.set()
            os.close(self._word)
            code = self._process.wait()
            with self._lock:
                if self._is_leaving or code in (0, USER_ERROR, FATAL) or self._restart_count == self._restarts:
                    self._listener.close()  # so that connecting fails at once
                    if not self._settled.is_set():
                        self._ended = code
                        self._settled.set()
                    return
                self._restart_count += 1
                attempt = f"{self._restart_count} of {self._restarts}"
                message = f"server {self.server} ended with {code} and is started again ({attempt})"
                print(message, file=sys.stderr, flush=True)
                kill_process(self._process)
                self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        secret, listener = secret_descriptor(self._secret), self._listener.fileno()
        self._word, word = os.pipe()
        identity = {"UNISONO_SERVER": str(self.server), "UNISONO_RESTART_COUNT": str(self._restart_count)}
        passed = {"UNISONO_LISTEN_FD": str(listener), "UNISONO_SECRET_FD": str(secret), _WORD: str(word)}
        process = subprocess.Popen(
            module_command(_MODULE),
            env=child_environ() | identity | passed | dict(self._environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener, secret, word],
            text=True,
            start_new_session=True,  # a signal to the worker's group must not stop its server, which the worker needs to finish
        )
        os.close(secret)
        os.close(word)
        return process


def _address(world: World) -> str:
    """This host's address as the job's other hosts see it."""
    if world.job.is_local:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: the kernel only chooses a route
        probe.connect((world.job.master_addr, 9))
        return str(probe.getsockname()[0])


def _tell_starter() -> None:
    word = int(os.environ.pop(_WORD))
    os.write(word, b"!")
    os.close(word)


if __name__ == "__main__":
    exit_with_parent()
    from unisono.kvstore.server.__main__ import main

    sys.exit(main(_tell_starter))
