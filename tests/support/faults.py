"""Servers and workers as processes, for tests that harm them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from faults_worker import COUNT, SQUARES, table
from nursery import Child, Nursery
from parameter_servers import ParameterServers
from procs import wait_until


class Worker:
    """A worker's process, and the lines it has said."""

    def __init__(self, child: Child, log: Path) -> None:
        self.child, self.log = child, log

    def lines(self) -> list[dict[str, Any]]:
        """Whole lines so far. Fails when one of them is no JSON: it is a traceback."""
        text = self.log.read_text() if self.log.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        assert all(line.startswith("{") for line in whole), text
        return [json.loads(line) for line in whole]

    def said(self, name: str) -> list[Any]:
        """All values said under that name."""
        return [line[name] for line in self.lines() if name in line]

    def until(self, name: str, count: int = 1, timeout_s: float = 30.0) -> list[Any]:
        """Wait for ``count`` of them."""
        wait_until(lambda: len(self.said(name)) >= count, f"{count} x {name} in {self.log}", timeout_s)
        return self.said(name)

    def finish(self, timeout_s: float = 60.0) -> None:
        """Wait until it has left as it should."""
        self.until("left", timeout_s=timeout_s)
        self.child.wait()


def worker(
    nursery: Nursery,
    servers: ParameterServers,
    folder: Path,
    number: int,
    *,
    incarnation: int = 0,
    addresses: Sequence[tuple[str, int]] | None = None,
    namespace: str = "",
    **facts: Any,
) -> Worker:
    """Start one; ``facts`` as ``faults_worker.main`` takes them."""
    log = folder / f"worker-{number}.{incarnation}.log"
    given = {
        "servers": [list(each) for each in addresses or servers.addresses],
        "secret": str(servers.secret_file),
        "worker": number,
        "incarnation": incarnation,
    }
    return Worker(nursery.start("faults_worker:main", given | facts, log=log, namespace=namespace), log)


def found(servers: ParameterServers, elements: int = 3000, **agreed: Any) -> tuple[float, float]:
    """What the two keys hold, each the same in every element. Asked by a worker that has not been there before."""
    visitor = servers.connect(table(elements), worker=99, **agreed)
    into = table(elements)
    visitor.pull(into).wait()
    visitor.close()
    values = [into[key].unique() for key in (COUNT, SQUARES)]
    assert [len(each) for each in values] == [1, 1], values
    return float(torch.stack(values)[0]), float(torch.stack(values)[1])
