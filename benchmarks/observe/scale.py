"""Time and memory of what reads the events of very large runs, which are made up. Prints JSON.

    python -m benchmarks.observe.scale [--lines 1000000] [--rounds 3]

A diagnosis, a report, ``unisono top --once``, and the goodput ledger by itself, which the report makes too. ``--lines`` is the
number of steps of all ranks; every hundred steps a rank has an event of the monitor and one of its links, every 500 an
evaluation. Each reading is a process of its own. The floor is reading the files line by line and decoding nothing. In a damaged
run one line of a hundred is cut short, has values of other types or is no step, and some ranks have no file.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.paired import spread

from unisono.observe.events import encode, events_path
from unisono.observe.history import STEP_FIELDS

READINGS: Mapping[str, str] = {
    "floor": "for path in sorted(run.glob('events/*.jsonl')):\n    with path.open('rb') as file:\n        sum(map(len, file))",
    "diagnosis": "from unisono.diagnose import diagnose, read_run\ndiagnose(read_run(run))",
    "report": "from unisono.report import write_report\nwrite_report(run)",
    "top": "import contextlib, io\nfrom unisono.cli.main import cli\nwith contextlib.redirect_stdout(io.StringIO()):\n"
    "    cli.main(['top', str(run), '--once'], standalone_mode=False)",
    "goodput": "from unisono.observe.goodput import read_goodput\nread_goodput(run)",
}
RANKS_PER_HOST = 8
SAMPLE_EVERY, EVAL_EVERY = 100, 500  # steps
MEASURED = """
import json, resource, sys, time
from pathlib import Path
run = Path(sys.argv[1])
begin = time.perf_counter()
{body}
seconds = time.perf_counter() - begin
print(json.dumps({{"s": seconds, "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}}))
"""


def make_run(folder: Path, ranks: int, steps: int, *, is_damaged: bool = False) -> None:
    """Events of a run whose ranks take equally long, but for noise; every step is a reading."""
    draw = random.Random(0)
    damage = random.Random(1)
    pool = [_step(draw) for _ in range(1000)]
    for rank in range(ranks):
        if is_damaged and rank % 50 == 49:
            continue
        path = events_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        envelope = {"t": 1.8e9, "rank": rank, "run": "large", "attempt": 1}
        others = {"system": _system(rank), "links": _links(ranks), "eval": encode({"eval/loss": 2.5})[1:]}
        with path.open("wb") as file:
            file.write(encode({"kind": "run_start", "m": 0.0, **envelope, "config": {}, "plan": {}}) + b"\n")
            for step in range(1, steps + 1):
                for kind in _kinds(step):
                    head = f'{{"kind":"{kind}","t":1.8e9,"m":{0.1 * step:.3f},"rank":{rank},"run":"large","attempt":1,'
                    line = f'{head}"step":{step},'.encode() + (
                        pool[draw.randrange(1000)] if kind == "step" else others[kind]
                    )
                    if is_damaged and damage.random() < 0.01:
                        line = damaged(line, damage)
                    file.write(line + b"\n")


def damaged(line: bytes, draw: random.Random) -> bytes:
    """A line cut short, with a loss of another type, or of another kind."""
    match draw.randrange(4):
        case 0:
            return line[: draw.randrange(len(line))]
        case 1:
            return line.replace(
                b'"train/loss":', draw.choice((b'"train/loss":"NaN","was":', b'"train/loss":[],"was":'))
            )
        case 2:
            return line.replace(b'"step":', draw.choice((b'"step":"x","was":', b'"step":1e400,"was":')))
        case _:
            return line.replace(b'"kind":"step"', b'"kind":"skipped_step"')


def _step(draw: random.Random) -> bytes:
    fields = {name: draw.random() * 1e-2 for name in STEP_FIELDS if name not in ("t", "m")}
    fields |= {"time/window_s": 0.1 + 0.01 * draw.random(), "time/forward_frac": 0.3, "time/backward_frac": 0.6}
    fields |= {"mem/now_bytes": 1e9, "mem/peak_bytes": 1e9, "mem/limit_bytes": 1e11}
    return encode(fields)[1:]


def _kinds(step: int) -> list[str]:
    """The events of a rank at the end of a step."""
    sampled = ["system", "links"] if step % SAMPLE_EVERY == 0 else []
    return ["step", *sampled, *(["eval"] if step % EVAL_EVERY == 0 else [])]


def _system(rank: int) -> bytes:
    """What the monitor writes: of the process and its device, on one rank of a host also of the host."""
    fields: dict[str, Any] = {"host": f"host{rank // RANKS_PER_HOST:03d}"}
    fields |= {"sys/process_cpus": 1.2, "sys/core_wait_frac": 0.01}
    if rank % RANKS_PER_HOST == 0:
        rates = ("disk_read", "disk_written", "network_sent", "network_received")
        fields |= {f"sys/{name}_bytes_per_s": 1e6 for name in rates}
        fields |= {"sys/cpu_frac": 0.4, "sys/iowait_frac": 0.01, "sys/memory_frac": 0.3}
    device = {"util_frac": 0.9, "power_w": 600.0, "power_limit_w": 700.0, "temperature_c": 60.0, "clock_hz": 1.9e9}
    device |= {
        "max_clock_hz": 2e9,
        "memory_bytes": 5e10,
        "throttled": 0.0,
        "corrected_errors": 0.0,
        "uncorrected_errors": 0.0,
    }
    return encode(fields | {f"sys/device_{name}": value for name, value in device.items()})[1:]


def _links(ranks: int) -> bytes:
    """What a rank writes of its traffic in a hundred steps: along dp, and along tp inside of a host."""
    wall_s = 0.1 * SAMPLE_EVERY
    rows: list[dict[str, Any]] = []
    for axis, group, members in (
        ("dp", "dp_replicate", ranks // RANKS_PER_HOST),
        ("tp", "tp", min(ranks, RANKS_PER_HOST)),
    ):
        if members < 2:
            continue
        row = {
            "axis": axis,
            "group": group,
            "transport": "nccl",
            "ranks": members,
            "hosts": members if axis == "dp" else 1,
        }
        row |= {"collectives": 1000, "payload_bytes": 10**10, "wire_bytes": 2 * 10**10, "wire_bytes_per_s": 2e9}
        row |= {"expected_s": 0.5, "expected_latency_s": 0.01, "measured_bytes_per_s": 4e10, "used_frac": 0.05}
        rows.append(row)
    peers = [{"peer": "nccl", "sent_bytes": 10**10, "received_bytes": 10**10}] if rows else []
    rates = {"sent_bytes_per_s": 1e9, "received_bytes_per_s": 1e9, "measured_bytes_per_s": 2e10, "used_frac": 0.05}
    times = {"steps": SAMPLE_EVERY, "wall_s": wall_s}
    return encode({**times, "axes": rows, "links": [peer | rates for peer in peers]})[1:]


def measure(folder: Path, body: str) -> dict[str, float]:
    """Seconds and peak memory of a process that runs ``body``."""
    code = MEASURED.format(body=body)
    done = subprocess.run([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    shapes = {
        "1,000 ranks": (1000, False),
        "1 rank": (1, False),
        "1,000 ranks, damaged": (1000, True),
        "1 rank, damaged": (1, True),
    }
    result: dict[str, Any] = {"lines": arguments.lines, "runs": {}}
    for name, (ranks, is_damaged) in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            make_run(run, ranks, arguments.lines // ranks, is_damaged=is_damaged)
            size = sum(path.stat().st_size for path in run.glob("events/*.jsonl"))
            measured = {key: [measure(run, body) for _ in range(arguments.rounds)] for key, body in READINGS.items()}
            result["runs"][name] = {"events_bytes": size, "report_bytes": (run / "report.html").stat().st_size} | {
                key: {"s": spread([one["s"] for one in values]), "peak_bytes": max(one["bytes"] for one in values)}
                for key, values in measured.items()
            }
        print(f"{name}: {time.strftime('%H:%M:%S')}", file=sys.stderr)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
