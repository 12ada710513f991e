"""Chunks of documents made by tasks of a Ray cluster, in place of child processes.

The driver, which is this process, reads the documents and writes the chunks. Tasks get bytes and return bytes, so the machines of
the cluster need no folder in common. Ray pickles on its own connections: the cluster is trusted (docs/security.md).
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.loading.worker_pool import allowed_cores
from unisono.errors import ConfigError, UnisonoError, missing_extra
from unisono.quality.duplicates.chunks import answer_request
from unisono.quality.options import CleanRecipe

Tag = TypeVar("Tag")

LOCAL: Final = "local"
_RETRIES: Final = 3  # of a task whose process or machine dies
_STORED: Final = 4  # requests and answers in memory for each core of a local cluster; twice as many as are in flight
_PACKAGES: Final = ("numpy", "safetensors", "rensa", "ftfy", "py3langid", "pillow", "simplejpeg")
_CONNECT_S: Final = 10.0
_STOPPED: Final = "the job stopped; the chunks that are finished are kept"
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_LOG: Final = logging.getLogger("unisono")


class _Logged(io.TextIOBase):
    """Standard output while Ray is connected: a thread of Ray prints there that a process or machine has died."""

    def write(self, text: str, /) -> int:
        if lines := _COLOUR.sub("", text).strip().splitlines():
            _LOG.warning("%s", lines[0])
            _LOG.debug("%s", "\n".join(lines))
        return len(text)


def require_ray(address: str) -> None:
    """Raise ExtraError if Ray is not installed, and ConfigError if the address is that of Ray's client server."""
    if "://" in address:
        raise ConfigError(
            given=f"--ray {address}",
            rule="the command runs on a machine of the cluster",
            consequence="nothing was read",
            nearest="on a machine of the cluster (ray start --address=HOST:PORT makes this one its part): --ray auto",
        )
    if find_spec("ray") is None:
        raise missing_extra("scale", "ray", "--ray")


def ray_map(
    requests: Iterable[tuple[Tag, bytes]],
    recipe: CleanRecipe,
    benchmark_hashes: NDArray[np.uint64],
    *,
    address: str,
    request_bytes: int,
) -> Generator[tuple[Tag, bytes]]:
    """(tag, chunk file) of each request, in order, by tasks of a Ray cluster.

    A task is tried again where its process or machine dies. Two requests for each core of the cluster are in flight, and no more
    than fit into this machine's part of Ray's memory. Closing the generator ends the tasks.

    Args:
        requests: Made by ``chunks.encode_request``.
        recipe: The steps that documents go through.
        benchmark_hashes: Sorted hashes of the benchmarks' n-grams.
        address: ``auto`` (the cluster of this machine), HOST:PORT, or ``local``: a cluster that ends with this call.
        request_bytes: Size of most requests.

    Raises:
        ExtraError: Ray is not installed, or a package that a step needs is not installed on a machine of the cluster.
        ConfigError: There is no such cluster, or a machine has other versions of the packages that make chunks.
        UnisonoError: A task failed.
    """
    with _cluster(address, request_bytes) as ray:
        task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(make_chunk_on_node)
        settings = ray.put((json.dumps(asdict(recipe)).encode(), benchmark_hashes, _versions()))
        in_flight: deque[tuple[Tag, Any]] = deque()
        for tag, request in requests:
            while len(in_flight) >= _most_in_flight(ray, request_bytes):
                yield _answered(ray, *in_flight.popleft())
            in_flight.append((tag, task.remote(request, settings)))
        while in_flight:
            yield _answered(ray, *in_flight.popleft())


def make_chunk_on_node(request: bytes, settings: tuple[bytes, NDArray[np.uint64], Mapping[str, str]]) -> bytes:
    """In a task: the chunk file of a request.

    Args:
        request: Made by ``chunks.encode_request``.
        settings: The recipe as JSON, the hashes of ``ray_map``, and the versions of the driver.

    Raises:
        ConfigError: This machine has other versions than the driver.
        UnisonoError: As ``chunks.answer_request``, with the name of this machine.
    """
    recipe, benchmark_hashes, versions = settings
    _require_versions(versions)
    try:
        return answer_request(request, msgspec.json.decode(recipe, type=CleanRecipe), benchmark_hashes)
    except UnisonoError as error:
        where = f"on {socket.gethostname()}, a machine of the Ray cluster, "
        problems = [replace(problem, given=where + problem.given, consequence=_STOPPED) for problem in error.problems]
        raise type(error)(*problems) from None


@contextmanager
def _cluster(address: str, request_bytes: int) -> Generator[Any]:
    """Ray, connected until the end."""
    require_ray(address)
    with ExitStack() as stack:
        settings: dict[str, Any] = {"address": address}
        if address == LOCAL:
            # Ray reads these when it is imported
            stack.enter_context(_variables(_local_variables()))
            folder = stack.enter_context(TemporaryDirectory(prefix="unisono-ray-", ignore_cleanup_errors=True))
            settings |= {
                "num_cpus": allowed_cores(),
                "object_store_memory": max(_STORED * allowed_cores(), 8) * request_bytes,
                "include_dashboard": False,
                "_temp_dir": folder,
            }
        stack.enter_context(redirect_stdout(_Logged()))
        with _same_sigterm():
            ray = importlib.import_module("ray")
            stack.callback(ray.shutdown)
            try:
                if ":" in address:
                    _require_listener(address)
                with chdir("/"):  # tasks could import modules from the driver's working folder
                    ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # some of Ray's have no class of their own
                raise ConfigError(
                    given=f"--ray {address}: {_first_line(error)}",
                    rule="a cluster is running, this machine is part of it, and versions of Python and Ray are the same on all",
                    consequence="no document was cleaned; the chunks of an earlier try are kept",
                    nearest="ray start on this machine, then --ray auto; or --ray local",
                ) from error
        yield ray


def _require_listener(address: str) -> None:
    """Raise OSError or ValueError if nothing listens at HOST:PORT, for which Ray waits minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _most_in_flight(ray: Any, request_bytes: int) -> int:
    """Number of requests that may be in flight; machines come and go."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    own = next((node for node in nodes if node["NodeID"] == ray.get_runtime_context().get_node_id()), None)
    cores = sum(node["Resources"].get("CPU", 0) for node in nodes)
    memory = 0 if own is None else own["Resources"].get("object_store_memory", 0)
    return max(2, int(min(2 * cores, memory // (2 * request_bytes))))


def _answered(ray: Any, tag: Tag, answer: Any) -> tuple[Tag, bytes]:
    """(tag, answer) once the answer is there. Raises the task's own error, without Ray's traceback."""
    try:
        return tag, ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UnisonoError):
            raise error.cause from None
        if isinstance(error.cause, RuntimeError) and "failed to import" in str(error.cause):
            raise ConfigError(
                given=f"a machine of the Ray cluster that cannot import {__name__}",
                rule="each machine of the cluster has unisono and the extras that the recipe needs, as this one",
                consequence=_STOPPED,
                nearest="the same unisono there as here, and Ray started there anew",
            ) from error
        cause = f"{type(error.cause).__name__}: {_first_line(error.cause)}"
        raise _failed(f"a task of the Ray cluster that ended with {cause}") from error
    except ray.exceptions.RayError as error:
        raise _failed(f"a task of the Ray cluster: {_first_line(error)}") from error


def _failed(given: str) -> UnisonoError:
    return UnisonoError(
        given=given,
        rule=f"a task runs until its documents are done; one whose process or machine dies is tried {_RETRIES} more times",
        consequence=_STOPPED,
        nearest="the same command again, --log-level debug for more; on machines without enough memory: fewer CPUs for Ray",
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@cache
def _versions() -> dict[str, str]:
    """The digest of unisono's source, and the versions of packages that chunks depend on."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    package = Path(__file__).parents[2]
    source = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).parts):
        source.update(path.read_bytes())
    return {"unisono": f"of source {source.hexdigest()}", **versions}


def _require_versions(driver: Mapping[str, str]) -> None:
    """Raise ConfigError if a package has another version here than on the driver. A step that needs a missing one says so."""
    for name, here in _versions().items():
        if driver.get(name, here) != here:
            raise ConfigError(
                given=f"{socket.gethostname()}, a machine of the Ray cluster, with {name} {here}; the command has {driver[name]}",
                rule="the result does not depend on the machines, so all have the same versions",
                consequence=_STOPPED,
                nearest=f"the same {name} there as here, and Ray started there anew",
            )


@cache
def _local_variables() -> dict[str, str]:
    """Of a cluster whose ports are at loopback, and shut to other users of this machine."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: no cluster but of 127.0.0.1
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def _variables(values: Mapping[str, str]) -> Generator[None]:
    """Environment variables that have these values until the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _same_sigterm() -> Generator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread, where Ray replaces none either
            signal.signal(signal.SIGTERM, before)
