"""Hosts of a job are compared fact by fact, and each difference names who has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from unisono.doctor import nodes
from unisono.doctor.nodes import compare_nodes, differences, variable_facts

HOSTS = ["a", "a", "b", "b"]
NODES = [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["1", "1", "1", "1"], None),
        (["1", "1", "2", "2"], "torch: 2 on b (ranks 2, 3); 1 on a (ranks 0, 1)"),
        (["1", "1", "1", "2"], "torch: 2 on b (rank 3); 1 on a (ranks 0, 1) and b (rank 2)"),
        ([None, "1", "1", "1"], "torch: not set on a (rank 0); 1 on a (rank 1) and b (ranks 2, 3)"),
        (
            ["1", "2", "3", "1"],
            "torch: 2 on a (rank 1), 3 on b (rank 2); 1 on a (rank 0) and b (rank 3)",
        ),
    ],
)
def test_who_differs_from_most(values: list[str | None], text: str | None) -> None:
    facts = [{"python": "3", **({"torch": value} if value else {})} for value in values]
    assert differences(facts, HOSTS, NODES) == ([text] if text else [])


def test_long_values_are_cut() -> None:
    (text,) = differences([{"PATH": "a" * 500}, {"PATH": "b" * 500}], ["a", "b"], [0, 1])
    assert len(text) < 300


def test_places_of_ranks_and_secrets_are_no_facts() -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "UNISONO_RANK": "3",
        "UNISONO_LAUNCH": "{}",
        "NCCL_PASSWORD": "x",
        "HOME": "/root",
        "OMP_NUM_THREADS": "4",
    }
    assert variable_facts(environ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}


def compared(world: Any, run_dir: str, fault: str) -> list[dict[str, Any]]:
    """The checks of ranks that stand for hosts of one rank each, of which the last has a fault."""
    with pytest.MonkeyPatch.context() as patch:
        environ = dict(os.environ)
        is_odd = world.rank == world.world_size - 1
        object.__setattr__(world, "job", _of_own_host(world.job))
        if is_odd and fault == "torch":
            import torch

            patch.setattr(torch, "__version__", "1.0")
        if is_odd and fault == "variable":
            environ["NCCL_ALGO"] = "Ring"
        if is_odd and fault == "limit":
            patch.setattr(nodes.resource, "getrlimit", lambda number: (7, 7))
        if is_odd and fault == "devices":
            patch.setattr(nodes, "device_facts", lambda: {"number of devices": "8"})
        if is_odd and fault.startswith("clock"):
            from unisono.measure import links

            now = links.time.time
            patch.setattr(links.time, "time", lambda: now() - float(fault.partition(" ")[2]))
        if is_odd and fault == "folder":
            patch.setattr(nodes, "_seen", lambda path, word: "ENOENT, No such file or directory")
        return [check.to_json() for check in compare_nodes(world, Path(run_dir), environ)]


def _of_own_host(job: Any) -> Any:
    from dataclasses import replace

    return replace(job, local_rank=0, local_world=1)


@pytest.mark.parametrize(
    ("fault", "code", "status", "evidence"),
    [
        ("none", "", "", ""),
        ("torch", "NODE01", "failure", "torch: 1.0 on "),
        ("devices", "NODE02", "failure", "number of devices: 8 on "),
        ("variable", "NODE03", "warning", "NCCL_ALGO: Ring on "),
        ("limit", "NODE04", "warning", "open files: 7 on "),
        ("clock 2", "NODE05", "warning", "(rank 1) is 2 s behind that of "),
        ("clock 60", "NODE05", "failure", "(rank 1) is 60 s behind that of "),
        ("folder", "NODE06", "failure", "does not see a file that "),
    ],
)
def test_each_difference_is_found_and_nothing_else(
    tmp_path: Path, pool: Pool, fault: str, code: str, status: str, evidence: str
) -> None:
    outcomes = pool.run(compared, str(tmp_path), fault)
    assert outcomes[0] == outcomes[1]
    by_code = {check["code"]: check for check in outcomes[0]}
    assert list(by_code) == [f"NODE0{number}" for number in range(1, 7)]
    for check in by_code.values():
        assert check["status"] == (status if check["code"] == code else "ok"), check
        assert bool(check["cure"]) == (check["code"] == code)
    if code:
        assert evidence in by_code[code]["evidence"].replace(" 2.0", " 2").replace("1.99", "2").replace("59.9", "60")
    assert list(tmp_path.iterdir()) == []
