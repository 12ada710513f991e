"""The pairs of snippets of examples/migrate: how each is run, and what the original returned (tests/interop/fixtures/migration).

    python tests/support/migration.py --write [ORIGIN …]

runs before.py of these origins with the libraries' own Pythons and writes what its functions returned.
"""

from __future__ import annotations

import ast
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nursery import Child, Nursery

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "migrate"
RECORDS = ROOT / "tests" / "interop" / "fixtures" / "migration"
RUN = Path(__file__).with_name("migration_run.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MSRUN = ("-m", "mindspore.parallel.cluster.run", "--worker_num=2", "--local_worker_num=2", "--join=True")
TIMEOUT_S = 170


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A library that programs come from.

    Attributes:
        title: Its name, as the head of the left column.
        environment: Variable that names a Python with the library. "": this Python has it. None: it cannot be run here.
        launcher: Arguments of that Python before the program.
        together: The same for the functions in TOGETHER of before.py, which need several processes.
        record: Origin whose functions of the same names compute the same; "": this one.
    """

    title: str
    environment: str | None
    launcher: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    record: str = ""


ORIGINS = {
    "mxnet": Origin(title="MXNet", environment="UNISONO_MXNET_PYTHON"),
    "mindspore": Origin(title="MindSpore", environment="UNISONO_MINDSPORE_PYTHON", together=MSRUN),
    "ddp": Origin(title="DDP", environment="", launcher=TORCHRUN),
    "horovod": Origin(title="Horovod", environment=None, record="ddp"),
    "accelerate": Origin(title="Accelerate", environment="", launcher=TORCHRUN),
    "lightning": Origin(title="Lightning", environment="UNISONO_LIGHTNING_PYTHON"),
    "deepspeed": Origin(title="DeepSpeed", environment="UNISONO_DEEPSPEED_PYTHON", launcher=TORCHRUN),
}


def module(origin: str, side: str) -> ast.Module:
    """``before`` or ``after`` of an origin, parsed."""
    return ast.parse((EXAMPLES / origin / f"{side}.py").read_text())


def functions(origin: str, side: str) -> list[ast.FunctionDef]:
    """The snippets of one side, in the order of the file."""
    found = [node for node in module(origin, side).body if isinstance(node, ast.FunctionDef)]
    return [node for node in found if not node.name.startswith("_") and node.name != "given"]


def constant(origin: str, side: str, name: str) -> Any:
    """The value of a constant of the file, or None."""
    for node in module(origin, side).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    return None


def listed(origin: str, side: str, name: str) -> tuple[str, ...]:
    """The names in SLOW, ALONE or TOGETHER of the file."""
    return constant(origin, side, name) or ()


def tolerance(origin: str, name: str) -> float:
    """Difference of two results as a share of the largest: fp32's, for sums in another order, or what TOLERANCE says."""
    return (constant(origin, "after", "TOLERANCE") or {}).get(name, 1e-5)


def recorded(origin: str) -> dict[str, Any]:
    """What each function of before.py returned."""
    return json.loads((RECORDS / f"{ORIGINS[origin].record or origin}.json").read_text())["results"]


def run_after(
    origin: str, folder: Path, nursery: Nursery, *, ranks: int = 1, only: Sequence[str] = ()
) -> dict[str, Any]:
    """The results of after.py, of ``only`` or of all that are not slow, in this many processes."""
    port = free_port()
    children: list[Child] = []
    try:
        for rank in range(ranks):
            facts = {
                "path": str(EXAMPLES / origin / "after.py"),
                "folder": str(folder),
                "slow": bool(only),
                "only": list(only),
            }
            environ = {} if ranks == 1 else ranks_environ(rank, ranks, port)
            log = folder / f"rank-{rank}.log"
            children.append(nursery.start("migration_run:main", facts, log=log, environ=environ))
        for rank, child in enumerate(children):
            assert child.exit_code(TIMEOUT_S) == 0, (folder / f"rank-{rank}.log").read_text()
    finally:
        for child in children:
            child.kill()
    return json.loads((folder / "results.json").read_text())


def run_before(origin: str, folder: Path) -> dict[str, Any]:
    """The results of before.py with the library's own Python."""
    about, together = ORIGINS[origin], listed(origin, "before", "TOGETHER")
    results = _run_before(origin, folder, about.launcher)
    if together:
        port = ("--master_port", str(free_port())) if about.together == MSRUN else ()
        results |= _run_before(origin, folder, (*about.together, *port), only=together)
    return results


def _run_before(origin: str, folder: Path, launcher: Sequence[str], only: Sequence[str] = ()) -> dict[str, Any]:
    about = ORIGINS[origin]
    assert about.environment is not None
    python = os.environ[about.environment] if about.environment else sys.executable
    which = ["--only", ",".join(only)] if only else ["--slow"]
    program = [str(RUN), str(EXAMPLES / origin / "before.py"), str(folder), *which]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # launchers start "python"
    environ["PATH"] = os.pathsep.join([str(Path(python).parent), environ["PATH"]])
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [python, *launcher, *program],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def ranks_environ(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which torch's programs are started."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def leaves(value: Any) -> Iterator[Any]:
    """The numbers, texts and truths in ``value``, in order."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from leaves(value[key])
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def difference(found: Any, expected: Any, tolerance: float) -> str:
    """What differs between two results, or ""."""
    mine, theirs = list(leaves(found)), list(leaves(expected))
    if len(mine) != len(theirs):
        return f"{len(mine)} values, expected {len(theirs)}"
    # what is rounded are sums of values of this size
    largest = max((abs(b) for b in theirs if isinstance(b, float)), default=0.0)
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        if not (math.isclose(a, b, rel_tol=0.0, abs_tol=tolerance * largest) if numbers else a == b):
            return f"value {number}: {a}, expected {b}"
    return ""


def main(arguments: Sequence[str]) -> int:
    RECORDS.mkdir(exist_ok=True)
    for origin in arguments[1:]:
        with tempfile.TemporaryDirectory() as folder:
            results = run_before(origin, Path(folder))
            if fragile := listed(origin, "before", "FRAGILE"):
                results |= _run_before(origin, Path(folder), ORIGINS[origin].launcher, only=fragile)
        for name, result in results.items():
            assert "error" not in result, f"{origin} {name}\n{result['error']}"
        lines = [f"  {json.dumps(name)}: {json.dumps(result['result'])}" for name, result in results.items()]
        (RECORDS / f"{origin}.json").write_text('{"results": {\n' + ",\n".join(lines) + "\n}}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
