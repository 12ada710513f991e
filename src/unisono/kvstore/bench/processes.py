"""The worker processes of a measurement.

A worker's standard input is a pipe from its parent, and the worker exits when the pipe closes: none outlives its
parent. Settings come through the same pipe or the environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import msgspec

from unisono.dist import JobSpec, job_from_environ
from unisono.dist.interpreter import module_command
from unisono.dist.secret import new_secret, secret_descriptor
from unisono.errors import CommError, UnisonoError
from unisono.kvstore.bench.settings import BenchSettings
from unisono.kvstore.server.child_servers import child_environ, exit_with_parent, kill_process

_MODULE = "unisono.kvstore.bench.processes"


def measure_on_this_host(settings: BenchSettings, workers: int, *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Measure with ``workers`` processes on this host; the result of ``measure`` on rank 0. Raises CommError where a
    process fails."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        secret = new_secret()
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes: list[subprocess.Popen[str]] = []
        for rank in range(workers):
            spec = JobSpec(
                run_id="bench",
                rank=rank,
                local_rank=rank,
                world_size=workers,
                local_world=workers,
                master_port=listener.getsockname()[1],
                source="unisono",
                listen_fd=listener.fileno() if rank == 0 else None,
            )
            secret_fd = secret_descriptor(secret)
            process = subprocess.Popen(
                module_command(_MODULE),
                env=child_environ() | spec.environ() | {"UNISONO_SECRET_FD": str(secret_fd)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=logs[rank],
                text=True,
                pass_fds=[secret_fd, listener.fileno()] if rank == 0 else [secret_fd],
            )
            os.close(secret_fd)
            stack.callback(kill_process, process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(settings)) + "\n")
            process.stdin.flush()
            processes.append(process)
        listener.close()
        assert processes[0].stdout is not None
        late = threading.Timer(timeout_s, lambda: [process.kill() for process in processes])
        stack.callback(late.cancel)
        late.start()
        output = processes[0].stdout.read()
        codes = [process.wait() for process in processes]
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if code:
                log.seek(0)
                raise _failed(f"worker {rank} ended with {code}: {log.read()[-2000:].strip()}")
        return json.loads(output)


def _failed(given: str) -> CommError:
    return CommError(
        given=given,
        rule="every worker measures to the end",
        consequence="there is no result",
        nearest="see what that worker said",
    )


def main() -> int:
    settings = msgspec.json.decode(_line(), type=BenchSettings)
    exit_with_parent()
    from unisono.kvstore.bench.measure import join_and_measure

    try:
        results = join_and_measure(job_from_environ(os.environ), settings)
    except UnisonoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if results is not None:
        print(json.dumps(results), flush=True)
    return 0


def _line() -> bytes:
    """One line of standard input, read byte by byte so that nothing after it is consumed."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
