"""Examinations that need several ranks: ``unisono launch`` starts them here or on the hosts of a file, and rank 0 reports.

Inside a job that another launcher started (torchrun, srun, mpirun) its own processes are the ranks. Rank 0 prints its result as
JSON in marked lines, which come through every launcher.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from unisono.data.options import default_cache_dir
from unisono.dist import JobSpec, job_from_environ
from unisono.dist.interpreter import module_command, module_path
from unisono.doctor.check import Check, judged
from unisono.doctor.rank_devices import check_rank_devices, default_ranks, gather_host_ranks
from unisono.errors import UnisonoError
from unisono.launch.child import error_paragraph, kill_group
from unisono.launch.workers import Reaper
from unisono.measure.calibration import CALIBRATION_FILE

_MODULE: Final = "unisono.doctor.ranks"
_MARK: Final = "unisono-doctor-result"
_LINE_CHARS: Final = 4000  # a launcher may cut longer lines
_TIMEOUT_S: Final = 60.0  # of a collective


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExamination:
    """What the ranks do.

    Attributes:
        kind: ``nodes`` compares their hosts, ``bench`` measures links, storage and matrix products.
        run_dir: Folder of runs.
        sizes: Bytes of the sums that ``bench`` times, ascending; empty for those of ``measure.links``.
        file_bytes: Size of the file that ``bench`` writes; 0 for that of ``measure.storage``.
        budget_s: Seconds for each figure of ``bench``.
    """

    kind: Literal["nodes", "bench"]
    run_dir: str
    sizes: tuple[int, ...] = ()
    file_bytes: int = 0
    budget_s: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """The checks of all ranks together, and the ``figures`` that were measured, as JSON types."""

    checks: tuple[Check, ...]
    figures: Mapping[str, Any]


def examine_ranks(
    examination: RankExamination,
    *,
    processes: int | None = None,
    hostfile: Path | None = None,
    ssh_port: int | None = None,
    timeout_s: float = 600.0,
) -> RankReport | None:
    """Examine ranks; None on ranks other than 0 of a job that is under way.

    Args:
        processes: Number of ranks; None for one per slot of the hosts file, or ``default_ranks``.
        hostfile: File of hosts to reach over ssh; None for this host.
        ssh_port: ssh port of hosts without one in the file.
        timeout_s: Seconds after which they are killed.
    """
    job = job_from_environ(os.environ)
    if job.world_size > 1:
        return _examine_as_rank(job, examination)
    if hostfile is None and processes is None:
        processes = default_ranks()
    where = [*(["-n", str(processes)] if processes else []), *(["--hostfile", str(hostfile)] if hostfile else [])]
    where += ["--ssh-port", str(ssh_port)] if ssh_port else []
    ranks = module_command(_MODULE, json.dumps(asdict(examination)))
    with (
        Reaper() as reaper,
        tempfile.TemporaryDirectory(prefix="unisono-doctor-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as said,
    ):
        process = subprocess.Popen(
            module_command("unisono", "launch", "--dir", f"{folder}/job", "--max-restarts", "0", *where, "--", *ranks),
            env={**os.environ, "PYTHONPATH": module_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reaper.watch(process.pid)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return _failed(f"the ranks were not done after {timeout_s:g} s")
        finally:
            kill_group(process)
            reaper.forget(process.pid)
        said.seek(0)
        report = _reported(output)
        if process.returncode == 0 and report is not None:
            return report
        return _failed(error_paragraph(said.read() + output) or f"the ranks ended with {process.returncode}")


def _failed(evidence: str) -> RankReport:
    check = judged(
        "JOB01",
        "ranks meet and work",
        evidence,
        failure="what it says; unisono launch with the same hosts starts any command in this way",
    )
    return RankReport(checks=(check,), figures={})


def _reported(output: str) -> RankReport | None:
    """What rank 0 has printed; None if that is not complete."""
    parts = dict(re.findall(rf"{_MARK} ([0-9]+/[0-9]+) (.*)$", output, flags=re.MULTILINE))
    if not parts:
        return None
    count = int(next(iter(parts)).partition("/")[2])
    text = "".join(parts.get(f"{number}/{count}", "") for number in range(count))
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=RankReport)
    return None


def _examine_as_rank(job: JobSpec, examination: RankExamination) -> RankReport | None:
    from unisono.dist import join_world
    from unisono.doctor.bench import bench, find_device
    from unisono.doctor.nodes import compare_nodes

    device = find_device(job)
    world = join_world(job, device_type=device.type if examination.kind == "bench" else "cpu", timeout_s=_TIMEOUT_S)
    try:
        own = list(check_rank_devices(gather_host_ranks(world)))
        if examination.kind == "nodes":
            found = compare_nodes(world, Path(examination.run_dir), os.environ)
            report = RankReport(checks=(*own, *found), figures={})
        elif any(check.status == "failure" for check in own):
            # ranks without a device would compute on the CPU, and the figures would be of another machine than a run's
            report = RankReport(checks=tuple(own), figures={})
        else:
            cache = default_cache_dir(os.environ) / CALIBRATION_FILE
            checks, figures = bench(
                world,
                Path(examination.run_dir),
                cache,
                device=device,
                sizes=examination.sizes,
                file_bytes=examination.file_bytes,
                budget_s=examination.budget_s,
            )
            report = RankReport(checks=(*own, *checks), figures=figures)
        world.barrier()
    finally:
        world.close()
    return report if job.rank == 0 else None


def main() -> int:
    """One rank."""
    examination = msgspec.json.decode(sys.argv[1], type=RankExamination)
    try:
        report = _examine_as_rank(job_from_environ(os.environ), examination)
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if report is not None:
        text = json.dumps(asdict(report))
        lines = [text[start : start + _LINE_CHARS] for start in range(0, len(text), _LINE_CHARS)]
        print("\n".join(f"{_MARK} {number}/{len(lines)} {line}" for number, line in enumerate(lines)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
