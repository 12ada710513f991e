"""All checks of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from unisono.doctor.check import Check
from unisono.doctor.devices import check_devices
from unisono.doctor.environment import check_environment
from unisono.doctor.host import check_host
from unisono.doctor.network import check_network
from unisono.doctor.rank_devices import check_own_ranks
from unisono.doctor.reachability import check_slurm
from unisono.doctor.storage import check_storage
from unisono.doctor.topology import check_topology
from unisono.doctor.versions import check_versions


def examine(run_dir: Path, environ: Mapping[str, str] | None = None) -> list[Check]:
    """Examine this host for runs in ``run_dir``: takes seconds and leaves nothing behind.

    ``environ``: the environment variables to check; None takes those of this process.
    """
    variables = os.environ if environ is None else environ
    groups: tuple[Callable[[], Iterator[Check]], ...] = (
        check_versions,
        check_devices,
        lambda: check_own_ranks(variables),
        check_topology,
        check_host,
        lambda: check_environment(variables),
        lambda: check_storage(run_dir),
        check_network,
        lambda: check_slurm(variables),
    )
    return [check for group in groups for check in group()]
