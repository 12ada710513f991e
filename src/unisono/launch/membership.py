"""What a worker needs to join a launched job: two files of the job's folder, there while the job runs.

join.json   run id, number of workers, addresses of the servers
secret      the job's 32 bytes, readable by its owner only; ``UNISONO_SECRET_FILE`` of a worker
joined/     one file for each rank that has joined
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.errors import LaunchError, Problem
from unisono.launch.workers import unwritable
from unisono.storage.files import PRIVATE_MODE, open_new, write_atomically
from unisono.storage.ownership import read_own_json

_FACTS, _SECRET, _JOINED = "join.json", "secret", "joined"
_CLAIM = re.compile(r"rank-\d+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """A running job that workers may join; ``folder`` holds its secret."""

    folder: str
    run_id: str
    world_size: int
    server_addresses: tuple[str, ...]

    @property
    def secret_file(self) -> str:
        return str(Path(self.folder) / _SECRET)


@contextmanager
def open_to_workers(
    folder: Path, run_id: str, world_size: int, servers: Sequence[str], secret: bytes
) -> Generator[None]:
    """Inside, workers that can read ``folder`` may join. Raises LaunchError if it cannot be written."""
    facts = Membership(
        folder=str(folder.absolute()), run_id=run_id, world_size=world_size, server_addresses=tuple(servers)
    )
    try:
        # left by a launch that was killed
        (folder / _SECRET).unlink(missing_ok=True)
        with _claims(folder) as claims:
            for claim in os.listdir(claims):
                if _CLAIM.fullmatch(claim):
                    os.unlink(claim, dir_fd=claims)
        with open_new(folder / _SECRET, mode=PRIVATE_MODE) as file:
            file.write(secret)
        write_atomically(folder / _FACTS, json.dumps(asdict(facts)).encode() + b"\n", mode=PRIVATE_MODE)
    except OSError as error:
        raise LaunchError(unwritable(folder, error)) from error
    try:
        yield
    finally:
        for name in (_FACTS, _SECRET):
            (folder / name).unlink(missing_ok=True)


def read_membership(folder: Path) -> Membership:
    """The job of ``folder``. Raises LaunchError where none runs that workers may join, or another user wrote its record."""
    try:
        facts = read_own_json(folder / _FACTS)
        servers = tuple(map(str, facts["server_addresses"]))
        return Membership(
            folder=str(folder.absolute()),
            run_id=str(facts["run_id"]),
            world_size=int(facts["world_size"]),
            server_addresses=servers,
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise LaunchError(
            given=f"--join {folder}, whose {_FACTS} cannot be read ({error})",
            rule="workers join a job while it runs: unisono launch --servers 1 --elastic",
            consequence="nothing was started",
            nearest="the folder (--dir) of that launch, or a copy of it",
        ) from error


def claim_ranks(job: Membership, count: int, first: int | None) -> list[int]:
    """``count`` ranks that no other worker of this job has, from ``first`` on; by default from the job's number of workers."""
    if first is not None and first < job.world_size:
        raise LaunchError(
            Problem(
                given=f"--first-rank {first} in a job of {job.world_size} workers",
                rule="a worker that joins has a rank of its own, above those of the job",
                consequence="nothing was started",
                nearest=f"--first-rank {job.world_size}, or leave it out",
            )
        )
    ranks: list[int] = []
    rank = job.world_size if first is None else first
    try:
        with _claims(Path(job.folder)) as claims:
            while len(ranks) < count:
                try:
                    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
                    os.close(os.open(f"rank-{rank}", flags, PRIVATE_MODE, dir_fd=claims))
                    ranks.append(rank)
                except FileExistsError:
                    pass
                rank += 1
    except OSError as error:
        raise LaunchError(unwritable(Path(job.folder) / _JOINED, error)) from error
    return ranks


@contextmanager
def _claims(folder: Path) -> Generator[int]:
    """The folder of claimed ranks, made if it is missing, as a descriptor. Raises OSError if it is a link."""
    (folder / _JOINED).mkdir(mode=0o700, exist_ok=True)
    claims = os.open(folder / _JOINED, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield claims
    finally:
        os.close(claims)
