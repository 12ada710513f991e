"""A package that brings a collective back end, as a vendor's does: installed into a folder, with an entry point.

The back end is a process group in Python that hands each operation to a Gloo group of its own and counts it. When the process
ends, rank N writes the counts of its groups into the file ``counts-N.json`` of the folder that UNISONO_TEST_COUNTS names.
"""

from __future__ import annotations

import json
from pathlib import Path

NAME = "counting"

_PACKAGE = '''
"""A collective back end that counts."""
import atexit, json, os
from collections import Counter
from pathlib import Path

import torch.distributed as dist

COUNTS = Counter()
LACKS = LACKING


def forwarded(name, inner):
    """Counts, and calls the operation of Gloo that is named ``inner``."""

    def operation(self, *arguments):
        COUNTS[name] += 1
        return getattr(self.inner, inner)(*arguments)

    return operation


def one_by_one(name, inner):
    """The same for lists of tensors that Gloo takes one by one."""

    def operation(self, outputs, inputs, options):
        COUNTS[name] += 1
        works = [getattr(self.inner, inner)(*pair, options) for pair in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    return operation


class Counting(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return NAME

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]  # which torch sets for groups of C++ alone


OPERATIONS = {
    # torch's name of the operation: Gloo's
    **{name: name for name in ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "reduce", "reduce_scatter",
                               "alltoall", "barrier", "send", "recv", "gather", "scatter")},
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
LISTS = {"all_gather_single_coalesced": "_allgather_base", "reduce_scatter_single_coalesced": "_reduce_scatter_base"}
for make, names in ((forwarded, OPERATIONS), (one_by_one, LISTS)):
    for name, inner in names.items():
        if name not in LACKS:
            setattr(Counting, name, make(name, inner))


def create(store, rank, size, timeout):
    if "creation" in LACKS:
        raise OSError("the fabric has no link")
    return Counting(store, rank, size, timeout)


def leave_counts():
    folder = os.environ.get("UNISONO_TEST_COUNTS")
    if folder and COUNTS:
        Path(folder, f"counts-{os.environ['UNISONO_RANK']}.json").write_text(json.dumps(COUNTS))


def register():
    if "driver" in LACKS:
        raise ImportError("libfabric.so.1: cannot open shared object file")
    if "registration" in LACKS:
        return
    dist.Backend.register_backend(NAME, create, devices=["cuda"] if "cpu" in LACKS else ["cpu"])
    atexit.register(leave_counts)
'''


def install(folder: Path, *, lacks: tuple[str, ...] = (), target: str = "register") -> Path:
    """Install the package into ``folder``, which belongs on the path of Python; returns ``folder``.

    Args:
        folder: Folder of packages.
        lacks: What it does not have: names of operations, ``creation`` (making a group fails), ``driver`` (its function
            fails), ``registration`` (its function registers nothing), ``cpu`` (it is for another device).
        target: Function that the entry point names.
    """
    info = folder / "counting_backend-1.0.dist-info"
    info.mkdir(parents=True)
    text = _PACKAGE.replace("LACKING", json.dumps(lacks)).replace("NAME", repr(NAME))
    (folder / "counting_backend.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[unisono.dist_backends]\n{NAME} = counting_backend:{target}\n")
    return folder
